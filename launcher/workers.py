"""One worker process: started with a control socket and a page for its steps, watched by pidfd."""

from __future__ import annotations

import contextlib
import mmap
import os
import resource
import signal
import socket
import struct
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from everstep.launcher import messages as m
from everstep.launcher.guardian import die_with_parent
from everstep.launcher.output import Relay
from everstep.recovery.control import FD_VARIABLE

NICE = 10


@dataclass
class Start:
    """How to start a worker."""

    worker: str
    argv: Sequence[str]
    env: Mapping[str, str]
    nice: bool = False
    stdout: int | None = 1  # our descriptor that its lines go to, or None
    stderr: int | None = 2
    stdout_file: Path | None = None
    stderr_file: Path | None = None


@dataclass
class WorkerProcess:
    """A running worker, as its agent holds it."""

    name: str
    process: subprocess.Popen[bytes]
    pidfd: int
    control: socket.socket
    page: mmap.mmap
    niced: bool
    rank: int = -1
    announced: bool = False  # its end was told to the coordinator
    frames: m.Frames = field(default_factory=m.Frames)
    outgoing: bytearray = field(default_factory=bytearray)

    @property
    def pid(self) -> int:
        return self.process.pid

    def committed(self) -> int:
        """Steps it has committed, as it counts them itself."""
        return int(struct.unpack_from("q", self.page, 0)[0])

    def send(self, message: m.ToWorker) -> None:
        """A worker that does not read (it is stopped, say) never holds up its agent."""
        self.outgoing += m.Frames.frame(m.encode(message))
        self.flush()

    def flush(self) -> bool:
        """Send what is waiting; True when nothing is left."""
        try:
            while self.outgoing:
                sent = self.control.send(self.outgoing)
                del self.outgoing[:sent]
        except BlockingIOError:
            return False
        except OSError:
            self.outgoing.clear()
        return True

    def signal(self, number: int) -> None:
        """Send a signal to the worker and its process group."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)

    def terminate(self) -> None:
        """SIGTERM, or SIGKILL where it does not heed that."""
        try:
            status = Path(f"/proc/{self.pid}/status").read_text()
        except OSError:
            return
        ignored = next((int(x.split()[1], 16) for x in status.splitlines() if x.startswith("SigIgn:")), 0)
        if ignored >> (signal.SIGTERM - 1) & 1:
            self.signal(signal.SIGKILL)
        else:
            self.signal(signal.SIGTERM)
            self.signal(signal.SIGCONT)

    def unnice(self) -> None:
        """It has a rank now: as fast as any other."""
        if self.niced:
            self.niced = False
            with contextlib.suppress(OSError):
                for task in os.listdir(f"/proc/{self.pid}/task"):
                    os.setpriority(os.PRIO_PROCESS, int(task), 0)

    def close(self) -> None:
        """Give back what the agent held of it."""
        os.close(self.pidfd)
        self.control.close()
        with contextlib.suppress(BufferError):  # the thread that felt its death may still hold it
            self.page.close()


def may_unnice() -> bool:
    """Can a process of ours be made nice and then ordinary again? Only root, or by RLIMIT_NICE."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NICE)
    return os.geteuid() == 0 or soft >= 20


def start(how: Start, relay: Relay, label: Callable[[], str]) -> WorkerProcess:
    """Start a worker. Raises OSError where it cannot be."""
    ours, theirs = socket.socketpair()
    page_fd = os.memfd_create("everstep-steps")
    os.ftruncate(page_fd, mmap.PAGESIZE)
    page = mmap.mmap(page_fd, mmap.PAGESIZE)
    struct.pack_into("q", page, 0, -1)
    env = {
        **how.env,
        FD_VARIABLE: str(theirs.fileno()),
        "EVERSTEP_PAGE": str(page_fd),
        "EVERSTEP_WORKER": how.worker,
    }

    nice = how.nice

    def prepare() -> None:
        die_with_parent(signal.SIGKILL)
        if nice:
            os.setpriority(os.PRIO_PROCESS, 0, NICE)

    out_read, out_write = os.pipe()
    err_read, err_write = os.pipe()
    try:
        process = subprocess.Popen(
            list(how.argv),
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=out_write,
            stderr=err_write,
            pass_fds=(theirs.fileno(), page_fd),
            start_new_session=True,
            preexec_fn=prepare,  # two system calls: our other threads hold no lock that they need
        )
    except OSError:
        for fd in (out_read, err_read):
            os.close(fd)
        ours.close()
        page.close()
        raise
    finally:
        os.close(out_write)
        os.close(err_write)
        theirs.close()
        os.close(page_fd)
    ours.setblocking(False)
    relay.add(out_read, how.stdout, label, how.stdout_file)
    relay.add(err_read, how.stderr, label, how.stderr_file)
    return WorkerProcess(how.worker, process, os.pidfd_open(process.pid), ours, page, nice)
