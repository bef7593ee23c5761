"""The way in and out of a worker: `init()` under the launcher or alone, and the last moments.

At the way out a worker that raised stays for a moment as a donor, since its state is
whole up to the step that failed; and one that has finished stays until all have.
"""

from __future__ import annotations

import atexit
import importlib.metadata
import mmap
import os
import platform
import signal
import socket
import struct
import sys
import threading
import traceback
from types import TracebackType
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from everstep.launcher import messages as m
from everstep.recovery import ddp, rng, tripwire
from everstep.recovery.control import DEAF_VARIABLE, FD_VARIABLE, Control
from everstep.recovery.errors import EverstepError, Fault, UsageError
from everstep.recovery.group import Group, make_default
from everstep.recovery.run import Run, _log
from everstep.recovery.seat import Seat, Solo
from everstep.recovery.transfer import Exchange
from torch._C._distributed_c10d import HashStore

# Under the launcher, beside the control socket's number: this worker's name, the address that
# state travels on, the page where it counts its committed steps, and whether checkpoints count.
WORKER_VARIABLE = "EVERSTEP_WORKER"
HOST_VARIABLE = "EVERSTEP_HOST"
PAGE_VARIABLE = "EVERSTEP_PAGE"
RESUME_VARIABLE = "EVERSTEP_RESUME"
# Seconds for the launcher to start everybody again, where the first group cannot be built.
_START_AGAIN = 10.0

# What DDP's constructor says when ranks have different models.
_OTHER_MODEL = ("appears not to match", "DDP expects same model across all ranks")

_run: Run | None = None


def versions() -> dict[str, str]:
    """What must be the same on every node."""
    return {
        "everstep": importlib.metadata.version("everstep"),
        "torch": str(torch.__version__),
        "python": platform.python_version(),
    }


def enter(seed: int, backend: str | None) -> Run:
    """See `everstep.recovery.run.init`."""
    global _run
    if _run is not None:
        raise UsageError("recovery.init() was called twice: call it once, at the top of the script")
    if FD_VARIABLE in os.environ:
        _run = _enter_seat(seed)
    else:
        _run = _enter_alone(seed, backend)
    return _run


def _enter_alone(seed: int, backend: str | None) -> Run:
    if not dist.is_initialized():
        kind = backend or ("nccl" if torch.cuda.is_available() else "gloo")
        if "RANK" in os.environ:
            dist.init_process_group(kind)
        else:
            dist.init_process_group(kind, store=HashStore(), rank=0, world_size=1)
        atexit.register(_destroy_group)
    rng.set_replica(dist.get_rank(), dist.get_world_size())
    rng.seed_all(seed)
    sys.excepthook = _one_line_for_ours
    resume = os.environ.get(RESUME_VARIABLE, "auto") != "none"
    return Run(Solo(), dist.group.WORLD, _device(), seed, resume=resume)


def _leave_signals_to_the_agent() -> None:
    """What announces a job's end would end this process, and what it holds, before that could be saved."""
    if DEAF_VARIABLE in os.environ:
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
            if signal.getsignal(number) == signal.SIG_DFL:  # the user's own handler is the user's business
                signal.signal(number, signal.SIG_IGN)


def _enter_seat(seed: int) -> Run:
    _leave_signals_to_the_agent()
    control = Control(socket.socket(fileno=int(os.environ.pop(FD_VARIABLE))))
    leaver = _Leaver(control)
    leaver.watch()
    host = os.environ.get(HOST_VARIABLE, "127.0.0.1")
    exchange = Exchange(control, host)
    control.start(leaver.on_abort)
    if "RANK" not in os.environ:
        from everstep.recovery.warm import warm_up

        warm_up()
    ddp.notice()
    page = _Page()
    control.send(m.Hello(versions()))
    control.wait(lambda: control.assigned is not None)
    assign = control.assigned
    if assign is None:
        raise UsageError("no rank was assigned")
    os.environ.update(assign.env)
    group = Group(assign.rank, assign.world_size)
    make_default(group)
    group.setting_up = True
    seat = Seat(control, assign, group, exchange, os.environ.get(WORKER_VARIABLE, ""))
    leaver.seat = seat
    threading.Thread(target=seat.watch, name="everstep-watch", daemon=True).start()
    rng.set_replica(assign.rank, assign.world_size)
    rng.seed_all(seed)
    resume = os.environ.get(RESUME_VARIABLE, "auto") != "none"
    run = Run(seat, group, _device(), seed, resume=resume)
    leaver.run = run
    seat.reach = run._reach
    if run._drill:
        group.before = lambda: run._reach("collective")
    run.on_commit = page.write
    run._reach("init")
    if assign.start:
        try:
            seat.connect(assign.generation)
        except Fault as fault:
            _start_again(control, str(fault))
    return run


def _start_again(control: Control, why: str) -> None:
    """A peer was lost before anything has begun: the launcher starts all afresh, and ends this process."""
    control.wait(lambda: False, _START_AGAIN)
    _log(f"{why}; this worker starts again")
    os.kill(os.getpid(), signal.SIGKILL)


