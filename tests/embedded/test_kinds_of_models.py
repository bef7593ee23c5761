"""Buckets one and many, views, unused and frozen parameters, accumulation, scalers, schedulers, EMA."""

from __future__ import annotations

from collections.abc import Callable

from harness import Job, right


def test_every_kind_of_model_survives_a_loss_in_each_ones_backward(
    launch: Callable[..., Job], undisturbed: Callable[..., str]
) -> None:
    """The first loss is in step 0, when optimizers have no state yet; others just after an inf."""
    places = [(0, 1), (3, 3), (4, 5), (8, 7), (9, 9), (13, 11), (14, 13), (18, 2), (23, 4)]
    faults = [
        f"kill:rank={gen % 3},step={step},at=collective,n={n},gen={gen}"
        for gen, (step, n) in enumerate(places, 1)
    ]
    ended = launch("zoo.py", faults=faults).end()
    assert len(ended.named("fault")) == len(faults), ended.output
    right(ended, undisturbed("zoo.py"), 3)
