"""What the training scripts of the tests share: a log of commits, and ways to go wrong just once."""

from __future__ import annotations

import os
import signal
from pathlib import Path

FOLDER = Path(os.environ.get("TEST_FOLDER", "."))


def log_commits(run) -> None:
    """Append a line `rank step pid` for each commit."""
    fd = os.open(FOLDER / "commits", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    before = run.on_commit

    def on_commit(committed: int) -> None:
        before(committed)
        os.write(fd, f"{run.rank} {committed - 1} {os.getpid()}\n".encode())

    run.on_commit = on_commit


def once(name: str) -> bool:
    """True the first time that any process of the run asks for this name."""
    try:
        os.close(os.open(FOLDER / f"once-{name.replace('/', '_')}", os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def die_here(where: str, rank: int, step: int) -> None:
    """SIGKILL, once, if DIE (`where:rank:step …`) names this place."""
    for place in os.environ.get("DIE", "").split():
        if place == f"{where}:{rank}:{step}" and once(f"die-{place}"):
            os.kill(os.getpid(), signal.SIGKILL)
