#!/bin/bash
# What each machine of the 22.05 cluster does when it starts: entrypoint.sh controller|node
set -euo pipefail
umask 022
role=$1
secrets=/run/cluster # a volume that all machines share and only root reads

if [ "$role" = controller ] && [ ! -e "$secrets/munge.key" ]; then
    chmod 0700 "$secrets"
    (umask 077 && head -c 1024 /dev/urandom > "$secrets/new" && mv "$secrets/new" "$secrets/munge.key")
fi
until [ -e "$secrets/munge.key" ]; do sleep 0.2; done
install -o munge -g munge -m 0400 "$secrets/munge.key" /etc/munge/munge.key
install -d -o munge -g munge -m 0755 /run/munge
setpriv --reuid=munge --regid=munge --clear-groups /usr/sbin/munged

cp /repo/docker/release-22.05/slurm.conf /repo/docker/slurm/plugstack.conf /etc/slurm/
mkdir -p /etc/slurm/plugstack.conf.d /var/spool/slurmctld /var/spool/slurmd
/opt/everstep/bin/python /repo/docker/live.py

case $role in
controller) exec slurmctld -D ;;
node) exec slurmd -D ;;
*)
    echo "entrypoint.sh: role '$role' is neither controller nor node" >&2
    exit 64
    ;;
esac
