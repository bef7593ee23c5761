"""The one door to the node: files under a root, and commands with a time limit.

With a root other than `/` the node is a recorded one: paths are read under it, and commands are looked up in
its `usr/bin` alone, so that a tool which is not there is missing.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from everstep.healthcheck.readers.proc import Usage

FOLDERS = (
    "/usr/bin",
    "/usr/sbin",
    "/bin",
    "/sbin",
    "/usr/local/bin",
    "/usr/local/sbin",
    "/opt/amazon/efa/bin",
    "/opt/aws/neuron/bin",
    "/opt/slurm/bin",
    "/opt/slurm/sbin",
)
"""Where tools are looked up: not in PATH, which may be anybody's when we run as root."""

MOST_OUTPUT = 1 << 30  # bytes; 800,000 lines of a kernel log are a tenth of that
MOST_OF_A_FILE = 64 << 20
_GRACE = 0.2  # seconds for a killed command to be gone
_LAST_WORDS = 0.5  # seconds for the output of a command that has ended, where a child of its keeps it open
_LOOK_EVERY = 0.1


@dataclass(frozen=True)
class Ran:
    """What came of a command."""

    code: int | None
    """Its exit code; None where it was missing or was stopped."""
    out: bytes = b""
    err: bytes = b""
    seconds: float = 0.0
    missing: bool = False
    timed_out: bool = False

    @property
    def said(self) -> str:
        """The first line that it complained with, for people."""
        text = (self.err.strip() or self.out.strip()).decode("utf-8", "replace")
        return text.splitlines()[0][:200] if text else ""


class Runner(Protocol):
    """What facts are read through."""

    root: Path

    @property
    def recorded(self) -> bool:
        """Whether this is a recorded node and not the one we run on."""

    def path(self, name: str) -> Path:
        """Where an absolute path of the node is."""

    def which(self, tool: str) -> str | None:
        """Where a tool is; None where it is missing."""

    def run(self, argv: Sequence[str], seconds: float, *, first_line: bool = False) -> Ran:
        """Run a command without a shell and take its output; `first_line`: stop it after one."""

    def run_python(self, program: str, words: Sequence[str], seconds: float, *, isolated: bool = True) -> Ran:
        """The same for a few lines of Python, in a child; `isolated`: with the standard library alone."""

    def usage(self, path: str) -> Usage | None:
        """How full the file system mounted there is; None where a recorded node does not tell."""

    def read(self, name: str) -> bytes | None:
        """A regular file's content; None where it cannot be read."""

    def names(self, folder: str) -> list[str]:
        """The names in a folder, sorted; none where there is no such folder."""

    def link(self, name: str) -> str | None:
        """The last part of where a symbolic link points; None where it is none."""

    def exists(self, name: str) -> bool:
        """Whether there is something of that name."""

    def stop(self) -> None:
        """End what is still running: nobody waits for it any more."""


