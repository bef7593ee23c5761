"""What is tracked: its canonical form, its digest, and putting it back bit for bit.

A `Snapshot` splits the tracked objects' state dicts into tensors (references, never
copies) and a `skeleton`: a short message that says what is where. The same skeleton goes
to a peer, into a checkpoint, and, freed of what two equal states may differ in, into the digest.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import msgspec
import torch
import xxhash
from everstep.recovery import values
from everstep.recovery.errors import UsageError
from everstep.recovery.tensors import (
    TensorSpec,
    as_bytes,
    copy_into,
    empty_like_spec,
    from_wire,
    memory_of,
    shape_of,
    to_wire,
    why_not,
)
from torch.nn.parallel import DistributedDataParallel

__all__ = [
    "Snapshot",
    "Stateful",
    "TensorSpec",
    "as_bytes",
    "check",
    "describe_mismatch",
    "digest",
    "empty_like_spec",
    "fingerprint",
    "from_wire",
    "landing",
    "layout",
    "load",
    "snapshot",
    "specs",
    "to_wire",
    "unwrap",
]

_VERSION = 1
_MODULE, _OPTIMIZER, _OBJECT = "module", "optimizer", "object"
_LOAD_ORDER = (_MODULE, _OPTIMIZER, _OBJECT)


@runtime_checkable
class Stateful(Protocol):
    """Anything that can be tracked."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state_dict: Any) -> Any: ...


@dataclass
class Snapshot:
    """Tracked state: what is where, and the tensors themselves (references to live memory)."""

    skeleton: bytes
    tensors: list[torch.Tensor]


def check(name: str, obj: object) -> None:
    """Raise `UsageError` if `obj` cannot be tracked."""
    if isinstance(obj, type) or not all(
        callable(getattr(obj, method, None)) for method in ("state_dict", "load_state_dict")
    ):
        raise UsageError(
            f"track({name}=…): {values.describe(obj)} has no state_dict() and load_state_dict(); "
            "track the object that has them, or give it both"
        )


def unwrap(obj: Any) -> Any:
    """The user's own model inside DistributedDataParallel and torch.compile."""
    while True:
        if isinstance(obj, DistributedDataParallel):
            obj = obj.module
            continue
        compiled_from = getattr(obj, "_orig_mod", None) if isinstance(obj, torch.nn.Module) else None
        if compiled_from is None:
            return obj
        obj = compiled_from


# ---------------------------------------------------------------- taking it apart


def snapshot(objs: Mapping[str, Stateful]) -> Snapshot:
    """The state of the tracked objects, sorted by name. No tensor is copied.

    Raises `UsageError` where a state dict holds something that cannot be sent.
    """
    table = _TensorTable()
    objects: list[list[Any]] = []
    with torch.no_grad():
        for name in sorted(objs):
            check(name, objs[name])
            obj = unwrap(objs[name])
            try:
                if isinstance(obj, torch.nn.Module):
                    objects.append([_MODULE, name, _encode_module(name, obj, table)])
                else:
                    kind = _OPTIMIZER if isinstance(obj, torch.optim.Optimizer) else _OBJECT
                    objects.append([kind, name, values.encode(obj.state_dict(), (name,), table.add)])
            except values.Unsendable as exc:
                where = ".".join(exc.path[1:]) or "the top"
                raise UsageError(
                    f"track({name}=…): its state_dict has {exc.what} at '{where}', which cannot be sent to a "
                    "peer; keep tensors, numbers, strings and plain containers of them there"
                ) from None
    specs = [[s.path, s.dtype, list(s.shape), s.nbytes, s.device] for s in table.specs]
    return Snapshot(msgspec.msgpack.encode([_VERSION, objects, specs]), table.tensors)


