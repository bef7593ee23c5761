"""What a fault is: how a recorded node gets it, and what the check that looks for it must say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from recorded import Node


@dataclass(frozen=True)
class Fault:
    """A fault: how a sound node gets it, and what is said of it."""

    check: str
    profile: str
    spoil: Callable[[Node], object]
    status: str = "critical"
    severity: str = "monitor"
    device: str = ""
    words: str = ""
    level: str = "full"
    growth: bool = False
    """It is in what has changed since an earlier run."""
    idle: bool = False
    """It is one where nothing may run on the GPUs."""


def log(*lines: str) -> Callable[[Node], None]:
    """It writes these lines into the kernel log."""
    return lambda node: node.log(*lines)


def write(path: str, text: str) -> Callable[[Node], object]:
    """This file says something else."""
    return lambda node: node.write(path, text)


def stop(pid: int) -> Callable[[Node], None]:
    """This process is gone."""
    return lambda node: node.remove(f"/proc/{pid}")
