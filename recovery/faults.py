"""Fault injection, for tests and drills.

`EVERSTEP_FAULTS="kill:rank=1,step=5,at=forward"` ends a worker with SIGKILL at a
chosen point. Several are separated by `;`. `at` is one of POINTS; `gen` says in which
generation (1 unless given), so that the replacement is not killed again; `n` which
time the point is passed in that step (1 unless given). `stop:` sends SIGSTOP instead.
"""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass, field

from everstep.recovery.errors import UsageError

VARIABLE = "EVERSTEP_FAULTS"
POINTS = (
    "init",  # a rank was given, init() is about to return
    "join",  # in steps(), before it says that it is ready
    "send",  # a donor, about to send
    "receive",  # about to receive
    "begin",  # a step begins
    "collective",  # a collective is about to be launched
    "optimizer",  # inside optimizer.step(), before it changes anything
    "stepped",  # after optimizer.step()
    "commit",  # the loop has come back, the step is not committed yet
    "committed",  # just after the commit
    "done",  # all steps are committed, waiting for the others
)


@dataclass
class Fault:
    """One fault to happen."""

    action: str
    rank: int
    at: str
    step: int | None = None
    gen: int = 1
    n: int = 1
    seen: int = field(default=0, compare=False)


def parse(text: str) -> list[Fault]:
    """The faults that the variable's text asks for. Raises UsageError."""
    faults = []
    for item in filter(None, (part.strip() for part in text.split(";"))):
        action, _, rest = item.partition(":")
        fields = dict(pair.partition("=")[::2] for pair in rest.split(","))
        try:
            fault = Fault(action, int(fields.pop("rank")), fields.pop("at"))
            for name, value in fields.items():
                if name not in ("step", "gen", "n"):
                    raise KeyError(name)
                setattr(fault, name, int(value))
        except (KeyError, ValueError) as error:
            raise UsageError(f"{VARIABLE}: {item!r} is not understood ({error})") from None
        if fault.at not in POINTS or action not in ("kill", "stop"):
            raise UsageError(f"{VARIABLE}: {item!r}: at=… is one of {', '.join(POINTS)}; kill: or stop:")
        faults.append(fault)
    return faults


class Drill:
    """The faults of this process."""

    def __init__(self) -> None:
        self._faults = parse(os.environ.get(VARIABLE, ""))

    def __bool__(self) -> bool:
        return bool(self._faults)

    def reach(self, at: str, rank: int, step: int, generation: int) -> None:
        """This point was reached: die here if so asked."""
        for fault in self._faults:
            if fault.at != at or fault.rank != rank or fault.gen != generation:
                continue
            if fault.step is not None and fault.step != step:
                continue
            fault.seen += 1
            if fault.seen == fault.n:
                os.kill(os.getpid(), signal.SIGKILL if fault.action == "kill" else signal.SIGSTOP)
