"""What the training scripts of the tests share: a log of commits, and ways to go wrong."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
from pathlib import Path

faulthandler.register(signal.SIGUSR2, all_threads=True)  # for `Job.stacks`
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


def reach(where: str, rank: int, step: int) -> None:
    """Do what DRILL asks for at this place: `kill:forward:1:3 raise:backward:*:7 …`.

    kill and raise-once happen once in the whole run; raise and exit at every try.
    """
    for item in os.environ.get("DRILL", "").split():
        action, at, who, when = item.split(":")
        if at != where or who not in ("*", str(rank)) or when not in ("*", str(step)):
            continue
        if action == "kill" and once(item):
            os.kill(os.getpid(), signal.SIGKILL)
        elif action == "raise" or (action == "raise-once" and once(item)):
            raise RuntimeError(f"Socket: no such sample on rank {rank}")
        elif action == "exit":
            sys.exit(3)
