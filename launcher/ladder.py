"""The resume ladder: what is done when hardware goes, rung by rung, each with its reason. PURE.

    1 standby   a standby on the rank's own node takes the rank
    2 spare     a standby of a spare node does
    3 replace   Slurm gives the run another node: a one-node job, whose workers become standbys
    4 requeue   the job goes back to the queue, bad nodes excluded, and on from its newest checkpoint
    5 stop      a person is told what to do

Rungs 1 and 2 take milliseconds and are chosen in `placing`; what comes after is chosen here. A rung is
tried a bounded number of times, with longer and longer pauses, and what was lost is never in doubt: a
run that has progressed and has no checkpoint is not requeued, since that would begin at step 0 in silence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from everstep.recovery.errors import UsageError

Rung = Literal["standby", "spare", "replace", "requeue", "stop"]
RUNGS: tuple[Rung, ...] = ("standby", "spare", "replace", "requeue")
NUMBER: dict[Rung, int] = {rung: number for number, rung in enumerate((*RUNGS, "stop"), 1)}

ASKS = 3
"""Replacement jobs that may come to nothing, one after the other, before the next rung."""
REQUEUES = 5
"""Times that a job may be requeued without a step of progress in between."""
_PAUSE = 5.0  # seconds before the second request; doubled each time


def parse_policy(text: str) -> tuple[Rung, ...]:
    """The rungs that may be used, from `--resume-policy`: `all`, `none`, or names with commas between.

    Raises UsageError for a word that is no rung.
    """
    words = [word.strip() for word in text.split(",") if word.strip()]
    if words == ["all"]:
        return RUNGS
    if words == ["none"]:
        return ()
    strange = [word for word in words if word not in RUNGS]
    if strange or not words:
        what = f"{strange[0]!r} is no rung of the ladder" if strange else "no rung is named"
        raise UsageError(
            f"--resume-policy {text}: {what}: use some of {', '.join(RUNGS)} (commas between), all or none"
        )
    return tuple(rung for rung in RUNGS if rung in words)


@dataclass(frozen=True)
class Situation:
    """Ranks are empty, and no standby is left for them."""

    ranks: Sequence[int]
    allowed: Sequence[Rung]
    in_job: bool
    """Is there a Slurm job, so that there is somebody to ask?"""
    can_requeue: bool
    """Is it a batch job that may be requeued?"""
    why_not: str
    """Why it may not."""
    refused: Sequence[str]
    """Why replacements that were asked for came to nothing, since the last committed step."""
    progress: bool
    """Has the run committed a step?"""
    saved: int
    """Committed steps of the newest checkpoint; -1: there is none."""
    can_save: bool
    """Checkpoints are configured, and a survivor that is whole can make one now."""
    attempts: int
    """Times in a row that the job was requeued without progress."""


@dataclass(frozen=True)
class Climb:
    """The rung to take, and why."""

    rung: Rung
    reason: str
    pause: float = 0.0
    """Seconds to wait first."""


def climb_down(now: Situation) -> Climb:
    """The next rung below the standbys."""
    whom = f"rank{'s' * (len(now.ranks) > 1)} {', '.join(map(str, now.ranks))}"
    missing = f"no standby is left for {whom} and none is coming"
    skipped = []
    if now.in_job and "replace" in now.allowed and len(now.refused) < ASKS:
        if not now.refused:
            return Climb("replace", f"{missing}: Slurm is asked for another node")
        pause = _PAUSE * 2 ** (len(now.refused) - 1)
        return Climb("replace", f"{now.refused[-1]}: Slurm is asked again in {pause:.0f} s", pause)
    if now.in_job and now.refused:
        skipped.append(now.refused[-1])
    elif "replace" not in now.allowed and now.in_job:
        skipped.append("--resume-policy allows no replacement")
    why = "; ".join([missing, *skipped])
    if not now.in_job:
        return Climb("stop", f"{missing}: requeue the job, or start it with --standby or --spare-nodes")
    if "requeue" not in now.allowed:
        return Climb("stop", f"{why}; --resume-policy allows no requeue: submit the job again")
    if not now.can_requeue:
        return Climb("stop", f"{why}; {now.why_not}: submit the job again")
    if now.attempts >= REQUEUES:
        return Climb(
            "stop",
            f"{why}; the job was requeued {now.attempts} times without a step of progress: see what the "
            "nodes that were lost have in common, and submit it again",
        )
    if now.progress and now.saved < 0 and not now.can_save:
        return Climb(
            "stop",
            f"{why}; there is no checkpoint, and a requeued job would begin at step 0: add "
            "run.checkpoint(path, every=N) to the script, or requeue it by hand (scontrol requeue)",
        )
    if now.can_save:
        source = "a checkpoint that is made now"
    elif now.saved >= 0:
        source = f"the checkpoint of step {now.saved}"
    else:
        source = "step 0, which nothing had gone beyond"
    return Climb("requeue", f"{why}: the job is requeued and goes on from {source}")
