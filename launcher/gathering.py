"""How a run comes up: agents gather, ranks are started, and all start anew while nothing has begun.

Until the first `Go` nobody holds anything worth keeping, so a failure is met as
torchrun does: every rank is stopped and started again, on spare nodes where its own is lost.
"""

from __future__ import annotations

from everstep.launcher import messages as m
from everstep.launcher.mind import Mind
from everstep.launcher.roster import End, Node, Seat
from everstep.launcher.tries import Failure


class Gathering(Mind):
    """The first part of a run."""

    def _agent_hello(self, hello: m.AgentHello) -> None:
        self.nodes[hello.node] = Node(hello.node, hello, unfit=hello.unfit)
        if hello.problem:
            self._end(hello.code, hello.problem)
            return
        expected = self.config.nnodes + self.config.spare_nodes
        if self._same_versions(hello.node, hello.versions) and len(self.nodes) == expected:
            self._seat_everyone()
            self._start_all()

    def _same_versions(self, who: str, versions: dict[str, str]) -> bool:
        for name, version in versions.items():
            known = self.versions.setdefault(name, version)
            if known != version:
                reason = f"{who} has {name} {version}, other nodes have {known}"
                self._end(64, f"{reason}: install the same {name} on every node")
                return False
        return True

    def _same_layout(self, members: list[m.Member]) -> bool:
        first = members[0]
        odd = next((x for x in members if x.layout != first.layout and x.rank >= 0), None)
        if odd is None:
            return True
        shapes = [x.layout.rpartition(",")[0] for x in (odd, first)]
        self._end(
            64,
            f"rank {odd.rank}'s model has other shapes than rank {first.rank}'s "
            f"({shapes[0]} against {shapes[1]}): build the same model on every rank",
        )
        return False

    def _seat_everyone(self) -> None:
        # Unfit nodes are used where there are no others: a check can be wrong.
        best = sorted(self.roster.alive(), key=lambda n: (bool(n.unfit), n.hello.spare, n.index))
        primary = sorted(best[: self.config.nnodes], key=lambda n: n.index)
        for node in self.roster.alive():
            if node.unfit:
                held = "it is used all the same" if node in primary else "another one is used"
                self._say(f"WARNING: node {node.name} is not fit for work ({node.unfit}): {held}")
                self._emit("health", node=node.name, fit=False, reason=node.unfit)
        self.roster.seats = [
            Seat(node.name, local, group)
            for group, node in enumerate(primary[: self.config.nnodes])
            for local in range(self.config.nproc)
        ]

    def _start_all(self) -> None:
        self.phase = "starting"
        self.generation += 1
        for rank, seat in enumerate(self.roster.seats):
            worker = self.roster.add(self.nodes[seat.node])
            self.roster.sit(rank, worker)
            env = self.config.environment(self._placement(rank))
            spawn = m.Spawn(worker.id, env, rank, seat.local_rank, self.attempt)
            self._to(seat.node, spawn)

    def _begin_if_all_are_here(self) -> None:
        holders = self.roster.holders()
        gone = next((w for w in holders if not w.alive and not w.said_hello), None)
        if gone is not None and self.recovers:
            self._end(
                64,
                f"rank {gone.rank} on {gone.node} ended (exit code 0) without recovery.init(), "
                "where the other ranks wait for it: call it on every rank",
            )
        elif all(w.said_hello for w in holders):
            for worker in holders:
                self._assign(worker)
            why = self._why() or "the run begins"
            self._emit("generation", world=self.config.world, reason=why)
            self._say(f"generation {self.generation}, world {self.config.world}: {why}")
            self._top_up(nice=False)

    # --- all again -------------------------------------------------------------------------------

    def _start_over(self, failure: Failure) -> None:
        """Nothing has begun yet, so everybody starts afresh, as torchrun does."""
        verdict = self.tries.restart(failure, self.recovers or self.config.expects_recovery)
        if isinstance(verdict, End):
            self._end(verdict.code, verdict.reason, verdict.detail)
            return
        self.failures = [failure]
        self._say(f"{failure.text}; all ranks start again, {verdict}")
        self.phase = "restarting"
        for worker in self.roster.workers.values():
            if worker.rank >= 0 and worker.alive:
                worker.released = True
                self._to(worker.node, m.Kill(worker.id, "all ranks start again"))
        self._restart_when_clear()

    def _restart_when_clear(self) -> None:
        if self.phase != "restarting" or any(w.rank >= 0 and w.alive for w in self.roster.workers.values()):
            return
        for worker in self.roster.workers.values():
            worker.rank = -1
        for rank, seat in enumerate(self.roster.seats):
            seat.holder = None
            if not self.nodes[seat.node].alive and not self._move(rank):
                self._climb([rank])
                return
        self.attempt += 1
        self._start_all()

    def _move(self, rank: int) -> bool:
        """Give a rank of a lost node a new home on a spare node, before anything has begun."""
        for node in self.roster.alive():
            taken = {s.local_rank for s in self.roster.seats if s.node == node.name}
            free = [i for i in range(self.config.nproc) if i not in taken]
            if node.hello.spare and free:
                seat = self.roster.seats[rank]
                seat.node, seat.local_rank = node.name, free[0]
                return True
        return False
