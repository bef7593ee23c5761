"""Runs `everstep run` as a user would, does harm to it, and says what came of it.

A `Job` is one run with its events, its commits and its output. It waits for events and
commits, never for time to pass, and every run must leave nothing behind: each carries a
variable of its own in its environment, by which all of its processes are found.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SCRIPTS = Path(__file__).parent / "scripts"
MARK = "EVERSTEP_TEST_RUN"
GRACE = 5.0  # seconds that a process of a run may outlive it
PATIENCE = 240.0  # seconds until a test is given up: far beyond what anything here takes
EVERSTEP = str(Path(sys.executable).with_name("everstep"))
TORCHRUN = str(Path(sys.executable).with_name("torchrun"))


@dataclass(frozen=True)
class Commit:
    """One step committed by one process."""

    rank: int
    step: int
    pid: int


@dataclass
class Ended:
    """What a run left to be looked at."""

    code: int
    output: str
    events: list[dict[str, Any]]
    commits: list[Commit]
    digests: dict[int, str]

    def named(self, event: str) -> list[dict[str, Any]]:
        """The events of one name."""
        return [e for e in self.events if e["event"] == event]

    @property
    def generations(self) -> int:
        return max((e["generation"] for e in self.named("generation")), default=0)

    @property
    def error(self) -> str:
        """Everstep's own last word, as one line."""
        lines = [x for x in self.output.splitlines() if "everstep: error: " in x]
        return lines[-1] if lines else ""


@dataclass
class Job:
    """One run under way."""

    process: subprocess.Popen[bytes]
    mark: str
    folder: Path
    _seen: int = 0
    _events: list[dict[str, Any]] = field(default_factory=list)

    # --- what is known of it --------------------------------------------------------------------

    @property
    def output(self) -> str:
        return (self.folder / "output").read_text(errors="replace")

    def events(self) -> list[dict[str, Any]]:
        """The events so far."""
        with contextlib.suppress(FileNotFoundError), (self.folder / "events.jsonl").open() as file:
            file.seek(self._seen)
            for line in iter(file.readline, ""):
                if not line.endswith("\n"):
                    break
                self._seen += len(line.encode())
                self._events.append(json.loads(line))
        return self._events

    def commits(self) -> list[Commit]:
        """The commits so far, in the order in which they happened."""
        with contextlib.suppress(FileNotFoundError):
            lines = (self.folder / "commits").read_text().splitlines()
            return [Commit(*map(int, line.split())) for line in lines if line.count(" ") == 2]
        return []

    def processes(self) -> dict[int, str]:
        """Every process that carries this run's mark: pid -> command line."""
        return marked(self.mark)

    # --- waiting --------------------------------------------------------------------------------

    def until(self, ready: Callable[[], Any], what: str) -> Any:
        """Wait for something to become true; what it is then."""
        deadline = time.monotonic() + PATIENCE
        while not (value := ready()):
            over = self.process.poll() is not None and not (value := ready())
            if over or time.monotonic() > deadline:
                raise AssertionError(
                    f"{what}: it never came (exit code {self.process.poll()})\n{self.output}"
                )
            time.sleep(0.005)
        return value

    def event(self, name: str, **fields: Any) -> dict[str, Any]:
        """Wait for an event; the first one with these fields."""

        def found() -> dict[str, Any] | None:
            return next(
                (e for e in self.events() if e["event"] == name and fields.items() <= e.items()), None
            )

        return dict(self.until(found, f"event {name} {fields}"))

    def committed(self, step: int, rank: int | None = None) -> Commit:
        """Wait until `step` is committed (by `rank`); who did it."""

        def found() -> Commit | None:
            fitting = (c for c in self.commits() if c.step >= step and rank in (None, c.rank))
            return next(fitting, None)

        commit = self.until(found, f"commit of step {step} by rank {rank}")
        assert isinstance(commit, Commit)
        return commit

    def pid(self, rank: int) -> int:
        """The process that holds a rank, by its latest commit."""
        return next(c.pid for c in reversed(self.commits()) if c.rank == rank)

    def agent(self, node: str) -> int:
        """The agent of a node: the parent of its workers. Its own parent is its guardian."""
        return parent(int(self.event("worker_started", node=node)["pid"]))

    # --- the end --------------------------------------------------------------------------------

    def end(self) -> Ended:
        """Wait for the end. Nothing of the run may be left 5 s later."""
        try:
            self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self.stacks()
            raise AssertionError(f"the run does not end\n{self.output}\n{self.processes()}") from None
        self.nothing_left()
        digests = {int(r): d for r, d in re.findall(r"^\[rank (\d+)\] digest (\w+)$", self.output, re.M)}
        return Ended(self.process.returncode, self.output, self.events(), self.commits(), digests)

    def stacks(self) -> None:
        """Have every worker write where it stands, for whoever has to find out why a run hangs."""
        for pid, line in self.processes().items():
            if ".py" in line:
                os.kill(pid, signal.SIGUSR2)
        time.sleep(2)

    def nothing_left(self) -> None:
        deadline = time.monotonic() + GRACE
        while left := self.processes():
            assert time.monotonic() < deadline, f"left behind {GRACE} s after the end: {left}\n{self.output}"
            time.sleep(0.02)

    def clear(self) -> None:
        """End whatever is left, after a test that failed."""
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()


