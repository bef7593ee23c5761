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

How a worker may end, once it has been in the loop:
- Its script ends after the last step. It stays, as a donor, until every rank's script
  has ended; then all are released. Killed meanwhile, it has lost nothing and is not
  replaced, unless another rank has to be: a new group needs every rank.
- Its script ends earlier, without an error. It is let go at once, since the others may
  wait for it in a collective. If all do the same, the run is finished; if the others
  go on, the run ends, and says so. If it exits with a code, that is its own failure.
- It raises. It stays, without a rank, as a donor until every rank stands in the next group.
- It dies. A standby takes the rank.
"""

from __future__ import annotations

from everstep.launcher import messages as m
from everstep.launcher import placing, tries
from everstep.launcher.ending import Ending
from everstep.launcher.evacuating import Evacuating
from everstep.launcher.roster import (
    Action,
    AskWhy,
    Blame,
    Config,
    Emit,
    End,
    Node,
    NodeLost,
    Placement,
    Recruit,
    RecruitFailed,
    RunEvent,
    Say,
    StopAsked,
    Timer,
    TimeUp,
    To,
    Worker,
)
from everstep.launcher.tries import REQUEUE, STANDBY_TRIES, Failure
from everstep.recovery.restore import Impossible, plan

__all__ = [
    "Action",
    "AskWhy",
    "Blame",
    "Config",
    "Emit",
    "End",
    "Membership",
    "NodeLost",
    "Placement",
    "Recruit",
    "RecruitFailed",
    "RunEvent",
    "Say",
    "StopAsked",
    "TimeUp",
    "Timer",
    "To",
]

_NO_STEPS = (
    "the script ended without a call of run.steps(): put the training loop in "
    "`for step in run.steps(N):`, or remove recovery.init()"
)


class Membership(Evacuating, Ending):
    """The state machine. Feed it with `handle`; it keeps no reference to anything outside."""

    # --- entrance -------------------------------------------------------------------------------

    def handle(self, node: str, message: m.FromAgent | NodeLost) -> list[Action]:
        """What to do about `message` of `node`.

        Unknown and lost nodes, workers that are not theirs, and whatever comes after the
        end are ignored. An `End` is the last action.
        """
        self._out = []
        if self.phase != "over":
            known = self.nodes.get(node)
            if isinstance(message, m.AgentHello):
                new = known is None or (message.joiner and not known.alive)
                if new and message.node == node:
                    self._introduced(message)
            elif known is not None and known.alive:
                self._dispatch(known, message)
        out, self._out = self._out, []
        return out

    def notice(self, event: RunEvent) -> list[Action]:
        """What to do about something that concerns the run as a whole."""
        self._out = []
        if self.phase != "over":
            if isinstance(event, StopAsked):
                self._stop_asked(event)
            elif isinstance(event, TimeUp):
                self._time_up(event)
            else:
                self._recruit_failed(event)
        out, self._out = self._out, []
        return out

    def _introduced(self, hello: m.AgentHello) -> None:
        if self.phase == "gathering":
            self._agent_hello(hello)
        else:
            self._late_hello(hello)

    def _dispatch(self, node: Node, message: m.FromAgent | NodeLost) -> None:
        if isinstance(message, NodeLost):
            self._node_lost(node, message.how)
        elif isinstance(message, m.Heartbeat):
            for name, committed in message.steps.items():
                worker = self._of(node, name)
                if worker is not None:
                    self._count(worker, committed)
        elif isinstance(message, m.WorkerStarted):
            worker = self._of(node, message.worker)
            if worker is not None:
                rank = worker.rank if worker.rank >= 0 else None
                self._emit("worker_started", node=node.name, worker=worker.id, pid=message.pid, rank=rank)
        elif isinstance(message, m.WorkerExited):
            worker = self._of(node, message.worker)
            if worker is not None:
                self._exited(worker, message)
        elif isinstance(message, m.Health):
            self._health(node, message)
        elif isinstance(message, m.Told):
            self._told(node, message.signal)
        elif isinstance(message, m.FromWorkers):
            worker = self._of(node, message.worker)
            if worker is not None and self.phase != "restarting":
                self._from_worker(worker, message.message)
            elif worker is not None and isinstance(message.message, m.Hello) and worker.rank < 0:
                self._hello(worker, message.message)  # a standby's: it stays for the next start

    def _of(self, node: Node, name: str) -> Worker | None:
        worker = self.roster.workers.get(name)
        return worker if worker is not None and worker.alive and worker.node == node.name else None

    def _from_worker(self, worker: Worker, message: m.FromWorker) -> None:
        if isinstance(message, m.Hello):
            self._hello(worker, message)
        elif isinstance(message, m.Ready):
            self._ready(worker, message)
        elif isinstance(message, m.Published):
            if message.generation == self.generation and worker.rank >= 0:
                entry = m.Entry(message.generation, message.key, message.value)
                self._tell(self.roster.holders(), entry)
        elif isinstance(message, m.Committed):
            self._committed(worker, message)
        elif isinstance(message, m.GroupReady):
            self._group_ready(worker, message)
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
        elif isinstance(message, m.Held):
            self._holds(worker, message)
        elif isinstance(message, m.Saved):
            self._written(worker, message)
        elif isinstance(message, m.Trouble):
            self._trouble(worker, message)
        elif isinstance(message, m.Done):
            self._done(worker, message)
        elif isinstance(message, m.Leaving):
            if worker.left is None:
                self._leaving(worker, message)
        elif isinstance(message, m.Note):
            self._say(message.text)

    # --- coming up ------------------------------------------------------------------------------

    def _hello(self, worker: Worker, hello: m.Hello) -> None:
        if worker.said_hello or not self._same_versions(worker.node, hello.versions):
            return
        self.recovers = worker.said_hello = True
        if worker.rank >= 0:
            self._begin_if_all_are_here()
        elif worker.status == "starting":
            worker.status = "standby"
            self.nodes[worker.node].broken = 0
            self._emit("standby_ready", node=worker.node, worker=worker.id)
            self._place()
            self._evacuate_all()

    # --- standbys -------------------------------------------------------------------------------

    def _standby_died(self, worker: Worker, was: str, exited: m.WorkerExited) -> None:
        node = self.nodes[worker.node]
        node.broken += was == "starting"
        how = tries.name_of(exited.code)
        self._fault(worker, how, exited.how)
        if node.broken >= STANDBY_TRIES:
            self._say(
                f"a standby on {node.name} ended {STANDBY_TRIES} times before it was ready ({how}): "
                "no more are started there"
            )
        else:
            if self.ending is None:
                self._say(f"a standby on {node.name} died ({how}), noticed by {exited.how}")
        if self.phase == "running" and self.stepped:
            self._top_up(nice=True)  # at other times the recovery comes first
        self._place()

    # --- a worker's end -------------------------------------------------------------------------

    def _exited(self, worker: Worker, exited: m.WorkerExited) -> None:
        donor, was = worker.donor, worker.status
        worker.status, worker.exit = "dead", exited.code
        if worker.released and (worker.rank < 0 or self.phase == "restarting"):
            self._restart_when_clear()
            self._try_go()
        elif donor:
            self._fault(worker, tries.name_of(exited.code), exited.how)
            self._donor_lost(worker, f"a worker on {worker.node} that had raised died")
        elif worker.rank < 0:
            self._standby_died(worker, was, exited)
        elif exited.code == 0:
            self._exited_well(worker)
        else:
            self._died(worker, exited)

    def _exited_well(self, worker: Worker) -> None:
        if worker.said_hello and not worker.through and not self._was_in_loop(worker):
            self._end(64, _NO_STEPS)
        elif self.joined and worker.through and not self._stands():
            self._needed_after_all(worker)
        elif self.recovers and not self.joined:
            self._begin_if_all_are_here()
        else:
            self._try_end()

    def _was_in_loop(self, worker: Worker) -> bool:
        return (
            worker.left.joined
            if worker.left is not None
            else worker.committed >= 0 or self.phase == "running"
        )

    def _died(self, worker: Worker, exited: m.WorkerExited) -> None:
        how, kind, rank = tries.name_of(exited.code), tries.kind_of(exited.code), worker.rank
        verb = "ended" if exited.code > 0 else "died"
        text = f"rank {rank} on {worker.node} {verb} ({how}), noticed by {exited.how}"
        self._fault(worker, how, exited.how)
        if worker.through and kind == "own":
            code = tries.shell_code(exited.code)
            self._end(code, f"rank {rank} on {worker.node} {verb} ({how}) after its last step")
        elif self._spent(worker):
            # All of its script has run, and its peers may be gone by now: there is nothing to repair.
            self._say(f"{text}; its script had ended, nothing is lost")
            self._try_end()
        else:
            failure = self._failure(worker, kind, text, how, tries.shell_code(exited.code))
            self.roster.vacate(worker)
            self._failed(failure)

    def _spent(self, worker: Worker) -> bool:
        """Can the run do without it? Its script has ended, and no group is being formed that needs it."""
        return worker.through and worker.left is not None and self._stands()

    def _needed_after_all(self, worker: Worker) -> None:
        text = f"rank {worker.rank} on {worker.node} had ended after its last step, but a new group needs it"
        failure = self._failure(worker, "outside", text, "ended", REQUEUE)
        self.roster.vacate(worker)
        self._failed(failure)

    def _leaving(self, worker: Worker, leaving: m.Leaving) -> None:
        worker.left = leaving
        self._count(worker, leaving.committed)
        if worker.rank < 0:
            self._release([worker], expected=False)
        elif leaving.usage:
            self._end(leaving.code or 64, f"rank {worker.rank} on {worker.node}: {leaving.error}")
        elif leaving.error:
            self._raised(worker, leaving)
        else:
            worker.status = "leaving"
            if not leaving.joined:
                self._release([worker])  # its exit code says what this was
            elif worker.through:
                self._try_end()
            elif self.phase == "running":
                self._release([worker])
            # Else it is part of the generation that is being formed, and stays until that stands.

    def _raised(self, worker: Worker, leaving: m.Leaving) -> None:
        text = f"rank {worker.rank} on {worker.node} raised {leaving.error}"
        code = leaving.code or 1
        self._fault(worker, "exception", "itself")
        if worker.through and leaving.generation == self.generation:
            self._end(code, f"{text} after its last step", leaving.traceback)
            return
        failure = self._failure(worker, "own", text, leaving.error, code, leaving.traceback)
        if self.joined:
            self.roster.vacate(worker)
            worker.status = "leaving"  # a donor, if it was ever in the loop
            if not leaving.joined:
                self._release([worker])
        self._failed(failure)

    def _trouble(self, worker: Worker, trouble: m.Trouble) -> None:
        if trouble.generation != self.generation or worker.rank < 0:
            return
        rank = worker.rank
        in_loop = self.phase == "running" and worker.grouped == self.generation
        ended = [w for w in self.roster.holders() if w.left_early or (w.through and w.left is not None)]
        if in_loop and ended and worker not in ended:
            self.troubled = True
            self._check_deserted(ended)
            return
        text = f"rank {rank} on {worker.node} could not go on ({trouble.what})"
        self._fault(worker, "trouble", "itself")
        self._failed(self._failure(worker, "trouble", text, trouble.what, 1))

    def _node_lost(self, node: Node, how: str) -> None:
        node.alive = False
        self.bad[node.name] = how
        self._out.append(Blame(node.name, how))
        gone = [w for w in self.roster.workers.values() if w.node == node.name and w.alive]
        donors = [w for w in gone if w.donor and not w.released]
        holders = [w for w in gone if w.rank >= 0]
        for worker in gone:
            worker.status = "dead"
        ranks = tuple(sorted(w.rank for w in holders))
        one = ranks[0] if len(ranks) == 1 else None
        self._emit("fault", node=node.name, rank=one, ranks=list(ranks), kind="node", noticed=how)
        what = f"node {node.name} was lost, noticed by {how}"
        if self.phase == "gathering":
            self._end(REQUEUE, what)
            return
        if self.phase == "restarting":
            self._say(what)
            self._restart_when_clear()
            return
        lost = [w for w in holders if not self._spent(w)]
        if lost:
            text = f"{what}; it held {placing.names(ranks)}"
            failure = self._failure(lost[0], "outside", text, "node lost", REQUEUE, ranks=ranks)
            for worker in holders:
                self.roster.vacate(worker)
            self._failed(failure)
        elif donors:
            self._donor_lost(donors[0], what)
        else:
            held = (
                f"the scripts of {placing.names(ranks)} had ended, nothing is lost"
                if ranks
                else "it held no rank"
            )
            self._say(f"{what}; {held}")
            self._place()
            self._try_end()

    def _donor_lost(self, donor: Worker, what: str) -> None:
        if self.phase == "winding":
            self._lost_while_winding()
        elif self.phase == "running":  # it may have been in the middle of giving its state
            self._failed(self._failure(donor, "outside", what, "a donor died", REQUEUE))
        else:
            self._place()
            self._try_go()

    # --- failures -------------------------------------------------------------------------------

    def _failed(self, failure: Failure) -> None:
        """Somebody is lost, or cannot go on: the next generation, a new start, or the end."""
        self.moving = ""
        if self.phase == "winding":
            self._lost_while_winding()
            return
        if self.ending is not None:
            self._wind()
            return
        if not self.joined:
            self._start_over(failure)
            return
        if self.phase == "running":
            self.failures = []
        self.failures.append(failure)
        end = self.tries.again(failure)
        if end is not None:
            self._end(end.code, end.reason, end.detail)
            return
        self._next_generation(failure)

    # --- the next generation --------------------------------------------------------------------

    def _next_generation(self, failure: Failure) -> None:
        self.generation += 1
        self.phase = "regrouping"
        self.stepped = False
        for worker in self.roster.workers.values():
            worker.ready = None
        for worker in self.roster.holders():
            if not worker.alive and not worker.deserted:
                self.roster.vacate(worker)  # it had ended in order, but a new group needs every rank
        self._tell(self.roster.holders() + self.roster.donors(), m.Abort(self.generation))
        self._emit("generation", world=self.config.world, reason=failure.text)
        if not self._check_deserted():
            self._place(failure)

    def _place(self, failure: Failure | None = None) -> None:
        """Give every empty rank a standby, or wait for one, or climb down the ladder."""
        if self.phase != "regrouping":
            return
        choice = placing.choose(self.roster)
        if choice.hopeless:
            self._climb(choice.hopeless)
            if self.phase != "regrouping":
                return
            failure = None  # said already
        for node in choice.to_start:
            self._spawn_standby(node, nice=False)
        for rank, worker in choice.taken.items():
            self.roster.sit(rank, worker)
        for rank, worker in choice.taken.items():
            self._emit("placed", rank=rank, node=worker.node, worker=worker.id)
            self._assign(worker)
        if failure is not None:
            words = [failure.text, *placing.in_words(choice, failure.ranks)]
        else:
            choice.waiting.clear()  # said already
            words = placing.in_words(choice, ())
        if words:
            words.append(f"generation {self.generation}, world {self.config.world}")
            self._say("; ".join(words))
        self._try_go()

    def _ready(self, worker: Worker, ready: m.Ready) -> None:
        if ready.generation != self.generation or self.phase not in ("starting", "regrouping", "winding"):
            return
        if worker.rank >= 0 or worker.donor:
            worker.ready = ready
            self.checkpoints = self.checkpoints or ready.checkpoints
            self.saved = max(self.saved, ready.checkpoint)
            if self.phase == "winding":
                self._try_save()
            else:
                self._try_go()

    def _try_go(self) -> None:
        """All that take part are ready: off they go."""
        if self.phase not in ("starting", "regrouping") or self.roster.empty():
            return
        present = [*self.roster.holders(), *(w for w in self.roster.donors() if not w.released)]
        members = [w.member(w.ready) for w in present if w.ready is not None]
        if len(members) < len(present) or not self._same_layout(members):
            return
        decision = plan(members, progress=self.progress)
        if isinstance(decision, Impossible):
            self._give_up(decision.reason)
            return
        if self.phase == "regrouping" or decision.source == "disk":
            self._say(decision.reason)
        self.phase = "running"
        self.joined = True
        self.troubled = False
        for worker in self.roster.holders():
            worker.committed = decision.committed
        self._tell(present, m.Go(self.generation, members, self.config.token(), self.progress))

    def _group_ready(self, worker: Worker, message: m.GroupReady) -> None:
        worker.grouped = max(worker.grouped, message.generation)
        if message.seconds > 0:
            self._emit(
                "group_ready", rank=worker.rank, seconds=message.seconds, generation=message.generation
            )
        if self._stands():
            # Nobody needs what those hold that raised, or whose scripts ended early.
            self._release(self.roster.donors() + [w for w in self.roster.holders() if w.left_early])
            self._try_end()

    def _committed(self, worker: Worker, message: m.Committed) -> None:
        self._count(worker, message.committed)
        self.tries.committed(message.committed)
        self.refused = []
        step = message.committed - 1
        self._emit("step", rank=worker.rank, step=step, generation=message.generation)
        if message.generation == self.generation and not self.stepped:
            self.stepped = True
            if self.generation > 1:
                self._say(f"generation {self.generation} goes on: step {step} committed")
            self._top_up(nice=True)
            self._evacuate_all()
