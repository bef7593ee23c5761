"""What `everstep doctor` knows when it judges: plain data, gathered on this host and on the job's nodes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec
from everstep.launcher.slurm.client import Job, Node, Partition


class Interface(msgspec.Struct, frozen=True):
    """A network interface of a host."""

    name: str
    address: str
    speed: int = 0
    """Mbit/s; 0 where the kernel does not say."""


class Loose(msgspec.Struct, frozen=True):
    """A file or folder that others than its owner may change."""

    path: str
    why: str
    """What it is to us: `the everstep command`."""


class HostFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What one host says of itself; sent as JSON from the nodes."""

    host: str
    everstep: str = ""
    """The version installed for the Python that runs us; empty: not installed."""
    torch: str = ""
    python: str = ""
    prefix: str = ""
    """Where that Python lives."""
    interfaces: tuple[Interface, ...] = ()
    """Those that are up, loopback apart."""
    chosen: str = ""
    """The address that state would travel on without --interface; empty where it cannot be told."""
    loose: tuple[Loose, ...] = ()


@dataclass(frozen=True)
class Plugin:
    """The SPANK plugin as srun and its configuration show it."""

    offered: bool = False
    """Whether `srun --help` has --auto-resume."""
    configured: tuple[str, ...] = ()
    """The lines of plugstack.conf that load it."""
    path: str = ""
    built_for: str = ""
    """The release it was compiled against, as `24.11`; empty where that cannot be read."""
    config_file: str = ""
    """plugstack.conf, or where it would be."""


@dataclass(frozen=True)
class SlurmFacts:
    """What Slurm says of itself."""

    release: str
    config: Mapping[str, str] = field(default_factory=dict)
    partitions: tuple[Partition, ...] = ()
    nodes: tuple[Node, ...] = ()
    job: Job | None = None
    """The job that we are in."""
    plugin: Plugin = Plugin()


@dataclass(frozen=True)
class Facts:
    """All of it."""

    here: HostFacts
    slurm: SlurmFacts | None = None
    slurm_problem: str = ""
    """Why `slurm` is None."""
    hosts: tuple[HostFacts, ...] = ()
    """What the nodes say of themselves; empty where they were not asked."""
    asked: tuple[str, ...] = ()
    """The nodes that were asked."""
    ask_problem: str = ""
    """Why the nodes, or some, did not answer."""
