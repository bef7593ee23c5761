"""Python values as plain msgpack data and back, without pickle.

A `state_dict()` holds tensors in a nest of ordinary values. Here the nest becomes
plain data ("nodes": None, bool, int, float, str, bytes, and tagged lists), in which
each tensor is only a number. Rebuilding a node runs no code that the sender chose: an
enum or a named tuple is looked up among the modules already imported here, and must be one.
"""

from __future__ import annotations

import enum
import sys
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import msgspec
import numpy as np
import torch

Node = Any  # what msgpack can hold: None | bool | int | float | str | bytes | list[Node]
Path = tuple[str, ...]

_INT_MIN, _INT_MAX = -(2**63), 2**64 - 1
_INLINE_ARRAY = 1 << 12  # bytes; a larger array travels as a tensor does
_FACTORIES: dict[str, Any] = {
    f.__name__: f for f in (list, dict, int, float, set, str, tuple, bool, OrderedDict, Counter)
}
_MAPS: dict[type, str] = {dict: "d", OrderedDict: "o", Counter: "n"}
_SEQUENCES: dict[type, str] = {list: "l", tuple: "u"}
_SETS: dict[type, str] = {set: "e", frozenset: "z"}


class Unsendable(Exception):
    """A value that plain data cannot hold: where it is, and what it is in words."""

    def __init__(self, path: Path, what: str) -> None:
        super().__init__(f"{what} at '{'.'.join(path)}'")
        self.path = path
        self.what = what


def encode(value: Any, path: Path, tensor: Callable[[torch.Tensor, Path], int]) -> Node:
    """The node of `value`. `tensor` is given each tensor with its path and returns its number.

    Raises `Unsendable` for a value of any other kind than those listed in docs.
    """
    try:
        return _Encoder(tensor).encode(value, path)
    except RecursionError:
        raise Unsendable(path, "a nest of containers too deep to follow") from None


def decode(node: Node, tensor: Callable[[int], torch.Tensor]) -> Any:
    """The value of a node; `tensor` returns the tensor of a number. ValueError if malformed."""
    try:
        return _decode(node, tensor)
    except (TypeError, IndexError, KeyError, AttributeError, OverflowError, RecursionError) as exc:
        raise ValueError(f"malformed value: {exc}") from exc


def canonical(node: Node, tensor: Callable[[int], bytes]) -> Node:
    """The node with everything taken out that two equal states may differ in.

    The order of keys, the kind of mapping, which tensors share memory, whether one is a
    Parameter, the number of a device. `tensor` returns what stands for a tensor's content.
    """
    if not isinstance(node, list):
        return node
    tag, *rest = node
    if tag in ("d", "o", "n", "f"):
        pairs = [[canonical(k, tensor), canonical(v, tensor)] for k, v in rest[-1]]
        return ["d", sorted(pairs, key=_sort_key)]
    if tag in ("l", "u", "e", "z"):
        return [tag, [canonical(item, tensor) for item in rest[0]]]
    if tag == "N":
        return [*node[:3], [canonical(item, tensor) for item in rest[2]]]
    if tag == "T":
        return ["T", tensor(rest[0])]
    if tag == "B":
        return ["B", *rest[:2], tensor(rest[2])]
    if tag == "V":
        return ["V", rest[0]]
    return node


_ARITY = {
    **dict.fromkeys(["d", "o", "n", "l", "u", "e", "z", "i", "s", "y", "S", "D"], 1),
    **dict.fromkeys(["f", "T", "c", "g", "V"], 2),
    **dict.fromkeys(["N", "B", "A", "r", "E"], 3),
}


def validate(node: Node, count: int) -> None:
    """ValueError unless the node is built as `encode` builds them, with tensors numbered below `count`."""
    if node is None or isinstance(node, (bool, int, float, str, bytes)):
        return
    ok = isinstance(node, list) and node and isinstance(node[0], str) and _ARITY.get(node[0]) == len(node) - 1
    if not ok:
        raise ValueError("malformed value: neither a scalar nor a known kind")
    tag, last = node[0], node[-1]
    if tag in ("d", "o", "n", "f", "l", "u", "e", "z", "N"):
        if not isinstance(last, list):
            raise ValueError(f"malformed value: kind {tag!r} without content")
        for item in last:
            if tag in ("d", "o", "n", "f"):
                if not (isinstance(item, list) and len(item) == 2):
                    raise ValueError("malformed value: a mapping that is not made of pairs")
                validate(item[0], 0)
                validate(item[1], count)
            else:
                validate(item, count)
    elif tag in ("T", "B"):
        number = node[1] if tag == "T" else node[3]
        if not (isinstance(number, int) and 0 <= number < count):
            raise ValueError("malformed value: a tensor that is not listed")


def tensor_numbers(node: Node) -> Iterator[int]:
    """The numbers of the tensors in a node, in order, with repetitions."""
    for _, number in tensor_places(node):
        yield number


