"""Slurm asked through pyslurm, where that is installed for this very release: no process a question.

pyslurm is optional and works with one series of Slurm only. What it does not do (sbatch's options, the
configuration in full) is left to the commands.
"""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, TypeVar

from everstep.launcher.slurm.cli_json import CliJson
from everstep.launcher.slurm.cli_text import in_order, states
from everstep.launcher.slurm.client import (
    Job,
    Node,
    Partition,
    SlurmBusy,
    SlurmClient,
    SlurmError,
    UnknownJob,
    expand,
)
from everstep.launcher.slurm.commands import Patience, wait_before_retry

T = TypeVar("T")


def load(release: str) -> ModuleType | None:
    """The pyslurm that is installed, if it was made for this release of Slurm; else None.

    A pyslurm of another series is not even imported where its version can be seen beforehand: it would
    load a library of Slurm that may be missing, or answer nonsense.
    """
    from importlib.metadata import PackageNotFoundError, version

    try:
        made_for = version("pyslurm")
        if made_for.split(".")[:2] != [str(int(part)) for part in release.split(".")[:2]]:
            return None
        flags = sys.getdlopenflags()
        try:
            return importlib.import_module("pyslurm")
        finally:
            sys.setdlopenflags(flags)  # pyslurm changes them for good
    except (PackageNotFoundError, ImportError, OSError, ValueError):
        return None


@dataclass(frozen=True)
class PySlurm(CliJson):
    """A SlurmClient over pyslurm; the commands for what that leaves out."""

    pyslurm: Any = None
    patience: Patience = field(default_factory=Patience)

    def job(self, job_id: int) -> Job:
        """One job, and whether it was made with --no-kill as far as that can be told."""
        found = self._asked(lambda: self.pyslurm.Job.load(job_id), f"asking for job {job_id}")
        job = read_job(found)
        if job.nodes and not job.cpus_per_node:
            return super().job(job_id)  # pyslurm 24.11.0 does not say what each node gave; the commands do
        return self._with_no_kill(job, batch=bool(found.is_batch_job))

    def nodes(self, names: Sequence[str] | None = None) -> tuple[Node, ...]:
        """The named nodes, in the order of the names; without names, all of them."""
        if names is not None and not names:
            return ()
        found = self._asked(self.pyslurm.Nodes.load, "asking for the nodes")
        return in_order(map(read_node, found.values()), names)

    def partitions(self) -> tuple[Partition, ...]:
        """The partitions that the user may see."""
        found = self._asked(self.pyslurm.Partitions.load, "asking for the partitions")
        return tuple(map(read_partition, found.values()))

    def requeue(self, job_id: int, *, hold: bool = False) -> None:
        """Put a job back into the queue; with `hold` it stays there until `release`."""
        self._asked(lambda: self.pyslurm.Job(job_id).requeue(hold=hold), f"requeueing job {job_id}")

    def _asked(self, ask: Callable[[], T], doing: str) -> T:
        """The answer, with the same patience that the commands have."""
        began, tries = time.monotonic(), 0
        while True:
            tries += 1
            try:
                return ask()
            except self.pyslurm.PyslurmError as error:
                said = str(error)
                if "invalid job id" in said.lower():
                    raise UnknownJob(f"{doing}: {said}: `squeue --me` lists yours") from error
                passed = time.monotonic() - began
                wait = wait_before_retry(said, tries=tries, passed=passed, once=False, patience=self.patience)
                if wait is None:
                    busy = wait_before_retry(
                        said, tries=1, passed=0.0, once=False, patience=Patience(limit=float("inf"))
                    )
                    raise (SlurmError if busy is None else SlurmBusy)(f"{doing}: {said}") from error
                time.sleep(wait)


def read_job(job: Any) -> Job:
    """A job from a pyslurm.Job."""
    layout = _layout(job)
    nodes = expand(job.allocated_nodes or "")
    state = states(job.state or "")
    over = not state & {"PENDING", "RUNNING", "SUSPENDED"}
    return Job(
        job_id=int(job.id),
        state=state,
        nodes=nodes,
        cpus_per_node=",".join(str(_count(layout[name]["cpu_ids"])) for name in nodes if name in layout),
        name=job.name or "",
        user=job.user_name or "",
        partition=job.partition or "",
        account=job.account or "",
        qos=job.qos or "",
        constraint=",".join(job.constraints or ()),
        gres=_gres(job.gres_per_node) or (_gres(layout[nodes[0]]["gres"]) if nodes and layout else ""),
        cpus_per_task=job.cpus_per_task,
        memory_per_node=job.memory_per_node or None,
        memory_per_cpu=job.memory_per_cpu or None,
        exclusive=job.resource_sharing == "NO",
        excluded=expand(job.excluded_nodes or ""),
        reservation=job.reservation or "",
        num_nodes=job.num_nodes or len(nodes),
        time_limit=job.time_limit,
        submit_time=job.submit_time or None,
        start_time=job.start_time or None,
        # A job without a limit ends in a year, says Slurm.
        end_time=(job.end_time or None) if job.time_limit is not None or over else None,
        requeue=job.is_requeueable,
        restarts=job.requeue_count or 0,
        reason="" if job.state_reason in (None, "None") else job.state_reason,
        waits_for="" if job.state_reason in (None, "None") else job.state_reason,
        comment=job.comment or "",
        command=job.command or "",
        workdir=job.working_directory or "",
        stdout=job.standard_output or "",
    )


def read_node(node: Any) -> Node:
    """A node from a pyslurm.Node."""
    return Node(
        name=node.name,
        state=states(node.state or ""),
        reason=node.reason or "",
        features=tuple(node.available_features or ()),
        gres=_gres(node.configured_gres),
        partitions=tuple(node.partitions or ()),
        version=node.slurm_version or "",
    )


def read_partition(partition: Any) -> Partition:
    """A partition from a pyslurm.Partition."""
    return Partition(
        name=partition.name,
        nodes=expand(partition.nodes or ""),
        default=bool(partition.is_default),
        state=partition.state or "",
        preempt_mode=partition.preempt_mode or "",
        grace_time=partition.preemption_grace_time or 0,
        priority_tier=partition.priority_tier or 0,
    )


def _layout(job: Any) -> Mapping[str, Any]:
    layout: Mapping[str, Any] = job.get_resource_layout_per_node() or {}
    return layout


def _gres(gres: Mapping[str, Any] | None) -> str:
    """`{"gpu": 2}`, `{"gres/gpu:a100": 2}` or `{"gpu": {"count": 2, "indexes": …}}`, as for --gres."""
    words: list[str] = []
    for name, count in (gres or {}).items():
        number = count.get("count") if isinstance(count, Mapping) else count
        words.append(f"{name.removeprefix('gres/')}:{number}")
    return ",".join(words)


def _count(ids: str) -> int:
    """How many there are in `0-3,8`."""
    ends = (part.partition("-") for part in (ids or "").split(",") if part)
    return sum(int(last or first) - int(first) + 1 for first, _, last in ends)


def client_for(commands: CliJson) -> SlurmClient | None:
    """A client over the installed pyslurm; None where there is none for this release."""
    module = load(commands.version())
    return None if module is None else PySlurm(commands.run, commands.environ, module)
