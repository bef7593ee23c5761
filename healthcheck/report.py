"""Which nodes and accelerators are usable, which are not, why, and what happens next. Pure.

`judge` looks at one node, `build` at all of them; how it is shown is for `report_text`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from everstep.healthcheck.policy import CONTRACT, PREFIX, key, one_line, read_reason, worded
from everstep.healthcheck.records import Record
from everstep.healthcheck.result import Severity, Status
from everstep.launcher.slurm.client import Job, Node

STALE_S = 3600.0
"""A last result that is older says nothing of now: it is shown, and not believed."""

ACCELERATORS = ("gpu", "neuron", "neuroncore", "neurondevice", "accelerator", "npu", "tpu", "hpu", "gcd")
"""Names of generic resources that are accelerators."""

_DRAIN = frozenset({"DRAIN", "DRAINED", "DRAINING"})
_BUSY = frozenset({"ALLOCATED", "ALLOC", "MIXED", "COMPLETING"})
_GONE = frozenset({"DOWN", "NOT_RESPONDING", "ERROR", "UNKNOWN", "INVALID", "INVALID_REG"})
_FAIL = frozenset({"FAIL", "FAILING"})
_LATER = frozenset(
    {"MAINT", "MAINTENANCE", "REBOOT", "REBOOT_ISSUED", "REBOOT_REQUESTED", "POWERING_DOWN", "POWER_DOWN"}
    | {"BLOCKED"}
)
_ON_DEMAND = frozenset({"POWERED_DOWN", "POWERING_UP", "POWER_UP"})
_PLAIN = ("IDLE", "MIXED", "ALLOCATED", "COMPLETING", "DOWN", "ERROR", "UNKNOWN")

_NEXT: Mapping[str, str] = {
    "look": "comes back by itself once the check passes",
    "reset": "reset the device; the node comes back once the check passes",
    "reboot": "reboot the node; it comes back once the check passes",
    "replace": "replace the part or the node",
}
_BY_HAND = "an administrator must look and resume it"


@dataclass(frozen=True)
class Source:
    """Where something is known from, and how old it is."""

    name: str
    at: float
    stale: bool = False


@dataclass(frozen=True)
class Row:
    """A node, as people want to know it."""

    name: str
    partitions: tuple[str, ...]
    state: tuple[str, ...]
    """Slurm's words, sorted."""
    word: str
    """One word for all of it: idle, mixed, allocated, draining, drained, down, sick ..."""
    status: Status
    usable: bool
    why: str = ""
    next: str = ""
    by: str = ""
    since: float = 0.0
    group: str = ""
    """Bad nodes with the same are one line."""
    accelerators: int = 0
    sick: int = 0
    """Accelerators of a usable node that are not."""
    used: int = 0
    sources: tuple[Source, ...] = ()
    record: Record | None = None

    @property
    def usable_accelerators(self) -> int:
        """Those that a job can have, now or once others have left."""
        return max(0, self.accelerators - self.sick) if self.usable else 0

    @property
    def free_accelerators(self) -> int:
        """Those that nobody has."""
        return max(0, self.usable_accelerators - self.used)


@dataclass(frozen=True)
class Partition:
    """A partition in numbers."""

    name: str
    nodes: int
    usable: int
    busy: int
    """Of the usable ones, those that have a job."""
    bad: int
    accelerators: int
    usable_accelerators: int
    free_accelerators: int


@dataclass(frozen=True)
class Overview:
    """All that the report knows."""

    at: float
    slurm: str
    """Its release."""
    rows: tuple[Row, ...]
    partitions: tuple[Partition, ...]
    jobs: tuple[Job, ...] = ()
    faults: tuple[str, ...] = ()
    """What could not be asked or believed."""

    @property
    def bad(self) -> tuple[Row, ...]:
        """The nodes that are not in order."""
        return tuple(row for row in self.rows if row.status >= Status.WARN)

    @property
    def status(self) -> Status:
        """The worst one."""
        return max((row.status for row in self.rows), default=Status.OK)

    @property
    def exit_code(self) -> int:
        """Nagios' exit code of the worst node."""
        return {Status.WARN: 1, Status.CRITICAL: 2}.get(self.status, 0)


