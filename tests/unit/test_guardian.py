"""Nothing of a run outlives it: real processes, killed in every place."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

PATIENCE = 20.0  # seconds until a test gives up, not what it takes

# A guardian, its agent, and what an agent may have below it. Each writes its pid once it is up.
SCRIPT = """
import os, signal, subprocess, sys, time
from everstep.launcher.guardian import adopt_orphans, die_with_parent, guarded

folder = sys.argv[1]
how = sys.argv[2] if len(sys.argv) > 2 else ""

def up(name):
    with open(os.path.join(folder, name + ".new"), "w") as file:
        file.write(str(os.getpid()))
    os.rename(os.path.join(folder, name + ".new"), os.path.join(folder, name))

def stay():
    while True:
        time.sleep(60)

def child(name, setsid=False, daemon=False):
    if os.fork():
        return
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the obstinate kind
    if setsid:
        os.setsid()
    if daemon:
        os.setsid()
        if os.fork():
            os._exit(0)
    if name == "worker":
        die_with_parent(signal.SIGKILL)
        child("loader")
        child("daemon", daemon=True)
    up(name)
    stay()

def agent():
    adopt_orphans()
    if how.startswith("code="):
        return int(how[5:])
    if how == "raise":
        raise ValueError("x")
    if how == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child("worker", setsid=True)
    child("helper")
    up("agent")
    if how == "end":
        while sum(not name.endswith(".new") for name in os.listdir(folder)) < 5:
            time.sleep(0.01)
        return 7
    stay()

sys.exit(guarded(agent))
"""
EVERYBODY = ("agent", "worker", "helper", "loader", "daemon")


class Tree:
    """A guardian and all below it."""

    def __init__(self, folder: Path, how: str = "") -> None:
        self.folder = folder
        self.guardian = subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(folder), how], stderr=subprocess.PIPE
        )
        self.processes: dict[str, psutil.Process] = {}

    def up(self) -> Tree:
        wait_until(lambda: all((self.folder / name).exists() for name in EVERYBODY), "all are up")
        self.processes = {n: psutil.Process(int((self.folder / n).read_text())) for n in EVERYBODY}
        return self

    def gone(self, *names: str) -> None:
        for name in names or EVERYBODY:
            wait_until(lambda name=name: over(self.processes[name]), f"{name} is gone")

    def end(self) -> None:
        for process in [*self.processes.values()]:
            if not over(process):
                process.kill()
        if self.guardian.poll() is None:
            self.guardian.kill()
        self.guardian.wait()
        if self.guardian.stderr is not None:
            self.guardian.stderr.close()


def over(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def wait_until(ready: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not ready():
        assert time.monotonic() < deadline, f"in vain: {what}"
        time.sleep(0.01)


@pytest.fixture
def tree(tmp_path: Path) -> Iterator[Callable[..., Tree]]:
    trees: list[Tree] = []

    def plant(how: str = "") -> Tree:
        trees.append(Tree(tmp_path, how))
        return trees[-1]

    yield plant
    for one in trees:
        one.end()


def test_an_agent_killed_outright_takes_all_that_it_started_with_it(tree: Callable[..., Tree]) -> None:
    whole = tree().up()
    whole.processes["agent"].kill()
    assert whole.guardian.wait(PATIENCE) == 75
    whole.gone()


def test_nothing_is_left_once_the_guardian_has_returned(tree: Callable[..., Tree]) -> None:
    whole = tree("end")
    assert whole.guardian.wait(PATIENCE) == 7
    pids = [int((whole.folder / name).read_text()) for name in EVERYBODY]
    assert [pid for pid in pids if psutil.pid_exists(pid)] == []


def test_a_guardian_killed_outright_takes_agent_and_workers_with_it(
    tree: Callable[..., Tree],
) -> None:
    whole = tree().up()
    whole.guardian.kill()
    whole.gone("agent", "worker")


def test_a_signal_is_passed_on_to_the_agent(tree: Callable[..., Tree]) -> None:
    whole = tree().up()
    whole.guardian.send_signal(signal.SIGTERM)
    assert whole.guardian.wait(PATIENCE) == 128 + signal.SIGTERM
    whole.gone()


def test_an_agent_deaf_to_signals_is_ended_all_the_same(tree: Callable[..., Tree]) -> None:
    whole = tree("deaf").up()
    whole.guardian.send_signal(signal.SIGTERM)
    assert whole.guardian.wait(PATIENCE) == 128 + signal.SIGKILL
    whole.gone()


@pytest.mark.parametrize(("how", "code"), [("code=0", 0), ("code=75", 75), ("raise", 70)])
def test_the_agents_own_exit_code_is_kept(tree: Callable[..., Tree], how: str, code: int) -> None:
    assert tree(how).guardian.wait(PATIENCE) == code


def test_a_dead_workers_children_are_found_by_its_session_and_others_are_spared() -> None:
    from everstep.launcher.guardian import end_descendants

    stay = [sys.executable, "-c", "import time; time.sleep(600)"]
    leader = subprocess.Popen(
        ["/bin/sh", "-c", f'"{sys.executable}" -c "import time; time.sleep(600)" & echo $!; wait'],
        start_new_session=True,
        stdout=subprocess.PIPE,
    )
    other = subprocess.Popen(stay)
    mine = {p.pid for p in psutil.Process().children()} - {leader.pid}
    try:
        assert leader.stdout is not None
        loader = psutil.Process(int(leader.stdout.readline()))
        os.kill(leader.pid, signal.SIGKILL)
        leader.wait()
        assert end_descendants(mine, leader.pid) >= 1
        wait_until(lambda: over(loader), "its child is gone")
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()
        leader.stdout.close()  # type: ignore[union-attr]
