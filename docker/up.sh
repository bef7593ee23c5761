#!/bin/bash
# Bring the test cluster up, from nothing if need be, and say how to use it: up.sh [--release 22.05]
#   --release 22.05  the second, small cluster of that Slurm release instead
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

case "$#${1:-}" in
0) ;;
2--release) use_release "$2" ;;
*)
    say "usage: docker/up.sh [--release 22.05]"
    exit 64
    ;;
esac

docker/engine.sh start
docker/images.sh "$@"
say "starting the cluster ..."
log=$(mktemp)
# Another checkout's cluster, or the host itself, may have the first subnet.
for subnet in 172.29.93 172.29.94 172.29.95 10.193.93 192.168.193; do
    export EVERSTEP_SUBNET=$subnet
    code=0
    compose up -d > "$log" 2>&1 || code=$?
    [ $code != 0 ] && grep -qi 'overlap\|needs to be recreated' "$log" || break
done
if [ $code != 0 ]; then
    cat "$log" >&2
    fail "the containers could not be started; what Compose says is above"
fi
rm -f "$log"
deadline=$((SECONDS + 120))
until cluster_is_up; do
    if [ $SECONDS -ge $deadline ]; then
        compose logs --tail=15 >&2 || true
        fail "the $NODES nodes did not come up in two minutes; their last lines are above"
    fi
    sleep 0.5
done

command=$(compose_command)
if [ $NODES = 2 ]; then
    say "The cluster of Slurm 22.05 is up: docker exec -it -u hpc ${COMPOSE_PROJECT_NAME}_old-controller_1 bash"
    exit
fi
cat << MESSAGE

The cluster is up: controller, login, n1 to n4 (Slurm $(on_machine controller sinfo --version | cut -d' ' -f2 | tr -d '\r')).
  log in          $command exec -u hpc login bash
  submit          srun -N4 hostname            (there; /shared is the same folder on all machines)
  kill a node     $command kill n3             (bring it back: $command start n3)
  take it down    make cluster-down
The checkout is mounted at /repo: what you change here is what runs there.
MESSAGE