def build(
    nodes: Iterable[Node],
    records: Mapping[str, Record],
    *,
    now: float,
    slurm: str = "",
    jobs: Sequence[Job] = (),
    faults: Sequence[str] = (),
    partition: str | None = None,
) -> Overview:
    """The report of these nodes. `records` are last results by node; `partition` keeps the others out."""
    rows = tuple(
        judge(node, records.get(node.name), now=now)
        for node in nodes
        if "FUTURE" not in node.state and (partition is None or partition in node.partitions)
    )
    names = dict.fromkeys(name for row in rows for name in row.partitions)
    wanted = [name for name in names if partition in (None, name)]
    return Overview(now, slurm, rows, _partitions(rows, wanted), tuple(jobs), tuple(faults))


def judge(node: Node, record: Record | None, *, now: float) -> Row:
    """One node: what Slurm says counts first, and its last result where that is not too old."""
    # Anybody may have written these words, and a terminal would obey what is in them.
    node = replace(node, reason=one_line(node.reason), reason_by=one_line(node.reason_by))
    sources = [Source("Slurm", now)]
    # A time to come is of a clock that is wrong, and would be believed for ever.
    stale = record is not None and abs(now - record.at) > STALE_S
    if record is not None:
        sources.append(Source(record.source or "last result", record.at, stale))
    fresh = None if stale else record
    total, used = accelerators(node.gres), accelerators(node.gres_used)
    row = Row(
        name=node.name,
        partitions=node.partitions,
        state=tuple(sorted(node.state)),
        word=_word(node.state),
        status=Status.OK,
        usable=True,
        accelerators=total,
        used=used,
        sources=tuple(sources),
        record=record,
    )
    if node.state & (_DRAIN | _GONE | _FAIL):
        return replace(row, **_out_of_service(node, fresh))
    if node.state & _LATER:
        why = node.reason or "the node is kept out for maintenance, a reboot or to save power"
        return replace(
            row, status=Status.WARN, usable=False, why=why, next="Slurm gives it back", **_who(node, why)
        )
    if fresh is not None and fresh.report.status >= Status.WARN:
        return replace(row, **_sick(fresh, total, row.word))
    if node.state & _ON_DEMAND:
        return replace(row, why="powered down; Slurm starts it when it is needed")
    return row


def accelerators(gres: str) -> int:
    """How many there are in `gpu:h100:8(S:0-1)`, `gpu:a100:4,gpu:v100:2`, `gpu:2(IDX:0-1)`; 0 in `(null)`."""
    total = 0
    for entry in re.sub(r"\([^)]*\)", "", gres).split(","):
        name, *rest = entry.strip().split(":")
        if name.lower() in ACCELERATORS:
            total += int(rest[-1]) if rest and rest[-1].isdigit() else 1
    return total


def as_dict(overview: Overview) -> dict[str, Any]:
    """The report as `everstep health --json` prints it."""
    return {
        "at": overview.at,
        "slurm": overview.slurm,
        "status": overview.status.word,
        "partitions": [dict(vars(partition)) for partition in overview.partitions],
        "nodes": [_row_dict(row, overview.at) for row in overview.rows],
        "jobs": [
            {
                "job": job.job_id,
                "state": sorted(job.state),
                "nodes": list(job.nodes),
                "waits_for": job.waits_for,
                "touched_by": [row.name for row in touched(overview, job)],
            }
            for job in overview.jobs
        ],
        "faults": list(overview.faults),
    }


def touched(overview: Overview, job: Job) -> tuple[Row, ...]:
    """The bad nodes among a job's own."""
    return tuple(row for row in overview.bad if row.name in job.nodes)


def _row_dict(row: Row, now: float) -> dict[str, Any]:
    return {
        "node": row.name,
        "partitions": list(row.partitions),
        "state": list(row.state),
        "word": row.word,
        "status": row.status.word,
        "usable": row.usable,
        "why": row.why,
        "next": row.next,
        "by": row.by,
        "since": row.since or None,
        "accelerators": {
            "total": row.accelerators,
            "usable": row.usable_accelerators,
            "used": row.used,
            "free": row.free_accelerators,
        },
        "sources": [
            {
                "source": source.name,
                "at": source.at,
                "age_s": round(now - source.at, 3),
                "stale": source.stale,
            }
            for source in row.sources
        ],
        "last_result": row.record.as_dict() if row.record is not None else None,
    }


