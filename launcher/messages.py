"""The typed messages between agents, coordinator and workers, and their one encoding.

Everything that crosses a socket is one of these structs in msgpack. What does not
decode as one is refused by the decoder (`BadMessage`): it is dropped and counted
by whoever reads, and is never fatal. Nothing here ever unpickles.
"""

from __future__ import annotations

from typing import TypeAlias, TypeVar

import msgspec


class Struct(msgspec.Struct, tag=True, frozen=True, forbid_unknown_fields=False, omit_defaults=True):
    """Base of every message: plain, frozen, tagged by its class name."""


# --- from a worker (through its agent) to the coordinator -------------------------------------


class Hello(Struct, frozen=True):
    """The worker has reached `recovery.init()`."""

    versions: dict[str, str]


class Ready(Struct, frozen=True):
    """The worker stands in `steps()` and states what it holds, for this generation."""

    generation: int
    committed: int
    whole: bool
    fresh: bool  # it was never part of a generation: it holds initial state only
    host: str
    port: int
    layout: str
    checkpoint: int = -1  # committed steps of the newest valid checkpoint it can read
    fingerprint: str = ""  # of its initial state, where the run has not begun yet
    checkpoints: bool = False  # it could write one


class Published(Struct, frozen=True):
    """A rendezvous entry of one rank, for everybody in the generation."""

    generation: int
    key: str
    value: bytes


class AbortDone(Struct, frozen=True):
    """The worker's communicators of the generations before this one are broken off."""

    generation: int
    seconds: float


class GroupReady(Struct, frozen=True):
    generation: int
    seconds: float


class Restored(Struct, frozen=True):
    generation: int
    bytes: int
    seconds: float
    donors: list[int]
    tier: str  # "peer" or "disk"


class Committed(Struct, frozen=True):
    """First committed step of a generation on this rank."""

    generation: int
    committed: int


class Held(Struct, frozen=True):
    """The worker was asked to hold, and does so between two steps."""

    generation: int
    committed: int


class Saved(Struct, frozen=True):
    """A checkpoint of so many committed steps was written, or (`error`) could not be."""

    committed: int
    error: str = ""


class Trouble(Struct, frozen=True):
    """Something failed in a collective or a transfer, and no fault is known to this worker."""

    generation: int
    what: str


class Done(Struct, frozen=True):
    """This rank has committed step `total - 1`."""

    total: int


class Leaving(Struct, frozen=True):
    """The worker's script has ended (or is ending by an exception); it waits for `Release`."""

    generation: int
    joined: bool  # did it ever pass `steps()`
    committed: int
    error: str = ""  # one line
    traceback: str = ""
    usage: bool = False  # the error is one of ours: its line says what to do
    code: int = 0  # what it will exit with, as far as it knows


class Note(Struct, frozen=True):
    """A line for the run's log."""

    text: str


FromWorker: TypeAlias = (
    Hello
    | Ready
    | Published
    | AbortDone
    | GroupReady
    | Restored
    | Committed
    | Held
    | Saved
    | Trouble
    | Done
    | Leaving
    | Note
)

# --- from the coordinator (through an agent) to a worker ----------------------------------------


class Assign(Struct, frozen=True):
    """The worker gets a rank. `env` is what torchrun would have put in its environment."""

    rank: int
    world_size: int
    generation: int
    env: dict[str, str]
    start: bool = False  # the run has not begun: collectives of set-up are real


class Abort(Struct, frozen=True):
    """Generation `generation` has begun: break off everything older."""

    generation: int


class Member(Struct, frozen=True):
    """One row of the table that a generation starts from. Rank -1: a donor that is leaving."""

    worker: str
    rank: int
    committed: int
    whole: bool
    fresh: bool
    host: str
    port: int
    layout: str
    checkpoint: int = -1
    fingerprint: str = ""


class Go(Struct, frozen=True):
    """All ranks are ready: build the group, restore, go on. `token` proves membership."""

    generation: int
    members: list[Member]
    token: bytes
    progress: bool  # has this run ever committed a step


class Entry(Struct, frozen=True):
    generation: int
    key: str
    value: bytes


class AllDone(Struct, frozen=True):
    total: int


class Hold(Struct, frozen=True):
    """Do not begin another step in this generation: the run is to stop."""

    generation: int


class Save(Struct, frozen=True):
    """Write a checkpoint of what is held now; nobody goes on in this generation."""

    generation: int


class Release(Struct, frozen=True):
    """The worker may end."""


ToWorker: TypeAlias = Assign | Abort | Go | Entry | AllDone | Hold | Save | Release

