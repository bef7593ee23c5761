"""Membership: which worker holds which rank, decided purely.

`Membership.handle(node, message)` takes what an agent said (or that a node was
lost) and returns what to do about it: messages to agents, events for the events
file, lines for the log, and in the end how the run ended. There are no sockets,
clocks or processes in here, so thousands of event orders can be tried in a test.

The life of a run: agents gather; workers are started on every rank; those that
reach `recovery.init()` are assigned generation 1. A fault starts the next
generation: all are told to abort, each empty rank gets a standby, and when every
rank is ready a `Go` with the table of who holds what lets them restore and go on.
Scripts that never reach `init()` get torchrun's whole-group restarts instead.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, Union

from everstep.launcher import messages as m
from everstep.recovery.restore import Impossible, plan

# How often one step may fail by the user's own doing, and by outside force, without progress.
OWN_TRIES = 3
OUTSIDE_TRIES = 8
# A standby that cannot start this many times in a row is not started again on that node.
STANDBY_TRIES = 3


@dataclass(frozen=True)
class Config:
    """The shape of a run. `environment` gives a rank's variables as torchrun would set them."""

    nnodes: int
    nproc: int
    environment: Callable[[Placement], dict[str, str]]
    standby: int = 1
    spare_nodes: int = 0
    max_restarts: int = 0
    token: Callable[[], bytes] = lambda: b""  # a fresh secret for each generation

    @property
    def world(self) -> int:
        return self.nnodes * self.nproc


@dataclass(frozen=True)
class Placement:
    """Where a rank runs and whom it finds as master."""

    rank: int
    local_rank: int
    group_rank: int
    master_host: str
    master_port: int
    attempt: int


# --- what to do --------------------------------------------------------------------------------


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
class End:
    """The run is over."""

    code: int
    reason: str
    detail: str = ""  # a traceback


Action = Union[To, Emit, Say, End]


@dataclass(frozen=True)
class NodeLost:
    """The node's agent is gone."""

    how: str


Status = Literal["starting", "standby", "ranked", "leaving", "dead"]


@dataclass
class Node:
    """A node as its agent introduced it."""

    name: str
    hello: m.AgentHello
    alive: bool = True
    broken: int = 0  # standbys in a row that never got ready
    started: int = 0

    @property
    def index(self) -> int:
        return self.hello.index


@dataclass
class Worker:
    """One process. It keeps its rank while it is `ranked`, and while it is `leaving` without error."""

    id: str
    node: str
    status: Status = "starting"
    rank: int = -1
    said_hello: bool = False
    left: m.Leaving | None = None
    ready: m.Ready | None = None
    grouped: int = 0  # newest generation whose group it has built
    done: int = 0
    committed: int = -1
    told_to_die: bool = False


@dataclass
class Seat:
    """One rank: where it lives, and who holds it."""

    node: str
    local_rank: int
    group_rank: int
    holder: str | None = None


