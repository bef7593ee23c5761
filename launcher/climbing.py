"""Down the resume ladder, where standbys and spare nodes are used up: other nodes, the queue, the end."""

from __future__ import annotations

from collections.abc import Sequence

from everstep.launcher import ladder
from everstep.launcher import messages as m
from everstep.launcher.gathering import Gathering
from everstep.launcher.roster import End, Node, Recruit, RecruitFailed
from everstep.launcher.tries import REQUEUE
from everstep.launcher.winding import Winding


class Climbing(Gathering, Winding):
    """What `ladder` chooses, carried out."""

    def _climb(self, ranks: Sequence[int]) -> None:
        """Nobody is left for these ranks."""
        if self.asking:
            return
        own = next((f for f in self.failures if f.kind == "own"), None)
        # A bug of the script's is no reason to take nodes.
        climb = ladder.climb_down(self._situation(ranks, own is not None))
        number = ladder.NUMBER[climb.rung]
        self._emit("rung", rung=climb.rung, number=number, reason=climb.reason, ranks=list(ranks))
        if climb.rung == "replace":
            self.asking = True
            lost = "" if self.refused else f"{self._why()}; "
            self._say(f"{lost}rung {number} ({climb.rung}): {climb.reason}")
            self._out.append(Recruit(climb.pause, climb.reason, tuple(self.bad)))
        elif climb.rung == "requeue":
            reason = f"{self._why()}; rung {number} ({climb.rung}): {climb.reason}"
            if self.phase == "restarting":
                self._end(REQUEUE, reason, requeue=True)
            else:
                self.ending = End(REQUEUE, reason, requeue=True)
                self._wind()
        else:
            self._give_up(climb.reason)

    def _situation(self, ranks: Sequence[int], own: bool) -> ladder.Situation:
        ready = [w.ready for w in self._present() if w.ready is not None]
        config = self.config
        return ladder.Situation(
            ranks=ranks,
            allowed=config.allowed,
            in_job=config.in_job and not own,
            can_requeue=config.can_requeue,
            why_not=config.why_not,
            refused=self.refused,
            progress=self.progress,
            saved=self.saved,
            # Not all have said yet what they hold; whoever was told to save and cannot says so later.
            can_save=any(r.checkpoints and r.whole and not r.fresh for r in ready) or self.checkpoints,
            attempts=config.attempts,
        )

    def _recruit_failed(self, failed: RecruitFailed) -> None:
        if not self.asking:
            return
        self.asking = False
        self.refused += [failed.reason] * (ladder.ASKS if failed.final else 1)
        self._try_again()

    def _late_hello(self, hello: m.AgentHello) -> None:
        """A replacement node is here: its workers are standbys."""
        node = Node(hello.node, hello, unfit=hello.unfit)
        self.nodes[hello.node] = node
        odd = {name: v for name, v in hello.versions.items() if self.versions.get(name, v) != v}
        problem = (
            hello.problem
            or hello.unfit
            or "; ".join(
                f"it has {name} {version}, the other nodes {self.versions[name]}"
                for name, version in odd.items()
            )
        )
        if problem:
            self._to(node.name, m.Stop(hello.code, problem))
            node.alive = False
            self._recruit_failed(RecruitFailed(f"node {node.name} came and is of no use: {problem}"))
            return
        self.asking = False
        self._emit("node_joined", node=node.name)
        self._say(f"node {node.name} has joined the run, in place of what was lost")
        self._try_again()

    def _try_again(self) -> None:
        if self.phase == "restarting":
            self._restart_when_clear()
        elif self.phase == "running" and self.stepped:
            self._top_up(nice=True)
        else:
            self._place()
