"""A process group whose inside can be replaced, so that DDP objects outlive a peer's death.

`Group` is what the user, DDP and torch's default group hold for the whole life of
the process. Each generation gives it a new inside: gloo for CPU tensors, NCCL for
CUDA ones. Between a fault and the next generation, and during the set-up of a
worker that joins later, collectives are *answered locally* by torch's fake group.

Not run on hardware yet: the NCCL half (the same path, with NCCL's own abort).
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from everstep.launcher import messages as m
from everstep.recovery.control import Control
from everstep.recovery.errors import Fault, UsageError
from everstep.recovery.sockets import Sockets
from everstep.recovery.underway import FOREVER, PATIENCE, THREADS, Underway, runners
from torch._C._distributed_c10d import FakeProcessGroup, HashStore, PrefixStore, Store, Work

BACKEND = "everstep"
# So many of NCCL's collectives are noted before those that are over are forgotten.
_NOTED = 16
# How long building a group may take, where nothing aborts it.
CONNECT = timedelta(seconds=60)
# As torch's own default for collectives; hangs are noticed by the launcher, much earlier.
TIMEOUT = timedelta(minutes=30)
# A peer's connection has ended, and a collective is under way all the same: how long until it is broken off.
BROKEN = timedelta(seconds=5)

_FORWARDED = [
    "allreduce",
    "allreduce_coalesced",
    "broadcast",
    "reduce",
    "barrier",
    "allgather",
    "_allgather_base",
    "allgather_coalesced",
    "allgather_into_tensor_coalesced",
    "all_gather_single",
    "all_gather_single_coalesced",
    "gather",
    "scatter",
    "reduce_scatter",
    "_reduce_scatter_base",
    "reduce_scatter_tensor_coalesced",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "alltoall",
    "alltoall_base",
    "all_to_all_single",
    "send",
    "recv",
    "recv_anysource",
    "monitored_barrier",
    "_start_coalescing",
    "_end_coalescing",
]


class Rendezvous(Store):
    """A store for one generation: entries are published through the launcher to every rank.

    It is authenticated (it *is* the control connection), has no port, and a wait in
    it ends as soon as the next generation begins.
    """

    def __init__(self, control: Control, generation: int) -> None:
        super().__init__()
        self._control = control
        self._generation = generation
        self.published: list[bytes] = []

    def set(self, key: str, value: bytes | str) -> None:
        data = value if isinstance(value, bytes) else value.encode("latin-1")
        self.published.append(data)
        self._control.send(m.Published(self._generation, key, data))

    def get(self, key: str) -> bytes:
        self.wait([key])
        value = self._control.entry(self._generation, key)
        if value is None:
            raise Fault(f"rendezvous entry {key} of generation {self._generation} is gone")
        self.published.append(value)
        return value

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        control, generation = self._control, self._generation
        control.wait_in(generation, lambda: all(control.entry(generation, k) is not None for k in keys))

    def check(self, keys: list[str]) -> bool:
        return all(self._control.entry(self._generation, k) is not None for k in keys)


class Inside:
    """The communicators of one generation, and how to break them off."""

    def __init__(self, control: Control, generation: int, rank: int, world: int, host: str) -> None:
        self.generation = generation
        self._store = Rendezvous(control, generation)
        self._sockets = Sockets()
        self._backends: list[Any] = []
        self.group: Any = None
        self._control = control
        self._failure: BaseException | None = None
        self._shape = (rank, world, host)
        self._shut = False
        self._thread: threading.Thread | None = None
        self._underway: Underway | None = None
        self._others: list[Any] = []  # NCCL's collectives under way

    def connect(self) -> None:
        """Build the communicators. Raises Fault as soon as the next generation begins.

        It is done in a thread of its own, which is left to its own time-out when a
        peer dies half-way: a gloo that waits to be connected to cannot be woken.
        """
        built = threading.Event()

        def build() -> None:
            try:
                self._build()
            except BaseException as error:
                self._failure = error
            built.set()
            self._control.note()

        self._thread = threading.Thread(target=build, name="everstep-connect", daemon=True)
        self._thread.start()
        self._control.wait_in(self.generation, built.is_set)
        if self._failure is not None:
            raise Fault(f"the group could not be built: {self._failure}") from self._failure

    def _build(self) -> None:
        rank, world, host = self._shape
        options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
        options._timeout = CONNECT
        options._threads = THREADS
        store = PrefixStore(f"everstep/{self.generation}/cpu", self._store)
        others = runners()
        gloo = dist.ProcessGroupGloo(store, rank, world, options)
        self._sockets.keep(self._store.published)
        gloo.set_timeout(FOREVER)
        self._underway = Underway(gloo, rank, world, others)
        group = dist.ProcessGroup(store, rank, world)
        group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
        self._backends.append(gloo)
        if torch.cuda.is_available():  # not run on hardware yet
            nccl_store = PrefixStore(f"everstep/{self.generation}/cuda", self._store)
            nccl_options = dist.ProcessGroupNCCL.Options()
            nccl_options._timeout = TIMEOUT
            nccl = dist.ProcessGroupNCCL(nccl_store, rank, world, nccl_options)
            group._register_backend(torch.device("cuda"), dist.ProcessGroup.BackendType.NCCL, nccl)
            self._backends.append(nccl)
        self.group = group

    def abort(self) -> None:
        """Make every call that is blocked in these communicators raise. From any thread."""
        if self._shut:
            return
        self._shut = True
        self._sockets.shut(self._store.published)
        if self._underway is not None:
            self._underway.fail()
        for backend in self._backends[1:]:  # NCCL's abort is real; gloo's blocks nothing and frees nothing
            with contextlib.suppress(RuntimeError):
                backend.abort()

    def broken(self) -> bool:
        """Has it been broken off, here or by a peer? What is true of it stays true."""
        return self._shut or self._sockets.broken()

    def launched(self, name: str, work: Any, args: tuple[Any, ...]) -> Any:
        """The collective `name` was launched; its handle, to be handed out."""
        if self._underway is None or not _on_cpu(args, alone=len(self._backends) == 1):
            if len(self._others) >= _NOTED:
                self._others = [x for x in self._others if not x.is_completed()]
            self._others.append(work)
            return work
        return self._underway.note(name, work, args[0] if args else [])

    def release(self) -> bool:
        """After `abort`: end the collectives that nothing else would. False: one could not be ended."""
        until = time.monotonic() + PATIENCE
        if self._underway is not None and not self._underway.release():
            return False
        while not all(x.is_completed() for x in list(self._others)):  # NCCL's own abort is to end them
            if time.monotonic() > until:
                return False
            time.sleep(0.05)
        return True

    def overdue(self) -> bool:
        """Is there a collective that will not end by itself, or has taken far too long?"""
        age = 0.0 if self._underway is None else self._underway.age(time.monotonic())
        return age > TIMEOUT.total_seconds() or (age > BROKEN.total_seconds() and self.broken())

    @property
    def building(self) -> bool:
        """Is it being built still, maybe by a thread that was left to its time-out?"""
        return self._thread is not None and self._thread.is_alive()

    def forget(self) -> None:
        """In a forked child: keep no peer's connection open."""
        self._sockets.forget()

    def close(self) -> None:
        """Drop the communicators; their threads are joined."""
        self.abort()
        if self._underway is not None:
            self._underway.close()
        self._others = []
        self._backends.clear()
        self.group = None
        self._sockets.close()


