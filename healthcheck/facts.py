"""A node's facts: lazy, read once, all through one runner. A fact that cannot be had raises `Absent`."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from everstep.healthcheck.errors import Absent, TimedOut
from everstep.healthcheck.history import History
from everstep.healthcheck.readers import smi
from everstep.healthcheck.registry import Level
from everstep.healthcheck.runner import Ran, Runner

T = TypeVar("T")


@dataclass
class Limits:
    """How long each tool may take, in seconds."""

    smi: float = 30.0
    tool: float = 15.0
    mount: float = 10.0
    dcgm: float = 45.0

    @classmethod
    def of(cls, level: Level) -> Limits:
        """Light must be over within 5 s, whatever hangs."""
        if level is Level.LIGHT:
            return cls(smi=4.0, tool=3.0, mount=3.0, dcgm=3.0)
        if level is Level.FULL:
            return cls()
        return cls(smi=60.0, tool=30.0, mount=10.0, dcgm=3 * 3600.0)


@dataclass
class Facts:
    """What is known of one node at one time. Checks read this and nothing else."""

    runner: Runner
    level: Level = Level.FULL
    now: float = field(default_factory=time.time)
    """Unix seconds."""
    history: History = field(default_factory=History)
    limits: Limits = field(default_factory=Limits)
    idle_gpus: frozenset[int] | None = None
    """The GPUs on which nothing may run now, as in a Prolog; None where that is not known."""
    sleep: Callable[[float], None] = time.sleep
    wait: float | None = None
    """How long one thread waits for another that reads the same fact."""
    _kept: dict[str, Any] = field(default_factory=dict, repr=False)
    _locks: dict[str, threading.Lock] = field(default_factory=dict, repr=False)
    _guard: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def once(self, name: str, make: Callable[[], T]) -> T:
        """`make()`, called once whoever asks; a failure is kept as well."""
        with self._guard:
            lock = self._locks.setdefault(name, threading.Lock())
        if not lock.acquire(timeout=-1 if self.wait is None else max(0.0, self.wait)):
            raise TimedOut(f"{name} is still being read")
        try:
            if name not in self._kept:
                try:
                    self._kept[name] = make()
                except Absent as absent:
                    self._kept[name] = absent
            kept = self._kept[name]
        finally:
            lock.release()
        if isinstance(kept, Absent):
            raise kept
        return kept  # type: ignore[no-any-return]

    def text(self, path: str) -> str | None:
        """A small file's text, stripped; None where it cannot be read."""
        data = self.runner.read(path)
        return None if data is None else data.decode("utf-8", "replace").strip()

    # NVIDIA

    @property
    def smi_ran(self) -> Ran:
        """`nvidia-smi -q -x`, as it ran. Absent only where there is no nvidia-smi."""

        def make() -> Ran:
            ran = self.runner.run(["nvidia-smi", "-q", "-x"], self.limits.smi)
            if ran.missing:
                raise Absent("there is no nvidia-smi")
            return ran

        return self.once("nvidia-smi", make)

    @property
    def smi(self) -> smi.Smi:
        """What nvidia-smi says of the GPUs that it shows."""

        def make() -> smi.Smi:
            ran = self.smi_ran
            if ran.timed_out:
                raise TimedOut(f"nvidia-smi did not answer in {ran.seconds:.0f} s", owner="gpu_smi")
            read = smi.parse(ran.out)
            if not read.gpus:
                raise Absent("nvidia-smi shows no GPU (see gpu_smi)")
            return read

        return self.once("smi", make)

    @property
    def gpus(self) -> tuple[smi.Gpu, ...]:
        """The GPUs that nvidia-smi shows; at least one."""
        return self.smi.gpus