def _out_of_service(node: Node, fresh: Record | None) -> dict[str, Any]:
    """A node that Slurm starts nothing on."""
    why, what = node.reason, ""
    told = read_reason(node.reason)
    if told is not None:
        why, what = node.reason[len(PREFIX) :], _NEXT.get(told.do, _BY_HAND)
        group = f"{told.check} {told.device} {told.do}"
        if "resume it by hand]" in node.reason:
            what = _BY_HAND
    elif node.reason in CONTRACT.values():
        does = "replaced" if node.reason == CONTRACT[Severity.REPLACE] else "rebooted"
        what, group = f"is {does} by the cluster manager", node.reason
    elif node.state & _GONE and (not node.reason or node.reason.lower().startswith("not responding")):
        why = why or "Slurm cannot reach it"
        what, group = "Slurm takes it back when it answers; else an administrator must look", why
    else:
        what, group = _BY_HAND, node.reason
    if fresh is not None and told is None and fresh.report.status is Status.CRITICAL:
        found = worded(fresh.report.findings[0])
        why = f"{why}; everstep found {found}" if why else f"everstep found {found}"
        group = f"{group} {key(fresh.report.findings[0])}"
    why = why or "no reason given"
    return {"status": Status.CRITICAL, "usable": False, "why": why, "next": what, **_who(node, group)}


def _sick(fresh: Record, total: int, word: str) -> dict[str, Any]:
    """A node that Slurm still gives out, and whose last result says something else."""
    worst = fresh.report.findings[0]
    more = len(fresh.report.findings) - 1
    why = worded(worst) + (f" (and {more} more)" if more else "")
    said = {"status": fresh.report.status, "why": why, "by": fresh.by, "since": fresh.at, "group": key(worst)}
    if fresh.report.status is Status.WARN:
        return {**said, "next": "nothing; the node is usable"}
    devices = {each.device for each in fresh.report.findings if each.status is Status.CRITICAL}
    whole = not all(_is_accelerator(device) for device in devices)
    what = {"drain": "everstep drains it when it looks next"}.get(
        fresh.mode, "Slurm still gives it out: avoid it"
    )
    return {**said, "word": "sick", "next": what, "sick": total if whole else min(total, len(devices))}


def _who(node: Node, group: str) -> dict[str, Any]:
    return {"by": node.reason_by, "since": node.reason_at, "group": f"{_word(node.state)} {group}"}


def _is_accelerator(device: str) -> bool:
    # gpu3, neuron0, or the PCI address that the kernel log knows a GPU by.
    return bool(re.match(r"(gpu|neuron|nd)[ _-]?\d+", device, re.IGNORECASE)) or bool(
        re.fullmatch(r"(?i)([0-9a-f]{4,8}:)?[0-9a-f]{2}:[0-9a-f]{2}(\.[0-7])?", device)
    )


def _word(state: frozenset[str]) -> str:
    """Slurm's several words as the one that sinfo would say."""
    base = next((word.lower() for word in _PLAIN if word in state), "")
    if state & _FAIL:
        return "failing" if state & _BUSY else "fail"
    if state & {"DOWN", "NOT_RESPONDING"}:
        return "down" if "DOWN" in state else "silent"
    if state & _DRAIN:
        return "draining" if state & _BUSY else "drained"
    if later := sorted(state & _LATER):
        return later[0].lower().replace("_", "-")
    if state & _ON_DEMAND:
        return "powered-down" if "POWERED_DOWN" in state else "powering-up"
    return base or "-".join(sorted(state)).lower() or "unknown"


def _partitions(rows: Sequence[Row], names: Iterable[str]) -> tuple[Partition, ...]:
    found = []
    for name in names:
        inside = [row for row in rows if name in row.partitions]
        usable = [row for row in inside if row.usable]
        found.append(
            Partition(
                name=name,
                nodes=len(inside),
                usable=len(usable),
                busy=sum(bool(_BUSY & set(row.state)) for row in usable),
                bad=sum(row.status is Status.CRITICAL for row in inside),
                accelerators=sum(row.accelerators for row in inside),
                usable_accelerators=sum(row.usable_accelerators for row in inside),
                free_accelerators=sum(row.free_accelerators for row in inside),
            )
        )
    return tuple(found)
