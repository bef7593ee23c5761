"""The checks in a process of their own: whoever asks never hangs, whatever a driver or a check does."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from everstep.healthcheck.errors import HealthError
from everstep.healthcheck.result import Report

if TYPE_CHECKING:
    from everstep.healthcheck.examine import Request

_SPARE_S = 2.0
"""Of the limit, what starting Python and writing the answer may take."""


@dataclass(frozen=True)
class Answer:
    """What came of one run."""

    report: Report | None
    faults: tuple[str, ...] = ()
    """Failures of everstep's own."""
    report_only: frozenset[str] = frozenset()
    """Checks that the site wants shown and not acted on."""


@dataclass(frozen=True)
class _Prepared:
    request: Request
    node_name: str | None
    report_only: frozenset[str]


def command(
    level: str,
    *,
    limit_s: float | None = None,
    config: str | None = None,
    every_s: float = 0.0,
    moment: bool = False,
) -> list[str]:
    """The command line of such a process. With `every_s` it goes on until its standard input is closed.

    With `moment` only what is about this very moment is looked at.
    """
    words = [sys.executable, "-m", "everstep.healthcheck.child", "--level", level]
    if limit_s is not None:
        words += ["--limit", str(limit_s)]
    if config is not None:
        words += ["--config", config]
    if moment:
        words.append("--moment")
    if every_s:
        words += ["--every", str(every_s)]
    return words


def run(
    level: str,
    *,
    limit_s: float,
    config: str | None = None,
    moment: bool = False,
    environ: Mapping[str, str] | None = None,
    argv: Sequence[str] | None = None,
) -> Answer:
    """Run the checks and take their answer. After `limit_s` seconds they are killed: a fault of ours."""
    argv = list(argv) if argv is not None else command(level, limit_s=limit_s, config=config, moment=moment)
    process = subprocess.Popen(
        argv,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=dict(os.environ if environ is None else environ),
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        _kill(process)
        return Answer(None, (f"the checks did not end in {limit_s:g} s and were killed",))
    answer = parse(out)
    if answer.report is None and not answer.faults:
        said = (err.decode(errors="replace").strip().splitlines() or ["nothing said"])[-1]
        return Answer(None, (f"the checks ended with code {process.returncode}: {said}",))
    return answer


def parse(text: bytes | str) -> Answer:
    """The answer in what the process printed; without a report where it is none."""
    try:
        data = json.loads(text)
        report = data["report"]
        faults = tuple(str(fault) for fault in data["faults"])
        report_only = frozenset(str(name) for name in data.get("report_only", ()))
        return Answer(None if report is None else Report.from_dict(report), faults, report_only)
    except (ValueError, KeyError, TypeError, AttributeError):
        return Answer(None)


def main(words: Sequence[str] | None = None) -> int:
    """Run the checks as the site's file says, print one JSON object a run."""
    options = _options(words)
    try:
        prepared, faults = _prepare(options.level, options.limit, options.config, options.moment)
    except HealthError as error:
        print(json.dumps({"report": None, "faults": [str(error)]}), flush=True)
        return 0
    while True:
        start = time.monotonic()
        try:
            print(json.dumps(_once(prepared, faults)), flush=True)
        except BrokenPipeError:
            return 0
        if not options.every:
            return 0
        # Whoever started us holds our standard input open; when it is gone, so are we.
        wait = max(0.0, options.every - (time.monotonic() - start))
        if select.select([sys.stdin], [], [], wait)[0] and not os.read(sys.stdin.fileno(), 4096):
            return 0


def _prepare(
    level: str, limit_s: float | None, config: str | None, moment: bool
) -> tuple[_Prepared, tuple[str, ...]]:
    """What is the same in every run: the site's file, its checks and its profiles."""
    from everstep.healthcheck import idle, plugins, site
    from everstep.healthcheck.examine import TOTAL_S, Request
    from everstep.healthcheck.registry import Level

    settings = site.load(config).site
    faults = plugins.load(settings)
    gpus, more = idle.of_job(os.environ)
    which = Level[level.upper()]
    total = TOTAL_S.get(which)
    if limit_s is not None:
        most = max(1.0, limit_s - _SPARE_S)
        # Where a job has just ended, its last processes get the time there is to be gone.
        total = most if total is None or gpus is not None else min(total, most)
    request = Request(
        level=which,
        off=settings.off(),
        profile=settings.profile or "auto",
        root=Path(settings.root or "/"),
        idle_gpus=gpus,
        moment=moment,
        site_profiles=plugins.profiles(settings),
        site_checks=False,  # they are in the register already
        total_s=total,
    )
    return _Prepared(request, settings.node_name, settings.settings().report_only), faults + more


def _once(prepared: _Prepared, faults: tuple[str, ...]) -> dict[str, Any]:
    from everstep.healthcheck.examine import examine

    try:
        report = examine(prepared.request)
    except HealthError as error:
        return {"report": None, "faults": [str(error)]}
    if prepared.node_name:
        report = replace(report, node=prepared.node_name)
    return {
        "report": report.as_dict(),
        "faults": [*faults, *report.faults],
        "report_only": sorted(prepared.report_only),
    }


def _options(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="everstep.healthcheck.child", description=__doc__)
    parser.add_argument("--level", choices=["light", "full", "deep"], required=True)
    parser.add_argument("--limit", type=float)
    parser.add_argument("--config")
    parser.add_argument("--moment", action="store_true")
    parser.add_argument("--every", type=float, default=0.0)
    return parser.parse_args(words)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill it and what it started: tools are in sessions of their own."""
    import psutil

    with contextlib.suppress(psutil.Error):
        for each in psutil.Process(process.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                each.kill()
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    # One that the kernel does not let go is left to it.
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.communicate(timeout=0.5)


if __name__ == "__main__":
    sys.exit(main())
