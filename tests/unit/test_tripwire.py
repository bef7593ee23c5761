"""The robust mutex by which an agent feels a worker's death as it begins."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
from everstep.recovery import tripwire

CHILD = """
import mmap, sys, threading
from everstep.recovery import tripwire
page = mmap.mmap(int(sys.argv[1]), mmap.PAGESIZE)
print(tripwire.arm(page), flush=True)
sys.stdin.readline()
sys.exit(3)
"""
GUARD = 30.0


@pytest.fixture
def shared() -> Iterator[tuple[int, mmap.mmap]]:
    fd = os.memfd_create("page")
    os.ftruncate(fd, mmap.PAGESIZE)
    yield fd, mmap.mmap(fd, mmap.PAGESIZE)
    os.close(fd)


def armed_child(fd: int) -> subprocess.Popen[bytes]:
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(fd)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=[fd]
    )
    assert child.stdout is not None
    assert child.stdout.readline() == b"True\n"
    return child


def felt(page: mmap.mmap) -> tuple[threading.Thread, list[bool]]:
    answers: list[bool] = []
    thread = threading.Thread(target=lambda: answers.append(tripwire.wait(page)), daemon=True)
    thread.start()
    return thread, answers


def test_a_killed_child_is_felt_and_its_signal_known_before_it_is_reaped(
    shared: tuple[int, mmap.mmap],
) -> None:
    fd, page = shared
    child = armed_child(fd)
    thread, answers = felt(page)
    child.kill()
    thread.join(GUARD)
    assert answers == [True]
    assert tripwire.killed_by(child.pid) == 9
    child.wait()


def test_a_living_child_is_not_felt(shared: tuple[int, mmap.mmap]) -> None:
    fd, page = shared
    child = armed_child(fd)
    thread, answers = felt(page)
    thread.join(0.2)
    assert answers == []
    assert tripwire.killed_by(child.pid) is None
    child.kill()
    thread.join(GUARD)
    child.wait()


def test_a_child_that_exits_by_itself_was_killed_by_no_signal(shared: tuple[int, mmap.mmap]) -> None:
    fd, page = shared
    child = armed_child(fd)
    thread, answers = felt(page)
    child.communicate(b"\n")
    thread.join(GUARD)
    assert answers == [True]
    assert tripwire.killed_by(child.pid) is None
    assert child.returncode == 3


def test_a_page_that_nobody_armed_does_not_block(shared: tuple[int, mmap.mmap]) -> None:
    assert tripwire.wait(shared[1]) is False
