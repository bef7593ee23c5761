"""What one pass of the loop's body may change, and how it is put back.

From a step's beginning to its commit this keeps the three promises on which exact
recovery rests: the rank knows whether it is *whole* (its tracked state is exactly
that of a committed step); what a failed forward pass changes (buffers, a scaler's
stage, gradients) can be put back; and no gradient lives from one step to the next.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from everstep.recovery import ddp, rng
from everstep.recovery.errors import UsageError
from torch._C._distributed_c10d import _broadcast_coalesced
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

_BROADCAST_BUCKET = 32 << 20

REFUSAL = (
    "a collective after optimizer.step() and before the step's commit: a fault in it would leave "
    "this rank between two steps. Do it before optimizer.step(), or call step.commit() first"
)


class Body:
    """The tracked objects, as far as one step is concerned."""

    def __init__(
        self,
        tracked: dict[str, Any],
        group: Any,
        refuse: Callable[[str | None], None],
        check_group: Callable[[], None],
    ) -> None:
        self._group = group
        self._refuse = refuse
        self._check_group = check_group
        objects = list(tracked.values())
        self.modules = [x for x in objects if isinstance(x, torch.nn.Module)]
        self._parameters = list(ddp.parameters_of(self.modules))
        self._known = {id(p) for p in self._parameters}
        self._slots = _slots(self.modules)
        self._replicas = ddp.replicas_of(self.modules)
        self._optimizers = [x for x in objects if isinstance(x, Optimizer)]
        self._managed = {id(p) for optimizer in self._optimizers for p in _parameters_in(optimizer)}
        self._strange: set[int] = (
            set()
        )  # optimizers of the user's that have nothing to do with tracked models
        self._scalers = [x for x in objects if isinstance(x, torch.amp.GradScaler)]
        # Learning-rate schedulers, scalers and the like: small, and changed even where a scaler skips
        # optimizer.step(). Optimizers change in step() alone, which is noticed.
        self._small = [x for x in objects if not isinstance(x, (torch.nn.Module, Optimizer))]
        self._small_states: list[Any] = []
        self._buffers: list[torch.Tensor] = []
        self._buffer_copies: list[torch.Tensor] = []
        self._versions: list[int] = []
        self._all_modules = [x for module in self.modules for x in module.modules()]
        self._flags: tuple[list[bool], list[bool]] = ([], [])
        self._synced = False
        self._stepped: list[Optimizer] = []
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
        self._flags = self._flags_now()
        self._keep_buffers()
        self._versions = [p._version for p in self._parameters]
        self._small_states = [copy.deepcopy(x.state_dict()) for x in self._small]
        self._synced = False
        self._stepped = []
        self._running = True
        rng.seed_step(seed, rng.replica()[0], step)

    def commit(self) -> None:
        """The step's last act.

        Raises Fault, or what a failed collective raises: `rewind` puts the state right again.
        Raises UsageError for gradients that would be lost.
        """
        if not self._stepped:
            self._check_group()  # an exception that the user's code kept to itself
            self._sync_buffers()
        self._check_gradients()
        self._running = False
        self.whole = True
        self._refuse(None)

    def put_flags_back(self) -> None:
        """A step that was interrupted between eval() and train(), or with layers frozen for a while."""
        if self._running:
            training, grad = self._flags
            for module, flag in zip(self._all_modules, training, strict=True):
                module.training = flag
            for p, flag in zip(self._parameters, grad, strict=True):
                p.requires_grad = flag

    def _flags_now(self) -> tuple[list[bool], list[bool]]:
        return [x.training for x in self._all_modules], [p.requires_grad for p in self._parameters]

    def rewind(self) -> None:
        """After a fault, or an exception of the user's: back to the beginning of the step.

        Where the rank is not whole, its state is a donor's business.
        """
        self._refuse(None)
        for p in self._parameters:
            p.grad = None
        for scaler in self._scalers:
            scaler._per_optimizer_states.clear()
        if self._running and self._versions != [p._version for p in self._parameters]:
            self.whole = False  # changed by hand, not by an optimizer of torch's kind
        if self._running and self.whole:
            self._put_buffers_back()
            for obj, state in zip(self._small, self._small_states, strict=True):
                obj.load_state_dict(state)
        self._running = False

    def restored(self) -> None:
        """A donor's state was loaded."""
        self._running = False
        self.whole = True

    # --- inside ---------------------------------------------------------------------------------

    def _before_optimizer(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not self._running or not self._concerns(optimizer):
            return
        if not self._stepped:
            self._check_group()  # an exception that the user's code kept to itself
            self._sync_buffers()
        self.reach("optimizer")
        self._stepped.append(optimizer)
        self.whole = False
        self._refuse(REFUSAL)

    def _after_optimizer(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._running and self._concerns(optimizer):
            self.reach("stepped")

    def _concerns(self, optimizer: Optimizer) -> bool:
        """Does it change a tracked model? Then it must be tracked, alone or inside something that is."""
        if any(optimizer is x for x in self._optimizers):
            return True
        if id(optimizer) in self._strange:
            return False
        if not any(id(p) in self._known for p in _parameters_in(optimizer)):
            self._strange.add(id(optimizer))
            return False
        if any(optimizer is held for x in self._small for held in vars(x).values()):
            self._optimizers.append(optimizer)  # what is tracked wraps it
            self._managed.update(id(p) for p in _parameters_in(optimizer))
            return True
        raise UsageError(
            f"an optimizer that changes a tracked model is not tracked itself ({type(optimizer).__name__}): "
            "its state would not be recovered. Name it in run.track(optimizer=…)"
        )

    def _keep_buffers(self) -> None:
        self._buffers = _buffers_at(self._slots)
        if [(b.shape, b.dtype, b.device) for b in self._buffers] != [
            (c.shape, c.dtype, c.device) for c in self._buffer_copies
        ]:
            self._buffer_copies = [torch.empty_like(b) for b in self._buffers]
        if self._buffers:
            with torch.no_grad():
                torch._foreach_copy_(self._buffer_copies, self._buffers)

    def _put_buffers_back(self) -> None:
        if self._buffers:
            with torch.no_grad():
                torch._foreach_copy_(self._buffers, self._buffer_copies)
        kept = iter(self._buffers)
        seen: dict[int, torch.Tensor] = {}
        for holder, name, number in self._slots:  # a module may have put another tensor in their place
            if number not in seen:
                seen[number] = next(kept)
            holder[name] = seen[number]

    def _sync_buffers(self) -> None:
        """Ranks hold different running statistics: make them rank 0's, so that any rank can be lost."""
        if self._synced or not self._slots or self._group.size() == 1:
            return
        _broadcast_coalesced(self._group, _buffers_at(self._slots), _BROADCAST_BUCKET, 0)
        self._synced = True

    def _check_gradients(self) -> None:
        """Gradients that the next step would start from, or would seem to, are not recovered."""
        if any(
            scaler._enabled and scaler.state_dict() != before
            for scaler, before in zip(self._small, self._small_states, strict=True)
            if scaler in self._scalers
        ):
            return  # a scaler that meets an inf skips optimizer.step()
        done = {id(p) for optimizer in self._stepped for p in _parameters_in(optimizer)}
        left = (p for p in self._parameters if p.grad is not None and id(p) not in done)
        if any(not self._stepped or id(p) in self._managed for p in left):
            raise UsageError(
                "gradients live across steps: this step ends without optimizer.step() for them, and the next "
                "one would start from them, though they are not part of the tracked state. Put all "
                "micro-batches of one optimizer.step() inside one step of run.steps() (or call zero_grad())"
            )


# Where a buffer lives: its module's dictionary, its name there, and a number for each distinct tensor.
Slot = tuple[dict[str, Any], str, int]


def _slots(modules: list[torch.nn.Module]) -> list[Slot]:
    numbers: dict[int, int] = {}
    slots: dict[tuple[int, str], Slot] = {}
    for module in modules:
        for inner in module.modules():
            for name, buffer in inner._buffers.items():
                if buffer is not None:
                    number = numbers.setdefault(id(buffer), len(numbers))
                    slots.setdefault((id(inner), name), (inner._buffers, name, number))
    return list(slots.values())


def _buffers_at(slots: list[Slot]) -> list[torch.Tensor]:
    """The tensors that are there now, each once."""
    now: dict[int, torch.Tensor] = {}
    for holder, name, number in slots:
        now.setdefault(number, holder[name])
    return list(now.values())


def _parameters_in(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    return (p for group in optimizer.param_groups for p in group["params"])
