"""Moving work off a node that is found unfit, while it still runs.

A node that goes bad takes the run with it sooner or later, and the move costs half a second. But a check can
be wrong, so a run is never ended for one: ranks are moved where somebody is ready to take them and their
state is held elsewhere too; until then the run goes on where it is, and Slurm is asked for another node.
"""

from __future__ import annotations

from everstep.launcher import messages as m
from everstep.launcher import placing
from everstep.launcher.climbing import Climbing
from everstep.launcher.roster import Node, Recruit, Timer, Worker


class Evacuating(Climbing):
    """What follows from a health check's verdict."""

    def _health(self, node: Node, health: m.Health) -> None:
        if health.unfit == node.unfit:
            return
        node.unfit = health.unfit
        if not node.unfit:
            self._emit("health", node=node.name, fit=True, reason="")
            self._say(f"node {node.name} is fit for work again")
            return
        self._emit("health", node=node.name, fit=False, reason=node.unfit)
        self._evacuate(node)

    def _evacuate_all(self) -> None:
        """Somebody may be ready now to take what could not be moved before."""
        for node in self.roster.alive():
            if node.unfit:
                self._evacuate(node)

    def _evacuate(self, node: Node) -> None:
        movable = self.phase == "running" and self.stepped and self.ending is None and not self.moving
        holders = [w for w in self.roster.holders() if w.node == node.name and w.alive]
        if not movable or not holders or any(w.left is not None for w in holders):
            return
        what = f"node {node.name} is not fit for work ({node.unfit})"
        if not any(w.alive and w.node != node.name for w in self.roster.holders()):
            self._warn(node, f"{what}, and no other node holds the state: the run stays there")
        elif placing.takers(node, self.roster) < len(holders):
            self._warn(node, f"{what}, and no standby elsewhere is ready: the run stays there until one is")
            self._ask_for_one_more(what)
        else:
            self.moving = node.name
            ranks = placing.names(sorted(w.rank for w in holders))
            self._say(f"{what}: {ranks} will be moved after the step under way")
            self._tell(self.roster.holders(), m.Hold(self.generation))
            self._out.append(Timer("move", self.config.grace, self.generation))

    def _all_hold(self) -> None:
        """Everybody stands between two steps, or the time for it is up: now."""
        node = self.nodes[self.moving]
        self.moving = ""
        if any(w.through or w.left is not None for w in self.roster.holders()):
            return  # the run is about to finish
        holders = [w for w in self.roster.holders() if w.node == node.name and w.alive]
        what = f"node {node.name} is not fit for work ({node.unfit})"
        if holders and node.unfit and placing.takers(node, self.roster) >= len(holders):
            self._leave_node(what, holders)
        else:  # it has changed since, and the ranks that hold have to be let go again
            self._failed(
                self._failure(self.roster.holders()[0], "outside", f"{what}, or was", "unfit node", 75)
            )

    def _leave_node(self, what: str, holders: list[Worker]) -> None:
        ranks = tuple(sorted(w.rank for w in holders))
        text = f"{what}; it held {placing.names(ranks)}"
        failure = self._failure(holders[0], "outside", text, "unfit node", 75, ranks=ranks)
        for worker in holders:
            self._fault(worker, "health", "a health check")
            self.roster.vacate(worker)
            worker.released = True  # its end is no news
            self._to(worker.node, m.Kill(worker.id, what))
        self._failed(failure)

    def _ask_for_one_more(self, what: str) -> None:
        may = self.config.in_job and "replace" in self.config.allowed
        if may and not self.asking and not self.refused:
            self.asking = True
            self._emit("rung", rung="replace", number=3, reason=what, ranks=[])
            away = tuple({*self.bad, *(n.name for n in self.roster.alive() if n.unfit)})
            self._out.append(Recruit(0.0, what, away))

    def _warn(self, node: Node, text: str) -> None:
        if node.warned != node.unfit:
            node.warned = node.unfit
            self._say(f"WARNING: {text}")
