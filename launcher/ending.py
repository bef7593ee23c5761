"""How a run ends: all scripts are over, or one is over too early for the others.

A script that ends early and without an error is no failure in itself: all may have
agreed to stop. That it is one shows when the others cannot go on without it.
"""

from __future__ import annotations

from everstep.launcher import messages as m
from everstep.launcher.mind import Mind
from everstep.launcher.roster import Worker


class Ending(Mind):
    """The last part of a run."""

    def _stands(self) -> bool:
        """Is the generation's group complete?"""
        holders = [w for w in self.roster.holders() if w.alive]
        return self.phase == "running" and all(w.grouped >= self.generation for w in holders)

    def _done(self, worker: Worker, message: m.Done) -> None:
        worker.done = max(worker.done, message.total)
        if self.roster.empty():
            return
        holders = self.roster.holders()
        total = min(w.done for w in holders)
        if total > self.all_done:
            self.all_done = total
            self._tell(holders, m.AllDone(total))
        elif worker.done <= self.all_done:  # it has taken a rank since
            self._tell([worker], m.AllDone(self.all_done))
        else:
            self._check_deserted()

    def _try_end(self) -> None:
        """All scripts have ended: let the workers go. All workers are gone: the run is over."""
        holders = self.roster.holders()
        if self._check_deserted() or self.roster.empty():
            return
        alive = [w for w in holders if w.alive]
        if not alive:
            self._end(0, "finished")
        elif self._stands() and all(w.status == "leaving" for w in alive):
            self._release(alive)

    def _check_deserted(self, ended: list[Worker] | None = None) -> bool:
        """Has a script ended that the others cannot go on without? `ended`: those that trouble them."""
        holders = self.roster.holders()
        deserters = [w for w in holders if w.deserted]
        if ended is not None and not any(w.left_early for w in ended):
            deserters = ended  # they went through all their steps, and others have more
        if not deserters or not self.joined:
            return False
        others = [w for w in holders if w.alive]
        waiting = bool(others) and all(w.done > self.all_done or w.status == "leaving" for w in others)
        waiting = waiting and any(w.status != "leaving" for w in others)
        if self.phase == "running" and not self.troubled and not waiting:
            return False
        worker = deserters[0]
        step = max(worker.committed, 0)
        if self.phase == "running":
            self._end(
                1,
                f"rank {worker.rank} ended its script at step {step} while the others go on: "
                "every rank must run the same steps",
            )
        else:
            self._give_up(
                f"rank {worker.rank} had ended its script at step {step} and cannot be part of it any more"
            )
        return True
