"""A run in miniature: workers that follow the protocol, and a scheduler that orders events as it likes.

What one worker says arrives in its order; between workers, and between both directions,
any order may happen. Time does not exist: a timer (a worker that waits for news of a
fault behind a failed collective) goes off when nothing else can happen any more. When
no timer is left either and the run has not ended, it is stuck, which is an error.

A worker's state is the list of steps that were applied to it, so a step done twice, left
out, or taken from somebody who was in the middle of one shows.
"""

from __future__ import annotations

import random
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from everstep.launcher import membership as ms
from everstep.launcher import messages as m
from everstep.recovery.restore import Impossible, plan

SIGKILL = 9
VERSIONS = {"torch": "2"}


@dataclass(frozen=True)
class Bug:
    """What the user's script does on `rank` (None: on each) when it comes to `step`, `times` times in all.

    kinds: raise, exit (with `code`), os_exit (with `code`), break; step -1 is its set-up,
    step == total is after the loop. `late`: after the step's collective and the optimizer.
    """

    kind: str
    step: int
    rank: int | None = None
    code: int = 0
    times: int = 1_000_000
    late: bool = False


@dataclass(frozen=True)
class Shape:
    """A run to be played."""

    nnodes: int = 2
    nproc: int = 1
    standby: int = 1
    spare_nodes: int = 0
    max_restarts: int = 0
    steps: int = 3
    recovers: bool = True
    devices: int = 0
    bugs: tuple[Bug, ...] = ()
    checkpoint_every: int = 0
    in_job: bool = False
    replacements: tuple[str, ...] = ()  # what comes of each request: node, refused, never; then refused


class PeerLost(Exception):
    """The worker's `Fault`."""


class UserError(Exception):
    """The user's own exception."""


class Leave(Exception):
    """sys.exit(code), or a return from the middle of the loop."""

    def __init__(self, code: int) -> None:
        self.code = code


class OsExit(Leave):
    """os._exit(code): no good-bye."""


Wait = tuple[Callable[[], bool], bool]  # what is waited for, and whether a timer may end the wait