@dataclass
class _TensorTable:
    """Tensors in order of appearance; one that is seen twice (tied weights) has one number."""

    tensors: list[torch.Tensor] = field(default_factory=list)
    specs: list[TensorSpec] = field(default_factory=list)
    _seen: dict[object, int] = field(default_factory=dict)
    _paths: set[str] = field(default_factory=set)

    def add(self, tensor: torch.Tensor, path: values.Path) -> int:
        what = why_not(tensor)
        if what:
            raise values.Unsendable(path, what)
        tensor = tensor.detach()
        if type(tensor) is not torch.Tensor:
            tensor = tensor.as_subclass(torch.Tensor)
        number = len(self.tensors)
        if tensor.numel():  # empty tensors have no memory to share
            number = self._seen.setdefault(memory_of(tensor), number)
        if number == len(self.tensors):
            text = ".".join(path).encode("utf-8", "backslashreplace").decode()
            if text in self._paths:  # keys 0 and '0', or 'a.b' and a nest of the two
                text = f"{text}#{number}"
            self._paths.add(text)
            self.tensors.append(tensor)
            self.specs.append(
                TensorSpec(
                    text,
                    values.dtype_name(tensor.dtype),
                    tuple(tensor.shape),
                    tensor.numel() * tensor.element_size(),
                    tensor.device.type,
                )
            )
        return number


def _encode_module(name: str, module: torch.nn.Module, table: _TensorTable) -> values.Node:
    """A module's state dict under the user's own names, and its buffers outside the state dict.

    A buffer registered with persistent=False is not in the state dict, but a newcomer
    that has another value there computes something else, so it goes along.
    """
    state = {_plain_name(k): v for k, v in module.state_dict().items()}
    buffers = {k: owner._buffers[leaf] for k, (owner, leaf) in _loose_buffers(module).items()}
    return [
        "d",
        [
            [part, ["d", [[k, values.encode(v, (name, k), table.add)] for k, v in content.items()]]]
            for part, content in (("state", state), ("buffers", buffers))
        ],
    ]


def _plain_name(key: str) -> str:
    """A state dict's key without what torch.compile adds for a compiled submodule."""
    return key.replace("_orig_mod.", "")


def _loose_buffers(module: torch.nn.Module) -> dict[str, tuple[torch.nn.Module, str]]:
    """The set buffers that are not in the state dict: plain name -> (their module, name in it)."""
    return {
        _plain_name(f"{prefix}.{leaf}" if prefix else leaf): (owner, leaf)
        for prefix, owner in module.named_modules()
        for leaf in sorted(owner._non_persistent_buffers_set)
        if owner._buffers.get(leaf) is not None
    }


# ---------------------------------------------------------------- reading a skeleton


class _Body(msgspec.Struct, array_like=True, frozen=True):
    version: int
    objects: list[tuple[str, str, Any]]
    specs: list[tuple[str, str, tuple[int, ...], int, str]]


@functools.lru_cache(maxsize=4)  # one is asked about several times in a restore, which a rank waits for
def _body(skeleton: bytes) -> _Body:
    try:
        body = msgspec.msgpack.decode(skeleton, type=_Body)
        for _, _, node in body.objects:
            values.validate(node, len(body.specs))
    except (msgspec.DecodeError, RecursionError) as exc:
        raise ValueError(f"this is no state that everstep can read: {exc}") from exc
    if body.version != _VERSION:
        raise ValueError(f"a state in format {body.version}; this everstep reads format {_VERSION}")
    for kind, name, node in body.objects:
        if kind not in _LOAD_ORDER or (kind == _MODULE and not _is_module_node(node)):
            raise ValueError(f"malformed state: {name!r} is no {kind}")
    for path, dtype, shape, nbytes, _ in body.specs:
        if min(shape, default=0) < 0 or math.prod(shape) * values.dtype_from(dtype).itemsize != nbytes:
            raise ValueError(f"malformed state: the size of {path!r}")
    return body


def _is_module_node(node: values.Node) -> bool:
    """Whether a (valid) node has the form that `_encode_module` gives it."""
    parts = node[1] if isinstance(node, list) and node[0] == "d" else []
    return [key for key, _ in parts] == ["state", "buffers"] and all(
        isinstance(part, list) and part[0] == "d" and all(isinstance(key, str) for key, _ in part[1])
        for _, part in parts
    )


def specs(skeleton: bytes) -> list[TensorSpec]:
    """The tensors that go with a skeleton, in order. ValueError if it cannot be read."""
    return [TensorSpec(*spec) for spec in _body(skeleton).specs]


