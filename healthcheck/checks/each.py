"""One judgement over many devices: the findings, else one pass, else one skip."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from everstep.healthcheck.readers.smi import Gpu
from everstep.healthcheck.result import Result, Status, ok, skip

T = TypeVar("T")


def each(
    devices: Sequence[T],
    judge: Callable[[T], Iterable[Result] | None],
    *,
    sound: str,
    unsupported: str,
) -> list[Result]:
    """Judge each device. `judge` returns its findings, or None where the device does not tell."""
    found: list[Result] = []
    judged = 0
    for device in devices:
        results = judge(device)
        if results is not None:
            judged += 1
            found += [result for result in results if result.status >= Status.WARN]
    if found:
        return found
    return [ok(sound)] if judged else [skip(unsupported)]


def quote(gpu: Gpu) -> str:
    """What to quote to whoever replaces it."""
    return f" (serial {gpu.serial}, {gpu.pci})" if gpu.serial else f" ({gpu.pci})"
