"""A worker is killed, any rank, at any point: the run ends with the digest of the undisturbed one."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

from harness import Job, right

MLP = ("mlp.py", "--steps", "42")
POINTS = ("begin", "collective", "optimizer", "stepped", "commit", "committed")
Launch = Callable[..., Job]
Undisturbed = Callable[..., str]


def kill(rank: int, at: str, gen: int, **more: int) -> str:
    """A fault for EVERSTEP_FAULTS."""
    rest = "".join(f",{name}={value}" for name, value in more.items())
    return f"kill:rank={rank},at={at},gen={gen}{rest}"


def test_every_rank_is_lost_at_every_point_of_a_step(launch: Launch, undisturbed: Undisturbed) -> None:
    """Eighteen losses in one run, each in a step of its own; and one more while waiting for the end."""
    places = [(at, rank) for at in POINTS for rank in range(3)]
    faults = [
        kill(rank, at, gen, step=2 * gen, n=1 + 2 * (at == "collective"))
        for gen, (at, rank) in enumerate(places, 1)
    ]
    faults.append(kill(0, "done", len(faults) + 1))
    ended = launch(*MLP, faults=faults).end()
    assert len(ended.named("fault")) == len(faults), ended.output
    right(ended, undisturbed(*MLP), 3)


def test_losses_in_forward_in_the_optimizer_and_on_the_way_back(
    launch: Launch, undisturbed: Undisturbed
) -> None:
    """The script tracks the bare model, has DataLoader children, and loses whoever is about to recover."""
    drill = "kill:forward:1:3 kill:optimizer:2:6"  # generations 1 and 2
    faults = [
        kill(0, "begin", 3, step=9),
        kill(0, "receive", 4),  # its replacement, about to receive
        kill(1, "send", 5),  # the donor, about to send
        kill(1, "join", 6),  # a replacement that has said nothing yet
        kill(2, "begin", 7),  # once more in the very step that was interrupted
        kill(0, "collective", 8, step=41),  # in the last step
    ]
    words = (*MLP, "--workers", "2", "--plain-loader", "--bare")
    ended = launch(*words, faults=faults, env={"DRILL": drill}).end()
    assert len(ended.named("fault")) == 8, ended.output
    right(ended, undisturbed(*MLP), 3)


def test_two_workers_at_once_and_then_a_standby(launch: Launch, undisturbed: Undisturbed) -> None:
    faults = [kill(rank, "collective", 1, step=3, n=2) for rank in (1, 2)]
    job = launch(*MLP, "--pause", "0.1", faults=faults)
    job.committed(5)
    standby = job.event("worker_started", node="n1", rank=None)
    os.kill(standby["pid"], signal.SIGKILL)
    lost = job.event("fault", rank=None)
    assert lost["node"] == "n1"
    generations = len([e for e in job.events() if e["event"] == "generation"])
    ended = job.end()
    assert ended.generations == generations, "a standby's death is nobody else's business"
    right(ended, undisturbed(*MLP), 3)


def test_a_loss_in_set_up_starts_the_whole_group_afresh(launch: Launch, undisturbed: Undisturbed) -> None:
    """In `init()`, in the script before DDP, and inside DDP's constructor: nothing is gained yet."""
    faults = [kill(2, "init", 1), kill(1, "collective", 2, n=2)]
    ended = launch(*MLP, faults=faults, env={"DRILL": "kill:setup:0:0"}).end()
    right(ended, undisturbed(*MLP), 3)
    assert [c.step for c in ended.commits if c.rank == 0] == list(range(42))


def test_a_fault_in_step_0_with_two_workers_on_each_node(launch: Launch, undisturbed: Undisturbed) -> None:
    """The survivors' optimizers have no state yet, or already: the newcomer's becomes theirs."""
    words, how = ("mlp.py", "--steps", "8"), {"nnodes": 2, "options": ("--nproc-per-node", "2")}
    faults = [kill(3, "collective", 1, step=0, n=8), kill(0, "stepped", 2, step=0)]
    ended = launch(*words, **how, faults=faults).end()
    assert ended.generations == 3, ended.output
    right(ended, undisturbed(*words, **how), 4)