def layout(skeleton: bytes) -> str:
    """A hash of what is tracked and of the models' tensors' names, dtypes and shapes.

    Equal on all ranks that run the same script, before and after optimizers have made their
    state. A difference is put in words by `describe_mismatch`.
    """
    return hashlib.sha256(msgspec.msgpack.encode(list(_layout_items(skeleton)))).hexdigest()


def _layout_items(skeleton: bytes) -> Iterator[tuple[str, str]]:
    body = _body(skeleton)
    for kind, name, node in body.objects:
        yield name, f"an {kind}" if kind[0] == "o" else f"a {kind}"
        if kind == _MODULE:
            for key, value in node[1][0][1][1]:
                if isinstance(value, list) and value[0] == "T":
                    _, dtype, shape, _, _ = body.specs[value[1]]
                    yield f"{name}.{key}", f"{dtype} {list(shape)}"


def describe_mismatch(a: bytes, b: bytes, a_name: str = "here", b_name: str = "on the peer") -> str:
    """The first difference between two skeletons' layouts, in words; empty if there is none."""
    mine, theirs = dict(_layout_items(a)), dict(_layout_items(b))
    for path, what in mine.items():
        if path not in theirs:
            return f"{path} ({what}) is there {a_name} but not {b_name}"
        if theirs[path] != what:
            return f"{path} is {what} {a_name} but {theirs[path]} {b_name}"
    for path, what in theirs.items():
        if path not in mine:
            return f"{path} ({what}) is there {b_name} but not {a_name}"
    return ""


# ---------------------------------------------------------------- digests


def digest(objs: Mapping[str, Stateful]) -> str:
    """SHA-256, in hex, of all tracked state: values, structure and every bit of the tensors.

    The same on every device, for wrapped and bare models, whatever the order in which keys
    came to be and whichever tensors share memory.
    """
    snap = snapshot(objs)
    body = _body(snap.skeleton)
    contents = [
        msgspec.msgpack.encode([dtype, shape, hashlib.sha256(as_bytes(to_wire(tensor))).digest()])
        for tensor, (_, dtype, shape, _, _) in zip(snap.tensors, body.specs, strict=True)
    ]
    whole = [[name, kind, values.canonical(node, contents.__getitem__)] for kind, name, node in body.objects]
    return hashlib.sha256(msgspec.msgpack.encode(whole)).hexdigest()


def fingerprint(snap: Snapshot) -> str:
    """xxh3_128, in hex, of a snapshot as it is sent: a fast check that it arrived unchanged."""
    state = xxhash.xxh3_128()
    state.update(len(snap.skeleton).to_bytes(8, "little"))
    state.update(snap.skeleton)
    for tensor in snap.tensors:
        state.update(as_bytes(to_wire(tensor)))
    return str(state.hexdigest())


def landing(objs: Mapping[str, Stateful], skeleton: bytes, device: torch.device | str) -> list[torch.Tensor]:
    """Where to receive each tensor of a skeleton: the live tensor it is for, or a new one.

    A live tensor is used only where nothing else lies in its memory, so that receiving one
    tensor can never spoil another; pass the list to `load` afterwards. New ones are made on
    `device`, except for what the sender kept on the CPU.
    """
    mine = snapshot(objs)
    numbers = dict(_places(skeleton))
    wanted: dict[int, set[int | None]] = {}  # ours -> the sender's tensors it would have to hold
    for place, ours in _places(mine.skeleton):
        wanted.setdefault(ours, set()).add(numbers.get(place))
    alone = _alone_in_memory(mine.tensors)
    live: dict[int, torch.Tensor] = {}
    for ours, theirs in wanted.items():
        number = next(iter(theirs))
        if len(theirs) == 1 and number is not None and alone[ours]:
            live[number] = mine.tensors[ours]
    found = []
    for number, spec in enumerate(specs(skeleton)):
        tensor = live.get(number)
        if tensor is None or shape_of(tensor) != (spec.dtype, spec.shape):
            tensor = empty_like_spec(spec, "cpu" if spec.device == "cpu" else device)
        found.append(tensor)
    return found


