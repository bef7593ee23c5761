"""The roster of a run: nodes, workers and seats, and the words that membership speaks in.

Plain data and what can be asked of it; nothing in here decides anything.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from everstep.launcher import messages as m
from everstep.launcher.ladder import RUNGS, Rung


@dataclass(frozen=True)
class Placement:
    """Where a rank runs and whom it finds as master."""

    rank: int
    local_rank: int
    group_rank: int
    master_host: str
    master_port: int
    attempt: int


@dataclass(frozen=True)
class Config:
    """The shape of a run. `environment` gives a rank's variables as torchrun would set them."""

    nnodes: int
    nproc: int
    environment: Callable[[Placement], dict[str, str]]
    standby: int = 1
    spare_nodes: int = 0
    max_restarts: int = 0
    expects_recovery: bool = False  # the script is likely to call recovery.init(): it mentions everstep
    token: Callable[[], bytes] = lambda: b""  # a fresh secret for each generation
    allowed: tuple[Rung, ...] = RUNGS  # of the resume ladder
    in_job: bool = False  # there is a Slurm job to ask for more
    can_requeue: bool = False
    why_not: str = "this is no batch job"  # why it cannot be requeued
    attempts: int = 0  # times in a row that the job was requeued without progress
    saved: int = -1  # committed steps of the checkpoint that an earlier attempt has left
    grace: float = 10.0  # seconds for the step under way, when the run is told to stop

    @property
    def world(self) -> int:
        return self.nnodes * self.nproc


# --- what happens that is no message, and what to do ---------------------------------------------


@dataclass(frozen=True)
class NodeLost:
    """The node's agent is gone."""

    how: str


@dataclass(frozen=True)
class StopAsked:
    """The run as a whole is told to stop; `code` where nothing has to be saved first."""

    why: str
    code: int
    requeue: bool = False


@dataclass(frozen=True)
class TimeUp:
    """A `Timer` has gone off."""

    name: str
    generation: int


@dataclass(frozen=True)
class RecruitFailed:
    """No replacement node will come of what was asked for; `final`: nor of asking again."""

    reason: str
    final: bool = False


RunEvent: TypeAlias = StopAsked | TimeUp | RecruitFailed


@dataclass(frozen=True)
class To:
    """Send `message` to the agent of `node`."""

    node: str
    message: m.ToAgent


@dataclass(frozen=True)
class Emit:
    """One object of the events file (the time is added by whoever writes it)."""

    event: str
    fields: dict[str, Any]


@dataclass(frozen=True)
class Say:
    """One line for people."""

    text: str


@dataclass(frozen=True)
class Timer:
    """Say `TimeUp` in so many seconds."""

    name: str
    seconds: float
    generation: int


@dataclass(frozen=True)
class AskWhy:
    """Most agents were told to stop by this signal: find out why, and say `StopAsked`."""

    signal: int


@dataclass(frozen=True)
class Recruit:
    """Ask Slurm for one more node, after a pause; its agent introduces itself, or `RecruitFailed` comes."""

    pause: float
    reason: str
    exclude: tuple[str, ...]


@dataclass(frozen=True)
class Blame:
    """A node was lost: tell the site, if it wants to know."""

    node: str
    reason: str


@dataclass(frozen=True)
class End:
    """The run is over."""

    code: int
    reason: str
    detail: str = ""  # a traceback
    requeue: bool = False  # the job goes back to the queue, without these nodes
    exclude: tuple[str, ...] = ()


Action: TypeAlias = To | Emit | Say | Timer | AskWhy | Recruit | Blame | End

# --- who is there --------------------------------------------------------------------------------

Status = Literal["starting", "standby", "ranked", "leaving", "dead"]


@dataclass
class Node:
    """A node as its agent introduced it."""

    name: str
    hello: m.AgentHello
    alive: bool = True
    unfit: str = ""  # why it is not fit for work, by its health checks
    warned: str = ""  # the same, as far as it was said
    told: int = 0  # the signal that told its agent to stop
    broken: int = 0  # standbys in a row that never got ready
    started: int = 0

    @property
    def index(self) -> int:
        return self.hello.index


