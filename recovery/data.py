"""The data of any step on demand: which samples, and a DataLoader that fetches them.

Both are keyed by the step and the logical replica. Nothing counts batches, so
nothing has to be saved or sent: a newcomer asks for step 4711 as anybody else does.
"""

from __future__ import annotations

import hashlib
import operator
from collections import OrderedDict
from collections.abc import Iterator
from math import isqrt
from typing import Any, NoReturn, SupportsIndex

import numpy as np
import numpy.typing as npt
from everstep.recovery import rng
from everstep.recovery.batches import DATALOADER_OPTIONS, Kept, Key, Order, Source, Stream
from everstep.recovery.errors import UsageError
from torch.utils.data import Dataset, IterableDataset

_AHEAD = 256  # samples whose indices are computed at once


class StepSampler:
    """Which samples belong to a step: a pure function of (seed, step, logical replica).

    Epochs follow each other without end, each in an order of its own. An index of
    that order is computed where it is asked for (a keyed permutation, see
    `_shuffled`), so the first batch costs the same in step 0 and in step 1,000,000,
    of a thousand samples and of a billion, and no random generator is touched.

    Parameters
    ----------
    n:
        Number of samples in the dataset.
    global_batch:
        Samples of one step over all replicas. Where it does not divide evenly,
        replica i of R takes [B*i//R, B*(i+1)//R): sizes differ by one at most.
    seed:
        Gives the order of each epoch.
    shuffle:
        False: each epoch in the order 0, 1, 2, ...
    drop_last:
        True: the rest of an epoch that makes no full batch is left out (another
        one in each epoch). False: that batch is filled up from the next epoch.
        So every batch has `global_batch` samples.

    Raises
    ------
    UsageError
        Where the numbers cannot work; the message says which.
    """

    def __init__(
        self, n: int, global_batch: int, seed: int = 0, shuffle: bool = True, drop_last: bool = True
    ) -> None:
        self.n = _integer("n", n)
        self.global_batch = _integer("global_batch", global_batch)
        self.seed = _integer("seed", seed)
        self.shuffle = shuffle
        self.drop_last = drop_last
        if self.global_batch < 1:
            raise UsageError(f"global_batch={global_batch}: a step needs at least one sample")
        if self.n < self.global_batch:
            raise UsageError(
                f"global_batch={global_batch}, but the dataset has {n} samples: "
                f"use a global_batch of at most {n}"
            )
        self._epoch = self.n - self.n % self.global_batch if drop_last else self.n
        self._computed: tuple[tuple[int, int, int], list[list[int]]] = ((-1, 0, 0), [])

    def indices(self, step: int, replica: int | None = None, replicas: int | None = None) -> list[int]:
        """This replica's samples of one step, in order.

        Without `replica` and `replicas`: those of this process (`recovery.init()`).
        """
        step = _integer("step", step)
        if step < 0:
            raise UsageError(f"step {step}: steps count from 0")
        own_replica, own_replicas = rng.replica()
        replica = own_replica if replica is None else replica
        replicas = own_replicas if replicas is None else replicas
        if not 0 <= replica < replicas:
            raise UsageError(f"replica {replica} of {replicas} does not exist: replicas count from 0")
        if self.global_batch < replicas:
            raise UsageError(
                f"global_batch={self.global_batch} is less than the {replicas} replicas that share it: "
                f"use a global_batch of at least {replicas}"
            )
        # The shares of some steps ahead cost as much to compute as that of one.
        steps = max(1, min(_AHEAD * replicas // self.global_batch, self._epoch // self.global_batch))
        block, row = divmod(step, steps)
        wanted = (block, replica, replicas)
        known, shares = self._computed
        if known != wanted:
            shares = self._shares(block * steps, steps, replica, replicas)
            self._computed = (wanted, shares)
        return list(shares[row])

    def _shares(self, step: int, steps: int, replica: int, replicas: int) -> list[list[int]]:
        """This replica's samples of `steps` steps from `step` on."""
        epoch, position = divmod(step * self.global_batch, self._epoch)
        first, end = (self.global_batch * i // replicas for i in (replica, replica + 1))
        line = position + np.arange(steps)[:, np.newaxis] * self.global_batch + np.arange(first, end)
        epochs, places = np.divmod(line, self._epoch)
        samples = places.astype(np.uint64)
        for later in np.unique(epochs) if self.shuffle else ():
            inside = epochs == later
            samples[inside] = _shuffled(samples[inside], self.n, self.seed, epoch + int(later))
        shares: list[list[int]] = samples.tolist()
        return shares


class StepLoader:
    """`loader[step]`: this replica's batch of that step, by a torch DataLoader.

    With `num_workers`, processes fetch ahead of a loop that goes on step by step.
    The first batch after a start or a jump is fetched by this process at once, and
    the processes are started at the next request: whoever comes back from a fault
    does not wait for a fork. The last two batches are kept for a step that is done
    again (as long as nobody has changed them in place).

    Random numbers drawn in the dataset or in `collate_fn` (by Python, NumPy or torch)
    depend on (seed, replica, step) alone, whichever process fetches the batch and
    however often; those of the training step itself are left as they were.

    A dataset must be map-style (`__len__` and `__getitem__`). What it opens lazily in
    this process is not passed on to the worker processes: they start from the dataset
    as it was given. Use it in the main thread: worker processes die with the thread
    that started them, so that none outlives a process that is killed.

    Parameters
    ----------
    dataset:
        A map-style dataset; `__getitems__` is used where it has one.
    global_batch, seed:
        As in StepSampler.
    num_workers:
        Worker processes; 0: every batch is fetched in this process.
    **dataloader_kwargs:
        collate_fn, pin_memory, timeout, worker_init_fn, multiprocessing_context and
        prefetch_factor, as in torch's DataLoader.

    Raises
    ------
    UsageError
        For a dataset or an argument that cannot work.
    RuntimeError
        From `loader[step]`, where a worker process died or timed out. The next request
        starts from fresh ones.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        global_batch: int,
        seed: int = 0,
        num_workers: int = 0,
        **dataloader_kwargs: Any,
    ) -> None:
        _check_dataset(dataset)
        _check_kwargs(dataloader_kwargs)
        self.num_workers = _integer("num_workers", num_workers)
        if self.num_workers < 0:
            raise UsageError(f"num_workers={num_workers}: use 0 to fetch in the training process itself")
        self.sampler = StepSampler(len(dataset), global_batch, seed)  # type: ignore[arg-type]
        self.sampler.indices(0)  # a global_batch too small for the replicas is said here already
        self._source = Source(dataset, self.sampler.seed, self.num_workers, dataloader_kwargs)
        self._stream: Stream | None = None
        self._recent: OrderedDict[Key, Kept] = OrderedDict()
        self._previous: Key | None = None

    def __getitem__(self, step: SupportsIndex) -> Any:
        key = Key(_integer("step", step), *rng.replica())
        batch = self._recent[key].batch() if key in self._recent else None
        if batch is None:
            batch = self._fetch(key)
            self._keep(key, batch)
        self._previous = key
        return batch

    def __iter__(self) -> NoReturn:
        raise UsageError("a StepLoader is asked by step: `for step in run.steps(N): batch = loader[step]`")

    def close(self) -> None:
        """Stop the worker processes. A later request starts new ones."""
        self._recent.clear()
        self._previous = None
        self._stop_stream()

    def _fetch(self, key: Key) -> Any:
        if self._stream is not None and self._stream.next == key:
            try:
                return self._stream.get()
            except BaseException:
                self._stop_stream()  # what it still holds is not known; the next request starts afresh
                raise
        second_in_a_row = self._previous is not None and key == self._previous.after()
        if self.num_workers and second_in_a_row:  # the loop goes on from here: fetch ahead of it
            self._stop_stream()
            self._stream = Stream(self._source, key.after(), _orders(self.sampler, key.after()))
        return self._source.fetch(Order(key, self.sampler.indices(*key)))

    def _keep(self, key: Key, batch: Any) -> None:
        self._recent[key] = Kept(batch)
        self._recent.move_to_end(key)
        while len(self._recent) > 2:
            self._recent.popitem(last=False)

    def _stop_stream(self) -> None:
        if self._stream is not None:
            self._stream.stop()
            self._stream = None


def _orders(sampler: StepSampler, key: Key) -> Iterator[Order]:
    while True:
        yield Order(key, sampler.indices(*key))
        key = key.after()


def _shuffled(places: npt.NDArray[np.uint64], n: int, seed: int, epoch: int) -> npt.NDArray[np.uint64]:
    """The samples at these places of an epoch's order, which is a permutation of range(n).

    A Feistel network over a square of at least n places; its round function squares
    a keyed line (a line alone leaves patterns between neighbours). What comes out at
    n or beyond goes round again, which few places do. Statistically as good as a
    shuffle even for n = 10, with no table of n numbers to make.
    """
    side = np.uint64(isqrt(n - 1) + 1)
    entropy = hashlib.shake_128(f"order {seed} {epoch}".encode()).digest(8 * 2 * 8)
    rounds = np.frombuffer(entropy, "<u8").reshape(8, 2)
    values: npt.NDArray[np.uint64]
    samples: npt.NDArray[np.uint64]
    samples, pending, values = places.copy(), np.arange(len(places)), places
    while len(pending):
        left, right = values // side, values % side
        for factor, term in rounds:
            line = right * factor + term
            left, right = right, (left + ((line * line) >> np.uint64(32))) % side
        values = left * side + right
        samples[pending] = values
        beyond = values >= n
        pending, values = pending[beyond], values[beyond]
    return samples


def _integer(name: str, value: SupportsIndex) -> int:
    try:
        return int(operator.index(value))  # a Step, say, is a plain int from here on
    except TypeError:
        raise UsageError(f"{name}={value!r}: an integer is needed") from None


def _check_dataset(dataset: object) -> None:
    if isinstance(dataset, IterableDataset):
        raise UsageError(
            f"{type(dataset).__name__} is an IterableDataset, which can only be read onwards, and a step "
            "that is done again needs its batch again: give it __len__ and __getitem__ (map-style)"
        )
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise UsageError(
            f"{type(dataset).__name__} is not a map-style dataset: it needs __len__ and __getitem__"
        )


def _check_kwargs(kwargs: dict[str, Any]) -> None:
    for name in kwargs:
        if name in ("batch_size", "shuffle", "sampler", "batch_sampler", "drop_last"):
            raise UsageError(
                f"StepLoader({name}=...): a step's samples follow from global_batch and seed; leave it out"
            )
        if name not in DATALOADER_OPTIONS:
            raise UsageError(
                f"StepLoader({name}=...): not an option here; there are {', '.join(DATALOADER_OPTIONS)}"
            )
