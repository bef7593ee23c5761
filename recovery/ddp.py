"""DistributedDataParallel after a fault: the private parts that must be put right, all in this file.

DDP lays its gradient buckets out anew after its first backward pass, in the order in
which gradients became ready. A newcomer's fresh DDP beside survivors' would then mix
gradients or hang. So every rank *rehearses* once before its first step: one synthetic
backward in a fixed order, with collectives answered locally, after which DDP has laid
out its buckets for good, alike on every rank, now and later.

After a fault a reducer may be left unfinished. `_reset_state` puts it back, but also makes
DDP lay its buckets out once more, in whatever order gradients come next; so every rank
rehearses again after each fault, survivors and newcomers alike.

Private API used (torch 2.13): `reducer._rebuild_buckets`, `reducer._reset_state`,
`reducer.prepare_for_forward`, `reducer.prepare_for_backward`, `_lazy_init`.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator

import torch
from everstep.recovery.errors import UsageError
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

# Every DDP object of this process. The user may track the bare model inside, which does not know of it.
_made: list[weakref.ref[DistributedDataParallel]] = []


def notice() -> None:
    """From now on, note each DDP object that is made."""

    def hook(module: torch.nn.Module, name: str, submodule: torch.nn.Module | None) -> None:
        if name == "module" and isinstance(module, DistributedDataParallel):
            _made.append(weakref.ref(module))

    register_module_module_registration_hook(hook)


def replicas_of(modules: Iterable[torch.nn.Module]) -> list[DistributedDataParallel]:
    """Every DDP object in and around these modules, each once, in the order of its making.

    Raises UsageError for one whose model is not among them.
    """
    found: dict[int, DistributedDataParallel] = {}
    known = {id(p) for p in parameters_of(modules)}
    for ref in _made:
        made = ref()
        if made is not None:
            found.setdefault(id(made), made)
            if any(p.requires_grad and id(p) not in known for p in made.module.parameters()):
                raise UsageError(
                    f"a DistributedDataParallel model is not tracked ({type(made.module).__name__}): "
                    "it would not be recovered. Name it in run.track(model=…)"
                )
    for module in modules:
        for inner in module.modules():
            if isinstance(inner, DistributedDataParallel):
                found.setdefault(id(inner), inner)
    return list(found.values())


def rehearse(ddp: DistributedDataParallel) -> None:
    """Have DDP lay out its buckets now. Collectives must be answered locally meanwhile.

    Gradients are None afterwards. Raises UsageError for what cannot be rehearsed.
    """
    if ddp.static_graph:
        raise UsageError(
            "DistributedDataParallel(static_graph=True) cannot be recovered yet: leave static_graph out"
        )
    ddp.reducer._reset_state()
    ddp.require_backward_grad_sync = True
    if ddp.find_unused_parameters:
        return  # such a DDP never lays its buckets out anew
    ignored = _ignored(ddp)
    params = [p for p in ddp.module.parameters() if p.requires_grad and id(p) not in ignored]
    for p in params:
        p.grad = None
    if not ddp._lazy_init_ran:
        ddp._lazy_init()  # type: ignore[no-untyped-call]
    with torch.enable_grad():
        ddp.reducer.prepare_for_forward()
        ddp.reducer.prepare_for_backward([])
        for p in reversed(params):
            # One parameter at a time, last first: the order must not be autograd's choice.
            some = p.reshape(-1)[:1].sum()
            some.backward(torch.zeros_like(some))
        ddp.reducer._rebuild_buckets()
    for p in params:
        p.grad = None


def parameters_of(modules: Iterable[torch.nn.Module]) -> Iterator[torch.nn.Parameter]:
    """Every parameter of these modules, each once."""
    seen: set[int] = set()
    for module in modules:
        for p in module.parameters():
            if id(p) not in seen:
                seen.add(id(p))
                yield p


def _ignored(ddp: DistributedDataParallel) -> set[int]:
    names: set[str] = getattr(ddp, "parameters_to_ignore", set())
    return {id(p) for name, p in ddp.module.named_parameters() if name in names}
