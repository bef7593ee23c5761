"""Gloo's collectives under way, and how to end those that nothing would ever end.

When a connection ends, gloo fails what is queued on it, but not the message that it
was in the middle of: the collective waits for the rest until its time-out. On a real
network, whose buffers hold less than a bucket of gradients, a peer that is killed in
a collective leaves its neighbours so more often than not. (`Pair::signalException`
in gloo's tcp/pair.cc looks at the queues alone.)

Once all connections are closed nobody can wake such a collective's thread, and
nobody touches its tensors: its result is declared here in gloo's place, and whoever
waits for it goes on. The thread stays where it is, so that gloo's objects must stay
too: they are kept for ever, at the cost of three sleeping threads.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch._C._distributed_c10d import Work

# Gloo must never come back to a collective that was given up, so it has no time-out of its own: see `late`.
FOREVER = timedelta(days=3650)
# Threads that run a group's collectives.
THREADS = 2
# The tag of a message that nobody sends.
_NOBODYS_TAG = 0x7E57
# The longest that one looks for the end of collectives which are broken off; it takes milliseconds.
PATIENCE = 20.0
# Those whose handle has no future, and the seconds in which they must have failed once all is closed.
_MESSAGE = 1.0
_WITHOUT_FUTURE = frozenset(
    {
        "send",
        "recv",
        "recv_anysource",
        "reduce_scatter",
        "_reduce_scatter_base",
        "reduce_scatter_tensor_coalesced",
        "reduce_scatter_single",
        "reduce_scatter_single_coalesced",
    }
)
# The system call futex (x86-64, aarch64), and its operation behind every wait on a condition variable.
_FUTEX, _WAIT_BITSET, _COMMAND = ("202", "98"), 9, 0x7F
_RUNNER = "pt_gloo_runloop"  # the threads that run gloo's collectives

_kept: list[Any] = []  # what must not be destroyed, since a thread waits inside for ever


def anything_kept() -> bool:
    """Does a thread wait in gloo for ever?"""
    return bool(_kept)


class Underway:
    """The collectives of one gloo group."""

    def __init__(self, gloo: Any, rank: int, world: int, before: set[int]) -> None:
        """`before` are the `runners()` from before the group was built with as many threads as THREADS."""
        self._gloo = gloo
        self._peers = [peer for peer in range(world) if peer != rank]
        self._before = before
        self._launched: deque[_Collective] = deque()
        # Whoever is to wait for a message holds its handle; nobody else knows when it is over.
        self._messages: weakref.WeakSet[_Message] = weakref.WeakSet()
        self._listing = threading.Lock()
        self._releasing = threading.Lock()
        self._failed = threading.Event()
        self._given_up = 0  # each a thread's that does not come back
        self._keep = False

    def note(self, name: str, work: Any, tensors: Any) -> Work:
        """The collective `name` was launched: what is handed out in the place of gloo's own handle."""
        launched: _Launched
        with self._listing:
            if name in _WITHOUT_FUTURE:
                launched = _Message(work, tensors)
                self._messages.add(launched)
            else:
                launched = _Collective(work, tensors)
                # They end in order, nearly; what is noted keeps its tensors.
                while self._launched and self._launched[0].is_completed():
                    self._launched.popleft()
                self._launched.append(launched)
        if self._given_up:  # there may be no thread left to run it
            threading.Thread(target=self.release, name="everstep-release", daemon=True).start()
        return launched

    def _left(self) -> list[_Launched]:
        with self._listing:
            return [x for x in (*self._launched, *self._messages) if not x.is_completed()]

    def age(self, now: float) -> float:
        """Seconds for which the oldest of them has been under way; 0 where there is none."""
        left = self._left()
        return now - min(x.began for x in left) if left else 0.0

    def fail(self) -> None:
        """Their connections were shut: close gloo's end of them all.

        A connection is read no further where the rest of a message has no place any
        more, and its end is not seen. A receive that times out closes every one.
        """
        gloo = self._gloo
        for peer in self._peers if gloo is not None else ():
            with contextlib.suppress(RuntimeError):
                gloo.recv([torch.empty(1)], peer, _NOBODYS_TAG).wait(timedelta(milliseconds=1))
        self._failed.set()

    def release(self, patience: float = PATIENCE) -> bool:
        """After `fail`: wait until all have ended, and end those that never will. False: it took too long."""
        began = time.monotonic()
        if not self._failed.wait(patience):  # another thread's business; before that one may only be waiting
            return False
        with self._releasing:
            while self._left():
                waited = time.monotonic() - began
                if waited > patience:
                    return False
                self._give_up(waited)
                time.sleep(0.002)
        return True

    def _give_up(self, waited: float) -> None:
        left = self._left()
        collectives = [x for x in left if isinstance(x, _Collective)]
        # Asked now: they give themselves their name, some time after the group was built.
        threads = runners() - self._before
        idle, stuck = waiting(threads)
        if (
            collectives
            and stuck
            and idle + stuck == len(threads) >= THREADS
            # Where a thread has nothing to do nothing is queued: what is left is what the others are in.
            and (not idle or stuck == self._given_up + len(collectives))
            and not any(x.over for x in collectives)
        ):
            self._given_up += len(collectives)
            self._keep = True
            for x in collectives:
                x.give_up()
        if waited > _MESSAGE:
            for message in left:
                if isinstance(message, _Message):
                    message.give_up()
                    self._keep = True

    def close(self) -> None:
        """Let gloo's objects go, or keep them where a thread is inside."""
        if not self.release() or self._keep:
            for x in (self._gloo, self._launched):
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(x))  # not even at Python's end
            _kept.append(self._gloo)
        self._launched = deque()
        self._gloo = None


