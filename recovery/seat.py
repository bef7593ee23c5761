"""A rank's part in the generations: how it joins one, and how it tells a fault from an error.

`Seat` is what stands between `Run` and the launcher. `Solo` is the same for a script
that runs under plain python or plain torchrun: nothing to join, no peer to receive from.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from everstep.launcher import messages as m
from everstep.recovery import state
from everstep.recovery.checkpoint import Checkpoints
from everstep.recovery.control import Control
from everstep.recovery.errors import EverstepError, Fault, NoStateError, UsageError
from everstep.recovery.group import Group, Inside
from everstep.recovery.restore import Impossible, Plan, plan
from everstep.recovery.transfer import Exchange
from everstep.recovery.underway import anything_kept

# How long a failed collective waits to hear of the fault behind it before it reports itself.
_HEARSAY = 5.0
# How often one looks for a collective that will not end by itself.
_WATCH = 2.0
# How often a broken group, with no fault known to the launcher, is put down to the network.
_TRIES = 3


@dataclass
class Held:
    """What a rank holds, and the means to change it: `Run`'s side of joining."""

    tracked: dict[str, Any]
    committed: int
    whole: bool
    checkpoints: Checkpoints | None
    resume: bool
    device: torch.device
    restored: Callable[[int], None]  # state was loaded: this many steps are committed now


class AnySeat(Protocol):
    """What `Run` needs of a seat."""

    def join(self, held: Held) -> None: ...
    def is_fault(self, error: BaseException) -> bool: ...
    def committed(self, committed: int) -> None: ...
    def saved(self, committed: int, error: str = "") -> None: ...
    def hold(self, committed: int) -> None: ...
    def check(self) -> None: ...
    def check_group(self) -> None: ...
    def interrupted(self) -> bool: ...
    def leave_group(self) -> None: ...
    def finish(self, total: int) -> None: ...
    @property
    def generation(self) -> int: ...
    @property
    def underway(self) -> int: ...