class Worker:
    """One process: a generator that yields what it waits for."""

    def __init__(self, run: Run, spawn: m.Spawn, node: str) -> None:
        self.run, self.name, self.node = run, spawn.worker, node
        self.rank = spawn.rank
        self.inbox: deque[m.ToWorker] = deque()
        self.outbox: deque[m.FromAgent] = deque()
        self.alive = True
        self.assigned: m.Assign | None = None
        self.generation = 0
        self.joined = 0
        self.go: m.Go | None = None
        self.all_done = -1
        self.hold = self.save = 0
        self.released = False
        self.timed_out = False
        self.committed = 0
        self.whole = True
        self.state: list[Any] = []
        self.reported = 0
        self.ended_well = False
        self.life = self.live()
        self.wait: Wait = (lambda: True, False)
        self.outbox.append(m.WorkerStarted(self.name, 4711))

    # --- talking --------------------------------------------------------------------------------

    def send(self, message: m.FromWorker) -> None:
        self.outbox.append(m.FromWorkers(self.name, message))

    def take(self) -> None:
        """The control thread: one message of the launcher."""
        message = self.inbox.popleft()
        if isinstance(message, m.Assign):
            self.assigned, self.rank = message, message.rank
            self.generation = max(self.generation, message.generation)
        elif isinstance(message, m.Abort):
            if message.generation > self.generation:
                self.generation = message.generation
                self.send(m.AbortDone(message.generation, 0.0))
        elif isinstance(message, m.Go):
            self.go = message
        elif isinstance(message, m.AllDone):
            self.all_done = max(self.all_done, message.total)
        elif isinstance(message, m.Hold):
            self.hold = message.generation
        elif isinstance(message, m.Save):
            self.save = message.generation
        elif isinstance(message, m.Release):
            self.released = True

    def ready_to_run(self) -> bool:
        return self.alive and self.wait[0]()

    def advance(self) -> None:
        try:
            self.wait = next(self.life)
        except StopIteration as end:
            self.run.ended(self, end.value)

    def time_out(self) -> None:
        self.timed_out = True
        self.wait = (lambda: True, False)

    # --- the script -----------------------------------------------------------------------------

    def live(self) -> Iterator[Wait]:
        shape = self.run.shape
        yield pause()
        if not shape.recovers:
            for step in range(shape.steps):
                yield pause()
                bug = self.bug(step)
                if bug is not None:
                    return bug.code or 1
            return 0
        try:
            self.stumble(-2)
        except Leave as leave:  # before recovery.init(): nothing is said
            return leave.code
        except UserError:
            return 1
        self.send(m.Hello(VERSIONS))
        yield from self.until(lambda: self.assigned is not None)
        error, code = "", 0
        try:
            yield from self.script(shape)
        except UserError as raised:
            error, code = f"ValueError: {raised}", 1
        except OsExit as leave:
            return leave.code
        except Leave as leave:
            code = leave.code
        yield pause()
        seen = self.joined or self.generation
        said = m.Leaving(
            seen,
            self.joined > 0,
            self.committed,
            error,
            "Traceback" if error else "",
            False,
            code if error else 0,
        )
        self.send(said)
        while True:
            known = self.joined or self.generation
            yield from self.until(lambda known=known: self.released or self.generation > known)
            if self.released or not self.joined:
                return code
            if error:
                yield from self.donate()
            else:
                yield from self.join()

    def script(self, shape: Shape) -> Iterator[Wait]:
        if self.assigned is not None and self.assigned.start:
            try:
                yield from self.connect(self.assigned.generation)
            except PeerLost:
                yield (lambda: False, False)
        yield pause()
        self.stumble(-1)
        while True:
            try:
                yield from self.train(shape)
                break
            except PeerLost:
                continue
        yield pause()
        self.stumble(shape.steps)

    def train(self, shape: Shape) -> Iterator[Wait]:
        yield from self.join()
        while self.committed < shape.steps:
            self.check()
            if self.hold == self.joined:
                self.send(m.Held(self.joined, self.committed))
                yield from self.until_in(self.joined, lambda: False)
            step = self.committed
            yield pause()
            self.stumble(step)
            yield from self.collective(step)
            self.whole = False
            self.state.append(step)
            yield pause()
            self.stumble(step, late=True)
            self.committed += 1
            self.whole = True
            self.run.newest = max(self.run.newest, self.committed)
            if self.reported != self.joined:
                self.reported = self.joined
                self.send(m.Committed(self.joined, self.committed))
            every = shape.checkpoint_every
            if every and self.rank == 0 and self.committed % every == 0:
                self.run.checkpoint = self.committed
                self.send(m.Saved(self.committed))
            yield pause()
        self.send(m.Done(shape.steps))
        yield from self.until_in(self.joined, lambda: self.all_done >= shape.steps)

    def bug(self, step: int, late: bool = False) -> Bug | None:
        for bug in self.run.shape.bugs:
            if bug.step == step and bug.late == late and bug.rank in (None, self.rank):
                self.run.stumbled[bug] += 1
                if self.run.stumbled[bug] <= bug.times:
                    return bug
        return None

    def stumble(self, step: int, late: bool = False) -> None:
        bug = self.bug(step, late)
        if bug is None:
            return
        if bug.kind == "raise":
            raise UserError(f"at step {step}")
        if bug.kind == "os_exit":
            raise OsExit(bug.code)
        raise Leave(bug.code)

    # --- the generations ------------------------------------------------------------------------

    def check(self) -> None:
        if self.generation > self.joined:
            raise PeerLost

    def until(self, ready: Callable[[], bool]) -> Iterator[Wait]:
        if not ready():
            yield (ready, False)

    def until_in(self, generation: int, ready: Callable[[], bool]) -> Iterator[Wait]:
        yield from self.until(lambda: self.generation > generation or ready())
        if self.generation > generation:
            raise PeerLost

    def news_or_trouble(self, generation: int) -> Iterator[Wait]:
        """Something failed: there must be a fault behind it, or this worker asks for the next generation."""
        self.timed_out = False
        if self.generation <= generation:
            yield (lambda: self.generation > generation, True)
        if self.timed_out and self.generation <= generation:
            self.send(m.Trouble(generation, "gloo: Connection closed by peer"))
            yield from self.until(lambda: self.generation > generation)

    def join(self) -> Iterator[Wait]:
        while self.joined != self.generation:
            generation = self.generation
            try:
                yield from self.assemble(generation, True)
                if self.run.group_of(self) != generation:
                    yield from self.connect(generation)
                else:
                    self.send(m.GroupReady(generation, 0.0))
                self.joined = generation
            except PeerLost:
                yield from self.news_or_trouble(generation)

    def donate(self) -> Iterator[Wait]:
        generation = self.generation
        try:
            yield from self.assemble(generation, False)
            self.joined = generation
        except PeerLost:
            yield from self.until(lambda: self.released or self.generation > generation)

    def assemble(self, generation: int, with_rank: bool) -> Iterator[Wait]:
        start = self.assigned is not None and self.assigned.start and not self.joined
        checkpoint = self.run.checkpoint if with_rank and not self.joined else -1
        fresh = not self.joined and not self.committed
        ready = m.Ready(
            generation,
            self.committed,
            self.whole,
            fresh,
            "h",
            1,
            "layout",
            checkpoint,
            "same" if start else "",
            self.run.shape.checkpoint_every > 0,
        )
        self.send(ready)

        def gone_on() -> bool:
            return self.go is not None and self.go.generation == generation

        yield from self.until_in(generation, lambda: gone_on() or self.save == generation)
        if not gone_on():
            assert self.whole, "asked to save what is not whole"
            self.run.checkpoint = max(self.run.checkpoint, self.committed)
            self.send(m.Saved(self.committed))
            yield from self.until_in(generation, gone_on)
        if self.go is None:
            raise AssertionError("no table")
        decision = plan(self.go.members, progress=self.go.progress)
        if isinstance(decision, Impossible):
            raise AssertionError("a Go for a generation that cannot begin")
        if decision.loader == self.name:
            self.committed, self.state, self.whole = decision.committed, list(range(decision.committed)), True
        donor = next((t.donor for t in decision.transfers if t.receiver == self.name), None)
        if donor is not None:
            them = self.run.workers[donor]
            offer = (generation, donor)
            yield from self.until_in(generation, lambda: offer in self.run.offers or not them.alive)
            if not them.alive:
                raise PeerLost
            self.committed, state = self.run.offers[offer]
            self.state, self.whole = list(state), True
            self.run.taken.add((generation, self.name))
        receivers = [t.receiver for t in decision.transfers if t.donor == self.name]
        if receivers:
            self.run.offers[generation, self.name] = (self.committed, tuple(self.state))
            taken, workers = self.run.taken, self.run.workers
            for name in receivers:
                yield from self.until_in(
                    generation, lambda name=name: (generation, name) in taken or not workers[name].alive
                )
                if (generation, name) not in taken:
                    raise PeerLost

    def connect(self, generation: int) -> Iterator[Wait]:
        yield from self.meet(generation, "connect")
        self.run.groups[self.name] = generation
        self.send(m.GroupReady(generation, 0.1))

    def collective(self, step: int) -> Iterator[Wait]:
        try:
            yield from self.meet(self.joined, step)
        except PeerLost:
            yield from self.news_or_trouble(self.joined)
            raise

    def meet(self, generation: int, what: Any) -> Iterator[Wait]:
        """All ranks of the generation come to the same point, or one of them is gone."""
        run, point = self.run, (generation, what)
        run.arrived[point].add(self.rank)
        run.members[generation, self.rank] = self
        world = run.config.world

        def complete() -> bool:
            return len(run.arrived[point]) == world

        def broken() -> bool:
            seated = [run.members.get((generation, r)) for r in range(world)]
            return any(w is not None and not w.alive for w in seated)

        yield from self.until_in(generation, lambda: complete() or broken())
        if not complete():
            raise PeerLost
        yield pause()


