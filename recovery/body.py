"""What one pass of the loop's body may change, and how it is put back.

From a step's beginning to its commit this keeps the three promises on which exact
recovery rests: the rank knows whether it is *whole* (its tracked state is exactly
that of a committed step); what a failed forward pass changes (buffers, a scaler's
stage, gradients) can be put back; and no gradient lives from one step to the next.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from everstep.recovery import ddp, rng
from everstep.recovery.errors import UsageError

_BROADCAST_BUCKET = 32 << 20

REFUSAL = (
    "a collective after optimizer.step() and before the step's commit: a fault in it would leave "
    "this rank between two steps. Do it before optimizer.step(), or call step.commit() first"
)


class Body:
    """The tracked objects, as far as one step is concerned."""

    def __init__(self, tracked: dict[str, Any], group: Any, refuse: Callable[[str | None], None]) -> None:
        self._group = group
        self._refuse = refuse
        objects = list(tracked.values())
        self.modules = [x for x in objects if isinstance(x, torch.nn.Module)]
        self._parameters = list(ddp.parameters_of(self.modules))
        self._buffers = _unique(b for module in self.modules for b in module.buffers())
        self._replicas = ddp.replicas_in(self.modules)
        self._scalers = [x for x in objects if isinstance(x, torch.amp.GradScaler)]
        # Learning-rate schedulers, scalers and the like: small, and changed without optimizer.step()
        # being called where a scaler skips it. Optimizers change in step() alone, which is noticed.
        self._small = [
            x for x in objects if not isinstance(x, (torch.nn.Module, torch.optim.Optimizer))
        ]
        self._small_states: list[Any] = []
        self._buffer_copies = [torch.empty_like(b) for b in self._buffers]
        self._synced = False
        self._stepped = False
        self._running = False
        self.whole = True
        self.reach: Callable[[str], None] = lambda at: None  # fault injection
        self._hooks = [
            register_optimizer_step_pre_hook(self._before_optimizer),
            register_optimizer_step_post_hook(self._after_optimizer),
        ]

    def rehearse(self) -> None:
        """Lay out DDP's buckets, alike everywhere. Collectives must be answered locally."""
        for replica in self._replicas:
            ddp.rehearse(replica)

    def close(self) -> None:
        """Take the hooks back."""
        for hook in self._hooks:
            hook.remove()

    # --- one step -------------------------------------------------------------------------------

    def begin(self, seed: int, step: int) -> None:
        """A step begins: same randomness whenever and wherever it is done; no old gradients."""
        for p in self._parameters:
            p.grad = None
        if self._buffers:
            with torch.no_grad():
                torch._foreach_copy_(self._buffer_copies, self._buffers)
        self._small_states = [copy.deepcopy(x.state_dict()) for x in self._small]
        self._synced = self._stepped = False
        self._running = True
        rng.seed_step(seed, rng.replica()[0], step)

    def commit(self) -> None:
        """The step's last act. Raises what a failed collective raises, with the state put right again by `rewind`."""
        self._sync_buffers()
        if not self._stepped:
            self._check_gradients()
        self._running = False
        self.whole = True
        self._refuse(None)

    def rewind(self) -> None:
        """After a fault, or an exception of the user's: back to the beginning of the step.

        Where the rank is not whole, its state is a donor's business.
        """
        self._refuse(None)
        for p in self._parameters:
            p.grad = None
        for scaler in self._scalers:
            scaler._per_optimizer_states.clear()
        if self._running and self.whole:
            if self._buffers:
                with torch.no_grad():
                    torch._foreach_copy_(self._buffers, self._buffer_copies)
            for obj, state in zip(self._small, self._small_states, strict=True):
                obj.load_state_dict(state)
        self._running = False

    def restored(self) -> None:
        """A donor's state was loaded."""
        self._running = False
        self.whole = True

    # --- inside ---------------------------------------------------------------------------------

    def _before_optimizer(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if not self._running:
            return
        self._sync_buffers()
        self.reach("optimizer")
        self._stepped = True
        self.whole = False
        self._refuse(REFUSAL)

    def _after_optimizer(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._running:
            self.reach("stepped")

    def _sync_buffers(self) -> None:
        """Ranks hold different running statistics: make them rank 0's, so that any rank can be lost."""
        if self._synced or not self._buffers or self._group.size() == 1:
            return
        dist._broadcast_coalesced(self._group, self._buffers, _BROADCAST_BUCKET, 0)
        self._synced = True

    def _check_gradients(self) -> None:
        if any(s._enabled for s in self._scalers):
            return  # a scaler that meets an inf skips optimizer.step()
        if any(p.grad is not None for p in self._parameters):
            raise UsageError(
                "gradients live across steps: this step ends without optimizer.step(), and the next one "
                "would start from its gradients, which are not part of the tracked state. Put all "
                "micro-batches of one optimizer.step() inside one step of run.steps() (or call zero_grad())"
            )


def _unique(tensors: Any) -> list[torch.Tensor]:
    seen: dict[int, torch.Tensor] = {}
    for tensor in tensors:
        seen.setdefault(id(tensor), tensor)
    return list(seen.values())
