"""A worker is killed, any rank, at any point: the run ends with the digest of the undisturbed one."""

from __future__ import annotations

from collections.abc import Callable

from harness import Job, right

MLP = ("mlp.py", "--steps", "48")
POINTS = ("begin", "collective", "optimizer", "stepped", "commit", "committed")


def kill(rank: int, at: str, gen: int, **more: int) -> str:
    rest = "".join(f",{name}={value}" for name, value in more.items())
    return f"kill:rank={rank},at={at},gen={gen}{rest}"


def test_every_rank_is_lost_at_every_point_of_a_step(
    launch: Callable[..., Job], undisturbed: Callable[..., str]
) -> None:
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
