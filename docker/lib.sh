# What docker/*.sh share. Sourced, not run.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
REPO=$PWD
IMAGE=everstep-cluster
BASE=debian:trixie-slim
NODES=4
# Where engine.sh writes which engine is ours: "PID START-TIME" (a pid alone may be another process by then).
ENGINE_RECORD=/run/everstep-dockerd

# The image needs nothing of BuildKit, and a client may come without it.
export DOCKER_BUILDKIT=0 COMPOSE_DOCKER_CLI_BUILD=0

say() { printf '%s\n' "$*" >&2; }
fail() {
    say "error: $*"
    exit 1
}

engine_answers() { docker version --format '{{.Server.Version}}' > /dev/null 2>&1; }

compose_command() {
    if docker compose version > /dev/null 2>&1; then
        echo docker compose
    else
        echo docker-compose
    fi
}
compose() { $(compose_command) "$@"; }

# The options that up.sh and down.sh share: which cluster is meant. `--release 22.05` is the second, small one.
use_release() {
    [ "$1" = 22.05 ] || fail "--release $1: there is a second cluster of release 22.05 only"
    export COMPOSE_FILE=docker/release-22.05/compose.yml
    COMPOSE_PROJECT_NAME=$(basename "$REPO" | tr '[:upper:]' '[:lower:]' | tr -cd 'a-z0-9_-')-2205
    export COMPOSE_PROJECT_NAME
    IMAGE=everstep-cluster-22.05 BASE=debian:bookworm-slim SUITE=bookworm NODES=2 CONTROLLER=old-controller LOGIN=old-controller
}
SUITE=trixie CONTROLLER=controller LOGIN=login

# Run a command on a machine of the cluster, its errors left out.
on_machine() {
    local name=$1
    shift
    compose exec -T "$name" "$@" 2> /dev/null < /dev/null
}

# Every compute node is there and without a job.
cluster_is_up() {
    [ "$(on_machine $CONTROLLER sinfo --noheader --Node --format=%N --responding --states=idle,alloc,mix | sort -u | wc -l)" = $NODES ] &&
        on_machine $LOGIN sinfo --noheader > /dev/null
}

apt_install() {
    [ "$(id -u)" = 0 ] || fail "$* must be installed, and that needs root: sudo apt-get install $*"
    command -v apt-get > /dev/null || fail "there is no apt-get here; install what stands for these yourself: $*"
    say "installing $* ..."
    # Debian starts a service when it installs it. The engine is started by engine.sh, or nobody would stop it.
    local policy=/usr/sbin/policy-rc.d no_services='' code=0
    if [ ! -e $policy ]; then
        no_services=$policy
        printf '#!/bin/sh\nexit 101\n' > $policy
        chmod +x $policy
    fi
    { apt-get update -qq &&
        DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends "$@" > /dev/null; } || code=$?
    [ -z "$no_services" ] || rm -f "$no_services"
    [ $code = 0 ] || fail "$* could not be installed; apt-get says why above"
}