@dataclass
class Worker:
    """One process. It keeps its rank when it dies in order; it loses it when it must be replaced."""

    id: str
    node: str
    status: Status = "starting"
    rank: int = -1
    said_hello: bool = False
    ready: m.Ready | None = None
    held: int = 0  # newest generation in which it holds between two steps
    grouped: int = 0  # newest generation whose group it has built
    done: int = -1  # steps of the loop that it has been through
    committed: int = -1
    left: m.Leaving | None = None
    released: bool = False  # it was told that it may end, or killed: its end is no news
    exit: int | None = None

    @property
    def alive(self) -> bool:
        return self.status != "dead"

    @property
    def through(self) -> bool:
        """Has it said Done for every step that it has committed?"""
        return self.done >= 0 and self.done >= self.committed

    @property
    def donor(self) -> bool:
        """It raised, has lost its rank, and stays for the state it holds."""
        return self.rank < 0 and self.status == "leaving" and self.left is not None and self.left.joined

    @property
    def left_early(self) -> bool:
        """Its script has ended, without an error, before its loop was through."""
        ended = self.exit == 0 or (self.left is not None and not self.left.error)
        return ended and not self.through

    def member(self, r: m.Ready) -> m.Member:
        """Its row in a generation's table."""
        held = (r.committed, r.whole, r.fresh, r.host, r.port, r.layout, r.checkpoint, r.fingerprint)
        return m.Member(self.id, self.rank, *held)

    @property
    def deserted(self) -> bool:
        """It left early, and it is certain that this was no failure: it will not come back."""
        return self.exit == 0 and not self.through


@dataclass
class Seat:
    """One rank: where it lives, and who holds it."""

    node: str
    local_rank: int
    group_rank: int
    holder: str | None = None


@dataclass
class Roster:
    """Everybody who is part of the run."""

    config: Config
    nodes: dict[str, Node] = field(default_factory=dict)
    workers: dict[str, Worker] = field(default_factory=dict)
    seats: list[Seat] = field(default_factory=list)

    def add(self, node: Node) -> Worker:
        """A new worker of this node, named after it."""
        worker = Worker(f"{node.name}/{node.started}", node.name)
        node.started += 1
        self.workers[worker.id] = worker
        return worker

    def holders(self) -> list[Worker]:
        """Who holds a rank, in rank order; empty seats are left out."""
        return [self.workers[s.holder] for s in self.seats if s.holder is not None]

    def empty(self) -> list[int]:
        """Ranks that nobody holds."""
        return [rank for rank, seat in enumerate(self.seats) if seat.holder is None]

    def donors(self) -> list[Worker]:
        """Workers without a rank that stay for the state they hold."""
        return [w for w in self.workers.values() if w.donor]

    def alive(self) -> list[Node]:
        """Nodes that are there, by index."""
        return sorted((n for n in self.nodes.values() if n.alive), key=lambda n: n.index)

    def idle(self, node: Node, *status: Status) -> list[Worker]:
        """Workers of this node without a rank that are in one of these states, oldest first."""
        return [w for w in self.workers.values() if w.node == node.name and w.rank < 0 and w.status in status]

    def hosted(self, node: Node) -> int:
        """How many ranks live on this node, those that wait for a standby of it included."""
        return sum(1 for s in self.seats if s.node == node.name)

    def sit(self, rank: int, worker: Worker) -> None:
        """Give the rank to this worker."""
        seat = self.seats[rank]
        if seat.node != worker.node:
            taken = {s.local_rank for s in self.seats if s.node == worker.node}
            seat.local_rank = next(i for i in range(len(self.seats) + 1) if i not in taken)
            seat.node = worker.node
        seat.holder = worker.id
        worker.status, worker.rank = "ranked", rank

    def vacate(self, worker: Worker) -> None:
        """Take the rank from this worker."""
        if worker.rank >= 0 and self.seats[worker.rank].holder == worker.id:
            self.seats[worker.rank].holder = None
        worker.rank = -1
