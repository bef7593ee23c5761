#!/bin/bash
# What each machine of the test cluster does when it starts, first time or again: entrypoint.sh controller|login|node
set -euo pipefail
umask 022
role=$1
secrets=/run/cluster # a volume that all machines share and only root reads

if [ "$role" = controller ]; then
    chmod 0700 "$secrets"
    if [ ! -e "$secrets/slurm.key" ]; then
        (umask 077 && head -c 1024 /dev/urandom > "$secrets/new" && mv "$secrets/new" "$secrets/slurm.key")
    fi
    if [ ! -e /home/hpc/.ssh/id_ed25519 ]; then
        install -d -o hpc -g hpc -m 0700 /home/hpc/.ssh
        su hpc -c 'ssh-keygen -q -t ed25519 -N "" -f ~/.ssh/id_ed25519 && cp ~/.ssh/id_ed25519.pub ~/.ssh/authorized_keys'
    fi
fi

until [ -e "$secrets/slurm.key" ]; do sleep 0.2; done
cp /repo/docker/slurm/*.conf /etc/slurm/
mkdir -p /etc/slurm/plugstack.conf.d /var/spool/slurmctld /var/spool/slurmd
install -m 0600 "$secrets/slurm.key" /etc/slurm/slurm.key

/opt/everstep/bin/python /repo/docker/live.py
if ! su hpc -c 'cat /repo/setup.cfg /repo/launcher/__init__.py' > /dev/null 2>&1; then
    echo "$HOSTNAME: user hpc cannot read the checkout mounted at /repo; on the host: chmod -R a+rX ." >&2
fi

ssh-keygen -A > /dev/null
mkdir -p /run/sshd
/usr/sbin/sshd

case $role in
controller) exec slurmctld -D ;;
login) exec sackd -D ;; # lets the commands of this machine prove who calls them
node)
    for gpu in 0 1; do
        [ -e /dev/fakegpu$gpu ] || mknod -m 0666 /dev/fakegpu$gpu c 1 3
    done
    exec slurmd -D
    ;;
*)
    echo "entrypoint.sh: role '$role' is none of controller, login, node" >&2
    exit 64
    ;;
esac
