"""The active tests' load: matmul, memory and all_reduce with torch, in a process of their own.

Run as `python -m everstep.healthcheck.load matmul [--cpu]`; prints one JSON object:
`{"results": [{"device": "gpu0", "value": 612.3, "wrong": false}]}`, or `{"skip": "why"}`.
Values: TFLOP/s, GB/s, and GB/s of bus bandwidth.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

REPEATS = 5
"""The best of these counts: others' noise must raise no alarm."""


@dataclass(frozen=True)
class Sizes:
    """How much work."""

    matrix: int
    copy_bytes: int
    reduce_bytes: int
    calls: int
    ranks: int


GPU = Sizes(matrix=8192, copy_bytes=2 << 30, reduce_bytes=1 << 30, calls=10, ranks=0)
CPU = Sizes(matrix=512, copy_bytes=32 << 20, reduce_bytes=4 << 20, calls=2, ranks=2)


def main(words: Sequence[str] | None = None) -> None:
    """Measure, and print what was measured."""
    words = list(sys.argv[1:] if words is None else words)
    kind, cpu = words[0], "--cpu" in words
    try:
        print(json.dumps(measure(kind, cpu)))
    except (RuntimeError, ImportError, OSError) as error:
        print(json.dumps({"skip": " ".join(str(error).split())[:200] or type(error).__name__}))


def measure(kind: str, cpu: bool) -> dict[str, Any]:
    """One of matmul, memory, all_reduce."""
    import torch

    if not cpu and not torch.cuda.is_available():
        return {"skip": "torch sees no GPU"}
    devices = ["cpu"] if cpu else [f"cuda:{i}" for i in range(torch.cuda.device_count())]
    if kind == "all_reduce":
        return _all_reduce(len(devices), cpu)
    test = {"matmul": _matmul, "memory": _memory}[kind]
    return {
        "results": [{"device": _named(device), **test(device, CPU if cpu else GPU)} for device in devices]
    }


def _named(device: str) -> str:
    return device.replace("cuda:", "gpu")


def _matmul(device: str, sizes: Sizes) -> dict[str, Any]:
    import torch

    size = sizes.matrix
    kind = torch.float32 if device == "cpu" else torch.bfloat16
    generator = torch.Generator().manual_seed(1)
    a = torch.randn(size, size, generator=generator).to(device, kind)
    b = torch.randn(size, size, generator=generator).to(device, kind)
    first = a @ b
    wrong = False

    def work() -> None:
        nonlocal wrong
        for _ in range(sizes.calls):
            last = a @ b
        # The same product must come out each time: one that does not is worse than a slow one. cuBLAS gives
        # it bit for bit, the host's libraries to rounding.
        same = (
            torch.allclose(first, last, rtol=1e-3, atol=1e-2) if device == "cpu" else torch.equal(first, last)
        )
        wrong = wrong or not same

    seconds = _best(work, device)
    return {"value": round(2 * size**3 * sizes.calls / seconds / 1e12, 3), "wrong": wrong}


def _memory(device: str, sizes: Sizes) -> dict[str, Any]:
    import torch

    source = torch.ones(sizes.copy_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)

    def work() -> None:
        for _ in range(sizes.calls):
            target.copy_(source)

    seconds = _best(work, device)
    wrong = not bool((target == 1).all())
    return {"value": round(2 * sizes.copy_bytes * sizes.calls / seconds / 1e9, 1), "wrong": wrong}


def _best(work: Callable[[], None], device: str) -> float:
    import torch

    def wait() -> None:
        if device != "cpu":
            torch.cuda.synchronize(device)

    work()
    wait()
    best = float("inf")
    for _ in range(REPEATS):
        start = time.perf_counter()
        work()
        wait()
        best = min(best, time.perf_counter() - start)
    return best


def _all_reduce(devices: int, cpu: bool) -> dict[str, Any]:
    from torch import multiprocessing as mp

    sizes = CPU if cpu else GPU
    ranks = sizes.ranks or devices
    if ranks < 2:
        return {"skip": "one device has nobody to reduce with"}
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(_rank, (ranks, cpu, folder), nprocs=ranks, start_method="spawn")  # type: ignore
        with open(os.path.join(folder, "result")) as file:
            return {"results": [{"device": "", **json.load(file)}]}


def _rank(rank: int, ranks: int, cpu: bool, folder: str) -> None:
    import torch
    import torch.distributed as dist

    sizes = CPU if cpu else GPU
    device = "cpu" if cpu else f"cuda:{rank}"
    if not cpu:
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "gloo" if cpu else "nccl", init_method=f"file://{folder}/store", rank=rank, world_size=ranks
    )
    data = torch.ones(sizes.reduce_bytes // 4, device=device)
    dist.all_reduce(data)
    wrong = not bool((data == ranks).all())

    def work() -> None:
        for _ in range(sizes.calls):
            dist.all_reduce(data, op=dist.ReduceOp.MAX)

    seconds = _best(work, device) / sizes.calls
    bus = 2 * (ranks - 1) / ranks * sizes.reduce_bytes / seconds / 1e9
    wrongs = torch.tensor([float(wrong)], device=device)
    dist.all_reduce(wrongs)
    if rank == 0:
        with open(os.path.join(folder, "result"), "w") as file:
            json.dump({"value": round(bus, 2), "wrong": bool(wrongs.item())}, file)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