def tensor_places(node: Node, place: tuple[bytes, ...] = ()) -> Iterator[tuple[tuple[bytes, ...], int]]:
    """Where in a node each tensor is: an unambiguous place (unlike a path for people) and its number."""
    if not isinstance(node, list) or not node:
        return
    tag = node[0]
    if tag == "T":
        yield place, node[1]
    elif tag == "B":
        yield place, node[3]
    elif tag in ("d", "o", "n", "f"):
        for key, item in node[-1]:
            yield from tensor_places(item, (*place, msgspec.msgpack.encode(key)))
    elif tag in ("l", "u", "N"):
        for i, item in enumerate(node[-1]):
            yield from tensor_places(item, (*place, msgspec.msgpack.encode(i)))


def _sort_key(node: Node) -> bytes:
    return msgspec.msgpack.encode(node)


class _Encoder:
    def __init__(self, tensor: Callable[[torch.Tensor, Path], int]) -> None:
        self._tensor = tensor
        self._open: set[int] = set()  # containers that we are inside of

    def encode(self, value: Any, path: Path) -> Node:
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, torch.Tensor):
            return self._encode_tensor(value, path)
        if isinstance(value, np.ndarray):
            return self._encode_array(value, path)
        leaf = _encode_leaf(value, path)
        if leaf is not None:
            return leaf
        if id(value) in self._open:
            raise Unsendable(path, f"a {type(value).__name__} that contains itself")
        self._open.add(id(value))
        try:
            return self._encode_container(value, path)
        finally:
            self._open.discard(id(value))

    def _encode_container(self, value: Any, path: Path) -> Node:
        kind = type(value)
        if kind in _MAPS:
            return [_MAPS[kind], self._pairs(value, path)]
        if kind is defaultdict:
            factory = value.default_factory
            name = None if factory is None else getattr(factory, "__name__", "")
            if name is not None and _FACTORIES.get(name) is not factory:
                raise Unsendable(path, "a defaultdict whose factory is a function")
            return ["f", name, self._pairs(value, path)]
        if kind in _SEQUENCES:
            return [_SEQUENCES[kind], self._items(value, path)]
        if kind in _SETS:
            # In sorted order: that of a set differs from process to process.
            return [_SETS[kind], sorted((_encode_key(v, path) for v in value), key=_sort_key)]
        if isinstance(value, tuple) and hasattr(kind, "_fields"):
            _importable(kind, path)
            return ["N", kind.__module__, kind.__qualname__, self._items(value, path)]
        raise Unsendable(path, describe(value))

    def _pairs(self, value: Mapping[Any, Any], path: Path) -> list[Node]:
        # dict.items, not value.items: iterating must have no effect on a clever subclass.
        return [[_encode_key(k, path), self.encode(v, (*path, str(k)))] for k, v in value.items()]

    def _items(self, value: Iterable[Any], path: Path) -> list[Node]:
        return [self.encode(v, (*path, str(i))) for i, v in enumerate(value)]

    def _encode_tensor(self, value: torch.Tensor, path: Path) -> Node:
        if isinstance(value, torch.nn.Parameter):
            return ["T", self._tensor(value, path), 2 if value.requires_grad else 1]
        return ["T", self._tensor(value, path), 0]

    def _encode_array(self, value: np.ndarray[Any, Any], path: Path) -> Node:
        if type(value) is not np.ndarray or value.dtype.kind not in "biufcSUMm":
            raise Unsendable(path, f"a NumPy array of {value.dtype}")
        shape = list(value.shape)
        flat = np.ascontiguousarray(value).reshape(-1)
        if value.nbytes < _INLINE_ARRAY:
            return ["A", value.dtype.str, shape, flat.tobytes()]
        raw = flat.view(np.uint8)
        if not raw.flags.writeable:  # torch would warn of it
            raw = raw.copy()
        return ["B", value.dtype.str, shape, self._tensor(torch.from_numpy(raw), path)]


def _encode_leaf(value: Any, path: Path) -> Node | None:
    """The node of a value that holds no others; None where it is a container or unknown."""
    kind = type(value)
    if isinstance(value, np.generic):
        if value.dtype.kind not in "biufcSUMm":
            raise Unsendable(path, f"a NumPy scalar of {value.dtype}")
        return ["g", value.dtype.str, value.tobytes()]
    if isinstance(value, enum.Enum):
        _importable(kind, path)
        return ["E", kind.__module__, kind.__qualname__, _encode_key(value.value, path)]
    # Subclasses of numbers and strings (a step of ours, say) travel as the plain value.
    if isinstance(value, int):
        number = int(value)
        return number if _INT_MIN <= number <= _INT_MAX else ["i", hex(number)]
    if isinstance(value, float):
        return float(value)
    if isinstance(value, str):
        text = str(value)
        try:
            text.encode()
        except UnicodeEncodeError:  # lone surrogates, as in a file name that is not UTF-8
            return ["s", text.encode("utf-8", "surrogatepass")]
        return text
    if isinstance(value, torch.Size):
        return ["S", list(value)]
    if kind is bytes:
        return value
    if kind is bytearray:
        return ["y", bytes(value)]
    if kind is complex:
        return ["c", value.real, value.imag]
    if kind is range:
        return ["r", *(_encode_leaf(n, path) for n in (value.start, value.stop, value.step))]
    if kind is torch.dtype:
        return ["D", dtype_name(value)]
    if kind is torch.device:
        return ["V", value.type, value.index]
    return None