class Seat:
    """A rank under the launcher."""

    def __init__(
        self, control: Control, assign: m.Assign, group: Group, exchange: Exchange, worker: str
    ) -> None:
        self._control = control
        self._group = group
        self._exchange = exchange
        self._worker = worker
        self._start = assign.start
        self.rank, self._world = assign.rank, assign.world_size
        self._assigned = assign.generation
        self._joined = 0
        self._joining = 0
        self._troubles = 0  # broken groups since the last commit that nobody else knew of
        self._strays: list[Inside] = []
        self._reported = 0  # newest generation whose first commit was reported
        self._inside: Inside | None = None
        self.reach: Callable[[str], None] = lambda at: None

    @property
    def generation(self) -> int:
        return self._joined or self._control.generation

    @property
    def underway(self) -> int:
        """The generation that this rank is part of, or about to be."""
        return self._joining or self.generation

    @property
    def ever_joined(self) -> bool:
        """Was this worker ever part of a generation."""
        return self._joined > 0

    def connect(self, generation: int) -> None:
        """Build this generation's group and use it."""
        began = time.monotonic()
        inside = Inside(self._control, generation, self.rank, self._world, self._exchange.host)
        self._inside = inside
        try:
            inside.connect()
        except Fault:
            inside.close()
            self._inside = None
            self._strays = [x for x in [*self._strays, inside] if x.building]
            raise
        self._group.use(inside)
        self._control.send(m.GroupReady(generation, time.monotonic() - began))

    def on_abort(self, generation: int) -> None:
        """In the control thread: break off everything older than `generation`."""
        began = time.monotonic()
        inside = self._inside
        if inside is not None and inside.generation < generation:
            inside.abort()
            threading.Thread(target=self._free, args=(inside,), name="everstep-free", daemon=True).start()
        self._exchange.abort()
        self._control.send(m.AbortDone(generation, time.monotonic() - began))

    def _free(self, inside: Inside) -> None:
        """A collective that nothing frees would hold up everybody: rather be lost, and replaced."""
        if not inside.release() and inside is self._inside:
            print(
                f"everstep: rank {self.rank} cannot be freed from a collective of generation "
                f"{inside.generation}: this worker gives up its place",
                file=sys.stderr,
                flush=True,
            )
            os.kill(os.getpid(), signal.SIGKILL)

    def watch(self) -> None:
        """In a thread of its own: break off what will not end by itself, though nobody was lost."""
        while True:
            time.sleep(_WATCH)
            inside = self._inside
            if inside is not None and inside.overdue():
                inside.abort()
                self._free(inside)

    # --- joining --------------------------------------------------------------------------------

    def join(self, held: Held) -> None:
        """Be part of the newest generation, with the state of its step.

        Raises EverstepError where the run cannot go on.
        """
        if self._inside is None and self._joined:
            self._await_next(self._joined, "its group is broken")
        while self._joined != self._control.generation:
            generation = self._control.generation
            try:
                self._join(generation, held)
            except Fault as fault:
                self._retry(generation, fault)

    def _retry(self, generation: int, fault: Fault) -> None:
        """A generation could not be joined: by the next one."""
        self.leave_group()
        self._await_next(generation, str(fault))

    def _await_next(self, generation: int, why: str) -> None:
        """Wait for the generation after this one, and ask for it if nobody else has."""
        control = self._control
        if not control.wait(lambda: control.generation > generation, _HEARSAY):
            control.send(m.Trouble(generation, why[:300]))
            control.wait(lambda: control.generation > generation)

    def _join(self, generation: int, held: Held) -> None:
        self._joining = generation
        self.reach("join")
        members, go = self._assemble(generation, held, with_rank=True)
        self._restore(members, go, held)
        if self._inside is None or self._inside.generation != generation:
            self.connect(generation)
        else:
            self._control.send(m.GroupReady(generation, 0.0))
        self._joined = generation

    def donate(self, held: Held) -> None:
        """A worker that is leaving after an exception stays a donor for whoever takes its rank."""
        generation = self._control.generation
        if generation == self._joined:
            return
        try:
            members, go = self._assemble(generation, held, with_rank=False)
            self._restore(members, go, held)
        except Fault:
            # Not asked again for this generation: the next one begins, or we may go.
            control = self._control
            control.wait(lambda: control.released or control.generation > generation)
            return
        self._joined = generation

    def _assemble(self, generation: int, held: Held, *, with_rank: bool) -> tuple[Plan, m.Go]:
        snap = state.snapshot(held.tracked)
        start = self._start and not self._joined
        newest = -1
        if held.checkpoints is not None and with_rank and not self._joined:
            newest = newest_to_try(held, start, self.rank)
        self._control.send(
            m.Ready(
                generation,
                held.committed,
                held.whole,
                not self._joined and not held.committed,
                self._exchange.host,
                self._exchange.port,
                f"{_size(held.tracked)},{state.layout(snap.skeleton)}",
                newest,
                state.fingerprint(snap) if start else "",
                held.checkpoints is not None,
            )
        )
        go = self._await_go(generation, held, snap)
        decision = plan(go.members, progress=go.progress)
        if isinstance(decision, Impossible):
            raise NoStateError(decision.reason)
        return decision, go

    def _await_go(self, generation: int, held: Held, snap: state.Snapshot) -> m.Go:
        control = self._control
        asked = False

        def news() -> bool:
            return (control.go is not None and control.go.generation == generation) or (
                control.save == generation and not asked
            )

        while True:
            control.wait_in(generation, news)
            if control.save == generation and not asked:
                asked = True  # the run is to stop, and this is what it will go on from
                save(held.checkpoints, held.committed, snap, self.saved)
            elif control.go is not None:
                return control.go

    def _restore(self, decision: Plan, go: m.Go, held: Held) -> None:
        if decision.loader == self._worker:
            self._load(go.generation, held)
        donor = next((t.donor for t in decision.transfers if t.receiver == self._worker), None)
        if donor is not None:
            self.reach("receive")
            self._receive(donor, go, held)
        receivers = [t.receiver for t in decision.transfers if t.donor == self._worker]
        if receivers:
            self.reach("send")
            self._exchange.serve(go.generation, receivers, held.committed, state.snapshot(held.tracked))

    def _load(self, generation: int, held: Held) -> None:
        began = time.monotonic()
        size = load_newest(held)
        self._control.send(m.Restored(generation, size, time.monotonic() - began, [], "disk"))

    def _receive(self, donor: str, go: m.Go, held: Held) -> None:
        them = next(x for x in go.members if x.worker == donor)
        # Into live tensors only where nothing is lost if the donor dies half-way.
        disposable = not held.whole or (not self._joined and not held.committed)

        def land(skeleton: bytes) -> list[torch.Tensor]:
            if disposable:
                held.whole = False  # until all of it is there and checked
                return state.landing(held.tracked, skeleton, held.device)
            return [
                state.empty_like_spec(s, s.device if s.device == "cpu" else held.device)
                for s in state.specs(skeleton)
            ]

        got = self._exchange.fetch(go.generation, self._worker, (them.host, them.port), go.token, land)
        state.load(held.tracked, got.skeleton, got.tensors)
        held.restored(got.committed)
        held.committed, held.whole = got.committed, True
        self._control.send(m.Restored(go.generation, got.nbytes, got.seconds, [them.rank], "peer"))

    # --- faults ---------------------------------------------------------------------------------

    def check(self) -> None:
        """Raises Fault when this generation is over."""
        if self._joined and self._control.generation > self._joined:
            raise Fault(f"generation {self._control.generation} has begun")

    def check_group(self) -> None:
        """Raises Fault when a collective may have failed, whether or not anybody has noticed yet."""
        if self._group.broken():
            raise Fault(f"the group of generation {self._joined} is broken")

    def interrupted(self) -> bool:
        """Is this generation over, or does its group work no more?"""
        return self._control.generation > self._newest() or self._group.broken()

    def lost_a_peer(self) -> bool:
        """Is this generation's group broken?"""
        return self._group.broken()

    def is_fault(self, error: BaseException) -> bool:
        """Is there a lost peer behind this exception? May wait a moment for the launcher's word.

        Whatever the exception says: what counts is whether the group is broken.
        """
        if any(isinstance(e, EverstepError) for e in _chain(error)):
            return False
        if not self.interrupted():
            return False
        control, newest = self._control, self._newest()
        if control.wait(lambda: control.generation > newest, _HEARSAY):
            return True
        self._troubles += 1
        if self._troubles >= _TRIES:  # it breaks again and again: let the exception speak
            return False
        control.send(m.Trouble(newest, (str(error).splitlines() or [""])[0][:300]))
        return control.wait(lambda: control.generation > newest, 4 * _HEARSAY)

    def _newest(self) -> int:
        return self._joined or self._assigned

    @property
    def has_strays(self) -> bool:
        """Is a thread left in gloo that nobody waits for any more?"""
        return anything_kept() or any(inside.building for inside in self._strays)

    def forget(self) -> None:
        """In a forked child: what belongs to the parent is closed here."""
        self._group.forget()
        self._exchange.forget()

    def leave_group(self) -> None:
        """Collectives are answered locally until the next generation is joined."""
        self._group.use(None)
        self._inside = None

    # --- progress -------------------------------------------------------------------------------

    def committed(self, committed: int) -> None:
        """A step was committed. The first one of a generation is reported."""
        self._troubles = 0
        if self._reported != self._joined:
            self._reported = self._joined
            self._control.send(m.Committed(self._joined, committed))

    def saved(self, committed: int, error: str = "") -> None:
        """A checkpoint was written, or could not be."""
        self._control.send(m.Saved(committed, error))

    def hold(self, committed: int) -> None:
        """Between two steps: wait here while the run is about to stop. Raises Fault when it does."""
        control, generation = self._control, self._joined
        if control.hold == generation and generation:
            control.send(m.Held(generation, committed))
            control.wait_in(generation, lambda: False)

    def finish(self, total: int) -> None:
        """Wait until every rank has committed the last step. Raises Fault."""
        control = self._control
        control.send(m.Done(total))
        control.wait_in(self._joined, lambda: control.all_done >= total)


