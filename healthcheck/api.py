"""What the launcher asks of the health checks: is this node fit for work, now and again while a step runs.

The checks run in a process of their own, so that an agent never waits for a driver. Whatever goes wrong with
that process is a fault of ours, and a node is never given up for one.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterable, Sequence
from dataclasses import dataclass

from everstep.healthcheck import child
from everstep.healthcheck.child import Answer, command
from everstep.healthcheck.policy import Settings, actionable, worded
from everstep.healthcheck.result import Report, Result

EVERY_S = 30.0
LIGHT_S = 6.0
"""How long light checks may take, the start of their process included."""
FULL_S = 60.0
MOST_OUTPUT = 16 * 2**20  # bytes of one answer
AGAIN_S = (1.0, 60.0)
"""How long to wait before a process that ended is started again: at first, and at the most."""

NOT_FOR_A_RUN = frozenset({"host_slurmd", "host_munge", "gpu_count", "gpu_init"})
"""Checks that say nothing of a run: Slurm's own services, which it can do without, and whether all GPUs are
there, since a job sees no others than its own (ConstrainDevices). Slurm's health program counts them all."""

__all__ = ["Verdict", "command", "examine", "light", "verdict", "watch"]


@dataclass(frozen=True)
class Verdict:
    """Whether a node is fit for work, and in words why not."""

    fit: bool
    reason: str = ""
    faults: tuple[str, ...] = ()
    """What went wrong with the checks themselves: to be shown, never to be acted on."""


def light(node: str = "", *, limit_s: float = LIGHT_S) -> list[Result]:
    """The light checks' results on this node; none where the checks broke. Blocks, `limit_s` at most.

    `node` is there for a caller's own messages: only the node that we are on can be examined.
    """
    return list(_results(child.run("light", limit_s=limit_s)))


async def examine(
    level: str = "light", *, limit_s: float | None = None, argv: Sequence[str] | None = None
) -> Verdict:
    """Run the checks once, without blocking the loop: the gate before a step starts."""
    if limit_s is None:
        limit_s = LIGHT_S if level == "light" else FULL_S
    return verdict(await asyncio.to_thread(child.run, level, limit_s=limit_s, argv=argv))


def verdict(answer: Answer | Iterable[Result]) -> Verdict:
    """What results mean for work on the node: only something critical makes it unfit. Pure.

    Checks that the site wants shown and not acted on count for nothing here either.
    """
    if not isinstance(answer, Answer):
        answer = Answer(Report("", "", "", tuple(answer)))
    found = actionable(_results(answer), Settings(report_only=answer.report_only | NOT_FOR_A_RUN))
    more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    return Verdict(not found, worded(found[0]) + more if found else "", answer.faults)


def _results(answer: Answer) -> tuple[Result, ...]:
    return answer.report.results if answer.report else ()


async def watch(
    every_s: float = EVERY_S, *, argv: Sequence[str] | None = None
) -> AsyncGenerator[Verdict, None]:
    """A verdict on this node every `every_s` seconds, for as long as it is iterated over.

    One process does all the checks, so Python starts once. Where it ends it is started again, ever later.
    Leaving the loop (or cancelling the task) ends it.
    """
    words = list(argv) if argv is not None else command("light", limit_s=LIGHT_S, every_s=every_s)
    pause, longest = AGAIN_S
    while True:
        process = await asyncio.create_subprocess_exec(
            *words,
            stdin=asyncio.subprocess.PIPE,  # held open; when we are gone it is closed, and the process ends
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            limit=MOST_OUTPUT,
        )
        try:
            async for said in _verdicts(process):
                pause = AGAIN_S[0]
                yield said
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
        yield Verdict(
            True, faults=(f"the health checks ended with code {process.returncode} and start again",)
        )
        await asyncio.sleep(pause)
        pause = min(2 * pause, longest)


async def _verdicts(process: asyncio.subprocess.Process) -> AsyncGenerator[Verdict, None]:
    if process.stdout is None:
        return
    while True:
        try:
            line = await process.stdout.readline()
        except ValueError:  # longer than any answer of ours
            return
        if not line:
            return
        yield verdict(child.parse(line))
