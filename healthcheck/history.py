"""What is remembered of a node's counters from one run to the next, for checks that judge growth."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

KEEP_S = 3600.0
"""How far back samples are kept."""
_RECORDED_KEEP_S = 7 * 86400.0

Sample = Mapping[str, float]


@dataclass
class History:
    """Samples by name, each a time and a few numbers. Checks read what was before and add what is now."""

    boot: str = ""
    before: dict[str, list[tuple[float, dict[str, float]]]] = field(default_factory=dict)
    added: dict[str, list[tuple[float, dict[str, float]]]] = field(default_factory=dict)

    def earlier(self, name: str, now: float, seconds: float = KEEP_S) -> list[tuple[float, Sample]]:
        """The samples of this boot in the last `seconds`, the oldest first, without this run's."""
        return [(at, values) for at, values in self.before.get(name, []) if 0 < now - at <= seconds]

    def add(self, name: str, now: float, values: Sample) -> None:
        """Remember this run's sample."""
        self.added.setdefault(name, []).append((now, dict(values)))

    def growth(
        self, name: str, now: float, values: Sample, seconds: float = KEEP_S
    ) -> tuple[float, dict[str, float]]:
        """How much each number has grown since the oldest sample of the window, and over how many seconds.

        A number that fell was reset in between, and has grown by what it shows since. This run's is added.
        """
        samples = self.earlier(name, now, seconds)
        self.add(name, now, values)
        if not samples:
            return 0.0, {}
        chain = [values for _, values in samples] + [values]
        grown: dict[str, float] = {}
        for each in values:
            series = [sample[each] for sample in chain if each in sample]
            if len(series) > 1:
                grown[each] = sum(b - a if b >= a else b for a, b in pairwise(series))
        return now - samples[0][0], grown

    def dumped(self, now: float) -> dict[str, Any]:
        """What is to be kept: a sample every 30 s at the most."""
        kept: dict[str, list[tuple[float, dict[str, float]]]] = {}
        for name in {*self.before, *self.added}:
            old = [each for each in self.before.get(name, []) if 0 < now - each[0] <= KEEP_S]
            new = self.added.get(name, [])
            if old and new and new[0][0] - old[-1][0] < 30 and len(old) > 1:
                old.pop()
            if old or new:
                kept[name] = old + new
        return {"boot": self.boot, "samples": kept}


class Store(Protocol):
    """Where a history is kept."""

    def load(self, boot: str) -> History:
        """What is known from this boot."""

    def save(self, history: History, now: float) -> None:
        """Keep it. Raises OSError where that cannot be."""


class Nowhere:
    """No history: each run is the first."""

    def load(self, boot: str) -> History:
        return History(boot)

    def save(self, history: History, now: float) -> None:
        pass


@dataclass
class FileStore:
    """A JSON file of mode 0600 in a private folder, replaced as a whole."""

    path: Path

    def load(self, boot: str) -> History:
        history = History(boot)
        try:
            fd = os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            return history
        with os.fdopen(fd, "rb") as file:
            about = os.fstat(fd)
            # A file that is not ours alone is nobody's word.
            if not stat.S_ISREG(about.st_mode) or about.st_uid != os.geteuid() or about.st_mode & 0o022:
                return history
            try:
                data = json.loads(file.read(16 << 20))
                if data["boot"] == boot:
                    history.before = {
                        str(name): [(float(at), _numbers(values)) for at, values in samples]
                        for name, samples in data["samples"].items()
                    }
            except (ValueError, KeyError, TypeError, AttributeError):
                return History(boot)
        return history

    def save(self, history: History, now: float) -> None:
        folder = self.path.parent
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        about = folder.lstat()
        if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.geteuid() or about.st_mode & 0o022:
            raise PermissionError(f"{folder} is not a folder that only its owner can write")
        fd, name = tempfile.mkstemp(prefix=".state-", dir=folder)  # 0600
        try:
            with os.fdopen(fd, "w") as file:
                json.dump(history.dumped(now), file)
            os.replace(name, self.path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(name)
            raise


def default_store(root: Path) -> FileStore:
    """In /var/lib/everstep/health for root, else in the user's state folder; a recorded node has its own."""
    if os.geteuid() == 0:
        folder = Path("/var/lib/everstep/health")
    else:
        state = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
        folder = Path(state) / "everstep" / "health"
    if root == Path("/"):
        return FileStore(folder / "counters.json")
    recorded = folder / "recorded"
    _forget_old(recorded)
    try:
        about = root.stat()
        words = f"{root.resolve()} {about.st_dev} {about.st_ino} {about.st_ctime_ns}"
    except OSError:
        words = str(root)
    return FileStore(recorded / f"{hashlib.sha256(words.encode()).hexdigest()[:16]}.json")


def _forget_old(folder: Path) -> None:
    with contextlib.suppress(OSError):
        for each in folder.iterdir():
            if time.time() - each.lstat().st_mtime > _RECORDED_KEEP_S:
                each.unlink(missing_ok=True)


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    return {str(name): float(value) for name, value in values.items()}
