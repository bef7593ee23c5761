"""What the events file says of a recovery."""

from __future__ import annotations

from typing import Any

from everstep.launcher.timeline import recoveries


def event(t: float, name: str, generation: int, **fields: Any) -> dict[str, Any]:
    return {"t": t, "event": name, "generation": generation, **fields}


START = [event(0.0, "generation", 1, reason="the run begins"), event(0.1, "step", 1, rank=0, step=0)]
FAULT = [
    event(1.0, "fault", 1, rank=1, kind="SIGKILL"),
    event(1.0, "generation", 2, reason="rank 1 died"),
    event(1.1, "abort_done", 2, rank=0, seconds=0.0),
    event(1.2, "abort_done", 2, rank=2, seconds=0.0),
    event(1.3, "restored", 2, rank=1, seconds=0.0),
    event(1.4, "group_ready", 2, rank=1, seconds=0.1),
    event(1.5, "step", 2, rank=0, step=5),
]


def test_a_calm_run_has_no_recovery() -> None:
    assert recoveries(START) == []


def test_a_recovery_is_over_when_the_lost_rank_has_committed_again() -> None:
    (unfinished,) = recoveries([*START, *FAULT])
    assert unfinished.first_step is None, "another rank's step is not the lost one's"
    (done,) = recoveries([*START, *FAULT, event(1.6, "step", 2, rank=1, step=5)])
    assert done.ranks == (1,)
    assert [name for name, _ in done.phases(1.0)] == [
        "noticed", "aborted", "restored", "regrouped", "first step",
    ]  # fmt: skip
    assert [round(at or -1.0) for _, at in done.phases(1.0)] == [-1, 200, 300, 400, 600]


def test_a_fault_during_a_recovery_belongs_to_the_next_one_too() -> None:
    again = [
        event(1.6, "fault", 2, rank=2, kind="SIGKILL"),
        event(1.6, "generation", 3, reason="rank 2 died"),
        event(2.0, "step", 3, rank=1, step=5),
        event(2.1, "step", 3, rank=2, step=5),
    ]
    last = recoveries([*START, *FAULT, *again])[-1]
    assert (last.ranks, last.noticed, last.first_step) == ((1, 2), 1.0, 2.1)


def test_a_lost_standby_is_no_recovery() -> None:
    assert recoveries([*START, event(1.0, "fault", 1, rank=None, kind="SIGKILL")]) == []