def _places(skeleton: bytes) -> Iterator[tuple[tuple[object, ...], int]]:
    for kind, name, node in _body(skeleton).objects:
        for place, number in values.tensor_places(node):
            yield (kind, name, *place), number


def _alone_in_memory(tensors: Sequence[torch.Tensor]) -> list[bool]:
    """Which tensors are contiguous, and overlap none of the others."""
    alone = [t.is_contiguous() and not t.is_conj() and not t.is_neg() for t in tensors]
    spans = []
    for i, t in enumerate(tensors):
        if t.numel():
            length = 1 + sum((size - 1) * step for size, step in zip(t.shape, t.stride(), strict=True))
            spans.append((str(t.device), t.data_ptr(), t.data_ptr() + length * t.element_size(), i))
    spans.sort()
    last: tuple[str, int, int] | None = None  # device, its furthest end so far, whose it is
    for device, start, end, i in spans:
        if last is not None and last[0] == device and start < last[1]:
            alone[i] = alone[last[2]] = False
        if last is None or last[0] != device or end > last[1]:
            last = (device, end, i)
    return alone


# ---------------------------------------------------------------- putting it back


def load(objs: Mapping[str, Stateful], skeleton: bytes, tensors: Sequence[torch.Tensor]) -> None:
    """Give the tracked objects the state of a snapshot, bit for bit. Takes the tensors over.

    Modules are written in place (not at all where a received tensor is the live one);
    then optimizers, whose parameters, groups and state stay the same objects; then the rest.
    `UsageError` where the objects are of another layout or refuse the state, ValueError where
    skeleton and tensors do not belong together.
    """
    body = _body(skeleton)
    wanted = [(dtype, tuple(shape)) for _, dtype, shape, _, _ in body.specs]
    if [shape_of(t) for t in tensors] != wanted:
        raise ValueError("the tensors are not those that the skeleton names")
    difference = describe_mismatch(snapshot(objs).skeleton, skeleton, "here", "in the state to restore")
    if difference:
        raise UsageError(
            f"the state does not fit what is tracked: {difference}; run the same script on all ranks"
        )
    readers: dict[int, set[str]] = {}
    for _, name, node in body.objects:
        for number in values.tensor_numbers(node):
            readers.setdefault(number, set()).add(name)
    for kind, name, node in sorted(body.objects, key=lambda o: _LOAD_ORDER.index(o[0])):
        own = _own_tensors(tensors, readers, copied=kind == _MODULE, homes=[s[4] for s in body.specs])
        value = values.decode(node, own)
        obj: Any = unwrap(objs[name])
        try:
            if kind == _MODULE:
                _load_module(obj, value["state"], value["buffers"])
            elif kind == _OPTIMIZER:
                _load_optimizer(obj, value)
            else:
                obj.load_state_dict(value)
        except (ValueError, TypeError, KeyError, AttributeError, IndexError, RuntimeError) as exc:
            reason = (str(exc).strip() or type(exc).__name__).splitlines()[0]
            raise UsageError(f"track({name}=…): load_state_dict() refused its own state: {reason}") from exc


def _own_tensors(
    tensors: Sequence[torch.Tensor], readers: Mapping[int, set[str]], *, copied: bool, homes: Sequence[str]
) -> Callable[[int], torch.Tensor]:
    """Tensors for one object to keep: what two objects would share is cloned for each.

    Sharing within an object is kept: where it writes to one, the sender's writes to both.
    """
    kept: dict[int, torch.Tensor] = {}

    def tensor(number: int) -> torch.Tensor:
        if number not in kept:
            found = tensors[number].detach()
            if not copied:
                if homes[number] == "cpu":
                    found = found.cpu()
                if len(readers[number]) > 1:
                    found = found.clone()
            kept[number] = found
        return kept[number]

    return tensor


