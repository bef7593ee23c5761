"""DistributedDataParallel's private parts: one bucket layout, whenever and however a rank got there."""

from __future__ import annotations

import pytest
import torch
from everstep.recovery import ddp
from everstep.recovery.errors import UsageError
from everstep.recovery.group import Group
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Odd(nn.Module):
    """Declared in another order than used, several dtypes, frozen parts, a complex one, one unused."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(6, 1).double()
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.turn = nn.Parameter(torch.ones(6, dtype=torch.complex64))
        self.first = nn.Linear(4, 6)
        self.low = nn.Linear(6, 6).bfloat16()
        self.empty = nn.Parameter(torch.empty(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.frozen(self.first(x))
        x = self.low((x * self.turn).real.bfloat16())
        return self.last(x.double()) + self.empty.sum()


def made(group: Group | None = None, **how: object) -> DistributedDataParallel:
    torch.manual_seed(0)
    return DistributedDataParallel(Odd(), process_group=group or Group(0, 2), bucket_cap_mb=0.0001, **how)


def layout(model: DistributedDataParallel) -> object:
    sizes = model._get_ddp_logging_data()
    return sizes.get("rebuilt_bucket_sizes"), sizes.get("bucket_sizes")


def train(model: DistributedDataParallel) -> None:
    for _ in range(2):
        model(torch.ones(3, 4)).sum().backward()
        model.zero_grad()


@pytest.mark.parametrize("views", [False, True])
def test_a_survivor_and_a_newcomer_lay_their_buckets_out_alike(views: bool) -> None:
    survivor, newcomer = made(gradient_as_bucket_view=views), made(gradient_as_bucket_view=views)
    ddp.rehearse(survivor)
    train(survivor)
    with pytest.raises(RuntimeError, match="never"):  # a backward pass that breaks off half-way
        x = survivor(torch.ones(3, 4))
        x.register_hook(_never)
        x.sum().backward()
    ddp.rehearse(survivor)
    ddp.rehearse(newcomer)
    train(newcomer)
    train(survivor)
    assert layout(survivor) == layout(newcomer)


def _never(grad: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("never")


def test_a_rehearsal_leaves_parameters_and_gradients_alone() -> None:
    model = made()
    before = [p.detach().clone() for p in model.parameters()]
    ddp.rehearse(model)
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))


def test_unused_parameters_need_no_rehearsal_but_a_reset() -> None:
    model = made(find_unused_parameters=True)
    ddp.rehearse(model)
    train(model)


def test_a_static_graph_is_refused() -> None:
    with pytest.raises(UsageError, match="static_graph"):
        ddp.rehearse(made(static_graph=True))
