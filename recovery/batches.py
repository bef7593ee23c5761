"""One batch, fetched here or by DataLoader worker processes, with the same random numbers.

torch's DataLoader does the work. What it has no public way for is done in `Stream`
alone: to stop worker processes at once, and to hear of a dead one while waiting for
its data instead of by an exception at any line of the user's code.
"""

from __future__ import annotations

import copy
import ctypes
import multiprocessing
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import Any, NamedTuple

import torch
import torch.multiprocessing
from everstep.recovery import rng
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, Dataset

# What a user may hand on to the DataLoader. persistent_workers changes nothing: they always are.
DATALOADER_OPTIONS = (
    "collate_fn",
    "multiprocessing_context",
    "persistent_workers",
    "pin_memory",
    "prefetch_factor",
    "timeout",
    "worker_init_fn",
)
_FOR_ANY_PROCESS = ("collate_fn", "pin_memory")
_PR_SET_PDEATHSIG = 1


class Key(NamedTuple):
    """What a batch depends on, besides the seed."""

    step: int
    replica: int
    replicas: int

    def after(self) -> Key:
        return self._replace(step=self.step + 1)


class Order(NamedTuple):
    """A batch to be fetched."""

    key: Key
    indices: list[int]


class Source:
    """Fetches batches of a dataset in this process, and builds the DataLoader that has others fetch them."""

    def __init__(self, dataset: Dataset[Any], seed: int, num_workers: int, options: dict[str, Any]) -> None:
        self._num_workers = num_workers
        self._seeded = _Seeded(dataset, seed)
        # A file that a dataset opens at its first use must not be shared with forked worker processes.
        self._seeded_here = _Seeded(_separate(dataset), seed) if num_workers else self._seeded
        self._options = {name: value for name, value in options.items() if name != "persistent_workers"}
        self._next: deque[Order] = deque()
        self._iterator: Any = None

    def fetch(self, order: Order) -> Any:
        """Fetch a batch in this process; its random state is as before afterwards."""
        threads = torch.get_num_threads()
        with rng.kept():
            if self._num_workers and threads != 1:
                torch.set_num_threads(1)  # as in a worker process, where sums come out in this order
            try:
                return self._fetch_here(order)
            finally:
                if self._num_workers and threads != 1:
                    torch.set_num_threads(threads)

    def _fetch_here(self, order: Order) -> Any:
        # One DataLoader for all batches: to make one takes as long as many a batch.
        iterator, self._iterator = self._iterator, None
        if iterator is None:
            options = {name: self._options[name] for name in _FOR_ANY_PROCESS if name in self._options}
            options.update(batch_sampler=_Once(iter(self._next.popleft, None)), generator=torch.Generator())
            iterator = iter(DataLoader(self._seeded_here, **options))
        self._next.append(order)
        batch = next(iterator)
        self._iterator = iterator  # not where it raised, or is asked by the dataset itself
        return batch

    def ahead(self, orders: Iterator[Order]) -> DataLoader[Any]:
        """A DataLoader of these batches, fetched by worker processes."""
        options = dict(self._options)
        method = options.get("multiprocessing_context") or torch.multiprocessing.get_start_method()
        if not isinstance(method, str):
            method = method.get_start_method()
        parent = None if method == "forkserver" else os.getpid()
        init = _WorkerInit(parent, options.pop("worker_init_fn", None))
        return DataLoader(
            self._seeded,
            batch_sampler=_Once(orders),  # type: ignore[arg-type]
            generator=torch.Generator(),  # torch would draw from the global one
            num_workers=self._num_workers,
            worker_init_fn=init,
            **options,
        )


