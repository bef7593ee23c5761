"""The little that everstep needs of Slurm: a Protocol, and plain data for the answers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from ClusterShell.NodeSet import NodeSet, NodeSetException, NodeSetParseError
from everstep.recovery.errors import UsageError

MOST_HOSTS = 100_000
"""In one list: Slurm knows 65,536 nodes at the most, and a slip of the finger names a thousand million."""


class SlurmError(UsageError):
    """Slurm refused what it was asked, in its own words."""


class SlurmBusy(SlurmError):
    """Slurm's controller gave no answer, however often and long it was asked: it may be restarting."""


class UnknownJob(SlurmError):
    """Slurm knows no job of that number (any more)."""


@dataclass(frozen=True)
class Job:
    """A job, as far as a launcher cares. What Slurm does not say is empty, or None."""

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
    name: str = ""
    user: str = ""
    partition: str = ""
    account: str = ""
    qos: str = ""
    constraint: str = ""
    """The features its nodes must have, as --constraint takes them."""
    gres: str = ""
    """The generic resources of each node, as --gres takes them (`gpu:2`): what it asked for, or, where
    it asked by task or for the job as a whole, what it was given on a node."""
    cpus_per_task: int | None = None
    memory_per_node: int | None = None
    """MB; None where it did not ask."""
    memory_per_cpu: int | None = None
    """MB; None where it did not ask."""
    exclusive: bool = False
    """Whether it shares its nodes with no other job."""
    excluded: tuple[str, ...] = ()
    """The nodes that it must not get."""
    reservation: str = ""
    num_nodes: int = 0
    """How many nodes it has, or asks for while it is pending."""
    time_limit: int | None = None
    """Minutes; None: no limit."""
    submit_time: int | None = None
    """Unix seconds, as are the other times."""
    start_time: int | None = None
    """When it started; for a pending job when it is expected to, if that is known."""
    end_time: int | None = None
    """When it ended, or will be ended by its time limit."""
    preempted: bool = False
    """Whether Slurm has told it that it must make room for another job."""
    requeue: bool | None = None
    """Whether Slurm may put it back into the queue."""
    batch: bool | None = None
    """Whether it has a batch script; only such a job can be put back."""
    restarts: int = 0
    """How often it was put back."""
    reason: str = ""
    """Why it waits, in Slurm's word: Resources, Priority, …"""
    waits_for: str = ""
    """The same with what Slurm adds to it, for people."""
    comment: str = ""
    command: str = ""
    """Path of its batch script, as it was submitted."""
    workdir: str = ""
    stdout: str = ""
    """The file of its output."""

    @property
    def pending(self) -> bool:
        """Whether it waits in the queue."""
        return bool(self.state & {"PENDING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT"})

    @property
    def running(self) -> bool:
        """Whether it has its nodes and is not being ended."""
        return "RUNNING" in self.state and "COMPLETING" not in self.state

    @property
    def over(self) -> bool:
        """Whether it has ended, and will not start again."""
        return bool(self.state & _OVER) and not self.pending


_OVER = frozenset(
    {"BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY"}
    | {"PREEMPTED", "REVOKED", "TIMEOUT"}
)


@dataclass(frozen=True)
class Node:
    """A node and what Slurm thinks of it."""

    name: str
    state: frozenset[str]
    reason: str = ""
    """Why it is down or drained, as whoever did it said."""
    features: tuple[str, ...] = ()
    gres: str = ""
    """As configured: `gpu:2`."""
    partitions: tuple[str, ...] = ()
    version: str = ""
    """The release of its slurmd."""
    address: str = ""
    gres_used: str = ""
    reason_by: str = ""
    """Who drained it or set it down."""
    reason_at: float = 0.0
    """Unix seconds, by slurmctld's clock; 0 where there is no reason, or Slurm does not say."""
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


@dataclass(frozen=True)
class Partition:
    """A partition, as far as preemption and limits go."""

    name: str
    nodes: tuple[str, ...]
    default: bool = False
    state: str = "UP"
    preempt_mode: str = ""
    """OFF, CANCEL, REQUEUE, SUSPEND, …"""
    grace_time: int = 0
    """Seconds between the notice of a preemption and the end."""
    priority_tier: int = 0


