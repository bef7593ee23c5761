#!/bin/bash
# Take the test cluster down with its volumes: down.sh [--engine | --release 22.05]
#   --release 22.05  the second, small cluster of that Slurm release instead
#   --engine         also stop the Docker engine, if docker/up.sh started it and nothing else runs in it
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

case "$#${1:-}" in
0 | 1--engine) ;;
2--release) use_release "$2" ;;
*)
    say "usage: docker/down.sh [--engine | --release 22.05]"
    exit 64
    ;;
esac
engine_answers || exit 0
log=$(mktemp)
if ! compose down --volumes --remove-orphans --timeout 3 > "$log" 2>&1; then
    cat "$log" >&2
    fail "the cluster could not be taken down; what Compose says is above"
fi
rm -f "$log"
say "the cluster is down"
[ "${1:-}" != --engine ] || docker/engine.sh stop
