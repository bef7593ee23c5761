"""The doctor's screen: a table for people, or JSON."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict

from everstep.launcher import screen
from everstep.launcher.doctor import checks
from everstep.launcher.doctor.checks import Line
from everstep.launcher.doctor.gather import answer, gather

_COLOURS = {"ok": "green", "warn": "yellow", "fail": "bold red", "skip": "dim"}


def run_doctor(srun_options: Sequence[str], *, as_json: bool, facts_only: bool) -> int:
    """Everything behind `everstep doctor`: the exit code."""
    if facts_only:
        print(answer(os.environ), flush=True)
        return 0
    lines = checks.examine(gather(srun_options, os.environ))
    print(to_json(lines)) if as_json else show(lines)
    return checks.exit_code(lines)


def to_json(lines: Sequence[Line]) -> str:
    """`{"level": the worst, "checks": [{check, level, text, fix}, …]}`."""
    worst = {0: "ok", 1: "warn", 2: "fail"}[checks.exit_code(lines)]
    return json.dumps({"level": worst, "checks": [asdict(line) for line in lines]}, indent=2)


def show(lines: Sequence[Line]) -> None:
    """One screen; colours on a terminal only."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for line in lines:
        told = Text(line.text)
        if line.fix and line.level != "ok":
            told.append(f"\n-> {line.fix}", style="dim" if line.level == "skip" else "cyan")
        level = "-" if line.level == "skip" else line.level
        table.add_row(Text(level, style=_COLOURS[line.level]), Text(line.check, style="bold"), told)
    screen.show(table, Text(summary(lines)))


def summary(lines: Sequence[Line]) -> str:
    """The last line."""
    bad = sum(line.level == "fail" for line in lines)
    odd = sum(line.level == "warn" for line in lines)
    unseen = sum(line.level == "skip" for line in lines)
    told = ", ".join(
        text
        for count, text in (
            (bad, f"{bad} to mend"),
            (odd, f"{odd} to look at"),
            (unseen, f"{unseen} not looked at"),
        )
        if count
    )
    return f"{len(lines)} checks: {told or 'all well'}"
