"""Finding a group's sockets among all that a process has open, and touching no other."""

from __future__ import annotations

import os
import select
import socket
import struct
from collections.abc import Iterator

import pytest
from everstep.recovery.sockets import Sockets, descriptors


def entry(listener: socket.socket) -> bytes:
    """A rendezvous entry as gloo publishes it: a sockaddr somewhere among other bytes."""
    host, port = listener.getsockname()
    address = struct.pack("=H", socket.AF_INET) + struct.pack("!H", port) + socket.inet_aton(host)
    return b"\x07" * 9 + address + b"\0" * 112 + b"\x01" * 8


class Pair:
    """A listener and one connection to it."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.here = socket.create_connection(self.listener.getsockname())
        self.there, _ = self.listener.accept()

    def close(self) -> None:
        for sock in (self.listener, self.here, self.there):
            sock.close()


@pytest.fixture
def scene() -> Iterator[tuple[Sockets, Pair, Pair]]:
    """Both pairs appear while the group is built; only the first is the group's."""
    sockets = Sockets()
    ours, others = Pair(), Pair()
    yield sockets, ours, others
    sockets.close()
    ours.close()
    others.close()


Scene = tuple[Sockets, Pair, Pair]


def closed(sock: socket.socket) -> bool:
    poll = select.poll()
    poll.register(sock, select.POLLRDHUP)
    return bool(poll.poll(0))


def test_both_ends_are_shut_and_nobody_elses(scene: Scene) -> None:
    sockets, ours, others = scene
    sockets.keep([entry(ours.listener)])
    assert not sockets.broken()
    assert sockets.shut([]) == 2
    assert sockets.broken()
    assert closed(ours.here)
    assert closed(ours.there)
    assert not closed(others.here)


def test_in_mid_construction_they_are_found_at_the_moment(scene: Scene) -> None:
    sockets, ours, others = scene
    assert sockets.shut([entry(ours.listener)]) == 2
    assert closed(ours.here)
    assert not closed(others.here)


def test_a_listener_is_left_alone(scene: Scene) -> None:
    """Gloo's accept would fail, which ends the process uncatchably."""
    sockets, ours, _ = scene
    sockets.keep([entry(ours.listener)])
    sockets.shut([])
    again = socket.create_connection(ours.listener.getsockname())
    again.close()


def test_a_descriptor_that_is_someone_elses_by_now_is_not_touched(scene: Scene) -> None:
    sockets, ours, _ = scene
    sockets.keep([entry(ours.listener)])
    number = ours.here.fileno()
    ours.here.close()
    reused = os.open(os.devnull, os.O_RDONLY)
    assert reused == number
    sockets.shut([])
    sockets.forget()
    ours.there.detach()  # this one was the group's still, and is closed
    assert os.read(reused, 1) == b""
    os.close(reused)


def test_a_peer_that_is_gone_shows(scene: Scene) -> None:
    sockets, ours, _ = scene
    sockets.keep([entry(ours.listener)])
    ours.there.shutdown(socket.SHUT_RDWR)
    assert sockets.broken()


def test_nothing_stays_open(scene: Scene) -> None:
    sockets, ours, _ = scene
    before = descriptors()
    sockets.keep([entry(ours.listener)])
    assert len(descriptors()) == len(before) + 2
    sockets.close()
    assert descriptors() == before
    assert not sockets.broken()
