"""What one agent needs to know to begin, and what follows from that alone."""

from __future__ import annotations

import importlib.metadata
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from everstep.launcher import messages as m
from everstep.launcher import torchrun
from everstep.launcher.jobside import Here
from everstep.launcher.options import RunOptions
from everstep.launcher.recruit import Terms
from everstep.launcher.roster import Placement
from everstep.launcher.slurm.client import SlurmClient

_PORTS = 8


@dataclass(frozen=True)
class Post:
    """Everything that one agent needs to know to begin."""

    node: str
    index: int
    nnodes: int  # that hold ranks
    options: RunOptions
    spec: torchrun.WorkerSpec
    run_id: str
    coordinator: tuple[str, int]
    address: str  # that state and groups travel on
    spare: bool = False
    listener: int = -1  # an already bound socket, for the coordinator
    bind: str = "127.0.0.1"
    devices: int = 0
    problem: str = ""
    code: int = 64
    joiner: bool = False  # of a replacement node, which comes to a run that is under way
    forsaken: Callable[[], None] | None = None  # what is left to do for the run where its coordinator is lost
    deaf: bool = False  # Slurm signals every process of a step, and workers leave that to their agent
    # The coordinator's, in a Slurm job: what it can be asked for, by whom, and where its history is kept.
    here: Here = Here()  # noqa: RUF009
    client: SlurmClient | None = None
    terms: Terms | None = None
    folder: Path | None = None

    @property
    def health(self) -> str:
        """The level of its health checks before the run: off, light or full."""
        asked = self.options.health
        return ("light" if self.deaf else "off") if asked == "auto" else asked


def introduction(post: Post, unfit: str) -> m.AgentHello:
    """How an agent presents itself to the coordinator."""
    versions = {name: importlib.metadata.version(name) for name in ("everstep", "torch")}
    return m.AgentHello(
        post.node,
        post.index,
        post.address,
        post.spare,
        _free_ports(post.address, _PORTS),
        versions,
        post.devices,
        post.problem,
        post.code,
        post.joiner,
        unfit,
    )


def rank_environment(post: Post, place: Placement) -> dict[str, str]:
    """The variables of a rank, as torchrun would set them, or Slurm where torchrun has no part."""
    task: dict[str, str] = {}
    if post.spec.plain:
        task = torchrun.task_environment(rank=place.rank, node_rank=place.group_rank, nnodes=post.nnodes)
        if not mentions_everstep(post.spec.script):
            return task
    return task | torchrun.rank_environment(
        post.spec,
        rank=place.rank,
        local_rank=place.local_rank,
        world_size=post.nnodes * post.spec.nproc_per_node,
        nnodes=post.nnodes,
        node_rank=place.group_rank,
        master_addr=place.master_host,
        master_port=place.master_port,
        restart_count=place.attempt,
        run_id=post.run_id,
    )


def mentions_everstep(script: str | None) -> bool:
    """Whether a script is likely to call recovery.init(): until it does, only its text can tell."""
    try:
        return script is not None and b"everstep" in Path(script).read_bytes()
    except OSError:
        return False


def _free_ports(host: str, count: int) -> list[int]:
    """Ports that are free now, for MASTER_PORT."""
    held, ports = [], []
    for _ in range(count):
        sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        try:
            sock.bind((host, 0))
        except OSError:
            sock.close()
            continue
        held.append(sock)
        ports.append(int(sock.getsockname()[1]))
    for sock in held:
        sock.close()
    return ports
