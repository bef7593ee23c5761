"""PURE: what the events say of a run as it is now: who holds which rank, who stands by, what was lost."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from everstep.launcher.timeline import Event, Recovery, recoveries

Phase = Literal["starting", "running", "recovering", "finished", "failed"]


@dataclass(frozen=True)
class Seat:
    """A rank and who holds it."""

    rank: int
    node: str
    pid: int | None = None
    worker: str = ""
    generation: int = 1
    """Since which generation this worker holds it."""
    step: int | None = None
    """The last step that the events tell of; they tell of the first in each generation only."""
    lost: bool = False
    """Its worker is gone, and nobody has the rank yet."""


@dataclass(frozen=True)
class Standby:
    """A worker that waits for a rank."""

    node: str
    pid: int | None
    ready: bool
    worker: str = ""


@dataclass(frozen=True)
class Picture:
    """The run as the events up to the last one tell it."""

    phase: Phase
    reason: str
    """Why it ended, or what led to the generation."""
    code: int | None
    attempt: int
    """How often the run was begun with this file: after a requeue it is begun again."""
    generation: int
    world: int
    began: float
    last: float
    """When the last event came; unix seconds, as is `began`."""
    seats: tuple[Seat, ...]
    standbys: tuple[Standby, ...]
    spares: tuple[str, ...]
    """Nodes that hold no rank."""
    lost_nodes: tuple[str, ...]
    recoveries: tuple[Recovery, ...]
    notes: tuple[str, ...] = ()
    """What else happened of late, in words."""

    def to_json(self) -> dict[str, Any]:
        """The same, for programs."""
        plain = asdict(self)
        for told, recovery in zip(plain["recoveries"], self.recoveries, strict=True):
            told["milliseconds"] = dict(recovery.phases(recovery.noticed))
        return plain


@dataclass
class _Run:
    """A run as its events are read one by one."""

    attempt: int
    events: list[Event] = field(default_factory=list)
    phase: Phase = "starting"
    reason: str = ""
    code: int | None = None
    generation: int = 1
    world: int = 0
    seats: dict[int, Seat] = field(default_factory=dict)
    waiting: dict[str, Standby] = field(default_factory=dict)
    nodes: dict[str, None] = field(default_factory=dict)
    lost: dict[str, None] = field(default_factory=dict)
    stepped: set[int] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)

    def take(self, event: Event) -> None:
        self.events.append(event)
        self.generation = max(self.generation, int(event.get("generation") or 0))
        handle = _HANDLERS.get(event["event"])
        if handle is not None:
            handle(self, event)

    def worker_started(self, event: Event) -> None:
        node, rank = event["node"], event.get("rank")
        self.nodes[node] = None
        self.lost.pop(node, None)
        if rank is None:
            self.waiting[event["worker"]] = Standby(node, event.get("pid"), False, event["worker"])
        else:
            self._sit(Seat(rank, node, event.get("pid"), event["worker"], event["generation"]))

    def standby_ready(self, event: Event) -> None:
        known = self.waiting.get(event["worker"])
        pid = known.pid if known else None
        self.waiting[event["worker"]] = Standby(event["node"], pid, True, event["worker"])

    def placed(self, event: Event) -> None:
        known = self.waiting.pop(event["worker"], None)
        pid = known.pid if known else None
        self._sit(Seat(event["rank"], event["node"], pid, event["worker"], event["generation"]))

    def generation_begun(self, event: Event) -> None:
        self.world, self.reason = event["world"], event["reason"]
        self.stepped = set()
        if event["generation"] > 1:
            self.phase = "recovering"

    def step(self, event: Event) -> None:
        rank = event["rank"]
        if event.get("generation") != self.generation:
            return
        self.stepped.add(rank)
        if (seat := self.seats.get(rank)) is not None:
            self.seats[rank] = replace(seat, step=event["step"], lost=False)
        if self.phase in ("starting", "recovering") and self.stepped >= set(self.seats):
            self.phase = "running"

    def fault(self, event: Event) -> None:
        node, worker = event.get("node", ""), event.get("worker", "")
        if event.get("kind") == "node":
            self.lost[node] = None
            gone = [name for name, standby in self.waiting.items() if standby.node == node]
            for name in gone:
                del self.waiting[name]
        if self.waiting.pop(worker, None) is not None:
            self.notes.append(f"a standby on {node} was lost ({event.get('kind')})")
        for rank, seat in self.seats.items():
            if (worker and seat.worker == worker) or (event.get("kind") == "node" and seat.node == node):
                self.seats[rank] = replace(seat, lost=True)
                if self.phase == "running":
                    self.phase = "recovering"

    def over(self, event: Event) -> None:
        self.phase = "finished" if event["event"] == "finished" else "failed"
        self.reason, self.code = event.get("reason", ""), event.get("code", 0)
        self.waiting.clear()

    def _sit(self, seat: Seat) -> None:
        self.seats[seat.rank] = seat
        self.world = max(self.world, len(self.seats))

    def picture(self) -> Picture:
        holding = {seat.node for seat in self.seats.values()}
        spares = tuple(n for n in self.nodes if n not in holding and n not in self.lost)
        return Picture(
            phase=self.phase,
            reason=self.reason,
            code=self.code,
            attempt=self.attempt,
            generation=self.generation,
            world=self.world,
            began=self.events[0]["t"],
            last=self.events[-1]["t"],
            seats=tuple(self.seats[rank] for rank in sorted(self.seats)),
            standbys=tuple(self.waiting.values()),
            spares=spares,
            lost_nodes=tuple(self.lost),
            recoveries=tuple(recoveries(self.events)),
            notes=tuple(self.notes[-3:]),
        )


_HANDLERS = {
    "worker_started": _Run.worker_started,
    "standby_ready": _Run.standby_ready,
    "placed": _Run.placed,
    "generation": _Run.generation_begun,
    "step": _Run.step,
    "fault": _Run.fault,
    "finished": _Run.over,
    "failed": _Run.over,
}


def picture(events: Iterable[Event]) -> Picture | None:
    """The run that the events end with; None where there is no event yet.

    A file may hold several runs, one after the other: a requeued job appends to it.
    """
    run: _Run | None = None
    for event in events:
        if run is None or _begins_anew(run, event):
            run = _Run(attempt=run.attempt + 1 if run else 1)
        run.take(event)
    return run.picture() if run else None


def _begins_anew(run: _Run, event: Event) -> bool:
    if event["event"] != "worker_started":
        return False
    cut_off = int(event.get("generation") or 0) < run.generation  # it never said its last word
    return cut_off or run.phase in ("finished", "failed")


def ranks_by_node(seats: Sequence[Seat]) -> dict[str, list[Seat]]:
    """The seats of each node, in the order of their first ranks."""
    found: dict[str, list[Seat]] = {}
    for seat in seats:
        found.setdefault(seat.node, []).append(seat)
    return found
