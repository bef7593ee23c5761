"""A node's results for people: findings first, one line each with what to do, and a line that sums up."""

from __future__ import annotations

from collections.abc import Iterable

from everstep.healthcheck.registry import Check
from everstep.healthcheck.result import Report, Result, Severity, Status
from rich.console import Console
from rich.table import Table
from rich.text import Text

_STYLE = {Status.OK: "green", Status.WARN: "yellow", Status.CRITICAL: "bold red", Status.SKIP: "dim"}
DO = {
    Severity.OK: "",
    Severity.MONITOR: "look",
    Severity.RESET: "reset",
    Severity.REBOOT: "reboot",
    Severity.REPLACE: "replace",
}


def show(report: Report, console: Console, *, everything: bool = False) -> None:
    """Print a report. `everything`: passes and skips too."""
    shown = list(report.findings)
    if everything:
        rest = [each for each in report.results if each.status < Status.WARN]
        shown += sorted(rest, key=lambda each: -each.status)
    if shown:
        table = Table(box=None, pad_edge=False, header_style="bold")
        for name in ("STATUS", "CHECK", "DEVICE", "DO"):
            table.add_column(name, no_wrap=True)
        table.add_column("REASON", overflow="fold")
        for each in shown:
            table.add_row(*_row(each))
        console.print(table)
    console.print(Text(summary(report), style=_STYLE[report.status]))
    for fault in report.faults:
        console.print(Text(f"everstep: {fault}", style="yellow"))


def summary(report: Report) -> str:
    """One line: `n1 (p5, light): CRITICAL, do: reboot; 1 critical, 2 warnings, 20 ok, 3 skipped in 1.2 s`."""
    count = {status: sum(each.status is status for each in report.results) for status in Status}
    do = DO[report.severity]
    return (
        f"{report.node} ({report.profile}, {report.level}): {report.status.word}"
        f"{f', do: {do}' if do else ''}; {count[Status.CRITICAL]} critical, {count[Status.WARN]} warnings, "
        f"{count[Status.OK]} ok, {count[Status.SKIP]} skipped"
    )


def listed(checks: Iterable[Check], console: Console) -> None:
    """The checks there are, with what each reads and asks for."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("CHECK", "LEVEL", "ABOUT"):
        table.add_column(name, no_wrap=True)
    for name in ("WANTS", "SOURCE", "ACTION"):
        table.add_column(name, overflow="fold")
    for each in checks:
        table.add_row(each.name, each.level.word, each.about, each.title, each.source, each.action)
    console.print(table)


def _row(each: Result) -> tuple[Text | str, ...]:
    status = Text(each.status.word, style=_STYLE[each.status])
    return status, Text(each.check), Text(each.device or "-"), DO[each.severity] or "-", Text(each.reason)
