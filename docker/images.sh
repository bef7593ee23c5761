#!/bin/bash
# The cluster's image: built where it is not there, or not from what the Dockerfile and setup.cfg say now.
# images.sh --release 22.05: the image of the second cluster, on top.
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

have() { docker image inspect "$1" > /dev/null 2>&1; }

# The base image, from a registry; where none answers, made of Debian's packages under the same name.
get_base() {
    have "$BASE" && return
    if timeout 300 docker pull -q "$BASE" > /dev/null 2>&1; then return; fi
    say "no image registry answers: making $BASE from Debian's packages ..."
    command -v mmdebstrap > /dev/null || apt_install mmdebstrap
    local tar
    tar=$(mktemp --suffix=.tar)
    mmdebstrap --quiet --variant=minbase --include=ca-certificates $SUITE "$tar" || {
        rm -f "$tar"
        fail "Debian's packages could not be had either; what mmdebstrap says is above"
    }
    docker import "$tar" "$BASE" > /dev/null
    rm -f "$tar"
}

docker/wheels.sh &
wheels=$!
get_base
wait "$wheels"

# build DOCKERFILE CONTEXT INPUTS: where the image was not made of just these inputs.
build() {
    local dockerfile=$1 context=$2 inputs=$3 log
    if [ "$(docker image inspect -f '{{index .Config.Labels "everstep.inputs"}}' $IMAGE 2> /dev/null)" = "$inputs" ]; then
        return
    fi
    say "building the image $IMAGE (two minutes the first time) ..."
    log=$(mktemp)
    if ! docker build --label "everstep.inputs=$inputs" -t $IMAGE -f "$dockerfile" "$context" > "$log" 2>&1; then
        tail -n 20 "$log" >&2
        fail "the image could not be built; the last lines are above, all of them in $log"
    fi
    rm -f "$log"
    # An image that this one has replaced is 2 GB that nobody asks for any more.
    docker image prune --force --filter label=everstep.inputs > /dev/null
}

build docker/Dockerfile . \
    "$(cat docker/Dockerfile docker/wheels/.complete docker/requirements.py | sha256sum | cut -d' ' -f1)"
if [ "${1:-}" = --release ]; then
    use_release "$2"
    get_base
    build docker/release-22.05/Dockerfile docker/release-22.05 \
        "$(cat docker/release-22.05/Dockerfile docker/wheels/.complete | sha256sum | cut -d' ' -f1)"
fi
