"""The report's question put to Slurm, to the nodes' last results and, if asked for, to the nodes over SSH."""

from __future__ import annotations

import shutil
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from everstep.healthcheck import records as record_files
from everstep.healthcheck import report, ssh
from everstep.healthcheck.errors import HealthError
from everstep.healthcheck.records import Record
from everstep.healthcheck.report import Overview
from everstep.launcher.slurm.client import Job, Node, SlurmClient, expand
from everstep.recovery.errors import UsageError


@dataclass(frozen=True)
class Question:
    """What is wanted."""

    partition: str | None = None
    nodes: str | None = None
    """A list of hosts."""
    job: str | None = None
    shared_dir: str | None = None
    """Where nodes leave their last results."""
    state_dir: str | None = None
    """Where this host, should it be a node, leaves its own."""
    ssh: ssh.Settings | None = None


def overview(question: Question, client: SlurmClient, clock: Callable[[], float] = time.time) -> Overview:
    """The answer. Raises HealthError where Slurm is not here, or knows no such node, job or partition."""
    try:
        nodes, jobs = _nodes(question, client)
        release = client.version()
    except HealthError:
        raise
    except UsageError as error:
        raise HealthError(str(error)) from error
    asked_at = clock()
    _known_partition(question, nodes)
    records, faults = _records(question, nodes)
    if question.ssh is not None and (silent := {n.name: n.address for n in nodes if _silent(n)}):
        answers, more = ssh.ask_all(silent, question.ssh)
        records, faults = {**records, **answers}, [*faults, *more]
        asked_at = clock()
    return report.build(
        nodes,
        records,
        now=asked_at,
        slurm=release,
        jobs=jobs,
        faults=faults,
        partition=question.partition,
    )


def slurm_is_here() -> None:
    """Raises HealthError where this host has no Slurm commands."""
    if shutil.which("scontrol") is None:
        raise HealthError(
            "no Slurm here: scontrol is not on the PATH; load its module (`module load slurm`) or log in to "
            "a host that has it (`everstep health check` looks at this machine alone)"
        )


def _nodes(question: Question, client: SlurmClient) -> tuple[tuple[Node, ...], tuple[Job, ...]]:
    jobs: tuple[Job, ...] = ()
    names: tuple[str, ...] | None = None
    if question.job is not None:
        jobs = client.job_parts(question.job)
        names = tuple(dict.fromkeys(name for job in jobs for name in job.nodes))
    if question.nodes is not None:
        wanted = expand(question.nodes)
        names = wanted if names is None else tuple(name for name in names if name in set(wanted))
        if not wanted:
            raise HealthError(f"{question.nodes!r} names no node, such as n[1-4,7]")
    return (client.nodes(names)), jobs


def _known_partition(question: Question, nodes: Sequence[Node]) -> None:
    there = sorted({name for node in nodes for name in node.partitions})
    if question.partition is not None and question.partition not in there and question.job is None:
        raise HealthError(
            f"Slurm has no partition {question.partition!r} of these nodes: {', '.join(there) or 'none'}"
        )


def _records(question: Question, nodes: Sequence[Node]) -> tuple[dict[str, Record], list[str]]:
    """The newest result that is known of each node."""
    found: dict[str, Record] = {}
    faults: list[str] = []
    if question.shared_dir is not None:
        try:
            shared, faults = record_files.read_folder(question.shared_dir, [node.name for node in nodes])
            _newest(found, shared)
        except HealthError as error:
            faults = [str(error)]
    for node in nodes:
        for text, where in ((node.comment, "Slurm's comment"), (node.extra, "Slurm's extra")):
            record = record_files.from_slurm(node.name, text, where) if text else None
            if record is not None:
                _newest(found, {node.name: record})
    if question.state_dir is not None:
        _newest(found, _own(Path(question.state_dir), {node.name for node in nodes}))
    return found, faults


def _own(state_dir: Path, names: set[str]) -> dict[str, Record]:
    # On a login node there is none, and that is no news.
    try:
        record = record_files.from_json((state_dir / record_files.LAST).read_bytes(), socket.gethostname())
    except (OSError, ValueError):
        return {}
    return {record.node: record} if record.node in names else {}


def _newest(found: dict[str, Record], others: Mapping[str, Record]) -> None:
    for name, record in others.items():
        if name not in found or found[name].at < record.at:
            found[name] = record


def _silent(node: Node) -> bool:
    return bool(node.state & {"NOT_RESPONDING", "DOWN", "UNKNOWN"})
