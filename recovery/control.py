"""The worker's control thread: what the launcher says, and what this worker answers.

A socket pair to the node agent, inherited at birth. The thread only records what
arrives and breaks off what an abort concerns; it never touches the training state.
The main thread waits on `Control.wait`. When the agent is gone, so is this worker:
its process group is ended at once, DataLoader children included.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable

from everstep.launcher import messages as m
from everstep.recovery.errors import Fault

# The number of the inherited socket travels in this variable.
FD_VARIABLE = "EVERSTEP_FD"
# Set where Slurm is about, which tells every process of a step what is meant for the agent.
DEAF_VARIABLE = "EVERSTEP_DEAF"


class Control:
    """What is known of the run's course, guarded by one condition."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._send_lock = threading.Lock()
        self.changed = threading.Condition()
        self.assigned: m.Assign | None = None
        self.generation = 0  # newest one that we were told of
        self.go: m.Go | None = None
        self.all_done = 0
        self.released = False
        self.hold = 0  # the generation in which no other step is to be begun
        self.save = 0  # the generation in which we are to write a checkpoint
        self._entries: dict[tuple[int, str], bytes] = {}
        self._on_abort: list[Callable[[int], None]] = []

    def start(self, on_abort: Callable[[int], None]) -> None:
        """Begin to listen; `on_abort(generation)` runs in the control thread."""
        self._on_abort.append(on_abort)
        threading.Thread(target=self._listen, name="everstep-control", daemon=True).start()

    def send(self, message: m.FromWorker) -> None:
        """Tell the launcher. A lost agent is noticed by the listening thread."""
        data = m.Frames.frame(m.encode(message))
        with self._send_lock, contextlib.suppress(OSError):
            self._sock.sendall(data)

    def wait(self, ready: Callable[[], bool], timeout: float | None = None) -> bool:
        """Wait until `ready()`; False when the time is over."""
        with self.changed:
            return self.changed.wait_for(ready, timeout)

    def wait_in(self, generation: int, ready: Callable[[], bool]) -> None:
        """Wait until `ready()`. Raises Fault as soon as a generation after this one begins."""
        self.wait(lambda: self.generation > generation or ready())
        if self.generation > generation:
            raise Fault(f"generation {self.generation} has begun")

    def entry(self, generation: int, key: str) -> bytes | None:
        """A rendezvous entry, if it is here."""
        return self._entries.get((generation, key))

    def note(self) -> None:
        """Wake whoever waits: something that they look at has changed."""
        with self.changed:
            self.changed.notify_all()

    def forget(self) -> None:
        """In a forked child: it does not speak for its parent."""
        self._sock.close()

    # --- the thread -----------------------------------------------------------------------------

    def _listen(self) -> None:
        frames = m.Frames()
        while True:
            try:
                data = self._sock.recv(1 << 16)
                arrived = frames.feed(data) if data else None
            except (OSError, m.BadMessage):
                arrived = None
            if arrived is None:
                _end_with_children()
                return
            for frame in arrived:
                with contextlib.suppress(m.BadMessage):
                    self._take(m.decode_to_worker(frame))

    def _take(self, message: m.ToWorker) -> None:
        aborted = 0
        with self.changed:
            if isinstance(message, m.Assign):
                self.assigned = message
                self.generation = max(self.generation, message.generation)
            elif isinstance(message, m.Abort):
                if message.generation > self.generation:
                    self.generation = aborted = message.generation
                    self._entries = {k: v for k, v in self._entries.items() if k[0] >= aborted}
            elif isinstance(message, m.Go):
                self.go = message
            elif isinstance(message, m.Entry):
                self._entries[message.generation, message.key] = message.value
            elif isinstance(message, m.AllDone):
                self.all_done = max(self.all_done, message.total)
            elif isinstance(message, m.Hold):
                self.hold = max(self.hold, message.generation)
            elif isinstance(message, m.Save):
                self.save = max(self.save, message.generation)
            elif isinstance(message, m.Release):
                self.released = True
            self.changed.notify_all()
        if aborted:
            for callback in self._on_abort:
                try:
                    callback(aborted)
                except Exception as error:  # a worker that listens no more could not even be told to end
                    print(f"everstep: breaking off failed: {error!r}", file=sys.stderr, flush=True)


def _end_with_children() -> None:
    """The agent is gone: nobody may outlive it. We lead our process group, unless started by hand."""
    if os.getpgid(0) == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(75)
