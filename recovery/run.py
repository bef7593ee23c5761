"""The public API: `init()`, `Run` and `Step`.

A training script calls `init()`, tracks what makes up its state, and loops over
`run.steps(N)` inside a function decorated with `run.protect`. Under `everstep run` or
`everstep srun` a lost peer then costs a fraction of a second and not one bit. Under
plain `python` or `torchrun` the same script runs as it is, with checkpoints alone.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from everstep.recovery import state
from everstep.recovery.body import Body
from everstep.recovery.checkpoint import Checkpoints
from everstep.recovery.errors import UsageError
from everstep.recovery.faults import Drill
from everstep.recovery.seat import AnySeat, Held, Seat, save

P = ParamSpec("P")
R = TypeVar("R")


class Step(int):
    """One pass of the loop's body: the step's number, counting from 0, and `commit()`."""

    _run: Run

    def __new__(cls, number: int, run: Run) -> Step:
        step = super().__new__(cls, number)
        step._run = run
        return step

    def commit(self) -> None:
        """State that the step is done: what follows in the body is not part of it.

        The loop does it by itself when it comes back. Collectives are allowed again
        afterwards. Raises UsageError when called twice.
        """
        self._run._commit(int(self))


class Run:
    """This worker's part in the run. Made by `init()`, once a process."""

    def __init__(
        self, seat: AnySeat, group: Any, device: torch.device, seed: int, *, resume: bool = True
    ) -> None:
        self.group = group
        self.device = device
        self.rank: int = dist.get_rank()
        self.world_size: int = dist.get_world_size()
        self._seat = seat
        self._seed = seed
        self._resume = resume
        self._tracked: dict[str, Any] = {}
        self._body: Body | None = None
        self._checkpoints: Checkpoints | None = None
        self._committed = 0
        self._open = False  # a step is under way
        self._looping = False  # steps() has begun and not ended
        self._ended_by: BaseException | None = None  # what a protected function was left by
        self._protected = False
        self._drill = Drill()
        self.on_commit: Callable[[int], None] = lambda committed: None

    # --- what makes up the state ----------------------------------------------------------------

    def track(self, **objects: Any) -> None:
        """Name the objects whose state is the run's: anything with state_dict and load_state_dict.

        Call it before `steps()`, with the same names in the same order on every rank.
        Raises UsageError for an object without these methods.
        """
        if self._body is not None:
            raise UsageError("run.track() after run.steps() began: track everything before the loop")
        for name, obj in objects.items():
            state.check(name, obj)
            if name in self._tracked and self._tracked[name] is not obj:
                raise UsageError(f"run.track({name}=…): another object is tracked under this name already")
            self._tracked[name] = obj

    def checkpoint(self, path: str | os.PathLike[str], every: int, keep: int = 2) -> None:
        """Write a checkpoint to `path` every `every` steps, keeping the newest `keep`.

        `steps()` continues from the newest valid one when nobody holds the state in
        memory. Call it between `track()` and `steps()`. Raises UsageError for a path
        that cannot be written.
        """
        if self._body is not None:
            raise UsageError("run.checkpoint() after run.steps() began: call it before the loop")
        if every < 1 or keep < 1:
            raise UsageError(f"run.checkpoint(every={every}, keep={keep}): both are at least 1")
        self._checkpoints = Checkpoints(Path(path), every, keep, log=_log)

    def digest(self) -> str:
        """SHA-256 of all tracked state, in hexadecimal; the same on every rank after `steps()`."""
        return state.digest(self._tracked)

    # --- the loop -------------------------------------------------------------------------------

    def protect(self, function: Callable[P, R]) -> Callable[P, R]:
        """Decorate the function that holds the loop: when a peer is lost it is unwound and called again.

        Its local variables start afresh at each call. Exceptions with no fault behind
        them are the user's own and are raised as they are.
        """

        @functools.wraps(function)
        def protected(*args: P.args, **kwargs: P.kwargs) -> R:
            self._protected = True
            while True:
                self._ended_by = None
                try:
                    result = function(*args, **kwargs)
                except Exception as error:
                    if not self._seat.is_fault(error):
                        self._ended_by = error
                        raise
                except BaseException as error:  # sys.exit(), Ctrl-C
                    self._ended_by = error
                    raise
                else:
                    if not self._looping or not self._seat.interrupted():
                        return result
                    # The fault's exception was kept from us by an `except` around the loop.
                self._rewind()

        return protected

    def steps(self, total: int) -> Iterator[Step]:
        """The steps up to `total`, from the first one that is not committed yet.

        Ends once every rank has committed step `total - 1`.
        """
        if not self._tracked:
            raise UsageError("run.steps() before run.track(): track the model and the optimizer first")
        if total < 0:
            raise UsageError(f"run.steps({total}): a number of steps is not negative")
        self._prepare()
        if self._open:
            self._leave_step()
        self._looping = True
        self._seat.join(self._held())
        while self._committed < total:
            self._seat.check()
            self._seat.hold(self._committed)
            step = Step(self._committed, self)
            self._begin(step)
            yield step
            if self._committed == int(step):
                step.commit()
        self._reach("done")
        self._seat.finish(total)
        self._looping = False

    def _prepare(self) -> None:
        if self._body is not None:
            return
        body = Body(self._tracked, self.group, self._refuse, self._seat.check_group)
        self._body = body
        body.reach = self._reach
        if isinstance(self._seat, Seat):
            if not self._protected:
                raise UsageError(
                    "run.steps() outside a protected function: decorate the function that holds "
                    "the loop with @run.protect, so that it can be called again after a fault"
                )
            self.group.setting_up = False
            with self.group.answered_locally():
                body.rehearse()

    def _begin(self, step: int) -> None:
        if self._body is None:
            raise UsageError("a step without a loop")
        self._open = True
        self._body.begin(self._seed, step)
        self._reach("begin")

    def _commit(self, number: int) -> None:
        if self._body is None or number != self._committed or not self._open:
            raise UsageError(f"step {number} is not the one under way: commit a step once, in its own body")
        self._reach("commit")
        self._body.commit()
        self._open = False
        self._committed += 1
        self._seat.committed(self._committed)
        self.on_commit(self._committed)
        self._reach("committed")
        if self._checkpoints is not None and self.rank == 0 and self._checkpoints.due(self._committed):
            save(self._checkpoints, self._committed, state.snapshot(self._tracked), self._seat.saved)
        self._seat.check()

    def _leave_step(self) -> None:
        """The last loop was left in mid-step, by a `break` or by an exception that was caught."""
        if self._body is None or self._seat.interrupted():
            self._rewind()
            return
        if not self._body.whole:
            raise UsageError(
                f"the loop was left in the middle of step {self._committed}, after optimizer.step(): "
                "call step.commit() before you leave it"
            )
        if isinstance(self._seat, Seat):
            with self.group.answered_locally():
                self._body.rehearse()
        self._body.rewind()
        self._open = False

    def _rewind(self) -> None:
        self._seat.leave_group()
        if self._body is not None:
            if isinstance(self._seat, Seat):
                self._body.put_flags_back()
                self._body.rehearse()  # collectives are answered locally now
            self._body.rewind()
        self._open = False

    def _become_donor(self) -> None:
        """The script has ended by an exception: only the state is of use now."""
        self._seat.leave_group()
        if self._body is not None:
            self._body.rewind()
        self._open = False

    def _held(self) -> Held:
        return Held(
            self._tracked,
            self._committed,
            self._body is None or self._body.whole,
            self._checkpoints,
            self._resume,
            self.device,
            self._restored,
        )

    def _restored(self, committed: int) -> None:
        self._committed = committed
        if self._body is not None:
            self._body.restored()

    def _refuse(self, why: str | None) -> None:
        if isinstance(self._seat, Seat):
            self.group.refusal = why

    def _reach(self, at: str) -> None:
        if self._drill:
            self._drill.reach(at, self.rank, self._committed, self._seat.underway)


def init(seed: int = 0, *, backend: str | None = None) -> Run:
    """Be given a rank. A standby waits here until it is needed.

    On return RANK, LOCAL_RANK, WORLD_SIZE and MASTER_* are set, the default group of
    torch.distributed is the run's, and everything random is seeded from `seed`, alike
    on every rank. `backend` is for plain torchrun alone (gloo, nccl).

    Raises UsageError when called twice.
    """
    from everstep.recovery.entrance import enter

    return enter(seed, backend)


def _log(text: str) -> None:
    print(f"everstep: {text}", file=sys.stderr, flush=True)
