"""State from one worker to another: a direct connection, proved, streamed and checked.

A worker listens on one port for its whole life. Whoever connects must first prove
that it belongs to the generation: an HMAC with the generation's token over both
sides' nonces, before the first byte of state (other users share the node). The
answer proves the donor in turn. Then: a header, the tensors' bytes in canonical
order, and an xxh3 digest over all of it. What does not match the digest is not used.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import torch
import xxhash
from everstep.recovery.control import Control
from everstep.recovery.errors import Fault
from everstep.recovery.state import (
    Snapshot,
    as_bytes,
    empty_like_spec,
    from_wire,
    specs,
    to_wire,
)

# Given a skeleton, the tensors to receive into, in its order.
Land = Callable[[bytes], list[torch.Tensor]]

CHUNK = 1 << 20
_NONCE = 32
_PATIENCE = 20.0  # seconds for a proof, where nothing aborts it
_MOST_STRANGERS = 64  # connections that have not proved themselves yet


class Header(msgspec.Struct, frozen=True):
    """What comes before the tensors."""

    committed: int
    skeleton: bytes


@dataclass(frozen=True)
class Received:
    """A donor's state, checked."""

    committed: int
    skeleton: bytes
    tensors: list[torch.Tensor]
    nbytes: int
    seconds: float


class Exchange:
    """This worker's end of all transfers."""

    def __init__(self, control: Control, host: str) -> None:
        self._control = control
        self._listener = socket.create_server((host, 0), family=_family(host), backlog=128)
        self.host, self.port = host, int(self._listener.getsockname()[1])
        self._arrived: dict[tuple[int, str], socket.socket] = {}
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._strangers = threading.Semaphore(_MOST_STRANGERS)
        threading.Thread(target=self._accept, name="everstep-accept", daemon=True).start()

    def abort(self) -> None:
        """Break off whatever is under way. From any thread."""
        with self._lock:
            for sock in self._open:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
            for sock in self._arrived.values():
                sock.close()
            self._arrived.clear()

    def forget(self) -> None:
        """In a forked child: close what it has inherited."""
        for sock in [self._listener, *self._open, *self._arrived.values()]:
            sock.close()

    # --- donor ----------------------------------------------------------------------------------

    def serve(self, generation: int, receivers: Sequence[str], committed: int, snap: Snapshot) -> None:
        """Send this worker's state to each receiver, all at once. Raises Fault if one fails."""
        failures: list[BaseException] = []

        def send(receiver: str) -> None:
            try:
                self._control.wait_in(generation, lambda: (generation, receiver) in self._arrived)
                sock = self._arrived.pop((generation, receiver))
                with self._opened(sock):
                    send_state(sock, committed, snap)
            except (OSError, Fault, KeyError) as error:
                failures.append(error)

        threads = [threading.Thread(target=send, args=(r,), daemon=True) for r in receivers[1:]]
        for thread in threads:
            thread.start()
        if receivers:
            send(receivers[0])
        for thread in threads:
            thread.join()
        if failures:
            raise Fault(f"sending state failed: {failures[0]}") from failures[0]

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                time.sleep(0.01)  # out of descriptors, say: peers try again
                continue
            if not self._strangers.acquire(blocking=False):
                sock.close()
                continue
            threading.Thread(target=self._admit, args=(sock,), daemon=True).start()

    def _admit(self, sock: socket.socket) -> None:
        try:
            sock.settimeout(_PATIENCE)
            generation, receiver = self._proved(sock)
            sock.settimeout(None)
            with self._lock:
                if self._control.generation > generation:
                    raise Fault("the next generation has begun")
                self._arrived[generation, receiver] = sock
            self._control.note()
        except (OSError, struct.error, Fault, ValueError):
            sock.close()
        finally:
            self._strangers.release()

    def _proved(self, sock: socket.socket) -> tuple[int, str]:
        nonce = os.urandom(_NONCE)
        sock.sendall(nonce)
        generation, length = struct.unpack("!IH", _exactly(sock, 6))
        if length > 512:
            raise ValueError("no name of ours is that long")
        receiver = _exactly(sock, length)
        theirs = _exactly(sock, _NONCE)
        proof = _exactly(sock, 32)
        token = self._token(generation)
        hello = struct.pack("!I", generation) + receiver
        if not hmac.compare_digest(proof, _mac(token, b"receiver", nonce, theirs, hello)):
            raise ValueError("no proof")
        sock.sendall(_mac(token, b"donor", nonce, theirs, hello))
        return generation, receiver.decode()

    def _token(self, generation: int) -> bytes:
        """The generation's token; a peer may be a little ahead of us."""
        control = self._control
        known = control.wait(
            lambda: control.go is not None and control.go.generation >= generation, timeout=_PATIENCE
        )
        if not known or control.go is None or control.go.generation != generation:
            raise Fault("no such generation")
        return control.go.token

    # --- receiver -------------------------------------------------------------------------------

    def fetch(self, generation: int, me: str, donor: tuple[str, int], token: bytes, land: Land) -> Received:
        """Receive the state of the worker at `donor`.

        Raises Fault when it fails or what arrived does not match its digest; what it
        landed in may have been written to by then.
        """
        began = time.monotonic()
        try:
            sock = socket.create_connection(donor, timeout=_PATIENCE)
        except OSError as error:
            raise Fault(f"the donor at {donor[0]}:{donor[1]} cannot be reached: {error}") from error
        with self._opened(sock):
            try:
                if self._control.generation > generation:
                    raise Fault("the next generation has begun")
                nonce, theirs = _exactly(sock, _NONCE), os.urandom(_NONCE)
                name = me.encode()
                hello = struct.pack("!I", generation) + name
                proof = _mac(token, b"receiver", nonce, theirs, hello)
                sock.sendall(struct.pack("!IH", generation, len(name)) + name + theirs + proof)
                if not hmac.compare_digest(_exactly(sock, 32), _mac(token, b"donor", nonce, theirs, hello)):
                    raise Fault("the donor has no proof")
                sock.settimeout(None)
                committed, skeleton, tensors, size = receive_state(sock, land)
            except OSError as error:
                raise Fault(f"receiving state failed: {error}") from error
        return Received(committed, skeleton, tensors, size, time.monotonic() - began)

    @contextlib.contextmanager
    def _opened(self, sock: socket.socket):  # type: ignore[no-untyped-def]
        with self._lock:
            self._open.add(sock)
        try:
            yield
        finally:
            with self._lock:
                self._open.discard(sock)
            sock.close()


