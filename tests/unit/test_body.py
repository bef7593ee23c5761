"""What one pass of the loop's body may change, and how it is put back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from everstep.recovery.body import Body
from everstep.recovery.errors import Fault, UsageError
from torch import nn


class Alone:
    """A group of one."""

    def size(self) -> int:
        return 1


class Net(nn.Module):
    """Has a parameter, BatchNorm's buffers, and one that is replaced by another tensor at each step."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.linear(x))
        self.mean = self.mean + y.detach().mean(0)
        return y


class Scene:
    """A model in the middle of training, alone."""

    def __init__(self, **more: Any) -> None:
        torch.manual_seed(0)
        self.net = Net()
        self.optimizer = torch.optim.AdamW(self.net.parameters())
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1)
        self.refused: list[str | None] = []
        self.check: Callable[[], None] = lambda: None
        tracked = {"net": self.net, "optimizer": self.optimizer, "scheduler": self.scheduler, **more}
        self.body = Body(tracked, Alone(), self.refused.append, lambda: self.check())

    def forward_and_backward(self) -> None:
        self.net(torch.randn(5, 3)).square().sum().backward()

    def buffers(self) -> dict[str, torch.Tensor]:
        return {name: b.clone() for name, b in self.net.named_buffers()}


@pytest.fixture
def scene() -> Any:
    scene = Scene()
    yield scene
    scene.body.close()


def test_an_interrupted_forward_pass_leaves_no_trace(scene: Scene) -> None:
    scene.body.begin(0, 0)
    before, scheduled = scene.buffers(), scene.scheduler.state_dict()
    scene.forward_and_backward()
    scene.scheduler.step()
    scene.body.rewind()
    assert scene.body.whole
    assert all(p.grad is None for p in scene.net.parameters())
    assert scene.scheduler.state_dict() == scheduled
    for name, buffer in scene.net.named_buffers():
        assert torch.equal(buffer, before[name]), name


def test_from_the_optimizers_first_step_to_the_commit_a_rank_is_not_whole(scene: Scene) -> None:
    scene.body.begin(0, 0)
    scene.forward_and_backward()
    assert scene.body.whole
    scene.optimizer.step()
    assert not scene.body.whole
    assert "step.commit()" in str(scene.refused[-1])
    scene.body.commit()
    assert scene.body.whole
    assert scene.refused[-1] is None


def test_interrupted_after_the_optimizer_it_stays_not_whole_until_restored(scene: Scene) -> None:
    scene.body.begin(0, 0)
    scene.forward_and_backward()
    scene.optimizer.step()
    scene.body.rewind()
    assert not scene.body.whole
    scene.body.restored()
    assert scene.body.whole


def test_a_parameter_changed_by_hand_makes_a_rank_not_whole(scene: Scene) -> None:
    scene.body.begin(0, 0)
    with torch.no_grad():
        scene.net.linear.weight -= 0.1
    scene.body.rewind()
    assert not scene.body.whole


def test_a_broken_group_stops_the_optimizer_before_it_changes_anything(scene: Scene) -> None:
    """The failed collective's exception was swallowed by the user's own `except`."""

    def broken() -> None:
        raise Fault("broken")

    scene.body.begin(0, 0)
    scene.forward_and_backward()
    before = scene.net.linear.weight.detach().clone()
    scene.check = broken
    with pytest.raises(Fault):
        scene.optimizer.step()
    assert torch.equal(scene.net.linear.weight, before)
    assert scene.body.whole
    with pytest.raises(Fault):
        scene.body.commit()


def test_a_step_that_was_taken_is_committed_though_the_group_breaks_meanwhile(scene: Scene) -> None:
    def broken() -> None:
        raise Fault("broken")

    scene.body.begin(0, 0)
    scene.forward_and_backward()
    scene.optimizer.step()
    scene.check = broken
    scene.body.commit()
    assert scene.body.whole


def test_gradients_do_not_live_across_steps(scene: Scene) -> None:
    scene.body.begin(0, 0)
    scene.forward_and_backward()
    with pytest.raises(UsageError, match="gradients live across steps"):
        scene.body.commit()
    scene.optimizer.zero_grad()
    scene.body.commit()


def test_a_scaler_that_skips_a_step_is_no_accumulation_but_a_step_without_it_is() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scene = Scene(scaler=scaler)
    try:
        scene.body.begin(0, 0)
        loss = scene.net(torch.randn(5, 3)).sum() * float("inf")
        scaler.scale(loss).backward()
        scaler.step(scene.optimizer)
        scaler.update()
        assert scene.body.whole
        scene.body.commit()
        scene.body.begin(0, 1)
        scaler.scale(scene.net(torch.randn(5, 3)).sum()).backward()
        with pytest.raises(UsageError, match="gradients live across steps"):
            scene.body.commit()
    finally:
        scene.body.close()


def test_a_scaler_can_unscale_again_after_a_rewind() -> None:
    scaler = torch.amp.GradScaler("cpu")
    scene = Scene(scaler=scaler)
    try:
        for _ in range(2):
            scene.body.begin(0, 0)
            scaler.scale(scene.net(torch.randn(5, 3)).sum()).backward()
            scaler.unscale_(scene.optimizer)
            scene.body.rewind()
    finally:
        scene.body.close()


def test_an_optimizer_of_a_tracked_model_must_be_tracked(scene: Scene) -> None:
    other = torch.optim.SGD(scene.net.parameters(), lr=0.1)
    scene.body.begin(0, 0)
    scene.forward_and_backward()
    with pytest.raises(UsageError, match="not tracked itself"):
        other.step()


def test_an_optimizer_of_something_else_is_the_users_own_business(scene: Scene) -> None:
    toy = torch.nn.Parameter(torch.ones(2))
    toy.grad = torch.ones(2)
    scene.body.begin(0, 0)
    torch.optim.SGD([toy], lr=0.1).step()
    assert scene.body.whole
    scene.body.commit()


def test_flags_that_a_fault_interrupted_are_as_at_the_steps_start() -> None:
    """A fault between eval() and train() once made the redone step run without dropout."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout(0.5))
    body = Body({"model": model}, Alone(), lambda why: None, lambda: None)
    try:
        body.begin(0, 3)
        model.eval()
        model[0].weight.requires_grad_(False)
        body.put_flags_back()
        body.rewind()
        assert all(module.training for module in model.modules())
        assert model[0].weight.requires_grad
    finally:
        body.close()