def _load_module(module: torch.nn.Module, state: dict[str, Any], buffers: dict[str, torch.Tensor]) -> None:
    own = module.state_dict()
    names = {_plain_name(k): k for k in own}
    if names.keys() == state.keys() and _is_plain(module, own):
        for name, new in state.items():
            copy_into(own[names[name]], new)
    else:
        fresh = OrderedDict((names.get(name, name), value) for name, value in state.items())
        if hasattr(own, "_metadata"):  # the versions that tell modules how to read it
            fresh._metadata = own._metadata  # type: ignore[attr-defined]
        module.load_state_dict(fresh)
    loose = _loose_buffers(module)
    owners = {_plain_name(f"{prefix}." if prefix else ""): m for prefix, m in module.named_modules()}
    for name in loose.keys() - buffers.keys():
        owner, leaf = loose[name]
        owner._buffers[leaf] = None
    for name, new in buffers.items():
        live = loose[name][0]._buffers[loose[name][1]] if name in loose else None
        if live is not None and shape_of(live) == shape_of(new):
            copy_into(live, new)
        else:  # made, or remade in another shape, on the way
            prefix, _, leaf = name.rpartition(".")
            device = live.device if live is not None else next(iter(own.values()), new).device
            owner = owners[f"{prefix}." if prefix else ""]
            owner.register_buffer(leaf, new.to(device, copy=True), persistent=False)


def _is_plain(module: torch.nn.Module, own: Mapping[str, Any]) -> bool:
    """Whether loading this module means no more than writing to its parameters and buffers."""
    for part in module.modules():
        if part._load_state_dict_pre_hooks or part._load_state_dict_post_hooks:
            return False
        for method in ("load_state_dict", "_load_from_state_dict"):
            if not getattr(type(part), method).__module__.startswith("torch.nn.modules."):
                return False
    memory = {
        name: t.data_ptr()
        for named in (module.named_parameters, module.named_buffers)
        for name, t in named(remove_duplicate=False)
    }
    return all(isinstance(t, torch.Tensor) and memory.get(name) == t.data_ptr() for name, t in own.items())


def _load_optimizer(optimizer: torch.optim.Optimizer, value: Any) -> None:
    """Load an optimizer exactly.

    `Optimizer.load_state_dict` casts floating state to the parameter's dtype, which loses
    bits of float32 moments of bfloat16 parameters; so the exact tensors are put in afterwards,
    on the device that it chose. It also makes new group and state dicts; the old ones, which
    others may hold, are kept and filled.
    """
    old_state, old_list, old_groups = optimizer.state, optimizer.param_groups, list(optimizer.param_groups)
    optimizer.load_state_dict(value)
    if not (isinstance(value, dict) and isinstance(value.get("state"), dict) and "param_groups" in value):
        return  # a format of its own; its load_state_dict knows best
    indices = [i for group in value["param_groups"] for i in group["params"]]
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for index, param in zip(indices, params, strict=True):
        if index in value["state"]:
            loaded = optimizer.state[param]
            exact = {k: _exact(v, loaded.get(k)) for k, v in value["state"][index].items()}
            loaded.clear()
            loaded.update(exact)
    new_state, new_groups = dict(optimizer.state), optimizer.param_groups
    old_state.clear()
    old_state.update(new_state)
    optimizer.state = old_state
    for old, new in zip(old_groups, new_groups, strict=True):
        for key, tensor in new.items():  # a learning rate that a captured graph reads stays where it is
            live = old.get(key)
            if not (isinstance(live, torch.Tensor) and isinstance(tensor, torch.Tensor)):
                continue
            if shape_of(live) == shape_of(tensor):
                copy_into(live.detach(), tensor)
                new[key] = live
        old.clear()
        old.update(new)
    old_list[:] = old_groups
    optimizer.param_groups = old_list


def _exact(sent: Any, loaded: Any) -> Any:
    """What was sent, bit for bit, on the device where the optimizer's own loading put it."""
    if isinstance(sent, torch.Tensor):
        if isinstance(loaded, torch.Tensor):
            return loaded if loaded.dtype == sent.dtype else sent.to(loaded.device)
        return sent
    if type(sent) is dict:
        return {k: _exact(v, loaded.get(k) if isinstance(loaded, dict) else None) for k, v in sent.items()}
    if type(sent) in (list, tuple):
        alike = isinstance(loaded, (list, tuple)) and len(loaded) == len(sent)
        pairs = zip(sent, loaded if alike else [None] * len(sent), strict=True)
        return type(sent)(_exact(a, b) for a, b in pairs)
    return sent
