"""How often something is tried again before the run ends: pure counting, and the last words.

A failure is the user's own (an exception, an exit code, a crash of the process by its
own doing), comes from outside (a kill, a lost node), or is trouble that nobody can
explain. Each kind has its patience. What counts is how many generations failed at one
step without progress: ranks that fail side by side in a generation are one try.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass, field
from typing import Literal

from everstep.launcher.roster import End

Kind = Literal["own", "outside", "trouble"]

TRIES: dict[Kind, int] = {"own": 3, "outside": 8, "trouble": 3}
# Whole-group restarts that are not counted against --max-restarts: kills before anything began.
FREE_RESTARTS = 3
# A standby that cannot start this many times in a row is not started again on that node.
STANDBY_TRIES = 3
REQUEUE = 75

_OWN_SIGNALS = {
    signal.SIGSEGV,
    signal.SIGABRT,
    signal.SIGBUS,
    signal.SIGFPE,
    signal.SIGILL,
    signal.SIGSYS,
    signal.SIGTRAP,
}


@dataclass(frozen=True)
class Failure:
    """Why a rank, or several at once, cannot go on."""

    kind: Kind
    text: str  # who, what and how it was noticed, for people
    what: str  # the short form: an exception, a signal
    ranks: tuple[int, ...]
    step: int  # that was under way
    generation: int  # in which it failed
    code: int  # what the run would end with
    detail: str = ""  # a traceback


@dataclass
class Tries:
    """What has failed so far."""

    max_restarts: int
    failed: dict[tuple[Kind, int], set[int]] = field(default_factory=dict)
    charged: int = 0  # whole-group restarts counted against max_restarts
    free: int = 0

    def again(self, failure: Failure) -> End | None:
        """None where the step is tried again, or how the run ends."""
        generations = self.failed.setdefault((failure.kind, failure.step), set())
        generations.add(failure.generation)
        limit = TRIES[failure.kind]
        if len(generations) < limit:
            return None
        if failure.kind == "outside":
            reason = f"step {failure.step} lost a worker {limit} times without progress: {failure.text}"
            return End(REQUEUE, reason)
        last = f", last on rank {failure.ranks[0]}" if failure.ranks else ""
        return End(
            failure.code, f"step {failure.step} failed {limit} times{last}: {failure.what}", failure.detail
        )

    def committed(self, committed: int) -> None:
        """So many steps are committed: what failed before them is forgiven."""
        self.failed = {key: tries for key, tries in self.failed.items() if key[1] >= committed}

    def restart(self, failure: Failure, recovers: bool) -> End | str:
        """Nothing has begun yet: how the start is counted when all start afresh, or how the run ends."""
        if recovers and failure.kind != "own":
            if self.free < FREE_RESTARTS:
                self.free += 1
                return f"restart {self.free} of {FREE_RESTARTS}"
            return End(REQUEUE, f"{failure.text}; the start has failed {FREE_RESTARTS + 1} times")
        if self.charged < self.max_restarts:
            self.charged += 1
            return f"restart {self.charged} of {self.max_restarts}"
        hint = "" if self.max_restarts or recovers else " (--max-restarts N would try again)"
        return End(failure.code, failure.text + hint, failure.detail)


def kind_of(code: int) -> Kind:
    """Whose doing an exit status is (negative: minus the signal)."""
    return "own" if code >= 0 or -code in _OWN_SIGNALS else "outside"


def name_of(code: int) -> str:
    """An exit status for people."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


def shell_code(code: int) -> int:
    """An exit status as a shell gives it."""
    return code if code >= 0 else 128 - code
