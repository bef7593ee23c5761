#!/bin/bash
# The cluster's image: built where it is not there, or not from what the Dockerfile and setup.cfg say now.
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
    mmdebstrap --quiet --variant=minbase --include=ca-certificates trixie "$tar" || {
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

inputs=$(cat docker/Dockerfile docker/wheels/.complete docker/requirements.py | sha256sum | cut -d' ' -f1)
if [ "$(docker image inspect -f '{{index .Config.Labels "everstep.inputs"}}' $IMAGE 2> /dev/null)" = "$inputs" ]; then
    exit 0
fi
say "building the image $IMAGE (two minutes the first time) ..."
log=$(mktemp)
if ! docker build --label "everstep.inputs=$inputs" -t $IMAGE -f docker/Dockerfile . > "$log" 2>&1; then
    tail -n 20 "$log" >&2
    fail "the image could not be built; the last lines are above, all of them in $log"
fi
rm -f "$log"
# An image that this one has replaced is 2 GB that nobody asks for any more.
docker image prune --force --filter label=everstep.inputs > /dev/null
