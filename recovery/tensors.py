"""Tensors as bytes: their specs, their memory without copies, and writing to live ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from everstep.recovery import values


@dataclass(frozen=True)
class TensorSpec:
    """A tensor without its content. `path` is for people and unique; `device` is where it was, by type."""

    path: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    device: str = "cpu"


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor of any dtype, as writable bytes. Nothing is copied."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise ValueError("as_bytes takes a contiguous CPU tensor; pass it through to_wire first")
    array: Any = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)


def to_wire(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as a contiguous one on the CPU: itself where it is one, else a copy."""
    return tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()


def from_wire(cpu: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Bring what arrived in `cpu` into `like`, if it was not received there; returns `like`."""
    copy_into(like.detach(), cpu)
    return like


def empty_like_spec(spec: TensorSpec, device: torch.device | str) -> torch.Tensor:
    """An uninitialized tensor of a spec's dtype and shape."""
    return torch.empty(spec.shape, dtype=values.dtype_from(spec.dtype), device=device)


def copy_into(live: torch.Tensor, new: torch.Tensor) -> None:
    """Write `new` into a live tensor; nothing to do where `new` is that very memory."""
    if live.numel() == 0 or memory_of(live) == memory_of(new):
        return
    if any(step == 0 and size > 1 for step, size in zip(live.stride(), live.shape, strict=True)):
        # An expanded tensor cannot be written to; usually a constant, equal on both sides.
        if as_bytes(to_wire(live)) == as_bytes(to_wire(new)):
            return
        raise ValueError("an expanded tensor cannot be restored; make it contiguous()")
    with torch.no_grad():
        live.copy_(new)


def shape_of(tensor: torch.Tensor) -> tuple[str, tuple[int, ...]]:
    """A tensor's dtype and shape, as specs have them."""
    return values.dtype_name(tensor.dtype), tuple(tensor.shape)


def why_not(tensor: torch.Tensor) -> str:
    """Why a tensor cannot be sent as bytes, in words; empty if it can."""
    if torch.nn.parameter.is_lazy(tensor):
        return "an uninitialized parameter (run the model once before track)"
    if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return f"a {type(tensor).__name__}"
    if tensor.layout is not torch.strided:
        return f"a {str(tensor.layout).removeprefix('torch.')} tensor"
    if tensor.is_quantized:
        return "a quantized tensor"
    if tensor.device.type == "meta":
        return "a tensor without content (on device meta)"
    return ""


def memory_of(tensor: torch.Tensor) -> tuple[object, ...]:
    """Equal for two tensors that are the same memory, read the same way."""
    return (
        tensor.device,
        tensor.untyped_storage().data_ptr(),
        tensor.storage_offset(),
        tensor.dtype,
        tuple(tensor.shape),
        tensor.stride(),
        tensor.is_conj(),
        tensor.is_neg(),
    )
