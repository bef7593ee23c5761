"""The run's secret, and the CURVE keys that every agent derives from it.

Whoever knows the secret can be an agent of the run; nobody else gets an answer. It
travels in the step's environment alone, and workers never see it.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from dataclasses import dataclass

import zmq
from everstep.recovery.errors import UsageError
from zmq.utils import z85

_SIZE = 32


def new_secret() -> str:
    """A fresh secret, in hexadecimal."""
    return secrets.token_hex(_SIZE)


@dataclass(frozen=True)
class Keys:
    """The two CURVE key pairs of a run: the coordinator's and the agents'."""

    server_public: bytes
    server_secret: bytes
    client_public: bytes
    client_secret: bytes
    token_root: bytes  # generation tokens come from it

    def token(self, generation: int) -> bytes:
        """What members of a generation prove themselves with, to each other."""
        return hmac.new(self.token_root, generation.to_bytes(8, "big"), hashlib.sha256).digest()


class Admission:
    """What pyzmq's authenticator asks: only who derived the run's client key gets in."""

    def __init__(self, keys: Keys) -> None:
        self._public = keys.client_public

    def callback(self, domain: str, key: bytes) -> bool:
        """Is this the run's client key?"""
        return key == self._public


def keys_from(secret: str) -> Keys:
    """The keys of this secret. Raises UsageError for one that is none of ours."""
    try:
        root = bytes.fromhex(secret)
    except ValueError:
        root = b""
    if len(root) != _SIZE:
        raise UsageError(
            "the run's secret (EVERSTEP_SECRET) is missing or damaged: start agents through "
            "`everstep run` or `everstep srun`, which make it"
        )
    server = z85.encode(_derive(root, b"server"))
    client = z85.encode(_derive(root, b"client"))
    return Keys(zmq.curve_public(server), server, zmq.curve_public(client), client, _derive(root, b"tokens"))


def _derive(root: bytes, purpose: bytes) -> bytes:
    return hmac.new(root, b"everstep " + purpose, hashlib.sha256).digest()
