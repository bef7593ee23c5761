"""Buckets one and many, views, unused and frozen parameters, accumulation, buffers, scalers, schedulers, EMA."""

from __future__ import annotations

from collections.abc import Callable

from harness import Job, right


def test_every_kind_of_model_survives_a_loss_in_each_ones_backward(
    launch: Callable[..., Job], undisturbed: Callable[..., str]
) -> None:
    """The first loss is in step 0, when optimizers have no state yet; others just after a step with an inf."""
    places = [(0, 1), (3, 4), (4, 9), (8, 14), (9, 18), (13, 22), (14, 26), (18, 30), (23, 34)]
    faults = [
        f"kill:rank={gen % 3},step={step},at=collective,n={n},gen={gen}"
        for gen, (step, n) in enumerate(places, 1)
    ]
    ended = launch("zoo.py", faults=faults).end()
    assert len(ended.named("fault")) == len(faults), ended.output
    right(ended, undisturbed("zoo.py"), 3)
