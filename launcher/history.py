"""What a run knows of its earlier attempts: a small file in its directory, kept over requeues.

`History` and what is told of it are plain data and pure functions; `load` and `store` are the shell.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec
from everstep.launcher.slurm.client import fold

STATE = "state.json"
EVENTS = "events.jsonl"


class Attempt(msgspec.Struct, kw_only=True):
    """One time that the job ran."""

    restart: int
    """SLURM_RESTART_COUNT: 0 the first time."""
    began: float
    ended: float = 0.0
    committed: int = -1
    """The most steps that it is known to have committed."""
    reason: str = ""
    """How it ended; empty while it runs, or where nobody was left to say."""
    bad_nodes: dict[str, str] = {}


class History(msgspec.Struct, kw_only=True):
    """The attempts of one job, oldest first."""

    job: str
    events: str = ""
    """Where the run's events are."""
    attempts: list[Attempt] = []

    def fruitless(self) -> int:
        """How many attempts in a row, the last ones, have brought the run no step further."""
        best, count = -1, 0
        for attempt in self.attempts:
            count = 0 if attempt.committed > best else count + 1
            best = max(best, attempt.committed)
        return count

    def saved(self) -> int:
        """The most steps that any attempt has committed; -1: none is known."""
        return max((attempt.committed for attempt in self.attempts), default=-1)

    def bad_nodes(self) -> dict[str, str]:
        """Every node that was lost in an earlier attempt, and how."""
        return {node: how for attempt in self.attempts for node, how in attempt.bad_nodes.items()}

    def in_words(self) -> str:
        """One line on what came before; empty where nothing did."""
        if not self.attempts:
            return ""
        last = self.attempts[-1]
        words = [f"attempt {len(self.attempts) + 1} of job {self.job}"]
        step = f" after step {last.committed - 1}" if last.committed > 0 else ""
        words.append(
            f"attempt {len(self.attempts)} ended{step}: {last.reason or 'nobody was left to say why'}"
        )
        if bad := self.bad_nodes():
            words.append(f"lost so far: {fold(list(bad))}")
        return "; ".join(words)


def default_folder(environ: Mapping[str, str]) -> Path | None:
    """Where a job keeps what outlives its attempts, if nothing was said: where it was submitted from."""
    job = environ.get("SLURM_JOB_ID")
    return Path(environ.get("SLURM_SUBMIT_DIR") or Path.cwd(), ".everstep", job) if job else None


def make(folder: Path) -> bool:
    """Make the folder, for its owner alone; whether it can be written."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK)


def load(folder: Path, job: str) -> History:
    """The job's history; an empty one where there is none that can be read."""
    try:
        known = msgspec.json.decode((folder / STATE).read_bytes(), type=History)
    except (OSError, msgspec.MsgspecError):
        return History(job=job)
    return known if known.job == job else History(job=job)


def store(folder: Path, history: History) -> None:
    """Write it, whole or not at all, for its owner alone. Raises OSError."""
    make(folder)
    fd, name = tempfile.mkstemp(prefix=".state-", dir=folder)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(history), indent=1) + b"\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, folder / STATE)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


class Chronicle:
    """This attempt's entry in the history, written as it changes."""

    def __init__(self, folder: Path, job: str, restart: int, events: Path | None = None) -> None:
        self.folder = folder
        self.history = load(folder, job)
        self.earlier = self.history.in_words() if restart else ""
        self.fruitless = self.history.fruitless() if restart else 0
        if not restart:
            self.history = History(job=job)  # another cluster, or a number that came round again
        self.history.events = str(events or folder / EVENTS)
        self._own = Attempt(restart=restart, began=time.time())
        self.history.attempts.append(self._own)
        store(folder, self.history)

    def lost(self, node: str, how: str) -> None:
        """A node of this attempt was lost. Raises OSError."""
        self._own.bad_nodes[node] = how
        store(self.folder, self.history)

    def ended(self, committed: int, reason: str) -> None:
        """This attempt is over. Raises OSError."""
        self._own.ended, self._own.committed, self._own.reason = time.time(), committed, reason
        store(self.folder, self.history)
