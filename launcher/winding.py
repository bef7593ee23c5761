"""Stopping a run in order: the step under way is finished, what is held in memory is saved, then all end.

Told to stop, ranks hold between two steps; one that is still in the middle of one when the time is over
goes back to its last committed step, as after a fault. Then one rank that is whole writes the checkpoint.
In pure data parallel every rank holds everything, so the last survivor is enough.
"""

from __future__ import annotations

from dataclasses import replace

from everstep.launcher import messages as m
from everstep.launcher import tries
from everstep.launcher.mind import Mind
from everstep.launcher.roster import AskWhy, End, Node, StopAsked, Timer, TimeUp, Worker

READY_WITHIN = 5.0
"""Seconds for all ranks to say what they hold; those that have not by then are not waited for."""
SAVE_WITHIN = 120.0
"""Seconds for writing the checkpoint; whoever told us to stop may be less patient."""
NO_CHECKPOINT = (
    "there is no checkpoint, and a requeued job would begin at step 0: add run.checkpoint(path, every=N) to "
    "the script"
)


class Winding(Mind):
    """The end of a run that could have gone on."""

    def _told(self, node: Node, signal: int) -> None:
        """An agent was told to stop. If most were, the run is meant; one alone is a node that is lost."""
        if node.told == signal:
            return
        node.told = signal
        alive = self.roster.alive()
        if 2 * sum(1 for n in alive if n.told) > len(alive):
            # Whether the job goes back to the queue is the same question, whoever hears of the signal first.
            self._out.append(AskWhy(signal))

    def _stop_asked(self, asked: StopAsked) -> None:
        if self.ending is not None:
            return
        if not self.joined or self.phase == "restarting":
            self._end(asked.code if not asked.requeue else tries.REQUEUE, asked.why, requeue=asked.requeue)
            return
        for node in self.roster.alive():
            self._to(node.name, m.Winding(self.config.grace + READY_WITHIN + SAVE_WITHIN))
        self.ending = End(tries.REQUEUE, asked.why, requeue=asked.requeue)
        if self.phase == "running":
            self._say(f"{asked.why}: the step under way is finished first (--grace {self.config.grace:g} s)")
            self._tell(self.roster.holders(), m.Hold(self.generation))
            self._out.append(Timer("hold", self.config.grace, self.generation))
        else:
            self._wind()

    def _time_up(self, timer: TimeUp) -> None:
        if timer.generation != self.generation:
            return
        if timer.name == "move" and self.phase == "running" and self.moving and self.ending is None:
            self._all_hold()
        elif self.ending is None:
            return
        elif timer.name == "hold" and self.phase == "running":
            self._wind()
        elif timer.name == "ready" and self.phase == "winding" and not self.saver:
            self._save()
        elif timer.name == "save" and self.phase == "winding":
            self._finish_winding(f"no checkpoint was written in {SAVE_WITHIN:.0f} s")

    def _holds(self, worker: Worker, held: m.Held) -> None:
        worker.held = max(worker.held, held.generation)
        self._count(worker, held.committed)
        everybody = all(w.held == self.generation or not w.alive for w in self.roster.holders())
        if self.phase == "running" and everybody:
            if self.ending is not None:
                self._wind()
            elif self.moving:
                self._all_hold()

    def _wind(self) -> None:
        """Everybody back to the last committed step: a generation that nobody will go on in."""
        if self.phase == "running":
            self.generation += 1
            for worker in self.roster.workers.values():
                worker.ready = None
            self._tell(self.roster.holders() + self.roster.donors(), m.Abort(self.generation))
            why = self.ending.reason if self.ending is not None else ""
            self._emit("generation", world=self.config.world, reason=why)
        self.phase = "winding"
        self._out.append(Timer("ready", READY_WITHIN, self.generation))
        self._try_save()

    def _present(self) -> list[Worker]:
        return [w for w in self.roster.holders() + self.roster.donors() if w.alive]

    def _try_save(self) -> None:
        if not self.saver and all(w.ready is not None for w in self._present()):
            self._save()

    def _save(self) -> None:
        """Have one rank that is whole and furthest write a checkpoint, where the script configures any."""
        self.saver = ""
        ready = [(w, w.ready) for w in self._present() if w.ready is not None]
        whole = [(w, r) for w, r in ready if r.whole and not r.fresh]
        best = max((r.committed for _, r in whole), default=-1)
        if best <= self.saved:
            self._finish_winding(f"the newest checkpoint is of step {self.saved}" if self.saved >= 0 else "")
            return
        able = [w for w, r in whole if r.committed == best and r.checkpoints]
        if not able:
            older = f"the newest checkpoint is of step {self.saved}, {best - self.saved} steps back"
            self._finish_winding(older if self.saved >= 0 else "")
            return
        worker = min(able, key=lambda w: (w.rank < 0, w.rank))
        writer = next((w for w in self._present() if w.rank == 0), None)
        if writer is not None and worker is not writer and len(self._present()) > 1:
            # It has the lock on the directory as long as it lives, and nothing worth saving.
            self._to(writer.node, m.Kill(writer.id, "another rank writes the last checkpoint"))
            return
        self.saver = worker.id
        self._tell([worker], m.Save(self.generation))
        self._out.append(Timer("save", SAVE_WITHIN, self.generation))

    def _written(self, worker: Worker, saved: m.Saved) -> None:
        """A checkpoint was written, in the ordinary course of things or at the end."""
        if not saved.error:
            self.saved = max(self.saved, saved.committed)
        if self.phase == "winding" and self.saver == worker.id:
            text = f"a checkpoint of step {saved.committed} was written"
            self._finish_winding(f"no checkpoint could be written ({saved.error})" if saved.error else text)

    def _lost_while_winding(self) -> None:
        """Somebody died: nobody replaces it, but it may have been the one that saves."""
        saver = self.roster.workers.get(self.saver)
        if saver is not None and not saver.alive:
            self._save()
        else:
            self._try_save()

    def _finish_winding(self, how: str) -> None:
        if self.ending is None:
            return
        end = replace(self.ending, reason=f"{self.ending.reason}; {how}" if how else self.ending.reason)
        if end.requeue and self.progress and self.saved < 0:
            end = replace(end, requeue=False, reason=f"{end.reason}; {NO_CHECKPOINT}")
        self._end(end.code, end.reason, requeue=end.requeue)