def pause() -> Wait:
    """Others may go first."""
    return (lambda: True, False)


@dataclass
class Fault:
    """Something that happens from outside, `after` so many events."""

    after: int
    kind: str  # kill, node, stop, requeue, sick, well
    target: int  # which of those that are there

    def __repr__(self) -> str:
        return f"Fault({self.after}, {self.kind!r}, {self.target})"


@dataclass
class Run:
    """All of it, and what was seen."""

    shape: Shape
    seed: int = 0
    faults: Sequence[Fault] = ()
    noise: float = 0.0  # how often a message that nobody should heed is thrown in
    workers: dict[str, Worker] = field(default_factory=dict)
    says: list[str] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    end: ms.End | None = None
    gos: dict[int, m.Go] = field(default_factory=dict)
    killed: list[str] = field(default_factory=list)  # workers killed from outside
    noticed: set[str] = field(default_factory=set)  # lost nodes that the coordinator knows of
    spawns: list[m.Spawn] = field(default_factory=list)
    assigns: list[tuple[str, m.Assign]] = field(default_factory=list)
    heard: list[tuple[str, m.FromAgent | ms.NodeLost]] = field(default_factory=list)  # delivered, in order
    arrived: dict[Any, set[int]] = field(default_factory=lambda: defaultdict(set))
    members: dict[tuple[int, int], Worker] = field(default_factory=dict)
    groups: dict[str, int] = field(default_factory=dict)
    offers: dict[tuple[int, str], tuple[int, tuple[Any, ...]]] = field(default_factory=dict)
    taken: set[tuple[int, str]] = field(default_factory=set)
    stumbled: dict[Bug, int] = field(default_factory=lambda: defaultdict(int))
    checkpoint: int = -1
    newest: int = 0
    dead_nodes: set[str] = field(default_factory=set)
    agents: dict[str, deque[m.FromAgent | ms.NodeLost]] = field(default_factory=dict)
    run_events: deque[ms.RunEvent] = field(default_factory=deque)
    timers: list[ms.Timer] = field(default_factory=list)
    recruits: list[ms.Recruit] = field(default_factory=list)

    def __post_init__(self) -> None:
        shape = self.shape
        self.dice = random.Random(self.seed)
        self.config = ms.Config(
            shape.nnodes,
            shape.nproc,
            lambda place: {"RANK": str(place.rank), "LOCAL_RANK": str(place.local_rank)},
            shape.standby,
            shape.spare_nodes,
            shape.max_restarts,
            in_job=shape.in_job,
            can_requeue=shape.in_job,
        )
        self.membership = ms.Membership(self.config)
        for index in range(shape.nnodes + shape.spare_nodes):
            name = f"n{index + 1}"
            spare = index >= shape.nnodes
            hello = m.AgentHello(name, index, "h", spare, [1000, 1001], VERSIONS, shape.devices)
            self.agents[name] = deque([hello])
        self.pending = sorted(self.faults, key=lambda f: f.after)

    # --- the course of things -------------------------------------------------------------------

    def play(self, limit: int = 60_000) -> ms.End:
        """Until the end. Raises AssertionError when it is stuck, or breaks a promise."""
        count = 0
        while self.end is None:
            count += 1
            if count > limit:
                raise AssertionError(f"no end after {limit} events; phase {self.membership.phase}")
            while self.pending and self.pending[0].after <= count:
                self.strike(self.pending.pop(0))
            if self.noise and self.dice.random() < self.noise:
                self.disturb()
            choices = self.choices()
            if not choices:
                timers = [w for w in self.workers.values() if w.alive and w.wait[1]]
                if self.timers and (not timers or self.dice.random() < 0.5):
                    timer = self.timers.pop(0)
                    self.run_events.append(ms.TimeUp(timer.name, timer.generation))
                    continue
                if not timers:
                    raise AssertionError(f"stuck in phase {self.membership.phase}: {self.says[-3:]}")
                self.dice.choice(timers).time_out()
                continue
            self.dice.choice(choices)()
        return self.end

    def choices(self) -> list[Callable[[], None]]:
        found: list[Callable[[], None]] = []
        for name, queue in self.agents.items():
            if queue:
                found.append(lambda n=name: self.deliver(n, self.agents[n].popleft()))
        if self.run_events:
            found.append(lambda: self.act(self.membership.notice(self.run_events.popleft())))
        if self.timers and self.dice.random() < 0.02:  # a clock may be fast
            found.append(self.go_off)
        for worker in self.workers.values():
            if worker.outbox and worker.node not in self.dead_nodes:
                found.append(lambda w=worker: self.deliver(w.node, w.outbox.popleft()))
            if worker.alive:
                if worker.inbox:
                    found.append(worker.take)
                if worker.wait[0]():
                    found.append(worker.advance)
        return found

    def go_off(self) -> None:
        timer = self.timers.pop(0)
        self.run_events.append(ms.TimeUp(timer.name, timer.generation))

    def deliver(self, node: str, message: m.FromAgent | ms.NodeLost) -> None:
        self.heard.append((node, message))
        if isinstance(message, ms.NodeLost):
            self.noticed.add(node)
        self.act(self.membership.handle(node, message))

    def act(self, actions: Sequence[ms.Action]) -> None:
        for at, action in enumerate(actions):
            if isinstance(action, ms.Say):
                self.says.append(action.text)
            elif isinstance(action, ms.Emit):
                self.events.append({"event": action.event, **action.fields})
            elif isinstance(action, ms.End):
                assert at == len(actions) - 1, "something after the end"
                self.end = action
            elif isinstance(action, ms.Timer):
                self.timers.append(action)
            elif isinstance(action, ms.Recruit):
                self.recruit(action)
            elif isinstance(action, ms.To):
                self.obey(action)

    def recruit(self, recruit: ms.Recruit) -> None:
        """Slurm's answer to a request for a node."""
        number = len(self.recruits)
        self.recruits.append(recruit)
        assert number < 50, "asked for nodes without an end"
        answers = self.shape.replacements
        answer = answers[number] if number < len(answers) else "refused"
        if answer == "node":
            name = f"r{number + 1}"
            hello = m.AgentHello(
                name, 100 + number, "h", True, [1000], VERSIONS, self.shape.devices, joiner=True
            )
            self.agents[name] = deque([hello])
        else:
            self.run_events.append(ms.RecruitFailed(f"answer {number}", answer == "never"))

    def obey(self, order: ms.To) -> None:
        message = order.message
        assert order.node not in self.noticed, "an order for a lost node"
        if isinstance(message, m.Spawn):
            self.spawns.append(message)
            assert message.worker not in self.workers, "a worker's name is used once"
            worker = Worker(self, message, order.node)
            self.workers[message.worker] = worker
            if order.node in self.dead_nodes:
                worker.alive = False
        elif isinstance(message, m.Kill):
            self.end_process(self.workers[message.worker], -SIGKILL)
        elif isinstance(message, m.ToWorkers):
            if isinstance(message.message, m.Go):
                self.see_go(message.message)
            for name in message.workers:
                worker = self.workers[name]
                assert worker.node == order.node, "told the wrong node"
                if isinstance(message.message, m.Assign):
                    self.assigns.append((name, message.message))
                worker.inbox.append(message.message)

    def see_go(self, go: m.Go) -> None:
        """The promises that every Go keeps."""
        before = self.gos.get(go.generation)
        if before is not None:
            assert before.members == go.members, "two tables for one generation"
            return
        ranks = sorted(x.rank for x in go.members if x.rank >= 0)
        assert ranks == list(range(self.config.world)), f"ranks {ranks} in generation {go.generation}"
        names = [x.worker for x in go.members]
        assert len(set(names)) == len(names), "a worker twice in one generation"
        for name in names:
            ready = [
                x.message
                for _, x in self.heard
                if isinstance(x, m.FromWorkers) and x.worker == name and isinstance(x.message, m.Ready)
            ]
            assert ready, "not ready for this generation"
            assert ready[-1].generation == go.generation, "not ready for this generation"
        newer = plan(go.members, progress=go.progress)
        assert not isinstance(newer, Impossible)
        for worker in self.workers.values():
            known = self.membership.roster.workers[worker.name]
            here = worker.alive and worker.whole and worker.joined and (known.rank >= 0 or known.donor)
            if here and not known.released:
                assert worker.committed <= newer.committed, "went backwards, and somebody held more"
        if newer.source == "start":
            assert not any(
                isinstance(x, m.FromWorkers) and isinstance(x.message, m.Committed) for _, x in self.heard
            )
        self.gos[go.generation] = go

    def group_of(self, worker: Worker) -> int:
        return self.groups.get(worker.name, 0)

    # --- from outside ---------------------------------------------------------------------------

    def strike(self, fault: Fault) -> None:
        if fault.kind in ("stop", "requeue"):
            self.run_events.append(ms.StopAsked("told to stop", 143, fault.kind == "requeue"))
        elif fault.kind in ("sick", "well"):
            nodes = [n for n in self.agents if n not in self.dead_nodes and n in self.membership.nodes]
            if nodes:
                unfit = "gpu3" if fault.kind == "sick" else ""
                self.agents[nodes[fault.target % len(nodes)]].append(m.Health(unfit))
        elif fault.kind == "kill":
            there = [w for w in self.workers.values() if w.alive]
            if there:
                self.kill(there[fault.target % len(there)])
        else:
            nodes = [n for n in self.agents if n not in self.dead_nodes and n != "n1"]
            if nodes:
                self.lose(nodes[fault.target % len(nodes)])

    def kill(self, worker: Worker) -> None:
        self.killed.append(worker.name)
        self.end_process(worker, -SIGKILL)

    def lose(self, node: str) -> None:
        """What its workers said may or may not have arrived; later its silence is noticed."""
        self.dead_nodes.add(node)
        for worker in list(self.workers.values()):
            if worker.node == node and worker.alive:
                worker.alive = False
                while worker.outbox and self.dice.random() < 0.5 and self.end is None:
                    self.deliver(node, worker.outbox.popleft())
        self.agents[node].append(ms.NodeLost("4 missed heartbeats"))

    def ended(self, worker: Worker, code: int) -> None:
        worker.ended_well = code == 0
        self.end_process(worker, code)

    def end_process(self, worker: Worker, code: int) -> None:
        if worker.alive:
            worker.alive = False
            worker.outbox.append(m.WorkerExited(worker.name, code))

    def disturb(self) -> None:
        """Something that must change nothing: of strangers, of the dead, of the past."""
        old = self.membership.generation - 1
        name, node = "n1/0", "n1"
        if self.workers:
            worker = self.dice.choice(list(self.workers.values()))
            name, node = worker.name, worker.node
        dead = name in self.workers and not self.workers[name].alive and not self.workers[name].outbox
        ready = m.Ready(old, 99, True, False, "h", 1, "odd")
        nonsense: list[tuple[str, m.FromAgent | ms.NodeLost]] = [
            ("stranger", m.Heartbeat({name: 99})),
            ("stranger", ms.NodeLost("x")),
            (node, m.WorkerExited("nobody/7", 1)),
            (node, m.FromWorkers(name, m.Trouble(old, "old news"))),
            (node, m.FromWorkers(name, m.Published(old, "k", b"v"))),
            (node, m.FromWorkers("nobody/7", m.Done(99))),
            (node, m.AgentHello(node, 0, "h", False, [1], {"torch": "9"})),
        ]
        if dead:
            nonsense += [
                (node, m.FromWorkers(name, m.Leaving(1, True, 1, "Late"))),
                (node, m.WorkerExited(name, 1)),
            ]
        if name in self.workers and self.workers[name].joined:
            nonsense.append((node, m.FromWorkers(name, ready)))
        where, what = self.dice.choice(nonsense)
        if node in self.membership.nodes or where == "stranger":
            self.act(self.membership.handle(where, what))

    # --- what was seen --------------------------------------------------------------------------

    def faults_of(self, worker: str, kind: str | None = None) -> list[dict[str, Any]]:
        return [
            e
            for e in self.named("fault")
            if e.get("worker") == worker and (kind is None or e["kind"] == kind)
        ]

    def named(self, event: str) -> list[dict[str, Any]]:
        return [e for e in self.events if e["event"] == event]

    def holder(self, rank: int) -> Worker:
        return self.workers[self.membership.roster.holders()[rank].id]