class Solo:
    """A rank under plain python or plain torchrun: checkpoints are its only memory."""

    generation = 1
    underway = 1

    def __init__(self) -> None:
        self._joined = False

    def join(self, held: Held) -> None:
        """Load the newest valid checkpoint, the same on every rank."""
        if self._joined:
            return
        self._joined = True
        if held.checkpoints is None:
            return
        # Rank 0 decides, so that all load the same one; -1: there is none.
        newest = newest_to_try(held, True, 0) if dist.get_rank() == 0 else -1
        agreed = torch.tensor([newest], device=held.device)
        dist.broadcast(agreed, 0)
        if int(agreed.item()) >= 0:
            load_newest(held)
            agreed.fill_(held.committed)
            dist.broadcast(agreed, 0)
            if int(agreed.item()) != held.committed:
                raise NoStateError(
                    f"rank {dist.get_rank()} reads the checkpoint of step {held.committed}, rank 0 that of "
                    f"step {int(agreed.item())}: keep checkpoints on a file system that all nodes share"
                )

    def is_fault(self, error: BaseException) -> bool:
        """Nobody repairs anything here."""
        return False

    def committed(self, committed: int) -> None:
        """Nobody listens."""

    def saved(self, committed: int, error: str = "") -> None:
        """Nobody listens."""

    def hold(self, committed: int) -> None:
        """Nobody asks us to."""

    def check(self) -> None:
        """Nothing to check."""

    def check_group(self) -> None:
        """Nothing to check."""

    def interrupted(self) -> bool:
        """What fails here is not repaired."""
        return False

    def leave_group(self) -> None:
        """Nothing to leave."""

    def finish(self, total: int) -> None:
        """The others end by themselves."""


