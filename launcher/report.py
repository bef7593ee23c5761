"""The last word: from the coordinator's agent back to `everstep srun` or srun, maybe on another host."""

from __future__ import annotations

import contextlib
import socket

import msgspec
import zmq
from everstep.launcher.keys import Admission, Keys
from zmq.auth.thread import ThreadAuthenticator


class Ended(msgspec.Struct, frozen=True):
    """How the run ended."""

    code: int


class Ear:
    """Listens for the run's exit code, on a port of this host."""

    def __init__(self, keys: Keys) -> None:
        self._context = zmq.Context()
        self._authenticator = ThreadAuthenticator(self._context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback("*", credentials_provider=Admission(keys))
        self._socket = self._context.socket(zmq.PULL)
        self._socket.curve_server = True
        self._socket.curve_secretkey = keys.server_secret
        self._socket.curve_publickey = keys.server_public
        self.port = self._socket.bind_to_random_port("tcp://*")

    def heard(self, timeout: float) -> int | None:
        """The run's exit code, if it was told within `timeout` seconds."""
        while self._socket.poll(int(timeout * 1000)):
            try:
                return msgspec.msgpack.decode(self._socket.recv(), type=Ended).code
            except msgspec.MsgspecError:
                continue
        return None

    def close(self) -> None:
        """Stop listening."""
        self._authenticator.stop()
        self._socket.close(linger=0)
        self._context.term()


def tell(address: str, keys: Keys, code: int) -> None:
    """Tell the ear at `address` (host:port). A lost word costs two seconds and nothing else.

    `line:host:port:token` is the SPANK plugin's ear in srun itself (slurm_spank/ear.c).
    """
    if address.startswith("line:"):
        _tell_srun(address, code)
        return
    context = zmq.Context()
    sock = context.socket(zmq.PUSH)
    sock.curve_serverkey = keys.server_public
    sock.curve_publickey = keys.client_public
    sock.curve_secretkey = keys.client_secret
    sock.connect(f"tcp://{address}")
    sock.send(msgspec.msgpack.encode(Ended(code)))
    sock.close(linger=2000)
    context.term()


def _tell_srun(address: str, code: int) -> None:
    _, host, port, token = address.split(":")
    with contextlib.suppress(OSError), socket.create_connection((host, int(port)), timeout=2.0) as sock:
        sock.sendall(f"everstep {token} {code}\n".encode())
