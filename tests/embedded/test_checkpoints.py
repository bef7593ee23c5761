"""The last tier: nobody holds the state in memory any more."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from harness import TORCHRUN, Job, right

MLP = ("mlp.py", "--steps", "16")
Launch = Callable[..., Job]
Undisturbed = Callable[..., str]


def test_all_workers_at_once_go_on_from_the_newest_checkpoint(
    launch: Launch, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    job = launch(*MLP, "--checkpoint", str(tmp_path / "saved"), "--pause", "0.1", nnodes=2)
    job.committed(7)
    for rank in range(2):
        os.kill(job.pid(rank), signal.SIGKILL)
    ended = job.end()
    assert {e["tier"] for e in ended.named("restored")} >= {"disk"}, ended.output
    assert "rank 0 reads the checkpoint of step 5" in ended.output
    right(ended, undisturbed(*MLP, nnodes=2), 2, gone_back=True)


def test_all_workers_at_once_without_a_checkpoint_end_the_run(launch: Launch) -> None:
    job = launch(*MLP, "--pause", "0.1", nnodes=2)
    job.committed(3)
    for rank in range(2):
        os.kill(job.pid(rank), signal.SIGKILL)
    ended = job.end()
    assert ended.code == 75
    assert "there is no valid checkpoint" in ended.error, ended.output


def test_a_run_goes_on_where_another_one_ended_unless_told_not_to(
    launch: Launch, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    saved = ("--checkpoint", str(tmp_path / "saved"))
    how = {"nnodes": 2, "standby": 0}
    assert launch("mlp.py", "--steps", "12", *saved, **how).end().code == 0
    resumed = launch(*MLP, *saved, **how).end()
    right(resumed, undisturbed(*MLP, nnodes=2), 2)
    assert min(c.step for c in resumed.commits) == 10
    afresh = launch(*MLP, *saved, **how, options=("--resume", "none")).end()
    right(afresh, undisturbed(*MLP, nnodes=2), 2)
    assert min(c.step for c in afresh.commits) == 0


@pytest.mark.parametrize("what", ["a calm run", "a rank that is never done with its step"])
def test_a_run_that_is_told_to_stop_saves_what_it_has_and_goes_on_from_there(
    launch: Launch, undisturbed: Undisturbed, tmp_path: Path, what: str
) -> None:
    saved = ("--checkpoint", str(tmp_path / "saved"))
    job = launch(*MLP, *saved, "--pause", "0.1", nnodes=2, options=("--grace", "1"))
    job.committed(7)
    if what != "a calm run":
        os.kill(job.pid(1), signal.SIGSTOP)
    job.process.send_signal(signal.SIGTERM)
    ended = job.end()
    assert ended.code == 75, ended.output
    newest = max(c.step for c in ended.commits if c.rank == 0) + 1
    assert f"a checkpoint of step {newest} was written" in ended.error, ended.output
    resumed = launch(*MLP, *saved, nnodes=2, standby=0).end()
    right(resumed, undisturbed(*MLP, nnodes=2), 2)
    assert min(c.step for c in resumed.commits) == newest


def test_plain_torchrun_resumes_too(
    command: Callable[..., Job], undisturbed: Undisturbed, tmp_path: Path
) -> None:
    """The same script; with two ranks even the same bits, since a sum of two has one order."""
    saved = ("--checkpoint", str(tmp_path / "saved"))
    torchrun = (TORCHRUN, "--standalone", "--nproc-per-node", "2")
    first = command((*torchrun, "mlp.py", "--steps", "12", *saved)).end()
    assert first.code == 0, first.output
    second = command((*torchrun, *MLP, *saved)).end()
    assert second.code == 0, second.output
    assert min(c.step for c in second.commits) == 10
    assert second.output.count(f"digest {undisturbed(*MLP, nnodes=2)}") == 2, second.output
