"""What membership keeps in mind, and how it says what is to be done. No decisions in here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from everstep.launcher import messages as m
from everstep.launcher import placing
from everstep.launcher.roster import Action, Config, Emit, End, Node, Placement, Roster, Say, To, Worker
from everstep.launcher.tries import REQUEUE, Failure, Kind, Tries

Phase = Literal["gathering", "starting", "restarting", "regrouping", "running", "winding", "over"]


@dataclass
class Mind:
    """The state of a run as its coordinator knows it, and the actions that are being collected."""

    config: Config
    phase: Phase = "gathering"
    generation: int = 0
    attempt: int = 0  # whole-group starts, less one
    recovers: bool = False  # some worker has reached recovery.init()
    progress: bool = False  # some step has been committed
    joined: bool = False  # some generation has begun with Go
    frontier: int = 0  # the most steps that anybody is known to have committed
    all_done: int = -1
    stepped: bool = False  # some rank has committed a step in this generation
    troubled: bool = False  # some rank could not go on beside one whose script had ended
    failures: list[Failure] = field(default_factory=list)  # that led to the generation being formed
    versions: dict[str, str] = field(default_factory=dict)
    bad: dict[str, str] = field(default_factory=dict)  # nodes that were lost, and how
    saved: int = field(init=False)  # committed steps of the newest checkpoint; -1: none
    ending: End | None = None  # how the run is to end, once its state is saved
    checkpoints: bool = False  # the script has them configured
    saver: str = ""  # the worker that saves it
    moving: str = ""  # the unfit node whose ranks are to move as soon as the step under way is over
    asking: bool = False  # a replacement node may come
    refused: list[str] = field(default_factory=list)  # why none came, since the last committed step
    roster: Roster = field(init=False)
    tries: Tries = field(init=False)
    _out: list[Action] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.roster = Roster(self.config)
        self.tries = Tries(self.config.max_restarts)
        self.saved = self.config.saved

    @property
    def nodes(self) -> dict[str, Node]:
        """All nodes that ever introduced themselves."""
        return self.roster.nodes

    # --- what led here ---------------------------------------------------------------------------

    def _why(self) -> str:
        return "; ".join(f.text for f in self.failures)

    def _give_up(self, reason: str) -> None:
        """The recovery that is under way cannot succeed. The user's own failure is the user's to see."""
        own = next((f for f in self.failures if f.kind == "own"), None)
        code = own.code if own is not None else REQUEUE
        self._end(code, f"{self._why()}; {reason}", own.detail if own is not None else "")

    def _failure(
        self,
        worker: Worker,
        kind: Kind,
        text: str,
        what: str,
        code: int,
        detail: str = "",
        ranks: tuple[int, ...] = (),
    ) -> Failure:
        if worker.rank >= 0 and not ranks:
            ranks = (worker.rank,)
        said = worker.left if kind == "own" else None
        generation = said.generation if said is not None else self.generation
        step = worker.committed if worker.committed >= 0 else self.frontier
        return Failure(kind, text, what, ranks, step, generation, code, detail)

    # --- workers ---------------------------------------------------------------------------------

    def _assign(self, worker: Worker) -> None:
        env = self.config.environment(self._placement(worker.rank))
        start = not self.joined
        self._tell([worker], m.Assign(worker.rank, self.config.world, self.generation, env, start))

    def _placement(self, rank: int) -> Placement:
        master = self.nodes[self.roster.seats[0].node].hello
        port = master.ports[(self.attempt + self.generation) % len(master.ports)] if master.ports else 29500
        seat = self.roster.seats[rank]
        return Placement(rank, seat.local_rank, seat.group_rank, master.host, port, self.attempt)

    def _spawn_standby(self, node: Node, nice: bool) -> None:
        self._to(node.name, m.Spawn(self.roster.add(node).id, {}, attempt=self.attempt, nice=nice))

    def _top_up(self, nice: bool) -> None:
        for node in self.roster.alive():
            for _ in range(placing.missing(node, self.roster)):
                self._spawn_standby(node, nice)

    def _release(self, workers: list[Worker], expected: bool = True) -> None:
        """Tell these workers that they may end; `expected`: their end is then no news."""
        told = [w for w in workers if w.alive and not w.released]
        for worker in told:
            worker.released = expected
        self._tell(told, m.Release())

    def _count(self, worker: Worker, committed: int) -> None:
        worker.committed = max(worker.committed, committed)
        self.frontier = max(self.frontier, committed)
        self.progress = self.progress or committed > 0

    # --- decided elsewhere -----------------------------------------------------------------------

    def _place(self, failure: Failure | None = None) -> None:
        """Give every empty rank a standby, or wait for one, or climb down the ladder."""
        raise NotImplementedError

    def _failed(self, failure: Failure) -> None:
        """Somebody is lost, or cannot go on."""
        raise NotImplementedError

    def _all_hold(self) -> None:
        """Everybody stands between two steps, because a node is to be left."""
        raise NotImplementedError

    def _climb(self, ranks: Sequence[int]) -> None:
        """Nobody is left for these ranks."""
        raise NotImplementedError

    # --- actions ---------------------------------------------------------------------------------

    def _end(self, code: int, reason: str, detail: str = "", requeue: bool = False) -> None:
        if self.phase == "over":
            return
        self.phase = "over"
        if code == 0:
            self._emit("finished", reason=reason)
        else:
            self._emit("failed", reason=reason, code=code, requeue=requeue)
        self._out.append(End(code, reason, detail, requeue, tuple(self.bad) if requeue else ()))

    def _fault(self, worker: Worker, kind: str, noticed: str) -> None:
        rank = worker.rank if worker.rank >= 0 else None
        self._emit("fault", node=worker.node, rank=rank, kind=kind, noticed=noticed, worker=worker.id)

    def _to(self, node: str, message: m.ToAgent) -> None:
        if self.nodes[node].alive and self.phase != "over":
            self._out.append(To(node, message))

    def _tell(self, workers: list[Worker], message: m.ToWorker) -> None:
        by_node: dict[str, list[str]] = {}
        for worker in workers:
            if worker.alive:
                by_node.setdefault(worker.node, []).append(worker.id)
        for node, names in by_node.items():
            self._to(node, m.ToWorkers(names, message))

    def _emit(self, event: str, **fields: Any) -> None:
        if self.phase != "over" or event in ("finished", "failed"):
            self._out.append(Emit(event, {"generation": self.generation, **fields}))

    def _say(self, text: str) -> None:
        if self.phase != "over":
            self._out.append(Say(text))