class Group(dist.ProcessGroup):
    """The run's process group: forwards each collective to the inside of the generation."""

    def __init__(self, rank: int, world: int) -> None:
        super().__init__(rank, world)  # type: ignore[call-arg]
        self._rank, self._world = rank, world
        self._fake = FakeProcessGroup._create_internal(rank, world)
        self._local: Any = dist.ProcessGroup(HashStore(), rank, world)
        self._local._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)
        for device in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
            self._local._register_backend(
                torch.device(device), dist.ProcessGroup.BackendType.CUSTOM, self._fake
            )
        self._inside: Inside | None = None
        self._lock = threading.Lock()
        self._name = BACKEND
        self.refusal: str | None = None  # why a collective is not allowed now
        self.before: Callable[[], None] | None = None  # fault injection
        self.setting_up = False  # between init() and steps()

    # --- changed by the run ---------------------------------------------------------------------

    def use(self, inside: Inside | None) -> None:
        """Take a new inside; None answers collectives locally."""
        with self._lock:
            old, self._inside = self._inside, inside
        if old is not None and old is not inside:
            old.close()

    @contextlib.contextmanager
    def answered_locally(self) -> Iterator[None]:
        """Collectives inside are answered locally, and the inside is what it was afterwards."""
        inside, self._inside = self._inside, None
        try:
            yield
        finally:
            self._inside = inside

    def broken(self) -> bool:
        """Can no collective succeed any more in this generation?"""
        inside = self._inside
        return inside is not None and inside.broken()

    def forget(self) -> None:
        """In a forked child: keep no connection open."""
        # The inside itself stays: to free it would wait for threads that the child does not have.
        if self._inside is not None:
            self._inside.forget()

    # --- what torch calls -----------------------------------------------------------------------

    def _target(self) -> tuple[Inside | None, Any]:
        if self.refusal is not None:
            raise UsageError(self.refusal)
        if self.setting_up:
            _refuse_objects()
        if self.before is not None:
            self.before()
        inside = self._inside
        return (None, self._local) if inside is None else (inside, inside.group)

    def size(self) -> int:
        return self._world

    def rank(self) -> int:
        return self._rank

    def getSize(self) -> int:
        return self._world

    def getRank(self) -> int:
        return self._rank

    def getBackendName(self) -> str:
        return BACKEND

    def getGroupName(self) -> str:
        return self._name

    def setGroupName(self, name: str) -> None:
        self._name = name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_name(self) -> str:  # type: ignore[override]
        return self._name