class System:
    """The node that we run on, or a recorded one."""

    def __init__(
        self,
        root: Path | str = "/",
        *,
        deadline: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.root = Path(root).absolute()  # tools are run from there
        self._base = "" if self.root == Path("/") else str(self.root)
        self.deadline = deadline
        """By `clock`: no command runs beyond it, whatever its own limit."""
        self._clock = clock
        self._running: set[subprocess.Popen[bytes]] = set()
        self._lock = threading.Lock()

    @property
    def recorded(self) -> bool:
        return self.root != Path("/")

    def path(self, name: str) -> Path:
        return self.root / name.lstrip("/")

    def which(self, tool: str) -> str | None:
        folders = [str(self.path("/usr/bin"))] if self.recorded else list(FOLDERS)
        for folder in folders:
            path = f"{folder}/{tool}"
            if os.path.isfile(path) and os.access(path, os.X_OK):
                return path
        return None

    def run(self, argv: Sequence[str], seconds: float, *, first_line: bool = False) -> Ran:
        tool = self.which(argv[0])
        if tool is None:
            return Ran(None, missing=True)
        return self._run([tool, *argv[1:]], seconds, first_line)

    def run_python(self, program: str, words: Sequence[str], seconds: float, *, isolated: bool = True) -> Ran:
        if isolated:
            return self._run([sys.executable, "-I", "-S", "-c", program, *words], seconds, False)
        return self._run([sys.executable, "-c", program, *words], seconds, False, dict(os.environ))

    def _run(
        self, argv: Sequence[str], seconds: float, first_line: bool, environment: dict[str, str] | None = None
    ) -> Ran:
        if self.deadline is not None:
            seconds = min(seconds, max(0.1, self.deadline - self._clock()))
        if environment is None:
            environment = {"PATH": "/usr/bin:/bin:/usr/sbin:/sbin", "LC_ALL": "C", "HOME": "/"}
        start = self._clock()
        try:
            process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                cwd=self.root,
                env=environment,
                start_new_session=True,
            )
        except OSError as error:
            return Ran(126, err=f"{argv[0]}: {error.strerror}".encode())
        with self._lock:
            self._running.add(process)
        out, err, ended = self._collect(process, start + seconds, first_line)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE)
        with self._lock:
            self._running.discard(process)
        took = self._clock() - start
        if ended == "line" or (ended and process.returncode is not None):
            return Ran(0 if ended == "line" else process.returncode, out, err, took)
        return Ran(None, out, err, took, timed_out=True)

    def _collect(
        self, process: subprocess.Popen[bytes], end: float, first_line: bool
    ) -> tuple[bytes, bytes, str]:
        """Its output until it has ended (`exit`), has said one line (`line`), or is out of time (empty).

        A child that keeps the output open after the command's end does not make it last longer.
        """
        chunks: dict[int, list[bytes]] = {}
        size = 0
        with selectors.DefaultSelector() as selector:
            streams = [stream for stream in (process.stdout, process.stderr) if stream is not None]
            for stream in streams:
                os.set_blocking(stream.fileno(), False)
                selector.register(stream, selectors.EVENT_READ)
                chunks[stream.fileno()] = []
            fds = [stream.fileno() for stream in streams]
            how = ""
            over: float | None = None  # from then on, a command that has ended has said all
            while selector.get_map() and not how:
                left = end - self._clock()
                if left <= 0:
                    break
                if over is None and _has_ended(process):
                    over = self._clock() + _LAST_WORDS
                ready = selector.select(min(left, _LOOK_EVERY))
                for key, _ in ready:
                    data = os.read(key.fd, 1 << 20)
                    if not data:
                        selector.unregister(key.fileobj)
                    elif size < MOST_OUTPUT:
                        chunks[key.fd].append(data)
                        size += len(data)
                        if first_line and key.fd == fds[0] and b"\n" in data:
                            how = "line"
                if not ready and not how and over is not None and self._clock() >= over:
                    how = "exit"
                    _kill(process)  # the child; the command, not waited for yet, keeps their session's number
                    process.wait()
            if not how and not selector.get_map():
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.0, end - self._clock()))
                    how = "exit"
            if how != "exit":
                _kill(process)
        for stream in streams:
            stream.close()
        out, err = (b"".join(chunks[fd]) for fd in fds)
        return out, err, how

    def usage(self, path: str) -> Usage | None:
        where = self.path(path)
        try:
            # A folder of a recording is no file system of its own: how full this machine is says nothing.
            if self.recorded and os.lstat(where).st_dev == os.lstat(self.root).st_dev:
                return None
            told = os.statvfs(where)
        except OSError:
            return None
        return Usage(
            path,
            told.f_blocks * told.f_frsize,
            (told.f_blocks - told.f_bfree) * told.f_frsize,
            told.f_bavail * told.f_frsize,
            told.f_files,
            told.f_files - told.f_ffree,
        )

    def read(self, name: str) -> bytes | None:
        # Without blocking: a FIFO or a device in the place of a file must not hold us up.
        try:
            fd = os.open(self._base + name, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                return None
            chunks = []
            size = 0
            while size < MOST_OF_A_FILE and (data := os.read(fd, 1 << 20)):
                chunks.append(data)
                size += len(data)
            return b"".join(chunks)
        except OSError:  # sysfs answers so where a device is gone
            return None
        finally:
            os.close(fd)

    def names(self, folder: str) -> list[str]:
        try:
            return sorted(os.listdir(self._base + folder))
        except OSError:
            return []

    def link(self, name: str) -> str | None:
        try:
            return os.path.basename(os.readlink(self._base + name))
        except OSError:
            return None

    def stop(self) -> None:
        with self._lock:
            for process in self._running:
                _kill(process)

    def exists(self, name: str) -> bool:
        return os.path.lexists(self._base + name)


def _has_ended(process: subprocess.Popen[bytes]) -> bool:
    """Whether it has; it is left to be waited for, so that its number stays its own."""
    try:
        return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return True


def _kill(process: subprocess.Popen[bytes]) -> None:
    # The whole session: a tool may be a script with children of its own.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
