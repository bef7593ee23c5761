"""Randomness as a pure function of (seed, logical replica, step).

Nothing about random numbers is ever saved or sent: every step begins by seeding
Python, NumPy and torch (CPU, and CUDA where it is in use) from these three
numbers. So a step that is done again, or done by another process, draws the same
numbers as the one that nothing happened to.
"""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import numpy.random  # numpy loads it at its first use: at an import, not at the first step after a fault
import torch
from everstep.recovery.errors import UsageError

_replica: tuple[int, int] | None = None


def set_replica(replica: int, replicas: int) -> None:
    """State which logical replica this process is, of how many; `recovery.init()` does it."""
    global _replica
    if not 0 <= replica < replicas:
        raise UsageError(f"replica {replica} of {replicas} does not exist: replicas count from 0")
    _replica = (replica, replicas)


def replica() -> tuple[int, int]:
    """(logical replica, number of replicas) of this process.

    Where `recovery.init()` has not set them: RANK and WORLD_SIZE as torchrun gives
    them, else (0, 1).
    """
    if _replica is not None:
        return _replica
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def seed_all(seed: int) -> None:
    """Seed everything from `seed` alone, alike in every process: for building the model.

    CUDA is seeded also where it is not initialised yet (torch does it when it is).
    """
    entropy = _entropy("setup", seed, 0, 0)
    _seed_cpu(entropy)
    torch.manual_seed(_torch_seed(entropy))


def seed_step(seed: int, replica: int, step: int, stream: str = "step") -> None:
    """Seed everything for one step of one logical replica. Takes tens of microseconds.

    `stream` keeps apart what must not see the same numbers: the data of a step
    and the step itself, though both may be given seed 0.
    """
    entropy = _entropy(stream, seed, replica, step)
    _seed_cpu(entropy)
    # Not torch.manual_seed: where CUDA is not initialised that formats a stack trace for later, at each call.
    torch_seed = _torch_seed(entropy)
    torch.default_generator.manual_seed(torch_seed)
    for generator in _cuda_generators():
        generator.manual_seed(torch_seed)


@contextmanager
def kept() -> Iterator[None]:
    """Leave all random state as it was, whatever is drawn or seeded inside."""
    python, legacy = random.getstate(), np.random.get_state(legacy=False)
    generators = (torch.default_generator, *_cuda_generators())
    states = [generator.get_state() for generator in generators]
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(legacy)
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


def _entropy(stream: str, seed: int, replica: int, step: int) -> bytes:
    """64 well mixed bytes: neighbouring seeds, replicas and steps have nothing in common."""
    return hashlib.blake2b(f"{stream} {seed} {replica} {step}".encode()).digest()


def _torch_seed(entropy: bytes) -> int:
    return int.from_bytes(entropy[:8], "little")


def _seed_cpu(entropy: bytes) -> None:
    random.seed(int.from_bytes(entropy[8:24], "little"))
    np.random.seed(np.frombuffer(entropy, np.uint32, count=4, offset=24))


def _cuda_generators() -> tuple[torch.Generator, ...]:
    # Never initialises CUDA, and is empty in a forked DataLoader worker, which must not touch it.
    in_use = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return tuple(torch.cuda.default_generators) if in_use else ()