def start(
    folder: Path,
    command: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> Job:
    """Start a command as a job whose traces lie in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    mark = uuid.uuid4().hex
    own = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_", "TORCHELASTIC_", "EVERSTEP_", "SLURM_")
    environ = {k: v for k, v in os.environ.items() if not k.startswith(own)}
    environ.update(
        {MARK: mark, "OMP_NUM_THREADS": "1", "TEST_FOLDER": str(folder), "PYTHONWARNINGS": "ignore"}
    )
    environ.update(env or {})
    with (folder / "output").open("wb") as out:
        process = subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            env=environ,
            cwd=cwd or SCRIPTS,
            start_new_session=True,
        )
    return Job(process, mark, folder)


def everstep(
    folder: Path,
    *script: str,
    nnodes: int = 3,
    standby: int | None = None,
    options: Sequence[str] = (),
    faults: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
) -> Job:
    """`everstep run` of a script with its arguments, with faults as `recovery/faults.py` has them."""
    command = [EVERSTEP, "run", "--nnodes", str(nnodes), "--events", str(folder / "events.jsonl")]
    if standby is not None:
        command += ["--standby", str(standby)]
    environ = dict(env or {})
    if faults:
        environ["EVERSTEP_FAULTS"] = ";".join(faults)
    return start(folder, [*command, *options, *script], env=environ)


def right(ended: Ended, undisturbed: str, world: int, *, gone_back: bool = False) -> None:
    """It ended well: exit 0, on every rank the digest of the run that nothing happened to, no step twice.

    A run that has gone back to a checkpoint does steps again.
    """
    assert ended.code == 0, ended.output
    assert ended.digests == dict.fromkeys(range(world), undisturbed), ended.output
    if not gone_back:
        no_step_twice(ended.commits)


def no_step_twice(commits: Sequence[Commit]) -> None:
    """No rank commits a step again that its state holds already.

    A process that dies with its last step held by nobody else takes that step with it.
    """
    last: dict[int, int] = {}
    for c in commits:
        assert last.get(c.pid, -1) < c.step, f"process {c.pid} of rank {c.rank} commits step {c.step} again"
        last[c.pid] = c.step
    by: dict[tuple[int, int], set[int]] = {}
    for c in commits:
        by.setdefault((c.rank, c.step), set()).add(c.pid)
    for (rank, step), pids in by.items():
        going_on = [pid for pid in pids if last[pid] > step]
        assert len(going_on) <= 1, f"step {step} is committed twice on rank {rank}, by {pids}"


def marked(mark: str) -> dict[int, str]:
    """Live processes with this mark in their environment: pid -> command line."""
    found = {}
    for pid in _pids():
        with contextlib.suppress(OSError):
            if f"{MARK}={mark}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                found[pid] = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    return found


def parent(pid: int) -> int:
    """The parent of a process."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def _pids() -> Iterator[int]:
    return (int(name) for name in os.listdir("/proc") if name.isdigit())