def _size(tracked: dict[str, Any]) -> str:
    """How large the models are, for people; optimizers, whose state comes late, are left out."""
    tensors = [t for x in tracked.values() if isinstance(x, torch.nn.Module) for t in x.state_dict().values()]
    tensors = [t for t in tensors if isinstance(t, torch.Tensor)]
    return f"{len(tensors)} tensors of {sum(t.numel() for t in tensors):,} elements"


def save(
    checkpoints: Checkpoints | None,
    committed: int,
    snap: state.Snapshot,
    report: Callable[[int, str], None],
) -> None:
    """Write a checkpoint, and report how that went."""
    if checkpoints is None:
        report(committed, "none is configured")
        return
    path = checkpoints.save(committed, snap, {"run": os.environ.get("TORCHELASTIC_RUN_ID", "")})
    report(committed, "" if path is not None else "see the message of its rank")


def newest_to_try(held: Held, start: bool, rank: int) -> int:
    """Committed steps of the newest checkpoint here, not verified yet; -1: none counts.

    With `--resume none` a run that starts puts older checkpoints aside, and trusts only its own.
    """
    if held.checkpoints is None:
        return -1
    if start and not held.resume:
        if rank == 0:
            held.checkpoints.set_aside()
        return -1
    return next(iter(held.checkpoints.candidates()), -1)


def load_newest(held: Held) -> int:
    """Load the newest checkpoint that is valid; bytes read. Raises NoStateError where there is none."""
    found = held.checkpoints.newest_valid() if held.checkpoints is not None else None
    if found is None:
        raise NoStateError(
            "there are checkpoints, but none is valid (see above); to begin at step 0, "
            "start with --resume none"
        )
    try:
        state.load(held.tracked, found.skeleton, found.tensors)
    except UsageError as error:
        raise UsageError(
            f"the checkpoint {found.path} is of another script or model: {error}; use another directory, "
            "or put it aside with --resume none"
        ) from error
    held.restored(found.committed)
    held.committed, held.whole = found.committed, True
    return sum(t.nbytes for t in found.tensors)


def _chain(error: BaseException | None) -> Any:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__