# --- from an agent to the coordinator -----------------------------------------------------------


class AgentHello(Struct, frozen=True):
    node: str
    index: int
    host: str  # address that state and groups travel on
    spare: bool
    ports: list[int]  # free ports at hand for MASTER_PORT
    versions: dict[str, str]
    devices: int = 0
    problem: str = ""  # why this node cannot take part, in one line
    code: int = 64
    joiner: bool = False  # of a replacement node
    unfit: str = ""  # why its health checks find it not fit for work


class Heartbeat(Struct, frozen=True):
    steps: dict[str, int] = {}  # worker -> committed


class WorkerStarted(Struct, frozen=True):
    worker: str
    pid: int


class WorkerExited(Struct, frozen=True):
    worker: str
    code: int  # exit status; negative: minus the signal
    how: str = "its agent"


class FromWorkers(Struct, frozen=True):
    worker: str
    message: FromWorker


class Health(Struct, frozen=True):
    """What this node's health checks say now; empty: it is fit for work."""

    unfit: str = ""


class Told(Struct, frozen=True):
    """The agent was told to stop, by this signal."""

    signal: int


class Output(Struct, frozen=True):
    """What workers of a replacement node print: its job has an output of its own, where nobody would look."""

    stream: int  # 1 or 2
    data: bytes


class Bye(Struct, frozen=True):
    """The agent's workers are gone and it ends."""


FromAgent: TypeAlias = (
    AgentHello | Heartbeat | WorkerStarted | WorkerExited | FromWorkers | Health | Told | Output | Bye
)

# --- from the coordinator to an agent -----------------------------------------------------------


class Spawn(Struct, frozen=True):
    """Start a worker. `env` holds rank variables, or none of them for a standby."""

    worker: str
    env: dict[str, str]
    rank: int = -1
    local_rank: int = -1
    attempt: int = 0
    nice: bool = False


class Kill(Struct, frozen=True):
    worker: str
    reason: str


class ToWorkers(Struct, frozen=True):
    workers: list[str]
    message: ToWorker


class Beat(Struct, frozen=True):
    """The coordinator lives."""


class Winding(Struct, frozen=True):
    """The whole run is being stopped in order, within so many seconds: wait for `Stop`."""

    seconds: float


class Stop(Struct, frozen=True):
    code: int
    reason: str


ToAgent: TypeAlias = Spawn | Kill | ToWorkers | Beat | Winding | Stop


T = TypeVar("T")


class BadMessage(ValueError):
    """What arrived is none of our messages."""


_encode = msgspec.msgpack.Encoder().encode
_from_worker = msgspec.msgpack.Decoder(FromWorker)
_to_worker = msgspec.msgpack.Decoder(ToWorker)
_from_agent = msgspec.msgpack.Decoder(FromAgent)
_to_agent = msgspec.msgpack.Decoder(ToAgent)


def encode(message: Struct) -> bytes:
    """One message as bytes."""
    return _encode(message)


def decode_from_worker(data: bytes) -> FromWorker:
    """Raises BadMessage."""
    return _decoded(_from_worker, data)


def decode_to_worker(data: bytes) -> ToWorker:
    """Raises BadMessage."""
    return _decoded(_to_worker, data)


def decode_from_agent(data: bytes) -> FromAgent:
    """Raises BadMessage."""
    return _decoded(_from_agent, data)


def decode_to_agent(data: bytes) -> ToAgent:
    """Raises BadMessage."""
    return _decoded(_to_agent, data)


def _decoded(decoder: msgspec.msgpack.Decoder[T], data: bytes) -> T:
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        # Text that is no UTF-8 is a ValueError; arrays a thousand deep, where a field is unknown, recurse.
        raise BadMessage(str(error)) from None


class Frames:
    """Length-prefixed frames out of a byte stream: bytes in, whole frames out. No sockets here."""

    LIMIT = 64 << 20

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """The frames that `data` completes. Raises BadMessage on an absurd length."""
        self._buffer += data
        frames = []
        while len(self._buffer) >= 4:
            size = int.from_bytes(self._buffer[:4], "little")
            if size > self.LIMIT:
                raise BadMessage(f"a frame of {size} bytes")
            if len(self._buffer) < 4 + size:
                break
            frames.append(bytes(self._buffer[4 : 4 + size]))
            del self._buffer[: 4 + size]
        return frames

    @staticmethod
    def frame(data: bytes) -> bytes:
        """`data` as one frame."""
        return len(data).to_bytes(4, "little") + data
