"""State from one worker to another: proved, streamed, checked, broken off."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from everstep.launcher import messages as m
from everstep.recovery import state, transfer
from everstep.recovery.errors import Fault
from everstep.recovery.transfer import Exchange

HOST, TOKEN = "127.0.0.1", b"t" * 32


class Control:
    """As much of the control connection as an exchange needs."""

    def __init__(self, generation: int = 1, token: bytes = TOKEN) -> None:
        self.changed = threading.Condition()
        self.generation = generation
        self.go = m.Go(generation, [], token, True)

    def note(self) -> None:
        with self.changed:
            self.changed.notify_all()

    def wait(self, ready: Callable[[], bool], timeout: float | None = None) -> bool:
        with self.changed:
            return self.changed.wait_for(ready, 30 if timeout is None else timeout)

    def wait_in(self, generation: int, ready: Callable[[], bool]) -> None:
        assert self.wait(lambda: self.generation > generation or ready())
        if self.generation > generation:
            raise Fault("the next generation has begun")

    def abort(self, generation: int, exchange: Exchange) -> None:
        with self.changed:
            self.generation = generation
            self.changed.notify_all()
        exchange.abort()


def model(value: float, size: int = 300_000) -> dict[str, Any]:
    net = torch.nn.ParameterDict(
        {
            "large": torch.nn.Parameter(torch.full((size,), value)),
            "small": torch.nn.Parameter(torch.full((3,), value)),
            "none": torch.nn.Parameter(torch.empty(0)),
            "low": torch.nn.Parameter(torch.full((5,), value, dtype=torch.bfloat16)),
        }
    )
    return {"net": net}


class Donor:
    """A worker that serves its state in a thread."""

    def __init__(self, receivers: list[str], value: float = 2.0) -> None:
        self.control = Control()
        self.exchange = Exchange(self.control, HOST)  # type: ignore[arg-type]
        self.tracked = model(value)
        self.failure: BaseException | None = None
        self._thread = threading.Thread(target=self._serve, args=(receivers,))
        self._thread.start()

    def _serve(self, receivers: list[str]) -> None:
        try:
            self.exchange.serve(1, receivers, 7, state.snapshot(self.tracked))
        except Fault as fault:
            self.failure = fault

    @property
    def address(self) -> tuple[str, int]:
        return self.exchange.host, self.exchange.port

    def end(self) -> None:
        self._thread.join(30)
        assert not self._thread.is_alive()


def fetch(donor: Donor, me: str, tracked: dict[str, Any], token: bytes = TOKEN) -> transfer.Received:
    exchange = Exchange(Control(), HOST)  # type: ignore[arg-type]
    got = exchange.fetch(
        1, me, donor.address, token, lambda skeleton: state.landing(tracked, skeleton, "cpu")
    )
    state.load(tracked, got.skeleton, got.tensors)
    return got


@pytest.fixture
def connections() -> Iterator[list[socket.socket]]:
    made: list[socket.socket] = []
    yield made
    for sock in made:
        sock.close()


def test_a_state_arrives_bit_for_bit_at_every_receiver() -> None:
    donor = Donor(["n1/1", "n2/1"])
    mine, theirs = model(0.0), model(1.0)
    other = threading.Thread(target=fetch, args=(donor, "n2/1", theirs))
    other.start()
    got = fetch(donor, "n1/1", mine)
    other.join(30)
    donor.end()
    assert donor.failure is None
    assert got.committed == 7
    assert got.nbytes == 300_000 * 4 + 3 * 4 + 5 * 2
    assert state.digest(mine) == state.digest(theirs) == state.digest(donor.tracked)


def test_who_has_no_proof_gets_nothing_and_stops_nobody() -> None:
    donor = Donor(["n1/1"])
    with pytest.raises(Fault):
        fetch(donor, "n1/1", model(0.0), token=b"x" * 32)
    mine = model(0.0)
    fetch(donor, "n1/1", mine)
    donor.end()
    assert state.digest(mine) == state.digest(donor.tracked)


def test_rubbish_and_silence_stop_nobody(connections: list[socket.socket]) -> None:
    donor = Donor(["n1/1"])
    for _ in range(5):
        connections.append(socket.create_connection(donor.address))
        connections[-1].sendall(os.urandom(200))
        connections.append(socket.create_connection(donor.address))
    mine = model(0.0)
    fetch(donor, "n1/1", mine)
    donor.end()
    assert state.digest(mine) == state.digest(donor.tracked)


def test_what_does_not_match_its_digest_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """One bit is lost on the way."""

    class Damaging:
        def __init__(self, sock: socket.socket) -> None:
            self._sock, self._sent = sock, 0

        def __getattr__(self, name: str) -> Any:
            return getattr(self._sock, name)

        def sendall(self, data: Any) -> None:
            self._sent += len(data)
            if self._sent > 600_000:
                data = bytes(data)
                data = data[:5] + bytes([data[5] ^ 1]) + data[6:]
            self._sock.sendall(data)

    real = transfer.send_state
    monkeypatch.setattr(transfer, "send_state", lambda sock, *rest: real(Damaging(sock), *rest))  # type: ignore[arg-type]
    donor = Donor(["n1/1"])
    with pytest.raises(Fault, match="digest"):
        fetch(donor, "n1/1", model(0.0))
    donor.end()


def test_the_next_generation_breaks_a_transfer_off(connections: list[socket.socket]) -> None:
    """The receiver has proved itself and then reads nothing: it was stopped, say."""
    donor = Donor(["n1/1"])
    donor.exchange.abort()  # nothing is under way yet
    exchange = Exchange(Control(), HOST)  # type: ignore[arg-type]

    def stop(skeleton: bytes) -> list[torch.Tensor]:
        donor.control.abort(2, donor.exchange)
        return state.landing(model(0.0), skeleton, "cpu")

    with pytest.raises(Fault):
        # More than the kernel's buffers hold is still to come.
        donor.tracked["net"]["large"] = torch.nn.Parameter(torch.zeros(300_000))
        got = exchange.fetch(1, "n1/1", donor.address, TOKEN, stop)
        raise Fault(f"all of {got.nbytes} bytes had been on their way already")
    donor.end()


def test_a_donor_that_waits_for_a_receiver_is_freed_by_the_next_generation() -> None:
    donor = Donor(["n1/1"])
    donor.control.abort(2, donor.exchange)
    donor.end()
    assert isinstance(donor.failure, Fault)


def test_a_donor_that_is_not_there_is_a_fault_at_once() -> None:
    began = time.monotonic()
    with socket.create_server((HOST, 0)) as gone:
        address = gone.getsockname()
    exchange = Exchange(Control(), HOST)  # type: ignore[arg-type]
    with pytest.raises(Fault, match="cannot be reached"):
        exchange.fetch(1, "n1/1", address, TOKEN, lambda skeleton: [])
    assert time.monotonic() - began < transfer._PATIENCE
