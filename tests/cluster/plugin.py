"""The SPANK plugin on a test cluster: compiled there, put on every machine, and taken away again."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from slurm_cluster import Cluster

CONF = "/etc/slurm/plugstack.conf.d"
LINE = f"{CONF}/everstep.conf"
MAKE = "make -s -C /repo/slurm_spank BUILD=/tmp/everstep-spank"


@contextmanager
def installed(cluster: Cluster) -> Iterator[None]:
    """Everstep's plugin, and one that registers --container-image, on every machine."""
    root = "/shared/spank"
    build = (
        f"set -e; rm -rf {root}; {MAKE} install DESTDIR={root}; "
        f"gcc -Wall -Wextra -Werror -fPIC -shared -o $(dirname $(find {root} -name everstep.so))/image.so "
        f"/repo/tests/cluster/scripts/image_plugin.c; echo 'optional image.so' > {root}{CONF}/image.conf"
    )
    cluster.exec("login", ["sh", "-c", build], user="root", timeout=120)
    machines = ("login", *cluster.nodes)
    for machine in machines:
        cluster.exec(machine, ["cp", "-r", f"{root}/.", "/"], user="root")
    try:
        yield
    finally:
        cluster.mend()
        for machine in machines:
            cluster.exec(machine, ["sh", "-c", f"rm -f {CONF}/everstep.conf {CONF}/image.conf"], user="root")


@contextmanager
def configured(cluster: Cluster, arguments: str) -> Iterator[None]:
    """Another line in plugstack.conf, where srun and sbatch are typed."""
    keep = f"cp {LINE} /tmp/line && echo 'optional everstep.so {arguments}' > {LINE}"
    cluster.exec("login", ["sh", "-c", keep], user="root")
    try:
        yield
    finally:
        cluster.exec("login", ["cp", "/tmp/line", LINE], user="root")


@contextmanager
def taken_out(cluster: Cluster) -> Iterator[None]:
    """srun without the plugin."""
    cluster.exec("login", ["mv", LINE, "/tmp/line"], user="root")
    try:
        yield
    finally:
        cluster.exec("login", ["mv", "/tmp/line", LINE], user="root")


def checked(cluster: Cluster) -> str:
    """What `make check` says on the login machine."""
    return cluster.exec("login", f"{MAKE} check", user="root", timeout=240).stdout


def environment(cluster: Cluster) -> list[str]:
    """What the task of a plain srun has in its environment, but for what differs from one to the next."""
    changing = re.compile(r"^SLURM_(\w*JOB_?ID|JOB_(START|END)_TIME|\w+_PORT|TASK_PID)=")
    done = cluster.exec("login", f"srun -N1 --nodelist={cluster.nodes[0]} env")
    return sorted(line for line in done.stdout.splitlines() if not changing.match(line))


def traced(cluster: Cluster, file: str) -> Counter[str]:
    """The processes, connections and opened files of a plain srun, as strace sees them."""
    calls = "execve,fork,vfork,clone,clone3,connect,openat,open"
    line = f"strace -f -qq -s 300 -e trace={calls} -o {file} srun -N1 --nodelist={cluster.nodes[0]} hostname"
    cluster.exec("login", line)
    started = (line for line in cluster.read_shared(file).splitlines() if "CLONE_THREAD" not in line)
    return Counter(_without_numbers(call) for line in started if (call := _call(line)))


def _call(line: str) -> str:
    found = re.match(r"\d+\s+(\w+\(.*)", line)
    return found[1] if found else ""


def _without_numbers(call: str) -> str:
    call = re.sub(r"\s+(=|<unfinished).*", "", call)
    call = re.sub(r"0x[0-9a-f]+|/proc/\d+|child_tidptr.*|/\* \d+ vars \*/", "", call)
    return re.sub(r"htons\(\d+\)|\(\d+, ", "(", call) if "sa_family" in call else call
