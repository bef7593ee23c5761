"""State from one process to another: everstep's checked transfer beside a raw TCP copy."""

from __future__ import annotations

import multiprocessing as mp
import socket
import statistics
import time
from collections.abc import Callable

import torch
from everstep.recovery import state
from everstep.recovery.transfer import receive_state, send_state

CHUNK = 1 << 20
ROUNDS = 7


def measure(sizes: tuple[int, ...] = (4_000_000, 100_000_000, 400_000_000)) -> list[dict]:
    """For each size: GB/s of both, medians of interleaved rounds between the same two processes."""
    rows = []
    for size in sizes:
        ours, raw = [], []
        for _ in range(ROUNDS):
            raw.append(size / _timed(_raw_sender, _raw_receiver, size) / 1e9)
            ours.append(size / _timed(_sender, _receiver, size) / 1e9)
        rows.append({"bytes": size, "gbps": statistics.median(ours), "raw_gbps": statistics.median(raw)})
    return rows


class Weights:
    """State of about `size` bytes: a few large tensors and many small ones, as a model has."""

    def __init__(self, size: int) -> None:
        small = [torch.ones(256) for _ in range(100)]
        rest = max(size - 100 * 1024, 0) // 4
        large = [torch.ones(rest // 10) for _ in range(10)] if rest else []
        self.tensors = {f"w{i}": t for i, t in enumerate(small + large)}

    def state_dict(self) -> dict[str, torch.Tensor]:
        return self.tensors

    def load_state_dict(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors = dict(tensors)


def _timed(sender: Callable, receiver: Callable, size: int) -> float:
    context = mp.get_context("fork")
    listener = socket.create_server(("127.0.0.1", 0))
    ready, result = context.Event(), context.Queue()
    child = context.Process(target=receiver, args=(listener.getsockname()[1], size, ready, result))
    child.start()
    prepared = sender(size)
    sock, _ = listener.accept()
    ready.wait()
    prepared(sock)
    seconds = result.get()
    child.join()
    sock.close()
    listener.close()
    return seconds


def _sender(size: int) -> Callable[[socket.socket], object]:
    snap = state.snapshot({"w": Weights(size)})
    return lambda sock: send_state(sock, 1, snap)


def _receiver(port: int, size: int, ready: object, result: object) -> None:
    torch.set_num_threads(1)
    mine = {"w": Weights(size)}
    with socket.create_connection(("127.0.0.1", port)) as sock:
        ready.set()  # type: ignore[attr-defined]
        began = time.perf_counter()
        receive_state(sock, lambda skeleton: state.landing(mine, skeleton, "cpu"))
        result.put(time.perf_counter() - began)  # type: ignore[attr-defined]


def _raw_sender(size: int) -> Callable[[socket.socket], object]:
    data = memoryview(bytearray(size))
    return lambda sock: sock.sendall(data)


def _raw_receiver(port: int, size: int, ready: object, result: object) -> None:
    data = memoryview(bytearray(size))
    data[:] = bytes(size)  # the pages are there, as the live tensors' are on the other side
    with socket.create_connection(("127.0.0.1", port)) as sock:
        ready.set()  # type: ignore[attr-defined]
        began = time.perf_counter()
        at = 0
        while at < size:
            at += sock.recv_into(data[at : at + CHUNK])
        result.put(time.perf_counter() - began)  # type: ignore[attr-defined]