class Stream:
    """Batches of consecutive steps from worker processes that fetch ahead."""

    def __init__(self, source: Source, key: Key, orders: Iterator[Order]) -> None:
        self.next = key
        self._owner = os.getpid()
        self._iterator: Any = None
        self._iterator = iter(source.ahead(orders))
        self._unwatch()
        self._iterator._worker_pids_set = False  # it is ours to watch and to unwatch from now on

    def get(self) -> Any:
        """The batch of `next`, which is one later afterwards. After any exception: stop."""
        with self._watched():
            try:
                batch = next(self._iterator)
            except (RuntimeError, OSError, EOFError) as error:
                if not isinstance(error, RuntimeError):  # a connection to a worker process that is going down
                    wait([worker.sentinel for worker in self._iterator._workers], timeout=1)
                self._raise_if_worker_died(error)
                raise
        self.next = self.next.after()
        return batch

    def stop(self) -> None:
        """End the worker processes at once, whatever they are doing.

        Not torch's own way, which waits for batches under way, and for ever where a
        worker process was killed while it held a lock.
        """
        iterator, self._iterator = self._iterator, None
        if iterator is None or os.getpid() != self._owner:
            return
        iterator._shutdown = True  # nothing is left to do for its __del__
        for worker in iterator._workers:
            worker.kill()
        for worker in iterator._workers:
            worker.join()
        results = iterator._worker_result_queue
        pinning = getattr(iterator, "_pin_memory_thread", None)
        if pinning is not None:
            iterator._pin_memory_thread_done_event.set()
            results.put((None, None))  # wakes it
            pinning.join(timeout=1)
        for queue in (*iterator._index_queues, results):
            queue.cancel_join_thread()
            if queue is not results or pinning is None or not pinning.is_alive():
                queue.close()

    def __del__(self) -> None:
        if getattr(self, "_iterator", None) is not None and not sys.is_finalizing():
            self.stop()

    @contextmanager
    def _watched(self) -> Iterator[None]:
        # torch's SIGCHLD handler raises for a dead worker process, wherever this thread is: so only in here.
        torch._C._set_worker_pids(id(self._iterator), tuple(w.pid for w in self._iterator._workers))
        try:
            self._raise_if_worker_died(None)
            yield
        finally:
            self._unwatch()

    def _unwatch(self) -> None:
        torch._C._remove_worker_pids(id(self._iterator))

    def _raise_if_worker_died(self, cause: BaseException | None) -> None:
        for worker in self._iterator._workers:
            if worker.exitcode is not None:
                raise RuntimeError(
                    f"StepLoader: DataLoader worker process {worker.pid} {_how_it_ended(worker.exitcode)} "
                    f"before the batch of step {self.next.step} was there; the next request starts fresh ones"
                ) from cause


class Kept:
    """A batch for a step that may be done again, as long as nobody has changed it."""

    def __init__(self, batch: Any) -> None:
        leaves, self._spec = pytree.tree_flatten(batch)
        self._leaves = [leaf.detach() if type(leaf) is torch.Tensor else leaf for leaf in leaves]
        self._usable = all(_can_be_kept(leaf) for leaf in leaves)
        self._versions = self._versions_now()

    def batch(self) -> Any:
        """The batch in containers of its own; None where it must be fetched again."""
        if not self._usable or self._versions_now() != self._versions:
            return None
        fresh = [leaf.detach() if isinstance(leaf, torch.Tensor) else leaf for leaf in self._leaves]
        return pytree.tree_unflatten(fresh, self._spec)

    def _versions_now(self) -> list[int]:
        # torch counts in-place changes of a tensor and of everything that shares its memory by a view.
        return (
            [leaf._version for leaf in self._leaves if isinstance(leaf, torch.Tensor)] if self._usable else []
        )


def _can_be_kept(leaf: object) -> bool:
    if type(leaf) is torch.Tensor:
        return not leaf.requires_grad and not leaf.is_inference()
    return leaf is None or type(leaf) in (bool, int, float, complex, str, bytes)


class _Seeded(Dataset[Any]):
    """A dataset that is asked for a whole batch, and seeds all random numbers for it first."""

    def __init__(self, dataset: Dataset[Any], seed: int) -> None:
        self.dataset = dataset
        self.seed = seed

    def __getitems__(self, order: Order) -> Any:
        rng.seed_step(self.seed, order.key.replica, order.key.step, stream="data")
        fetch_many = getattr(self.dataset, "__getitems__", None)
        if fetch_many is not None:
            return fetch_many(order.indices)
        return [self.dataset[index] for index in order.indices]


class _Once:
    """An iterator as a batch sampler."""

    def __init__(self, orders: Iterator[Order]) -> None:
        self._orders = orders

    def __iter__(self) -> Iterator[Order]:
        return self._orders


@dataclass(frozen=True)
class _WorkerInit:
    """First thing in a worker process: see to it that it ends with the process that it works for.

    The kernel kills it when the *thread* that started it ends; under a fork server a thread of its own does.
    """

    parent: int | None  # None: a fork server is, which lives on as long as its children do
    then: Callable[[int], None] | None

    def __call__(self, worker_id: int) -> None:
        if self.parent is None:
            threading.Thread(target=_end_with_parent, daemon=True).start()
        else:
            if sys.platform == "linux":
                ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != self.parent:
                os._exit(1)  # it died before the line above
        if self.then is not None:
            self.then(worker_id)


def _separate(value: Any, nested: bool = False) -> Any:
    """A copy of a dataset, and of the datasets it is made of, that shares all samples.

    What one of the two sets on itself afterwards, the other does not see.
    """
    if isinstance(value, Dataset) or (not nested and hasattr(value, "__dict__")):
        twin = copy.copy(value)
        for name, part in list(vars(twin).items()):
            vars(twin)[name] = _separate(part, nested=True)
        return twin
    if type(value) in (list, tuple) and any(isinstance(part, Dataset) for part in value):
        return type(value)(_separate(part, nested=True) for part in value)
    return value


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()  # the training process, also under a fork server
    if parent is not None:
        parent.join()
        os.kill(os.getpid(), signal.SIGKILL)


def _how_it_ended(exitcode: int) -> str:
    if exitcode >= 0:
        return f"exited with code {exitcode}"
    name = signal.Signals(-exitcode).name
    return f"was killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")
