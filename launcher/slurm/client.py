"""The little that everstep needs to know of Slurm: a Protocol, and plain data for the answers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from ClusterShell.NodeSet import NodeSet, NodeSetException, NodeSetParseError
from everstep.recovery.errors import UsageError


@dataclass(frozen=True)
class Job:
    """A job, as far as a launcher cares."""

    job_id: int
    state: frozenset[str]
    """Slurm's words, such as RUNNING or COMPLETING; several may hold at once."""
    nodes: tuple[str, ...]
    """Its nodes as they are now: a job that survives its nodes' deaths has fewer than it began with."""
    cpus_per_node: str = ""
    """As in SLURM_JOB_CPUS_PER_NODE, `4(x2),8`; empty where Slurm does not say."""
    no_kill: bool | None = None
    """Whether it was made with --no-kill; None where nothing that could be asked tells."""
    no_kill_reason: str = ""
    waits_for: str = ""
    """Slurm's word for why it does not run, such as Resources or JobHeldAdmin."""


@dataclass(frozen=True)
class Node:
    """A node and what Slurm thinks of it."""

    name: str
    state: frozenset[str]
    address: str = ""
    partitions: tuple[str, ...] = ()
    gres: str = ""
    """What it has, as in `gpu:h100:8(S:0-1)`."""
    gres_used: str = ""
    reason: str = ""
    reason_by: str = ""
    reason_at: float = 0.0
    """Unix seconds, by slurmctld's clock; 0 where there is no reason."""
    comment: str = ""
    extra: str = ""

    @property
    def usable(self) -> bool:
        """Whether a step may be started there: up, answering, and not on its way out."""
        return not self.state & _UNUSABLE


_UNUSABLE = frozenset(
    {"DOWN", "DRAIN", "DRAINED", "DRAINING", "ERROR", "FAIL", "FAILING", "FUTURE", "INVALID", "INVALID_REG"}
    | {"MAINT", "NOT_RESPONDING", "POWERED_DOWN", "POWERING_DOWN", "REBOOT_ISSUED", "UNKNOWN"}
)


class SlurmClient(Protocol):
    """What is asked of Slurm, whichever way it is asked."""

    def version(self) -> str:
        """The release, such as `24.11.5`."""

    def job(self, job_id: int) -> Job:
        """One job. Raises UsageError where Slurm knows none of that number."""

    def nodes(self, names: Sequence[str]) -> tuple[Node, ...]:
        """The named nodes, in the order of the names."""

    def all_nodes(self) -> tuple[Node, ...]:
        """Every node that the caller may see."""

    def job_parts(self, job: str) -> tuple[Job, ...]:
        """What a user means by `12`, `12_3` or `12+1`. Raises UsageError where Slurm knows none."""


def expand(hostlist: str) -> tuple[str, ...]:
    """The names in a list of hosts such as `n[1-3],login`, in the order of the list, each once.

    Raises UsageError where the list cannot be read.
    """
    names: dict[str, None] = {}
    try:
        for part in _parts(hostlist):
            names.update(dict.fromkeys(NodeSet(part)))
    except (NodeSetException, NodeSetParseError) as error:
        raise UsageError(f"{hostlist!r} is no list of hosts, such as n[1-4,7]: {error}") from error
    return tuple(names)


def fold(names: Iterable[str]) -> str:
    """The shortest list of hosts for these names: `n[1-3]`."""
    return str(NodeSet.fromlist(list(names)))


def _parts(hostlist: str) -> list[str]:
    # NodeSet sorts; Slurm's order is kept by taking the list apart at the commas outside brackets.
    parts, depth, part = [], 0, ""
    for letter in hostlist:
        depth += (letter == "[") - (letter == "]")
        if letter == "," and depth == 0:
            parts.append(part)
            part = ""
        else:
            part += letter
    return [text for text in (*parts, part) if text.strip()]
