"""The resume ladder below the standbys: which rung, and why."""

from __future__ import annotations

from dataclasses import replace

import pytest
from everstep.launcher.ladder import ASKS, REQUEUES, RUNGS, Situation, climb_down, parse_policy
from everstep.recovery.errors import UsageError
from hypothesis import given
from hypothesis import strategies as st

LOST = Situation(
    ranks=[2],
    allowed=RUNGS,
    in_job=True,
    can_requeue=True,
    why_not="",
    refused=[],
    progress=True,
    saved=40,
    can_save=False,
    attempts=0,
)


def test_a_replacement_node_comes_first() -> None:
    climb = climb_down(LOST)
    assert climb.rung == "replace"
    assert climb.reason == "no standby is left for rank 2 and none is coming: Slurm is asked for another node"


def test_each_further_request_waits_longer_and_their_number_is_bounded() -> None:
    refused: list[str] = []
    pauses = []
    while (climb := climb_down(replace(LOST, refused=refused))).rung == "replace":
        pauses.append(climb.pause)
        refused = [*refused, "no node was free in 600 s"]
    assert pauses == sorted(pauses)
    assert len(pauses) == ASKS
    assert climb.rung == "requeue"
    assert climb.reason.endswith(
        "no node was free in 600 s: the job is requeued and goes on from the checkpoint of step 40"
    )


def test_without_a_checkpoint_nothing_begins_at_step_0_in_silence() -> None:
    climb = climb_down(replace(LOST, allowed=("requeue",), saved=-1))
    assert climb.rung == "stop"
    assert "would begin at step 0" in climb.reason
    assert "run.checkpoint(" in climb.reason


def test_a_survivor_that_can_write_a_checkpoint_now_is_as_good_as_one_on_disk() -> None:
    climb = climb_down(replace(LOST, allowed=("requeue",), saved=-1, can_save=True))
    assert climb.rung == "requeue"
    assert climb.reason.endswith("from a checkpoint that is made now")


def test_a_run_that_has_not_progressed_may_begin_at_step_0_again() -> None:
    assert climb_down(replace(LOST, allowed=("requeue",), saved=-1, progress=False)).rung == "requeue"


def test_a_job_that_gets_nowhere_is_not_requeued_for_ever() -> None:
    climb = climb_down(replace(LOST, allowed=("requeue",), attempts=REQUEUES))
    assert climb.rung == "stop"
    assert f"requeued {REQUEUES} times without a step of progress" in climb.reason


@pytest.mark.parametrize(
    ("change", "cure"),
    [
        ({"in_job": False}, "start it with --standby or --spare-nodes"),
        ({"allowed": ()}, "--resume-policy allows no requeue: submit the job again"),
        (
            {"allowed": ("requeue",), "can_requeue": False, "why_not": "job 7 is no batch job"},
            "submit the job again",
        ),
    ],
)
def test_the_last_rung_says_what_a_person_has_to_do(change: dict, cure: str) -> None:
    climb = climb_down(replace(LOST, **change))
    assert climb.rung == "stop"
    assert climb.reason.endswith(cure)


@given(
    st.sets(st.sampled_from(RUNGS)),
    st.booleans(),
    st.booleans(),
    st.lists(st.just("refused"), max_size=5),
    st.booleans(),
    st.integers(-1, 3),
    st.booleans(),
    st.integers(0, 9),
)
def test_whatever_is_the_case_a_rung_that_is_not_allowed_is_not_taken_and_there_is_a_reason(
    allowed: set,
    in_job: bool,
    can: bool,
    refused: list,
    progress: bool,
    saved: int,
    can_save: bool,
    attempts: int,
) -> None:
    now = Situation([0, 1], tuple(allowed), in_job, can, "", refused, progress, saved, can_save, attempts)
    climb = climb_down(now)
    assert climb.reason
    assert climb.rung == "stop" or (in_job and climb.rung in allowed)
    if climb.rung == "requeue":
        assert can
        assert not progress or saved >= 0 or can_save


def test_a_policy_names_rungs_in_any_order() -> None:
    assert parse_policy("requeue, standby") == ("standby", "requeue")
    assert parse_policy("all") == RUNGS
    assert parse_policy("none") == ()


@pytest.mark.parametrize("text", ["reboot", "", "all,standby"])
def test_a_policy_that_is_none_names_the_rungs(text: str) -> None:
    with pytest.raises(UsageError, match="standby, spare, replace, requeue"):
        parse_policy(text)