def _encode_key(value: Any, path: Path) -> Node:
    """The node of a mapping's key or a set's member: any scalar, or a tuple or frozenset of them."""
    if value is None or isinstance(value, bool):
        return value
    if type(value) is tuple:
        return ["u", [_encode_key(v, path) for v in value]]
    if type(value) is frozenset:
        return ["z", sorted((_encode_key(v, path) for v in value), key=_sort_key)]
    leaf = _encode_leaf(value, path)
    if leaf is None:
        raise Unsendable(path, f"{describe(value)} as a key")
    return leaf


def _decode(node: Node, tensor: Callable[[int], torch.Tensor]) -> Any:
    if not isinstance(node, list):
        return node
    tag, *rest = node
    if tag == "T":
        found = tensor(rest[0])
        return torch.nn.Parameter(found, requires_grad=rest[1] == 2) if rest[1] else found
    if tag in ("d", "o", "n", "f"):
        pairs = [(_decode(k, tensor), _decode(v, tensor)) for k, v in rest[-1]]
        if tag == "f":
            return defaultdict(None if rest[0] is None else _FACTORIES[rest[0]], pairs)
        return {"d": dict, "o": OrderedDict}[tag](pairs) if tag != "n" else Counter(dict(pairs))
    if tag in ("l", "u", "e", "z"):
        items = [_decode(item, tensor) for item in rest[0]]
        return {"l": list, "u": tuple, "e": set, "z": frozenset}[tag](items)
    if tag == "N":
        return _lookup(rest[0], rest[1], tuple)(*(_decode(item, tensor) for item in rest[2]))
    if tag == "B":
        raw = tensor(rest[2]).detach().cpu().contiguous().numpy()
        return raw.view(_array_dtype(rest[0])).reshape(rest[1])
    return _decode_leaf(tag, rest)


def _decode_leaf(tag: str, rest: list[Any]) -> Any:
    if tag == "i":
        return int(rest[0], 16)
    if tag == "s":
        return rest[0].decode("utf-8", "surrogatepass")
    if tag == "y":
        return bytearray(rest[0])
    if tag == "c":
        return complex(*rest)
    if tag == "r":
        return range(*(_decode(n, _no_tensor) for n in rest))
    if tag == "g":
        return np.frombuffer(rest[1], dtype=_array_dtype(rest[0]), count=1)[0]
    if tag == "A":
        return np.frombuffer(rest[2], dtype=_array_dtype(rest[0])).reshape(rest[1]).copy()
    if tag == "S":
        return torch.Size(rest[0])
    if tag == "D":
        return dtype_from(rest[0])
    if tag == "V":
        return _own_device(rest[0], rest[1])
    if tag == "E":
        return _lookup(rest[0], rest[1], enum.Enum)(_decode(rest[2], _no_tensor))
    raise ValueError(f"malformed value: unknown kind {tag!r}")


def _no_tensor(_number: int) -> torch.Tensor:
    raise ValueError("malformed value: a tensor where none can be")


def _array_dtype(text: str) -> np.dtype[Any]:
    dtype: np.dtype[Any] = np.dtype(text)
    if dtype.kind not in "biufcSUMm":  # an object array is made of pointers
        raise ValueError(f"malformed value: array of {text!r}")
    return dtype


def dtype_name(dtype: torch.dtype) -> str:
    """'float32' for torch.float32."""
    return str(dtype).removeprefix("torch.")


def dtype_from(name: str) -> torch.dtype:
    """The torch dtype of that name; ValueError if there is none."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"this torch has no dtype {name!r}")
    return dtype


def _own_device(kind: str, index: int | None) -> torch.device:
    """A device of the sender as one of ours: the second GPU there is this process's current one here."""
    if index is None or kind == "cpu":
        return torch.device(kind) if index is None else torch.device(kind, index)
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is not None and accelerator.type == kind:
        return torch.device(kind, torch.accelerator.current_device_index())
    return torch.device(kind, index)


def _resolve(module: str, qualname: str) -> Any:
    found: Any = sys.modules.get(module)
    for part in qualname.split("."):
        found = getattr(found, part, None)
    return found


def _importable(kind: type, path: Path) -> None:
    if _resolve(kind.__module__, kind.__qualname__) is not kind:
        raise Unsendable(path, f"a {kind.__qualname__}, a class that a peer cannot find by its name,")


def _lookup(module: str, qualname: str, base: type) -> Any:
    found = _resolve(module, qualname)
    if not (isinstance(found, type) and issubclass(found, base)):
        raise ValueError(f"the sender has a class {module}.{qualname}, which is not imported here")
    if base is tuple and not hasattr(found, "_fields"):
        raise ValueError(f"malformed value: {qualname} is no named tuple")
    return found


def describe(value: Any) -> str:
    """A value's kind in words: 'a function', 'an object of class Foo'."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if callable(value) and hasattr(value, "__name__"):
        return "a function"
    return f"an object of class {type(value).__name__}"