@dataclass
class Membership:
    """The state machine. Feed it with `handle`; it keeps no reference to anything outside."""

    config: Config
    nodes: dict[str, Node] = field(default_factory=dict)
    workers: dict[str, Worker] = field(default_factory=dict)
    seats: list[Seat] = field(default_factory=list)
    generation: int = 0
    attempt: int = 0  # whole-group starts, less one
    phase: Literal["gathering", "starting", "regrouping", "running", "over"] = "gathering"
    recovers: bool = False  # some worker has reached recovery.init()
    progress: bool = False  # some step has been committed
    joined: bool = False  # some generation has begun with Go
    all_done: int = 0
    released: bool = False
    versions: dict[str, str] = field(default_factory=dict)
    failures: dict[tuple[str, int], set[int]] = field(default_factory=dict)
    stepped: set[int] = field(default_factory=set)  # ranks that committed in this generation
    why: str = ""  # reason of the generation being formed
    said_waiting: bool = False
    exit_codes: dict[str, int] = field(default_factory=dict)
    _out: list[Action] = field(default_factory=list)

    # --- entrance -------------------------------------------------------------------------------

    def handle(self, node: str, message: m.FromAgent | NodeLost) -> list[Action]:
        """What to do about `message` of `node`. Unknown nodes and workers are ignored."""
        self._out = []
        if self.phase != "over":
            if isinstance(message, m.AgentHello):
                self._agent_hello(message)
            elif node in self.nodes and self.nodes[node].alive:
                self._dispatch(self.nodes[node], message)
        out, self._out = self._out, []
        return out

    def _dispatch(self, node: Node, message: m.FromAgent | NodeLost) -> None:
        if isinstance(message, NodeLost):
            self._node_lost(node, message.how)
        elif isinstance(message, m.Heartbeat):
            for name, committed in message.steps.items():
                if name in self.workers:
                    self.workers[name].committed = max(self.workers[name].committed, committed)
        elif isinstance(message, m.WorkerStarted):
            worker = self.workers.get(message.worker)
            if worker is not None:
                rank = worker.rank if worker.rank >= 0 else None
                self._emit("worker_started", node=node.name, worker=worker.id, pid=message.pid, rank=rank)
        elif isinstance(message, m.WorkerExited):
            worker = self.workers.get(message.worker)
            if worker is not None and worker.status != "dead":
                self._exited(worker, message)
        elif isinstance(message, m.FromWorkers):
            worker = self.workers.get(message.worker)
            if worker is not None and worker.status != "dead":
                self._from_worker(worker, message.message)

    def _from_worker(self, worker: Worker, message: m.FromWorker) -> None:
        if isinstance(message, m.Hello):
            self._hello(worker, message)
        elif isinstance(message, m.Ready):
            if message.generation == self.generation and worker.status in ("ranked", "leaving"):
                worker.ready = message
                worker.committed = max(worker.committed, message.committed)
                self._try_go()
        elif isinstance(message, m.Published):
            if message.generation == self.generation:
                entry = m.Entry(message.generation, message.key, message.value)
                self._tell(self._holders(), entry)
        elif isinstance(message, m.Committed):
            self._committed(worker, message)
        elif isinstance(message, m.GroupReady):
            worker.grouped = message.generation
            if message.seconds > 0:
                self._emit("group_ready", rank=worker.rank, seconds=message.seconds, generation=message.generation)
            self._release_donors()
        elif isinstance(message, m.Restored):
            self._emit(
                "restored",
                rank=worker.rank,
                bytes=message.bytes,
                seconds=message.seconds,
                donors=message.donors,
                tier=message.tier,
                generation=message.generation,
            )
        elif isinstance(message, m.AbortDone):
            self._emit("abort_done", rank=worker.rank, seconds=message.seconds, generation=message.generation)
        elif isinstance(message, m.Trouble):
            if message.generation == self.generation and worker.rank >= 0 and self.phase == "running":
                self._fault(worker, "trouble", "itself")
                self._next_generation(f"rank {worker.rank} could not go on ({message.what})")
        elif isinstance(message, m.Done):
            worker.done = max(worker.done, message.total)
            self._try_all_done()
        elif isinstance(message, m.Leaving):
            self._leaving(worker, message)
        elif isinstance(message, m.Note):
            self._say(message.text)

    # --- coming up ------------------------------------------------------------------------------

    def _agent_hello(self, hello: m.AgentHello) -> None:
        if hello.node in self.nodes:
            return
        node = Node(hello.node, hello)
        self.nodes[hello.node] = node
        if hello.problem:
            return self._end(hello.code, hello.problem)
        if not self._same_versions(node.name, hello.versions):
            return None
        if len(self.nodes) == self.config.nnodes + self.config.spare_nodes:
            self._seat_everyone()
            self._start_all()
        return None

    def _same_versions(self, who: str, versions: dict[str, str]) -> bool:
        for name, version in versions.items():
            known = self.versions.setdefault(name, version)
            if known != version:
                self._end(
                    64,
                    f"{who} has {name} {version}, other nodes have {known}: "
                    f"install the same {name} on every node",
                )
                return False
        return True

    def _seat_everyone(self) -> None:
        primary = sorted((n for n in self.nodes.values() if not n.hello.spare), key=lambda n: n.index)
        self.seats = [
            Seat(node.name, local, group)
            for group, node in enumerate(primary[: self.config.nnodes])
            for local in range(self.config.nproc)
        ]

    def _start_all(self) -> None:
        self.phase = "starting"
        self.generation += 1
        self.why = self.why or "the run begins"
        for rank, seat in enumerate(self.seats):
            worker = self._spawn(self.nodes[seat.node], rank)
            worker.status, worker.rank = "ranked", rank
            seat.holder = worker.id

    def _spawn(self, node: Node, rank: int = -1, nice: bool = False) -> Worker:
        worker = Worker(f"{node.name}/{node.started}", node.name)
        node.started += 1
        self.workers[worker.id] = worker
        env: dict[str, str] = {}
        local_rank = -1
        if rank >= 0:
            local_rank = self.seats[rank].local_rank
            env = self.config.environment(self._placement(rank))
        self._to(node.name, m.Spawn(worker.id, env, rank, local_rank, self.attempt, nice))
        return worker

    def _placement(self, rank: int) -> Placement:
        master = self.nodes[self.seats[0].node].hello
        port = master.ports[(self.attempt + self.generation) % len(master.ports)] if master.ports else 29500
        seat = self.seats[rank]
        return Placement(rank, seat.local_rank, seat.group_rank, master.host, port, self.attempt)

    def _hello(self, worker: Worker, hello: m.Hello) -> None:
        if not self._same_versions(worker.node, hello.versions):
            return
        self.recovers = worker.said_hello = True
        if worker.rank >= 0:
            if all(self.workers[h].said_hello for h in self._holders()):
                for holder in self._holders():
                    self._assign(self.workers[holder])
                self._emit("generation", world=self.config.world, reason=self.why)
                self._say(f"generation {self.generation}, world {self.config.world}: {self.why}")
                self._top_up(nice=False)
        elif worker.status == "starting":
            worker.status = "standby"
            self.nodes[worker.node].broken = 0
            self._place()

    def _assign(self, worker: Worker) -> None:
        env = self.config.environment(self._placement(worker.rank))
        self._tell([worker.id], m.Assign(worker.rank, self.config.world, self.generation, env, start=not self.joined))

    # --- standbys -------------------------------------------------------------------------------

    def _hosted(self, node: str) -> int:
        return sum(1 for s in self.seats if s.node == node and s.holder is not None)

    def _wanted(self, node: Node) -> int:
        """How many standbys the node should have."""
        hosted = self._hosted(node.name)
        if node.hello.spare and not hosted:
            return self.config.nproc
        return self.config.standby

    def _idle(self, node: str, status: Status) -> list[Worker]:
        return [w for w in self.workers.values() if w.node == node and w.status == status and w.rank < 0]

    def _top_up(self, nice: bool) -> None:
        """Start the standbys that are missing."""
        for node in self._alive():
            have = len(self._idle(node.name, "standby")) + len(self._idle(node.name, "starting"))
            while have < self._wanted(node) and node.broken < STANDBY_TRIES:
                self._spawn(node, nice=nice)
                have += 1

    def _alive(self) -> list[Node]:
        return sorted((n for n in self.nodes.values() if n.alive), key=lambda n: n.index)

    def _can_spawn(self, node: Node) -> bool:
        wanted = self.config.standby > 0 or (node.hello.spare and not self._hosted(node.name))
        return wanted and node.broken < STANDBY_TRIES

    # --- faults ---------------------------------------------------------------------------------

    def _exited(self, worker: Worker, exited: m.WorkerExited) -> None:
        kind = _kind(exited.code)
        was, worker.status = worker.status, "dead"
        code = exited.code if exited.code >= 0 else 128 - exited.code
        self.exit_codes[worker.id] = code
        if worker.told_to_die or (worker.rank < 0 and was == "leaving"):
            if self.phase == "starting" and not any(self._living(w) for w in self._doomed()):
                self._restart_when_clear()
            self._try_go()
            return
        if worker.rank < 0:
            node = self.nodes[worker.node]
            node.broken += was == "starting"
            self._emit("fault", node=worker.node, rank=None, kind=kind, noticed=exited.how, pid_of=worker.id)
            if node.broken >= STANDBY_TRIES:
                self._say(f"a standby on {worker.node} ended {STANDBY_TRIES} times before it was ready ({kind}): no more are started there")
            else:
                self._say(f"a standby on {worker.node} died ({kind}); another is started")
                self._top_up(nice=True)
            self._place()
            return
        if exited.code == 0 and (not self.recovers or worker.left is not None or worker.said_hello):
            self._try_end()
            return
        if self.released or worker.left is not None:
            # Training was over: what it ended with is the user's own code.
            self._end(code, f"rank {worker.rank} on {worker.node} ended with {kind} after training")
            return
        rank = worker.rank
        self._fault(worker, kind, exited.how)
        self._vacate(worker)
        text = f"rank {rank} on {worker.node} died ({kind}), noticed by {exited.how}"
        own = exited.code > 0 or -exited.code in _OWN_SIGNALS
        self._lost_rank(worker, text, kind, code, own)

    def _lost_rank(self, worker: Worker, text: str, what: str, code: int, own: bool, detail: str = "") -> None:
        if not self.joined:
            self._early_fault(text, code, own, detail)
            return
        step = max(worker.committed, 0)
        generation = worker.left.generation if worker.left is not None else self.generation
        tries = self.failures.setdefault(("own" if own else "outside", step), set())
        tries.add(generation)
        if own and len(tries) >= OWN_TRIES:
            self._end(code, f"step {step} failed {OWN_TRIES} times, last on rank {_rank_of(text)}: {what}", detail)
        elif not own and len(tries) >= OUTSIDE_TRIES:
            self._end(75, f"step {step} lost a worker {OUTSIDE_TRIES} times without progress: {text}")
        else:
            self._next_generation(text)

    def _early_fault(self, text: str, code: int, own: bool, detail: str) -> None:
        """Nothing is gained yet, so everybody starts afresh, as torchrun does."""
        limit = self.config.max_restarts
        if self.recovers and not own:
            limit = max(limit, OWN_TRIES)
        if self.attempt >= limit:
            more = "" if self.config.max_restarts or self.recovers else " (--max-restarts N would try again)"
            self._end(code, text + more, detail)
            return
        self.why = f"{text}; all start again, attempt {self.attempt + 1} of {limit}"
        self._say(self.why)
        self.phase = "starting"
        for worker in self.workers.values():
            if worker.rank >= 0 and worker.status != "dead" and not worker.told_to_die:
                worker.told_to_die = True
                self._to(worker.node, m.Kill(worker.id, "the whole group starts again"))
        self._restart_when_clear()

    def _doomed(self) -> list[Worker]:
        return [w for w in self.workers.values() if w.told_to_die and w.rank >= 0]

    def _living(self, worker: Worker) -> bool:
        return worker.status != "dead" and self.nodes[worker.node].alive

    def _restart_when_clear(self) -> None:
        if any(self._living(w) for w in self._doomed()):
            return
        for worker in self._doomed():
            worker.rank = -1
        for rank, seat in enumerate(self.seats):
            seat.holder = None
            if not self.nodes[seat.node].alive and not self._reseat(rank):
                return
        self.attempt += 1
        self._start_all()

    def _reseat(self, rank: int) -> bool:
        """Give a rank of a lost node a new home on a spare node, before anything has begun."""
        for node in self._alive():
            taken = {s.local_rank for s in self.seats if s.node == node.name}
            free = [i for i in range(self.config.nproc) if i not in taken]
            if node.hello.spare and free:
                self.seats[rank].node, self.seats[rank].local_rank = node.name, free[0]
                return True
        self._end(75, f"rank {rank} has no node left: {self.why}")
        return False

    def _node_lost(self, node: Node, how: str) -> None:
        node.alive = False
        ranks = [r for r, s in enumerate(self.seats) if s.node == node.name and s.holder is not None]
        for worker in self.workers.values():
            if worker.node == node.name:
                worker.status = "dead"
        held = [w for w in (self.seats[r].holder for r in ranks) if w is not None]
        self._emit("fault", node=node.name, rank=ranks[0] if len(ranks) == 1 else None, ranks=ranks, kind="node", noticed=how)
        what = f"node {node.name} was lost, noticed by {how}"
        if not ranks:
            self._say(f"{what}; it held no rank")
            if self.phase == "gathering":
                self._end(75, what)
            return
        for rank in ranks:
            self.seats[rank].holder = None
        text = f"{what}; it held rank{'s' * (len(ranks) > 1)} {_ranges(ranks)}"
        self._lost_rank(self.workers[held[0]], text, "node lost", 75, own=False)

    def _leaving(self, worker: Worker, leaving: m.Leaving) -> None:
        worker.left = leaving
        worker.committed = max(worker.committed, leaving.committed)
        if worker.rank < 0:
            return
        if not leaving.error:
            if not leaving.joined and leaving.code == 0:
                self._end(64, "the script ended without a call of run.steps(): put the training loop in `for step in run.steps(N):` (see --help), or remove recovery.init()")
                return
            worker.status = "leaving"
            if leaving.code:
                self._end(leaving.code, f"rank {worker.rank} on {worker.node} ended with exit code {leaving.code}")
            self._try_end()
            return
        rank, where = worker.rank, worker.node
        if leaving.usage:
            self._end(leaving.code or 64, f"rank {rank} on {where}: {leaving.error}")
            return
        text = f"rank {rank} on {where} raised {leaving.error}"
        self._fault(worker, "exception", "itself")
        if self.all_done and worker.done >= self.all_done:
            self._end(leaving.code or 1, f"{text} after training", leaving.traceback)
            return
        if not leaving.joined and not self.joined:
            # In its own set-up, which trying again does not change, unless the user asked for it.
            self._vacate(worker)
            worker.told_to_die = True
            self._tell([worker.id], m.Release())
            self._early_fault(text, leaving.code or 1, True, leaving.traceback)
            return
        self._vacate(worker)
        worker.status = "leaving"  # without a rank, but with state: a donor until its rank is restored
        self._lost_rank(worker, text, leaving.error, leaving.code or 1, True, leaving.traceback)

    def _vacate(self, worker: Worker) -> None:
        if worker.rank >= 0 and self.seats[worker.rank].holder == worker.id:
            self.seats[worker.rank].holder = None
        worker.rank = -1

    def _fault(self, worker: Worker, kind: str, noticed: str) -> None:
        self._emit("fault", node=worker.node, rank=worker.rank, kind=kind, noticed=noticed)

    # --- the next generation --------------------------------------------------------------------

    def _next_generation(self, why: str) -> None:
        self.why = f"{self.why}; {why}" if self.phase == "regrouping" else why
        self.generation += 1
        self.phase = "regrouping"
        self.stepped = set()
        self.said_waiting = False
        for worker in self.workers.values():
            worker.ready = None
        concerned = self._holders() + [w.id for w in self.workers.values() if w.status == "leaving" and w.rank < 0]
        self._tell(concerned, m.Abort(self.generation))
        self._emit("generation", world=self.config.world, reason=why)
        self._place(why)

    def _place(self, why: str = "") -> None:
        """Give every empty rank a standby, or wait for one, or give up."""
        if self.phase != "regrouping":
            return
        taken, waiting = [], []
        for rank, seat in enumerate(self.seats):
            if seat.holder is not None:
                continue
            standby, reason = self._standby_for(rank)
            if standby is None and not reason:
                return self._end(75, f"{self.why}; no standby is left for rank {rank} and none is coming: requeue the job, or start it with --standby or --spare-nodes")
            if standby is None:
                waiting.append(reason)
                continue
            self._seat(rank, standby)
            taken.append(f"standby on {standby.node} takes {'it' if len(self.seats) and not waiting else f'rank {rank}'}")
        if taken:
            self._say(f"{self.why if not why else why}; {'; '.join(taken)}; generation {self.generation}, world {self.config.world}")
        elif why and not waiting:
            self._say(f"{why}; generation {self.generation}, world {self.config.world}")
        if waiting and not self.said_waiting:
            self.said_waiting = True
            self._say(f"{why or self.why}; {'; '.join(waiting)}")
        return self._try_go()

    def _standby_for(self, rank: int) -> tuple[Worker | None, str]:
        """The standby that takes this rank; or None and what it waits for; or None and nothing."""
        seat = self.seats[rank]
        home = self.nodes[seat.node]
        groups: list[list[Node]] = [[home]] if home.alive else []
        groups.append([n for n in self._alive() if n.hello.spare and self._room(n) and n is not home])
        # The last resort is a standby beside other ranks, which has no device of its own.
        groups.append([n for n in self._alive() if not n.hello.devices and n is not home])
        for group in groups:
            for node in group:
                ready = self._idle(node.name, "standby")
                if ready:
                    return ready[0], f"standby on {node.name}"
            for node in group:
                if self._idle(node.name, "starting"):
                    return None, f"waiting for the standby on {node.name} to be ready"
                if self._can_spawn(node):
                    self._spawn(node)
                    return None, f"waiting for a new standby on {node.name}"
        return None, ""

    def _room(self, node: Node) -> bool:
        return self._hosted(node.name) < self.config.nproc

    def _seat(self, rank: int, worker: Worker) -> None:
        seat = self.seats[rank]
        if seat.node != worker.node:
            taken = {s.local_rank for s in self.seats if s.node == worker.node and s.holder is not None}
            seat.node = worker.node
            seat.local_rank = next(i for i in range(len(self.seats) + 1) if i not in taken)
        seat.holder = worker.id
        worker.status, worker.rank = "ranked", rank
        self._assign(worker)

    def _try_go(self) -> None:
        if self.phase not in ("starting", "regrouping") or any(s.holder is None for s in self.seats):
            return
        donors = [w for w in self.workers.values() if w.status == "leaving" and w.rank < 0]
        present = [self.workers[h] for h in self._holders()]
        if any(w.ready is None for w in present + donors):
            return
        members = [
            m.Member(w.id, w.rank, r.committed, r.whole, r.fresh, r.host, r.port, r.layout, r.checkpoint, r.fingerprint)
            for w in present + donors
            if (r := w.ready) is not None
        ]
        odd = next((x for x in members if x.layout != members[0].layout), None)
        if odd is not None:
            self._end(
                64,
                f"rank {odd.rank}'s model has other shapes than rank {members[0].rank}'s "
                f"({odd.layout.rpartition(',')[0]} against {members[0].layout.rpartition(',')[0]}): "
                "build the same model on every rank",
            )
            return
        decision = plan(members, progress=self.progress)
        if isinstance(decision, Impossible):
            self._end(75, f"{self.why}; {decision.reason}")
            return
        if self.phase == "regrouping" or decision.source == "disk":
            self._say(decision.reason)
        self.phase = "running"
        self.joined = True
        go = m.Go(self.generation, members, self.config.token(), self.progress)
        self._tell([x.worker for x in members], go)

    def _release_donors(self) -> None:
        """Workers that raised stay as donors until every rank stands in the new group."""
        if any(self.workers[h].grouped < self.generation for h in self._holders()):
            return
        for worker in self.workers.values():
            if worker.status == "leaving" and worker.rank < 0 and not worker.told_to_die:
                worker.told_to_die = True
                self._tell([worker.id], m.Release())

    def _committed(self, worker: Worker, committed: m.Committed) -> None:
        if worker.rank < 0:
            return
        worker.committed = max(worker.committed, committed.committed)
        self.progress = True
        if committed.generation != self.generation or worker.rank in self.stepped:
            return
        first = not self.stepped
        self.stepped.add(worker.rank)
        self._emit("step", rank=worker.rank, step=committed.committed - 1)
        self.failures = {k: v for k, v in self.failures.items() if k[1] >= committed.committed}
        if first and self.generation > 1:
            self._say(f"generation {self.generation} goes on: step {committed.committed - 1} committed")
            self._top_up(nice=True)

    # --- the end --------------------------------------------------------------------------------

    def _try_all_done(self) -> None:
        if any(s.holder is None for s in self.seats):
            return
        total = min(self.workers[h].done for h in self._holders())
        if total > 0:
            self.all_done = max(self.all_done, total)
            self._tell(self._holders(), m.AllDone(total))

    def _try_end(self) -> None:
        """All ranks have left: let them go; all are gone: the run is over."""
        if any(s.holder is None for s in self.seats):
            return
        held = [self.workers[h] for h in self._holders()]
        if all(w.status == "dead" for w in held):
            code = max(self.exit_codes.get(w.id, 0) for w in held)
            self._end(code, "finished" if code == 0 else f"a worker ended with exit code {code} after training")
        elif all(w.status in ("dead", "leaving") for w in held) and not self.released:
            self.released = True
            self._tell([w.id for w in held if w.status == "leaving"], m.Release())

    def _end(self, code: int, reason: str, detail: str = "") -> None:
        if self.phase == "over":
            return
        self.phase = "over"
        if code == 0:
            self._emit("finished", reason=reason)
        else:
            self._emit("failed", reason=reason, code=code)
        self._out.append(End(code, reason, detail))

    # --- small things ---------------------------------------------------------------------------

    def _holders(self) -> list[str]:
        return [s.holder for s in self.seats if s.holder is not None]

    def _to(self, node: str, message: m.ToAgent) -> None:
        if self.nodes[node].alive:
            self._out.append(To(node, message))

    def _tell(self, workers: list[str], message: m.ToWorker) -> None:
        by_node: dict[str, list[str]] = {}
        for name in workers:
            if self.workers[name].status != "dead":
                by_node.setdefault(self.workers[name].node, []).append(name)
        for node, names in by_node.items():
            self._to(node, m.ToWorkers(names, message))

    def _emit(self, event: str, **fields: Any) -> None:
        self._out.append(Emit(event, {"generation": self.generation, **fields}))

    def _say(self, text: str) -> None:
        self._out.append(Say(text))


_OWN_SIGNALS = {signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSYS}


def _kind(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


def _rank_of(text: str) -> str:
    return text.split()[1] if text.startswith("rank ") else "?"


def _ranges(ranks: list[int]) -> str:
    return ", ".join(str(r) for r in ranks)
