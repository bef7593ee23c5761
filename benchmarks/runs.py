"""Running the benchmarks' training script under everstep or torchrun, and killing its workers."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

TRAIN = Path(__file__).with_name("train.py")
BIN = Path(sys.executable).parent
PATIENCE = 120.0


@dataclass(frozen=True)
class Commit:
    """A committed step, as its rank logged it."""

    t: float
    rank: int
    step: int
    pid: int


@dataclass
class Job:
    """One training run."""

    folder: Path
    command: Sequence[str]
    env: dict[str, str] = field(default_factory=dict)
    process: subprocess.Popen[bytes] | None = None

    @property
    def events_file(self) -> Path:
        return self.folder / "events.jsonl"

    def start(self) -> Job:
        self.folder.mkdir(parents=True)
        with (self.folder / "output.txt").open("wb") as output:
            self.process = subprocess.Popen(
                self.command, stdout=output, stderr=subprocess.STDOUT, env={**os.environ, **self.env}
            )
        return self

    def commits(self) -> list[Commit]:
        log = self.folder / "commits.txt"
        lines = log.read_text().splitlines() if log.exists() else []
        return [Commit(float(t), int(r), int(s), int(p)) for t, r, s, p in map(str.split, lines)]

    def events(self) -> list[dict]:
        lines = self.events_file.read_text().splitlines() if self.events_file.exists() else []
        return [json.loads(line) for line in lines]

    def wait_for(self, happened: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + PATIENCE
        while not happened():
            if self.process is not None and self.process.poll() is not None:
                raise RuntimeError(f"the run ended before {what}:\n{self.output()[-2000:]}")
            if time.monotonic() > deadline:
                raise RuntimeError(f"waited {PATIENCE:.0f} s for {what}:\n{self.output()[-2000:]}")
            time.sleep(0.01)

    def output(self) -> str:
        return (self.folder / "output.txt").read_text(errors="replace")

    def finish(self) -> str:
        """Wait for the end; the digest that all ranks printed, or nothing for plain runs."""
        if self.process is None:
            return ""
        code = self.process.wait(PATIENCE * 3)
        if code:
            raise RuntimeError(f"exit code {code}:\n{self.output()[-3000:]}")
        digests = set(re.findall(r"digest ([0-9a-f]{64})", self.output()))
        if len(digests) > 1:
            raise RuntimeError(f"ranks disagree: {digests}")
        return digests.pop() if digests else ""

    def stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            self.process.wait(30)


def everstep(folder: Path, world: int, steps: int, *script: str, standby: int = 1) -> Job:
    """The script under `everstep run`, a worker a node."""
    command = [
        *(str(BIN / "everstep"), "run", "--nnodes", str(world), "--standby", str(standby)),
        *("--events", str(folder / "events.jsonl"), str(TRAIN), "--steps", str(steps)),
        *("--commits", str(folder / "commits.txt"), *script),
    ]
    return Job(folder, command, {"OMP_NUM_THREADS": "1"})


def torchrun(folder: Path, world: int, steps: int, *script: str, restarts: int = 0) -> Job:
    """The script under stock torchrun."""
    command = [
        *(str(BIN / "torchrun"), "--nnodes", "1", "--nproc-per-node", str(world), "--rdzv-backend", "c10d"),
        *("--rdzv-endpoint", "127.0.0.1:0", "--max-restarts", str(restarts), str(TRAIN)),
        *("--steps", str(steps), "--commits", str(folder / "commits.txt"), *script),
    ]
    # Without this a restart reuses one shared store and does not come up at all on torch 2.13.
    env = {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    return Job(folder, command, env)


def kill_and_time(job: Job, rank: int, ready: Callable[[], object], after: int) -> float:
    """SIGKILL the worker of `rank`; seconds until its successor has committed a step.

    Before the kill, `ready()` must hold and `after` more steps must have been committed.
    """
    job.wait_for(ready, "the standbys to be ready")
    seen = len([c for c in job.commits() if c.rank == rank])
    job.wait_for(lambda: len([c for c in job.commits() if c.rank == rank]) >= seen + after, "some steps")
    victim = [c for c in job.commits() if c.rank == rank][-1].pid
    time.sleep(0.05)  # somewhere inside the next step
    killed = time.time()
    os.kill(victim, signal.SIGKILL)

    def successor() -> list[Commit]:
        return [c for c in job.commits() if c.rank == rank and c.pid != victim and c.t > killed]

    job.wait_for(successor, "the replaced rank's next committed step")
    return successor()[0].t - killed


def ready_standbys(job: Job, used: int, world: int) -> Callable[[], bool]:
    """As many standbys have got ready as there are nodes, and as have been used."""
    return lambda: sum(e["event"] == "standby_ready" for e in job.events()) >= world + used
