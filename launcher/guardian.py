"""A small process above the agent, so that nothing of the run outlives it.

The agent is a child of the guardian, and the guardian is a subreaper: if the agent is
killed outright, everything that it started falls to the guardian, which ends it. If
the guardian is killed, the agent is told by the kernel and ends its own. Both hold a
process each; neither imports torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable
from types import FrameType

from everstep.launcher.voice import say
from everstep.recovery.errors import EverstepError

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_GRACE = 4.0
_IN_ORDER = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)

_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent(sig: int = signal.SIGKILL) -> None:
    """Have the kernel send this process `sig` when its parent ends (the parent's thread, to be exact)."""
    _libc.prctl(_PR_SET_PDEATHSIG, int(sig), 0, 0, 0)


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent ends."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def guarded(
    main: Callable[[], int], patience: float = _GRACE, if_killed: Callable[[], None] | None = None
) -> int:
    """Run `main` in a child process; its exit code, once nothing of it is left.

    Signals are passed on. `patience`: seconds from SIGTERM, SIGUSR1 or SIGUSR2, which ask for an end in
    order, until the child is killed. The end of our own parent is SIGHUP to us, which has no time for order.
    """
    parent = os.getppid()
    adopt_orphans()
    die_with_parent(signal.SIGHUP)
    if os.getppid() != parent:
        return 128 + signal.SIGHUP
    guardian = os.getpid()
    child = os.fork()
    if child == 0:
        die_with_parent(signal.SIGKILL)
        if os.getppid() != guardian:
            os._exit(75)
        os._exit(_outcome(main))
    code = _watch(child, patience)
    return code if code is not None else _killed(if_killed)


def _outcome(main: Callable[[], int]) -> int:
    import traceback

    try:
        code = main()
    except SystemExit as exit_:
        code = exit_.code if isinstance(exit_.code, int) else 1
    except EverstepError as error:
        say(f"error: {error}")
        code = error.exit_code
    except BaseException:
        traceback.print_exc()
        code = 70
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    return code


def _watch(child: int, patience: float) -> int | None:
    """The child's exit code; None where it was killed and nobody had asked it to end."""
    deadline: list[float] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        limit = patience if number in _IN_ORDER else _GRACE
        if number not in (signal.SIGUSR1, signal.SIGUSR2):
            deadline.append(time.monotonic() + limit)
            signal.setitimer(signal.ITIMER_REAL, limit)
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, number)

    def too_late(number: int, frame: FrameType | None) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)

    for number in (*_IN_ORDER, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, pass_on)
    signal.signal(signal.SIGALRM, too_late)
    while True:
        pid, status = os.wait()
        if pid == child:
            break
    signal.setitimer(signal.ITIMER_REAL, 0)
    end_descendants(set())
    code = os.waitstatus_to_exitcode(status)
    if code < 0 and not deadline:
        # Nobody asked for it: the run can go on elsewhere.
        name = signal.Signals(-code).name
        say(
            f"error: an agent on {os.uname().nodename} was killed ({name}), its workers are ended: "
            "the run goes on without them if it can, else requeue it (exit code 75)"
        )
        return None
    return code if code >= 0 else 128 - code


def _killed(then: Callable[[], None] | None) -> int:
    if then is not None:
        then()
    return 75


def end_descendants(spare: set[int], session: int | None = None) -> int:
    """SIGKILL this process's children that are not in `spare`, and their children; how many.

    With `session`, also whatever belongs to that session. A child that is not known
    is an orphan of one that has ended.
    """
    me = os.getpid()
    killed: set[int] = set()
    for _ in range(50):
        doomed = _doomed(me, spare, session)
        for pid in doomed:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        killed |= doomed
        for pid in doomed:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        if not doomed:
            break
        if session is not None:
            break  # orphans come to us by and by; the caller looks again
        time.sleep(0.01)
    return len(killed)


def _doomed(me: int, spare: set[int], session: int | None) -> set[int]:
    table = {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
        except OSError:
            continue
        table[int(name)] = (fields[0], int(fields[1]), int(fields[3]))  # state, parent, session
    doomed = {p for p, (state, parent, sid) in table.items() if parent == me and p not in spare}
    if session is not None:
        # What is of our own session we have started ourselves (a health check): no worker's orphan.
        own = os.getsid(0)
        doomed = {p for p in doomed if table[p][2] != own}
        doomed |= {p for p, (state, parent, sid) in table.items() if sid == session}
    grown = True
    while grown:
        more = {p for p, (state, parent, sid) in table.items() if parent in doomed and p not in spare}
        grown = not more <= doomed
        doomed |= more
    doomed.discard(me)
    return doomed - spare
