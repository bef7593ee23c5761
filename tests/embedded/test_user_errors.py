"""What the user's own code does wrong: tried three times, then said, and never taken for a fault."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from harness import Job, right

MLP = ("mlp.py", "--steps", "10")
Launch = Callable[..., Job]
Undisturbed = Callable[..., str]


def test_an_exception_on_one_rank_once_costs_its_process_and_not_one_bit(
    launch: Launch, undisturbed: Undisturbed
) -> None:
    """It even sounds like the network's. The script has an excepthook, a thread and an atexit of its own."""
    ended = launch(*MLP, "--untidy", nnodes=2, env={"DRILL": "raise-once:body:1:7"}).end()
    assert [e["kind"] for e in ended.named("fault")] == ["exception"]
    assert ended.output.count("my own hook: Socket") == 1
    right(ended, undisturbed(*MLP, nnodes=2), 2)


@pytest.mark.parametrize("who", ["1", "*"], ids=["on one rank", "on all ranks"])
def test_an_exception_at_every_try_ends_the_run_with_it(launch: Launch, who: str) -> None:
    ended = launch(*MLP, nnodes=2, env={"DRILL": f"raise:forward:{who}:7"}).end()
    assert ended.code == 1
    assert "RuntimeError: Socket: no such sample" in ended.output
    assert "step 7 failed 3 times" in ended.error, ended.output
    assert "Traceback" in ended.output
    assert not ended.digests
    assert max(c.step for c in ended.commits) == 6


def test_exit_in_a_step_ends_the_run_with_its_code(launch: Launch) -> None:
    ended = launch(*MLP, nnodes=2, env={"DRILL": "exit:body:1:4"}).end()
    assert ended.code == 3, ended.output


def test_exit_after_training_is_the_runs_exit_code(launch: Launch, undisturbed: Undisturbed) -> None:
    ended = launch(*MLP, nnodes=2, standby=0, env={"DRILL": "exit:end:1:*"}).end()
    assert ended.code == 3, ended.output
    assert ended.digests == dict.fromkeys(range(2), undisturbed(*MLP, nnodes=2))


@pytest.mark.parametrize("where", ["body", "loop"])
def test_a_broad_except_does_not_hide_a_fault(launch: Launch, undisturbed: Undisturbed, where: str) -> None:
    faults = [f"kill:rank={gen % 2},step={2 * gen},at=collective,n=3,gen={gen}" for gen in (1, 2)]
    ended = launch(*MLP, "--swallow", where, nnodes=2, faults=faults).end()
    assert len(ended.named("fault")) == 2, ended.output
    right(ended, undisturbed(*MLP, nnodes=2), 2)