class SlurmClient(Protocol):
    """What is asked of Slurm, whichever way it is asked.

    Every method raises SlurmBusy where the controller does not answer in time, and SlurmError, with
    Slurm's own last word, where it refuses.
    """

    def version(self) -> str:
        """The release, such as `24.11.5`."""

    def job(self, job_id: int) -> Job:
        """One job. Raises UnknownJob."""

    def job_parts(self, job: str) -> tuple[Job, ...]:
        """What a user means by `12`, `12_3` or `12+1`: a job, an array's tasks, a het job's parts.

        Nothing is said of --no-kill, which takes more questions. Raises UnknownJob.
        """

    def nodes(self, names: Sequence[str] | None = None) -> tuple[Node, ...]:
        """The named nodes, in the order of the names; without names, all of them."""

    def partitions(self) -> tuple[Partition, ...]:
        """The partitions that the user may see."""

    def config(self) -> Mapping[str, str]:
        """Slurm's configuration, as `scontrol show config` words it."""

    def submit(
        self,
        argv: Sequence[str],
        *,
        script: str | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
    ) -> int:
        """Submit a batch job; its number.

        Parameters
        ----------
        argv
            sbatch's words without `sbatch`: options, then the script's path and its arguments.
        script
            The text of the script, in place of a path in `argv`.
        env
            The environment that sbatch runs in, and that the job inherits by default; None: ours.
        cwd
            The folder that sbatch runs in; None: ours.

        Raises SlurmBusy also where it cannot be told whether the job was made: it is not tried again
        then, since that might make two.
        """

    def test_submit(
        self,
        argv: Sequence[str],
        *,
        script: str | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
    ) -> str:
        """What Slurm thinks of such a job, and when it would start (`sbatch --test-only`)."""

    def cancel(self, job_id: int, signal: str | None = None) -> None:
        """End a job, or send it a signal. A job that is over or unknown is none of anybody's business."""

    def requeue(self, job_id: int, *, hold: bool = False) -> None:
        """Put a job back into the queue; with `hold` it stays there until `release`.

        Seen with 24.11: what a job excludes (ExcNodeList) can be changed only while it is pending, and a
        requeued job waits two minutes (the life of a credential) before it may start. So to requeue a job
        without its bad nodes, and at once: `requeue(job, hold=True)`; wait until it is no longer
        COMPLETING; `update_job(job, ExcNodeList=…, StartTime="now")`; `release(job)`. Whoever does that
        from inside the job has KillWait seconds for it.
        """

    def release(self, job_id: int) -> None:
        """Let a held job start."""

    def update_job(self, job_id: int, **fields: str) -> None:
        """Change a job: fields as `scontrol update` names them, such as ExcNodeList, Comment, TimeLimit."""

    def update_nodes(self, names: Sequence[str], **fields: str) -> None:
        """Change nodes, as the site allows it: State and Reason, or Comment."""


def expand(hostlist: str) -> tuple[str, ...]:
    """The names in a list of hosts such as `n[1-3],login`, in the order of the list, each once.

    Raises UsageError where the list cannot be read, or names more than MOST_HOSTS.
    """
    named = _most_named(hostlist)
    if named > MOST_HOSTS:
        raise UsageError(
            f"{hostlist[:80]!r} names {named:,} hosts, and {MOST_HOSTS:,} are the most: name fewer, such as "
            "n[1-4,7]"
        )
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


def _most_named(hostlist: str) -> int:
    """No fewer than the names in a list of hosts, by its brackets: NodeSet would make every name first."""
    total = 0
    for part in (each for text in _parts(hostlist) for each in re.split("[!&^]", text)):
        named = 1
        for inside in re.findall(r"\[([^\[\]]*)\]", part):
            named *= max(1, sum(_most_of_range(each) for each in inside.split(",")))
        total += named
    return total


def _most_of_range(text: str) -> int:
    found = re.fullmatch(r"\s*(\d{1,30})-(\d{1,30})(?:/(\d{1,30}))?\s*", text)
    if found is None:
        return 1  # one name, or what NodeSet itself refuses
    first, last, step = int(found[1]), int(found[2]), int(found[3] or 1)
    return max(0, last - first) // max(1, step) + 1


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
