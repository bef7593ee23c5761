"""The report as people read it: sinfo's habits, a table a question. Pure: it returns lines."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import click
from everstep.healthcheck.report import Overview, Row, touched
from everstep.healthcheck.result import Status
from everstep.launcher.slurm.client import Job, fold

COLOURS = {Status.CRITICAL: "red", Status.WARN: "yellow"}
LONG = 100
"""Characters of a reason in a table; `-R` shows all of it."""
LONG_LIST = 32
"""A longer list of nodes has a line of its own."""


@dataclass(frozen=True)
class _Group:
    """Bad nodes that are so for one reason."""

    rows: tuple[Row, ...]

    @property
    def names(self) -> str:
        return fold(row.name for row in self.rows)

    @property
    def first(self) -> Row:
        return self.rows[0]

    @property
    def since(self) -> float:
        return min((row.since for row in self.rows if row.since), default=0.0)

    @property
    def why(self) -> str:
        """The reason; of several that differ in their values, the first one."""
        others = {row.why for row in self.rows} - {self.first.why}
        return f"{self.first.why} ..." if others else self.first.why


def summary(overview: Overview) -> list[str]:
    """The answer to `everstep health`: partitions in numbers, then what is bad, by reason."""
    head = ["PARTITION", "NODES", "USABLE", "BUSY", "BAD", "ACCELS", "USABLE", "FREE"]
    body = [dataclasses.astuple(part) for part in overview.partitions]
    styles = [
        Status.CRITICAL if not part.usable and part.nodes else Status.OK for part in overview.partitions
    ]
    lines = table(head, body, styles)
    if overview.bad:
        lines += ["", *_bad(overview, short=True)]
    else:
        lines += ["", "every node is in order" if overview.rows else "no nodes"]
    return [*lines, *_foot(overview)]


def by_node(overview: Overview) -> list[str]:
    """A line a node, as `sinfo -N` has it."""
    head = ["NODE", "PARTITION", "STATE", "ACCELS", "USABLE", "FREE", "SINCE", "BY", "RESULT", "WHY"]
    body, styles = [], []
    for row in overview.rows:
        numbers = [row.accelerators, row.usable_accelerators, row.free_accelerators]
        words = [row.name, ",".join(row.partitions), row.word, *numbers, _age(overview.at, row.since)]
        body.append([*words, row.by or "-", _result(row, overview.at), _cut(row.why) or "-"])
        styles.append(row.status)
    return [*table(head, body, styles), *_foot(overview)]


def by_reason(overview: Overview) -> list[str]:
    """The reasons in full, and whom they keep out, as `sinfo -R` has it."""
    if not overview.bad:
        return ["every node is in order" if overview.rows else "no nodes", *_foot(overview)]
    return [*_bad(overview, short=False), *_foot(overview)]


def by_job(overview: Overview) -> list[str]:
    """Whether a job is touched, and by what."""
    lines: list[str] = []
    for job in overview.jobs:
        lines += _job(overview, job)
    bad = {row.name for job in overview.jobs for row in touched(overview, job)}
    if bad:
        lines += ["", *_bad(overview, short=False)]
    return [*lines, *_foot(overview)]


def table(head: Sequence[str], body: Sequence[Sequence[object]], styles: Sequence[Status]) -> list[str]:
    """Lines of columns: numbers to the right, words to the left, the last one as long as it is."""
    cells = [[str(cell) for cell in line] for line in body]
    widths = [max(map(len, column)) for column in zip(head, *cells, strict=True)]
    right = [bool(body) and all(isinstance(line[place], int) for line in body) for place in range(len(head))]

    def one(words: Sequence[str]) -> str:
        padded = [
            word.rjust(width) if is_number else word.ljust(width)
            for word, width, is_number in zip(words, widths, right, strict=True)
        ]
        return "  ".join(padded).rstrip()

    lines = [click.style(one(head), bold=True)]
    for line, status in zip(cells, styles, strict=True):
        colour = COLOURS.get(status)
        lines.append(click.style(one(line), fg=colour) if colour else one(line))
    return lines


def ago(seconds: float) -> str:
    """How long ago, in one unit: 45s, 12m, 3h, 2d."""
    if seconds < 0:
        return "0s"
    for size, unit in ((86400, "d"), (3600, "h"), (60, "m")):
        if seconds >= 2 * size or (seconds >= size and size == 60):
            return f"{int(seconds // size)}{unit}"
    return f"{int(seconds)}s"


def _bad(overview: Overview, *, short: bool) -> list[str]:
    groups: dict[tuple[Status, str, str], list[Row]] = {}
    for row in overview.bad:
        groups.setdefault((row.status, row.word, row.group or row.why), []).append(row)
    ordered = sorted(
        (_Group(tuple(rows)) for rows in groups.values()), key=lambda each: -int(each.first.status)
    )
    head = ["NODES", "STATE", "SINCE", "BY", "WHY"]
    body: list[list[object]] = []
    for group in ordered:
        why = _cut(group.why) if short else group.why
        since = _age(overview.at, group.since)
        names = group.names if len(group.names) <= LONG_LIST else f"{len(group.rows)} nodes"
        body.append([names, group.first.word, since, group.first.by or "-", why])
    lines = table(head, body, [group.first.status for group in ordered])
    woven = [lines[0]]
    for line, group in zip(lines[1:], ordered, strict=True):
        woven.append(line)
        if len(group.names) > LONG_LIST:
            woven.append(f"  nodes: {group.names}")
        if group.first.next:
            woven.append(f"  next: {group.first.next}")
    return woven


def _job(overview: Overview, job: Job) -> list[str]:
    state = "+".join(sorted(job.state)) or "UNKNOWN"
    waits = f" ({job.waits_for})" if job.waits_for else ""
    if not job.nodes:
        lines = [f"job {job.job_id} is {state}{waits} and has no nodes"]
        if "held" in job.waits_for.lower():
            lines.append(f"  it is held: `scontrol release {job.job_id}` lets it run")
        return lines
    bad = touched(overview, job)
    over = not job.state & {"RUNNING", "COMPLETING", "SUSPENDED", "CONFIGURING", "STOPPED"}
    verb = "ran on" if over else "runs on"
    count = (
        "none of its nodes is bad"
        if not bad
        else f"{len(bad)} of its {len(job.nodes)} nodes: {fold(r.name for r in bad)}"
    )
    said = f"job {job.job_id} is {state}{waits} and {verb} {fold(job.nodes)}: "
    return [click.style(f"{said}touched, {count}", fg=COLOURS[bad[0].status]) if bad else f"{said}{count}"]


def _foot(overview: Overview) -> list[str]:
    """Where all this is from, and how old it is."""
    known: dict[str, list[float]] = {}
    stale = 0
    for row in overview.rows:
        for source in row.sources[1:]:
            known.setdefault(source.name, []).append(overview.at - source.at)
            stale += source.stale
    parts = [f"Slurm {overview.slurm}".strip() + " asked just now"]
    for name, ages in sorted(known.items()):
        span = ago(min(ages)) if len(ages) == 1 else f"{ago(min(ages))} to {ago(max(ages))}"
        parts.append(f"last results of {len(ages)} of {len(overview.rows)} nodes from {name}, {span} old")
    if not known and overview.rows:
        parts.append("no node's last result is known here")
    if stale:
        parts.append(f"{stale} too old to count (or dated in the future)")
    return ["", click.style("; ".join(parts), dim=True), *(f"note: {fault}" for fault in overview.faults)]


def _result(row: Row, now: float) -> str:
    if row.record is None:
        return "-"
    return f"{row.record.report.status.word} {ago(now - row.record.at)}"


def _age(now: float, since: float) -> str:
    return ago(now - since) if since else "-"


def _cut(text: str) -> str:
    return text if len(text) <= LONG else text[: LONG - 3].rstrip() + "..."


def joined(lines: Iterable[str]) -> str:
    """The lines as one text."""
    return "\n".join(lines)