class _Launched(Work):
    """Torch's handle of one collective, which can be given up."""

    def __init__(self, work: Any, tensors: Any) -> None:
        super().__init__()
        self._work = work
        self._tensors = tensors if isinstance(tensors, list) else [tensors]
        self.began = time.monotonic()
        self.given_up = False

    def give_up(self) -> None:
        """Whoever waits for it goes on."""
        self.given_up = True

    def is_completed(self) -> bool:
        return self.given_up or bool(self._work.is_completed())

    def is_success(self) -> bool:
        return not self.given_up and bool(self._work.is_success())

    def exception(self) -> Any:
        return RuntimeError(_GIVEN_UP) if self.given_up else self._work.exception()

    def result(self) -> Any:
        return self._work.result()

    def source_rank(self) -> int:
        return int(self._work.source_rank())

    def synchronize(self) -> None:
        self.wait()

    def get_future(self) -> Any:
        return self._work.get_future()


class _Collective(_Launched):
    @property
    def over(self) -> bool:
        """Has gloo come to its end, even if what hangs on it is not done yet?"""
        return bool(self._work.get_future().done())

    def wait(self, timeout: timedelta | None = None) -> bool:
        if timeout:
            return bool(self._work.wait(timeout))
        self._work.get_future().wait()  # ended by gloo, or by `give_up`
        if self.given_up:
            raise RuntimeError(_GIVEN_UP)
        return bool(self._work.wait())

    def give_up(self) -> None:
        super().give_up()
        # A future can be given a value only: what comes of it is never committed, since the group is broken.
        self._work.get_future().set_result(self._tensors)


class _Message(_Launched):
    """A message has no future, and its time-out would break its group: another thread waits for it."""

    def __init__(self, work: Any, tensors: Any) -> None:
        super().__init__(work, tensors)
        self._end = threading.Event()
        self._waited = False
        self._error: Exception | None = None

    def is_completed(self) -> bool:
        # Gloo does not know before somebody waits.
        return self.given_up or not self._waited or self._end.is_set()

    def wait(self, timeout: timedelta | None = None) -> bool:
        if timeout:
            return bool(self._work.wait(timeout))
        if not self._waited:
            self._waited = True
            threading.Thread(target=self._wait, name="everstep-message", daemon=True).start()
        self._end.wait()
        if self._error is not None:
            raise self._error
        if self.given_up:
            raise RuntimeError(_GIVEN_UP)
        return True

    def _wait(self) -> None:
        try:
            self._work.wait()
        except Exception as error:
            self._error = error
        self._end.set()

    def give_up(self) -> None:
        super().give_up()
        self._end.set()


_GIVEN_UP = "broken off in the middle of a message"


# --- threads ------------------------------------------------------------------------------------


def runners() -> set[int]:
    """The threads of this process that run gloo's collectives."""
    found = set()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):
            if (task / "comm").read_text().strip() == _RUNNER:
                found.add(int(task.name))
    return found


def waiting(threads: set[int], read: Callable[[int], str] | None = None) -> tuple[int, int]:
    """How many of the threads wait for work, and how many inside a collective.

    Both wait on a condition variable: for work without a time limit, in a collective with one.
    """
    idle = stuck = 0
    for thread in threads:
        words = (read or _system_call)(thread).split()
        if len(words) < 5 or words[0] not in _FUTEX or int(words[2], 16) & _COMMAND != _WAIT_BITSET:
            continue
        limited = int(words[4], 16) != 0
        stuck += limited
        idle += not limited
    return idle, stuck


def _system_call(thread: int) -> str:
    """What the kernel says that a thread waits in: `202 0xADDRESS 0x189 …`, or `running`."""
    try:
        return Path(f"/proc/self/task/{thread}/syscall").read_text()
    except OSError:
        return ""
