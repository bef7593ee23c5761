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
from io import FileIO
from pathlib import Path


@dataclass
class _Stream:
    fd: int
    out: int | None  # descriptor of our own to write to
    label: Callable[[], str]
    file: FileIO | None
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
        handle = None
        if file is not None:
            try:
                handle = file.open("ab", buffering=0)
            except OSError as error:
                _write(
                    2,
                    f"everstep: {file} cannot be opened ({error.strerror}); this log is not kept\n".encode(),
                )
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
        if stream.file is not None:
            self._keep(stream, data)
        if stream.out is not None:
            self._show(stream, stream.out, data)
        return bool(data)

    def _keep(self, stream: _Stream, data: bytes) -> None:
        if stream.file is None:
            return
        try:
            if data:
                stream.file.write(data)
                return
            stream.file.close()
        except OSError as error:
            # A full disk costs the log, not the run: this thread is what empties the workers' pipes.
            text = f"everstep: {stream.file.name} cannot be written any more ({error.strerror})\n"
            _write(2, text.encode())
            with contextlib.suppress(OSError):
                stream.file.close()
        stream.file = None

    def _show(self, stream: _Stream, out: int, data: bytes) -> None:
        # A line without an end comes out when it ends, or when the worker does.
        cut = data.rfind(b"\n") + 1
        if data and not cut:
            stream.partial += data
            return
        whole = bytes(stream.partial) + data[:cut] if data else bytes(stream.partial)
        stream.partial = bytearray(data[cut:])
        if whole:
            prefix = stream.label().encode()
            lines = whole.replace(b"\r\n", b"\n").removesuffix(b"\n").split(b"\n")
            _write(out, b"".join(prefix + line + b"\n" for line in lines))


def _write(fd: int, data: bytes) -> None:
    with contextlib.suppress(OSError):  # whoever read our output is gone; workers need not care
        while data:
            data = data[os.write(fd, data) :]
