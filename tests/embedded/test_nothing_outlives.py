"""Whatever is killed or told to stop: nothing of the run is left 5 s after its end."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest
from harness import Job, parent, right

# Many steps, with DataLoader children: nothing of it ends by itself.
LONG = ("mlp.py", "--steps", "100000", "--workers", "1", "--plain-loader")
MLP = ("mlp.py", "--steps", "30")
Launch = Callable[..., Job]
Undisturbed = Callable[..., str]


def test_the_launcher_is_killed(launch: Launch) -> None:
    job = launch(*LONG, nnodes=2)
    job.committed(3)
    assert len(job.processes()) >= 10
    job.process.kill()
    job.process.wait()
    job.nothing_left()


@pytest.mark.parametrize("what", ["the coordinator's agent", "a guardian"])
def test_an_agent_or_its_guardian_is_killed(launch: Launch, what: str) -> None:
    job = launch(*LONG, nnodes=2, standby=0)
    job.committed(3)
    agent = job.agent("n1") if what == "the coordinator's agent" else parent(job.agent("n2"))
    os.kill(agent, signal.SIGKILL)
    assert job.end().code == 75


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 75)])
def test_the_launcher_is_told_to_stop(launch: Launch, number: signal.Signals, code: int) -> None:
    job = launch(*LONG, nnodes=2, standby=0)
    job.committed(3)
    job.process.send_signal(number)
    assert job.end().code == code


def test_a_lost_node_is_replaced_by_the_spare_node(launch: Launch, undisturbed: Undisturbed) -> None:
    job = launch(*MLP, "--pause", "0.1", nnodes=2, options=("--spare-nodes", "1"))
    job.committed(3)
    os.kill(job.agent("n2"), signal.SIGKILL)
    ended = job.end()
    assert [(e["node"], e["kind"]) for e in ended.named("fault")] == [("n2", "node")], ended.output
    right(ended, undisturbed(*MLP, nnodes=2), 2)


def test_a_lost_node_without_a_spare_one_or_standbys_ends_the_run(launch: Launch) -> None:
    job = launch(*LONG, nnodes=2, standby=0)
    job.committed(3)
    os.kill(job.agent("n2"), signal.SIGKILL)
    ended = job.end()
    assert ended.code == 75
    assert "no standby is left" in ended.error, ended.output