class _Leaver:
    """What happens when the script ends, however it ends."""

    def __init__(self, control: Control) -> None:
        self._control = control
        self._pid = os.getpid()
        self._error: BaseException | None = None
        self._text = ""
        self._code = 0  # as sys.exit() was given it
        self._left = False
        self.seat: Seat | None = None
        self.run: Run | None = None

    def watch(self) -> None:
        """Be there at the end of the script."""
        sys.excepthook = self.excepthook
        atexit.register(self.leave)
        os.register_at_fork(after_in_child=self._forked)
        real = sys.exit

        def noting(status: Any = None, /) -> NoReturn:
            self._code = _exit_code(status)
            real(status)

        sys.exit = noting

    def _forked(self) -> None:
        self._control.forget()
        if self.seat is not None:
            self.seat.forget()

    def on_abort(self, generation: int) -> None:
        if self.seat is not None:
            self.seat.on_abort(generation)

    def excepthook(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        """Print as Python would, but for our own errors: these are one line.

        Then leave at once: what runs at exit (the user's own, or a thread that is waited
        for) might take the state apart, or never end, and peers need it now.
        """
        if os.getpid() != self._pid:
            sys.__excepthook__(kind, error, trace)
            return
        if self.seat is not None and not self.seat.ever_joined and self.seat.lost_a_peer():
            _start_again(self._control, _in_a_line(error, False))
        self._note(error)
        if isinstance(self._error, EverstepError):
            sys.stderr.write(f"everstep: error: {self._error}\n")
        else:
            sys.__excepthook__(kind, error, trace)
        sys.stderr.flush()
        self.leave()
        if isinstance(self._error, EverstepError):
            raise SystemExit(self._error.exit_code)

    def _note(self, error: BaseException) -> None:
        self._error = error
        self._text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        if any(words in str(error) for words in _OTHER_MODEL):
            self._error = UsageError(
                f"{_in_a_line(error, False)} The model is another one than on rank 0: "
                "build the same model on every rank"
            )
            return
        seat, run = self.seat, self.run
        unprotected = run is None or run._ended_by is None
        broken = unprotected and seat is not None and isinstance(error, RuntimeError) and seat.interrupted()
        if isinstance(error, Fault) or broken:
            self._error = UsageError(
                f"a peer was lost outside a protected function ({_in_a_line(error, False)}): decorate the "
                "function that holds the loop, and what needs peers after it, with @run.protect"
            )

    def leave(self) -> None:
        """Say how it ended, and stay as long as the others need what this worker holds."""
        if self._left or os.getpid() != self._pid:
            return
        self._left = True
        run, seat = self.run, self.seat
        if self._error is None and run is not None and run._ended_by is not None:
            # It went past us: sys.exit(), or a hook of the user's in the place of ours.
            if isinstance(run._ended_by, SystemExit):
                self._code = _exit_code(run._ended_by.code)
            else:
                self._note(run._ended_by)
        error = self._error
        usage = isinstance(error, EverstepError)
        code = self._code if error is None else getattr(error, "exit_code", 1) if usage else 1
        control = self._control
        control.send(
            m.Leaving(
                seat.generation if seat is not None else 0,
                seat is not None and seat.ever_joined,
                run._committed if run is not None else 0,
                _in_a_line(error, usage),
                "" if usage else self._text[-8000:],
                usage,
                code,
            )
        )
        if run is not None and seat is not None:
            if error is not None and seat.ever_joined:
                run._become_donor()
            self._linger(run, seat, error)
        else:
            control.wait(lambda: control.released, 10.0)
        sys.stdout.flush()
        sys.stderr.flush()
        if seat is not None and seat.has_strays:
            os._exit(code)  # a thread in gloo that woke during Python's own end would abort the process

    def _linger(self, run: Run, seat: Seat, error: BaseException | None) -> None:
        control = self._control
        while True:
            known = seat.generation
            control.wait(lambda known=known: control.released or control.generation > known)  # type: ignore[misc]
            if control.released or not seat.ever_joined:
                return
            if error is not None:
                seat.donate(run._held())
            else:
                seat.leave_group()
                seat.join(run._held())


class _Page:
    """The page that the agent reads: committed steps, with no message a step, and the tripwire."""

    def __init__(self) -> None:
        fd = os.environ.pop(PAGE_VARIABLE, None)
        self._page = mmap.mmap(int(fd), mmap.PAGESIZE) if fd is not None else None
        if self._page is not None:
            tripwire.arm(self._page)

    def write(self, committed: int) -> None:
        if self._page is not None:
            struct.pack_into("q", self._page, 0, committed)


def _exit_code(status: object) -> int:
    if status is None:
        return 0
    return status if isinstance(status, int) else 1


def _in_a_line(error: BaseException | None, usage: bool) -> str:
    if error is None:
        return ""
    text = str(error).strip().splitlines()
    first = text[0] if text else ""
    return first if usage else f"{type(error).__name__}: {first}"[:500]


def _one_line_for_ours(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> Any:
    if not isinstance(error, EverstepError):
        return sys.__excepthook__(kind, error, trace)
    sys.stderr.write(f"everstep: error: {error}\n")
    sys.stderr.flush()
    code = error.exit_code
    atexit.register(lambda: os._exit(code))
    return None


def _device() -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    local = int(os.environ.get("LOCAL_RANK", "0"))  # not run on hardware yet
    device = torch.device("cuda", local)
    torch.cuda.set_device(device)
    return device


def _destroy_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
