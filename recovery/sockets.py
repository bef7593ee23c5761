"""Finding gloo's sockets, so that a blocked collective can be broken off.

Gloo has no working abort: what works is `shutdown()` on its sockets from another
thread, which makes the blocked call raise within milliseconds here and at its
peers. Gloo does not hand its sockets out, so they are found among the descriptors
that appeared while the group was built, and only those are taken whose own or
peer's address stands in the rendezvous entries that gloo published: a socket that
another thread of the user opened meanwhile is never touched.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import threading
from collections.abc import Iterable


def descriptors() -> set[int]:
    """The file descriptors that are open now, and the one that the listing took."""
    return {int(name) for name in os.listdir("/proc/self/fd")}


def open_sockets() -> dict[int, str]:
    """The sockets that are open now: descriptor -> what it stands for, `socket:[inode]`.

    A number says nothing: it is given out again as soon as it is closed.
    """
    found = {}
    for fd in descriptors():
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{fd}")
            if target.startswith("socket:"):
                found[fd] = target
    return found


class Sockets:
    """The sockets of one gloo group; `published` are the rendezvous entries of all its ranks."""

    def __init__(self) -> None:
        self._before = set(open_sockets().values())
        self._kept: list[socket.socket] | None = None
        self._numbers: dict[int, int] = {}  # gloo's own descriptors -> inode
        self._poll = select.poll()
        self._polling = threading.Lock()  # a poll object is one thread's at a time

    def keep(self, published: Iterable[bytes]) -> None:
        """Take a duplicate of each socket now: later, its number may be another descriptor's."""
        self._kept = self._find(published)
        for sock in self._kept:
            self._poll.register(sock, select.POLLRDHUP)

    def broken(self) -> bool:
        """Has a peer closed one of them, or have we? Costs one system call."""
        with self._polling:
            return bool(self._kept) and bool(self._poll.poll(0))

    def forget(self) -> None:
        """In a forked child: close what it has inherited, or its dead parent's peers would wait for it."""
        self._polling = threading.Lock()  # a thread that the child does not have may have held it
        for fd, inode in self._numbers.items():
            with contextlib.suppress(OSError):
                if os.fstat(fd).st_ino == inode:  # gloo may have closed it, and its number be someone else's
                    os.close(fd)
        with contextlib.suppress(OSError):
            self.close()

    def shut(self, published: Iterable[bytes]) -> int:
        """Shut the group's sockets down; how many there were. Works in mid-construction too."""
        found = self._kept if self._kept is not None else self._find(published)
        for sock in found:
            with contextlib.suppress(OSError):  # its peer may have closed it already
                sock.shutdown(socket.SHUT_RDWR)
        return len(found)

    def close(self) -> None:
        """Give the duplicates back."""
        with self._polling:
            for sock in self._kept or ():
                sock.close()
            self._kept = []
            self._numbers = {}
            self._poll = select.poll()

    def _find(self, published: Iterable[bytes]) -> list[socket.socket]:
        entries = list(published)
        found: list[socket.socket] = []
        seen: set[int] = set()  # a number that listing them took for itself may be one of our copies by now
        for fd, target in open_sockets().items():
            if target in self._before:
                continue
            try:
                copy = os.dup(fd)
            except OSError:
                continue
            try:
                sock = socket.socket(fileno=copy)
            except OSError:  # no socket
                os.close(copy)
                continue
            inode = os.fstat(copy).st_ino
            ours = sock.type == socket.SOCK_STREAM and not _listens(sock) and _is_of(sock, entries)
            if ours and inode not in seen:
                seen.add(inode)
                found.append(sock)
                self._numbers[fd] = inode
            else:
                sock.close()
        return found


def _listens(sock: socket.socket) -> bool:
    # A listener that is shut down makes gloo's accept fail, which ends the process uncatchably.
    try:
        return bool(sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
    except OSError:
        return False


def _is_of(sock: socket.socket, entries: list[bytes]) -> bool:
    for name in (sock.getsockname, sock.getpeername):
        try:
            raw = _raw_address(sock.family, name())
        except OSError:
            continue
        if raw and any(raw in entry for entry in entries):
            return True
    return False


def _raw_address(family: int, address: tuple[str, int]) -> bytes:
    """The address as it stands in a sockaddr, without what follows."""
    if family == socket.AF_INET:
        return struct.pack("=H", family) + struct.pack("!H", address[1]) + socket.inet_aton(address[0])
    if family == socket.AF_INET6:
        # Flow label and scope differ between ends; family and port are enough here.
        return struct.pack("=H", family) + struct.pack("!H", address[1])
    return b""