# torch's functions whose result only another rank knows, and which fall over an answer that is not real.
_FROM_ONE_RANK = frozenset({"broadcast_object_list", "scatter_object_list", "recv_object_list"})


def _refuse_objects() -> None:
    frame = sys._getframe(1)
    while frame is not None:
        if (
            frame.f_code.co_name in _FROM_ONE_RANK
            and frame.f_code.co_filename == dist.distributed_c10d.__file__
        ):
            raise UsageError(
                f"{frame.f_code.co_name}() between init() and steps(): a worker that joins later cannot be "
                "sent it again, since its peers are past it. Have every rank find the value by itself (from "
                "the environment, a file, the seed), or do it inside the loop"
            )
        frame = frame.f_back  # type: ignore[assignment]


def _on_cpu(args: Any, *, alone: bool) -> bool:
    """Are these gloo's to work on? A call without tensors is, where gloo is `alone`."""
    for arg in args:
        if isinstance(arg, torch.Tensor):
            return arg.device.type == "cpu"
        if isinstance(arg, list) and arg:
            return _on_cpu(arg, alone=alone)
    return alone


class Answered(Work):
    """A collective that was answered locally: done, its result the tensors as they are."""

    def __init__(self, result: Any) -> None:
        super().__init__()
        self._future: torch.futures.Future[Any] = torch.futures.Future()
        self._future.set_result(result)

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        return self._future


def _forward(name: str) -> Callable[..., Any]:
    def method(self: Group, *args: Any, **kwargs: Any) -> Any:
        inside, target = self._target()
        work = getattr(target, name)(*args, **kwargs)
        if target is self._local and work is not None:
            return Answered(args[0] if args else [])
        return work if inside is None or work is None else inside.launched(name, work, args)

    method.__name__ = name
    return torch._dynamo.disable(method) if hasattr(torch, "_dynamo") else method  # type: ignore[no-untyped-call]


for _name in _FORWARDED:
    setattr(Group, _name, _forward(_name))


def make_default(group: Group) -> None:
    """Make `group` the default group of torch.distributed. There is one a process."""

    def create(store: Any, rank: int, size: int, timeout: timedelta) -> Group:
        if dist.is_initialized():
            raise UsageError(
                "torch.distributed.new_group() under everstep: sub-groups are not recovered yet; "
                "use the default group"
            )
        return group

    devices = ["cpu", "cuda"]
    dist.Backend.register_backend(BACKEND, create, devices=devices)
    dist.init_process_group(BACKEND, store=HashStore(), rank=group.rank(), world_size=group.size())
