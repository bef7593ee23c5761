"""PURE: what the events file says of each recovery, and how long each part of it took."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Event = Mapping[str, Any]


@dataclass(frozen=True)
class Recovery:
    """One recovery; times in unix seconds on the coordinator's clock, None where it did not come to that."""

    generation: int
    reason: str
    ranks: tuple[int, ...]
    """The ranks that were lost."""
    noticed: float
    aborted: float | None
    """All survivors' communicators are broken off."""
    restored: float | None
    """All who needed state have it."""
    regrouped: float | None
    """Every rank stands in the new group."""
    first_step: float | None
    """Every lost rank has committed a step again."""

    def phases(self, since: float) -> list[tuple[str, float | None]]:
        """(phase, milliseconds after `since`), in the order in which they happen."""
        moments = {
            "noticed": self.noticed,
            "aborted": self.aborted,
            "restored": self.restored,
            "regrouped": self.regrouped,
            "first step": self.first_step,
        }
        return [(name, None if at is None else (at - since) * 1e3) for name, at in moments.items()]


def recoveries(events: Iterable[Event]) -> list[Recovery]:
    """Every recovery in a file of events. Faults that struck before it was over belong to it too."""
    events = list(events)
    found: list[Recovery] = []
    open_faults: list[Event] = []
    for at, event in enumerate(events):
        if event["event"] == "fault" and _ranks(event):
            open_faults.append(event)
        elif event["event"] == "generation" and event["generation"] > 1 and open_faults:
            number = event["generation"]
            later = [e for e in events[at:] if e.get("generation") == number]
            lost = tuple(sorted({r for fault in open_faults for r in _ranks(fault)}))
            steps = {e["rank"]: e["t"] for e in later if e["event"] == "step"}
            over = all(rank in steps for rank in lost)
            found.append(
                Recovery(
                    generation=number,
                    reason=event["reason"],
                    ranks=lost,
                    noticed=open_faults[0]["t"],
                    aborted=_last(later, "abort_done"),
                    restored=_last(later, "restored"),
                    regrouped=_last(later, "group_ready"),
                    first_step=max(steps[rank] for rank in lost) if over else None,
                )
            )
            if over:
                open_faults = []
    return found


def _ranks(fault: Event) -> tuple[int, ...]:
    if fault.get("ranks"):
        return tuple(fault["ranks"])
    return () if fault.get("rank") is None else (fault["rank"],)


def _last(events: Sequence[Event], name: str) -> float | None:
    return max((e["t"] for e in events if e["event"] == name), default=None)
