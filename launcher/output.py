"""Workers' lines to the agent's own output, each with its rank before it, and to log files.

A thread of its own: a terminal that stands still must hold back the workers that
print, and never the agent's heartbeats.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO


@dataclass
class _Stream:
    fd: int
    out: int | None  # descriptor of our own to write to
    label: Callable[[], str]
    file: BinaryIO | None
    partial: bytearray = field(default_factory=bytearray)


class Relay:
    """Reads the workers' pipes until they are closed."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        self._selector.register(self._wake_read, selectors.EVENT_READ, None)
        self._added: list[_Stream] = []
        self._lock = threading.Lock()
        self._ending = False
        self._thread = threading.Thread(target=self._run, name="everstep-output", daemon=True)
        self._thread.start()

    def add(self, fd: int, out: int | None, label: Callable[[], str], file: Path | None) -> None:
        """Relay the pipe `fd` to descriptor `out` (None: not shown) and to `file`."""
        handle = file.open("ab") if file is not None else None
        with self._lock:
            self._added.append(_Stream(fd, out, label, handle))
        os.write(self._wake_write, b"x")

    def drain(self, timeout: float) -> None:
        """Wait until all that was written is out, as long as that takes at most."""
        self._ending = True
        with contextlib.suppress(OSError):
            os.write(self._wake_write, b"x")
        self._thread.join(timeout)

    def _run(self) -> None:
        open_streams = 0
        while True:
            for key, _ in self._selector.select():
                if key.data is None:
                    with contextlib.suppress(BlockingIOError):
                        os.read(self._wake_read, 4096)
                    with self._lock:
                        added, self._added = self._added, []
                    for stream in added:
                        self._selector.register(stream.fd, selectors.EVENT_READ, stream)
                        open_streams += 1
                elif not self._pass(key.data):
                    self._selector.unregister(key.data.fd)
                    os.close(key.data.fd)
                    open_streams -= 1
            if self._ending and not open_streams and not self._added:
                return

    def _pass(self, stream: _Stream) -> bool:
        try:
            data = os.read(stream.fd, 1 << 16)
        except OSError:
            data = b""
        if stream.file is not None and data:
            stream.file.write(data)
            stream.file.flush()
        if stream.out is not None:
            # A line without an end comes out when it ends, or when the worker does.
            stream.partial += data
            cut = stream.partial.rfind(b"\n") + 1 if data else len(stream.partial)
            whole, stream.partial = bytes(stream.partial[:cut]), stream.partial[cut:]
            if whole:
                prefix = stream.label().encode()
                lines = whole.removesuffix(b"\n").replace(b"\r\n", b"\n").split(b"\n")
                _write(stream.out, b"".join(prefix + line + b"\n" for line in lines))
        if not data and stream.file is not None:
            stream.file.close()
        return bool(data)


def _write(fd: int, data: bytes) -> None:
    with contextlib.suppress(OSError):  # whoever read our output is gone; workers need not care
        while data:
            data = data[os.write(fd, data) :]