def send_state(sock: socket.socket, committed: int, snap: Snapshot) -> int:
    """Stream a snapshot; bytes of tensors sent. Raises OSError."""
    _large_buffers(sock)
    header = msgspec.msgpack.encode(Header(committed, snap.skeleton))
    digest = xxhash.xxh3_128(header)
    sock.sendall(struct.pack("!I", len(header)) + header)
    total = 0
    small = bytearray()
    for tensor in snap.tensors:
        view = as_bytes(to_wire(tensor))
        total += view.nbytes
        if view.nbytes < CHUNK // 4:  # many small tensors: one call for all of them
            digest.update(view)
            small += view
            if len(small) >= CHUNK:
                sock.sendall(small)
                small.clear()
            continue
        if small:
            sock.sendall(small)
            small.clear()
        for at in range(0, view.nbytes, CHUNK):
            part = view[at : at + CHUNK]
            digest.update(part)
            sock.sendall(part)
    sock.sendall(bytes(small) + digest.digest())
    return total


def receive_state(sock: socket.socket, land: Land) -> tuple[int, bytes, list[torch.Tensor], int]:
    """What `send_state` sends: (committed, skeleton, tensors, bytes). Raises OSError and Fault."""
    _large_buffers(sock)
    (length,) = struct.unpack("!I", _exactly(sock, 4))
    raw = _exactly(sock, length)
    digest = xxhash.xxh3_128(raw)
    try:
        header = msgspec.msgpack.decode(raw, type=Header)
    except msgspec.MsgspecError as error:
        raise Fault(f"the donor's header is damaged: {error}") from error
    tensors, total = land(header.skeleton), 0
    for spec, target in zip(specs(header.skeleton), tensors, strict=True):
        direct = target.device.type == "cpu" and target.is_contiguous()
        wire = target if direct else empty_like_spec(spec, "cpu")
        view = as_bytes(wire)
        for at in range(0, view.nbytes, CHUNK):
            part = view[at : at + CHUNK]
            _into(sock, part)
            digest.update(part)
        total += view.nbytes
        if not direct:
            from_wire(wire, target)
    if not hmac.compare_digest(_exactly(sock, 16), digest.digest()):
        raise Fault("the state that arrived does not match its digest")
    return header.committed, header.skeleton, tensors, total


def _into(sock: socket.socket, view: memoryview) -> None:
    while view.nbytes:
        got = sock.recv_into(view)
        if not got:
            raise ConnectionError("the donor closed the connection")
        view = view[got:]


def _exactly(sock: socket.socket, size: int) -> bytes:
    data = bytearray(size)
    _into(sock, memoryview(data))
    return bytes(data)


def _mac(token: bytes, role: bytes, server: bytes, client: bytes, hello: bytes) -> bytes:
    return hmac.new(token, role + server + client + hello, hashlib.sha256).digest()


def _large_buffers(sock: socket.socket) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
