"""Which samples a step has, and that its batch is the same whoever fetches it, and how often."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import psutil
import pytest
import torch
from everstep.recovery import rng
from everstep.recovery.data import StepLoader, StepSampler
from everstep.recovery.errors import UsageError
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, Subset


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(rng, "_replica", (0, 1))
    with rng.kept():
        yield


def whole_batch(sampler: StepSampler, step: int, replicas: int = 1) -> list[int]:
    return [index for replica in range(replicas) for index in sampler.indices(step, replica, replicas)]


class TestSampler:
    @given(st.integers(1, 300), st.integers(0, 5), st.integers(0, 3))
    def test_an_epoch_has_every_sample_once(self, n: int, seed: int, epoch: int) -> None:
        sampler = StepSampler(n, 1, seed)
        samples = [sampler.indices(step, 0, 1)[0] for step in range(epoch * n, (epoch + 1) * n)]
        assert sorted(samples) == list(range(n))

    @given(st.integers(1, 200), st.data(), st.booleans(), st.integers(0, 10_000))
    def test_the_replicas_share_a_batch_without_gap_or_overlap(
        self, n: int, data: st.DataObject, drop_last: bool, step: int
    ) -> None:
        batch = data.draw(st.integers(1, n))
        replicas = data.draw(st.integers(1, batch))
        sampler = StepSampler(n, batch, seed=1, drop_last=drop_last)
        shares = [sampler.indices(step, replica, replicas) for replica in range(replicas)]
        assert [index for share in shares for index in share] == whole_batch(sampler, step)
        assert len(whole_batch(sampler, step)) == batch
        assert max(map(len, shares)) - min(map(len, shares)) <= 1
        for i, share in enumerate(shares):
            assert len(share) == batch * (i + 1) // replicas - batch * i // replicas

    def test_drop_last_leaves_out_the_rest_of_an_epoch_and_another_one_in_the_next(self) -> None:
        sampler = StepSampler(10, 4, seed=0)
        epochs = [whole_batch(sampler, 2 * e) + whole_batch(sampler, 2 * e + 1) for e in range(20)]
        assert all(len(set(epoch)) == 8 for epoch in epochs)
        assert len({frozenset(epoch) for epoch in epochs}) > 1

    def test_without_drop_last_a_batch_reaches_into_the_next_epoch(self) -> None:
        sampler = StepSampler(10, 4, seed=0, drop_last=False)
        stream = [index for step in range(5) for index in whole_batch(sampler, step)]
        assert sorted(stream[:10]) == sorted(stream[10:]) == list(range(10))

    def test_without_shuffle_samples_come_in_order_again_and_again(self) -> None:
        sampler = StepSampler(6, 4, shuffle=False, drop_last=False)
        assert [whole_batch(sampler, step) for step in range(3)] == [[0, 1, 2, 3], [4, 5, 0, 1], [2, 3, 4, 5]]

    def test_epochs_and_seeds_have_orders_of_their_own(self) -> None:
        orders = {
            tuple(whole_batch(StepSampler(50, 50, seed), epoch)) for seed in range(5) for epoch in range(5)
        }
        assert len(orders) == 25

    def test_the_order_is_this_on_every_machine_and_in_every_release(self) -> None:
        assert StepSampler(1000, 8, seed=5).indices(1234, 0, 1) == [716, 621, 521, 897, 843, 270, 618, 210]

    @pytest.mark.parametrize("n", [2, 10, 97])
    def test_every_sample_lands_everywhere_equally_often(self, n: int) -> None:
        """Chi-squared over the n x n table (place, sample) of many epochs: 5 sigma at most."""
        epochs = 4000
        table = np.zeros((n, n))
        sampler = StepSampler(n, n, seed=0)
        for epoch in range(epochs):
            table[np.arange(n), sampler.indices(epoch, 0, 1)] += 1
        expected, freedom = epochs / n, (n - 1) ** 2
        assert ((table - expected) ** 2 / expected).sum() < freedom + 5 * (2 * freedom) ** 0.5

    def test_samples_that_follow_each_other_are_strangers_in_a_large_dataset(self) -> None:
        """Of consecutive samples, neither the values nor their distances favour any part of the range."""
        n, count = 10**9, 50_000
        samples = np.array(StepSampler(n, count, seed=3).indices(2, 0, 1))
        assert len(set(samples.tolist())) == count
        for values in (
            samples,
            np.diff(samples) % n,
            np.diff(samples, 2) % n,
            (samples[7:] - samples[:-7]) % n,
        ):
            filled = np.bincount(values * 100 // n, minlength=100)
            expected = len(values) / 100
            assert ((filled - expected) ** 2 / expected).sum() < 99 + 5 * (2 * 99) ** 0.5

    def test_takes_this_process_where_no_replica_is_named(self) -> None:
        rng.set_replica(1, 3)
        sampler = StepSampler(100, 10)
        assert sampler.indices(4) == sampler.indices(4, 1, 3)

    def test_touches_no_random_generator(self) -> None:
        before = random.getstate(), np.random.get_state()[1].tobytes(), torch.get_rng_state()
        StepSampler(100, 10).indices(5)
        assert random.getstate() == before[0]
        assert np.random.get_state()[1].tobytes() == before[1]
        assert torch.equal(torch.get_rng_state(), before[2])

    @pytest.mark.parametrize(
        ("make", "message"),
        [
            (lambda: StepSampler(10, 0), "at least one sample"),
            (lambda: StepSampler(10, 11), "use a global_batch of at most 10"),
            (lambda: StepSampler(10, 2.5), "global_batch=2.5: an integer"),  # type: ignore[arg-type]
            (lambda: StepSampler(10, 4).indices(0, 0, 5), "use a global_batch of at least 5"),
            (lambda: StepSampler(10, 4).indices(0, 2, 2), "replica 2 of 2 does not exist"),
            (lambda: StepSampler(10, 4).indices(-1), "steps count from 0"),
        ],
    )
    def test_numbers_that_cannot_work_are_refused_in_one_line(
        self, make: Callable[[], object], message: str
    ) -> None:
        with pytest.raises(UsageError, match=message) as refused:
            make()
        assert "\n" not in str(refused.value)


class Augmented(Dataset[Any]):
    """Every sample with random numbers from all three generators, and who made it."""

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> tuple[int, Any, int]:
        drawn = torch.tensor([random.random(), np.random.random(), float(torch.rand(()))])
        return index, drawn, os.getpid()


class Slow(Augmented):
    """Worker processes never come to an end of a batch; this process does at once."""

    def __init__(self) -> None:
        self.pid = os.getpid()

    def __getitem__(self, index: int) -> tuple[int, Any, int]:
        if os.getpid() != self.pid:
            signal.pause()
        return super().__getitem__(index)


Loaders = Callable[..., StepLoader]


@pytest.fixture
def loaders() -> Iterator[Loaders]:
    made: list[StepLoader] = []

    def make(dataset: Any = None, global_batch: int = 6, **options: Any) -> StepLoader:
        made.append(StepLoader(Augmented() if dataset is None else dataset, global_batch, **options))
        return made[-1]

    yield make
    for loader in made:
        loader.close()


def content(batch: Any) -> tuple[list[int], list[list[float]]]:
    index, drawn, _ = batch
    return index.tolist(), drawn.tolist()


def fetched_here(batch: Any) -> bool:
    return set(batch[2].tolist()) == {os.getpid()}


def worker_processes() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE]


class TestLoader:
    @pytest.mark.parametrize("workers", [0, 1, 2])
    def test_a_batch_has_the_samplers_samples(self, loaders: Loaders, workers: int) -> None:
        loader = loaders(seed=4, num_workers=workers)
        for step in range(6):
            assert content(loader[step])[0] == StepSampler(1000, 6, seed=4).indices(step)

    def test_random_augmentation_is_the_same_whoever_fetches_it(self, loaders: Loaders) -> None:
        here, two, three = loaders(), loaders(num_workers=2), loaders(num_workers=3)
        for step in range(10):
            expected = content(here[step])
            assert content(two[step]) == expected
            assert content(three[step]) == expected
        assert not fetched_here(two[10])
        assert content(loaders(num_workers=2)[7]) == content(here[7])

    def test_random_collation_is_too(self, loaders: Loaders) -> None:
        here, worker = loaders(collate_fn=noisy), loaders(collate_fn=noisy, num_workers=1)
        for step in range(4):
            assert torch.equal(here[step], worker[step])

    def test_replicas_steps_and_samples_get_random_numbers_of_their_own(self, loaders: Loaders) -> None:
        seen: list[float] = []
        for replica in range(2):
            rng.set_replica(replica, 2)
            loader = loaders()
            for step in range(3):
                seen += np.ravel(content(loader[step])[1]).tolist()
        assert len(set(seen)) == len(seen) == 2 * 3 * 3 * 3

    @pytest.mark.parametrize("workers", [0, 2])
    def test_the_training_steps_own_randomness_is_untouched(self, loaders: Loaders, workers: int) -> None:
        loader = loaders(num_workers=workers)
        for step in (0, 1, 2, 3, 9):
            rng.seed_step(0, 0, step)
            expected = random.random(), np.random.random(), float(torch.rand(()))
            rng.seed_step(0, 0, step)
            loader[step]
            assert (random.random(), np.random.random(), float(torch.rand(()))) == expected

    def test_a_datasets_own_getitems_is_used(self, loaders: Loaders) -> None:
        subset = Subset(Augmented(), range(500, 600))  # has __getitems__
        calls = Counted(subset)
        assert content(loaders(calls)[3])[0] == [i + 500 for i in StepSampler(100, 6).indices(3)]
        assert calls.whole_batches == 1

    def test_epochs_follow_each_other_without_end(self, loaders: Loaders) -> None:
        loader = loaders(Subset(Augmented(), range(7)), num_workers=1)
        assert [len(content(loader[step])[0]) for step in range(30)] == [6] * 30
        assert len(content(loader[10**12])[0]) == 6

    def test_a_step_of_a_run_is_an_integer_like_any_other(self, loaders: Loaders) -> None:
        class Step(int):
            def __reduce__(self) -> NoReturn:
                raise AssertionError("a Step holds the run: it must not travel to a worker process")

        loader, here = loaders(num_workers=1), loaders()
        for step in map(Step, range(5)):
            assert content(loader[step]) == content(here[int(step)])

    @pytest.mark.skipif(not torch.cuda.is_available(), reason="pinned memory needs a CUDA device")
    def test_batches_are_in_pinned_memory_where_asked_for(self, loaders: Loaders) -> None:
        loader = loaders(num_workers=2, pin_memory=True)
        for step in (0, 1, 2, 3, 70, 71, 72, 72):
            assert loader[step][1].is_pinned()
            assert content(loader[step]) == content(loaders()[step])
        loader.close()
        assert not worker_processes()


class TestJumpsAndRetries:
    def test_the_first_batch_is_fetched_here_and_worker_processes_take_over(self, loaders: Loaders) -> None:
        loader = loaders(num_workers=2)
        assert fetched_here(loader[5])
        assert not worker_processes()  # no fork delays the step after a fault
        loader[6]
        assert len(worker_processes()) == 2
        assert not fetched_here(loader[7])
        assert not fetched_here(loader[8])

    def test_a_jump_starts_new_worker_processes_and_ends_the_old(self, loaders: Loaders) -> None:
        loader, here = loaders(num_workers=2), loaders()
        for step in range(4):
            loader[step]
        old = worker_processes()
        for step in (50, 51, 52, 53):
            assert content(loader[step]) == content(here[step])
        assert not any(process.is_running() for process in old)
        assert len(worker_processes()) == 2
        assert not fetched_here(loader[54])

    def test_one_batch_in_between_leaves_the_stream_alone(self, loaders: Loaders) -> None:
        loader = loaders(num_workers=2)
        for step in range(4):
            loader[step]
        old = worker_processes()
        assert fetched_here(loader[900])
        assert not fetched_here(loader[4])
        assert worker_processes() == old

    def test_worker_processes_in_the_middle_of_a_batch_are_not_waited_for(self, loaders: Loaders) -> None:
        loader = loaders(Slow(), num_workers=2)
        loader[0], loader[1]
        old = worker_processes()
        assert len(old) == 2
        loader[100], loader[101]  # would hang here
        assert not any(process.is_running() for process in old)
        loader.close()
        assert not worker_processes()

    def test_the_last_two_batches_are_kept_for_a_step_that_is_done_again(self, loaders: Loaders) -> None:
        dataset = Counted(Augmented())
        loader = loaders(dataset)
        first = [content(loader[step]) for step in range(3)]
        assert [content(loader[step]) for step in (2, 1, 2)] == [first[2], first[1], first[2]]
        assert dataset.whole_batches == 3
        assert content(loader[0]) == first[0]
        assert dataset.whole_batches == 4

    def test_a_retry_does_not_disturb_the_stream(self, loaders: Loaders) -> None:
        loader, here = loaders(num_workers=2), loaders()
        for step in (0, 1, 2, 3, 3, 2, 3, 4, 4, 5):
            assert content(loader[step]) == content(here[step])
        assert not fetched_here(loader[6])

    @pytest.mark.parametrize(
        "spoil",
        [
            lambda batch: batch["x"].mul_(2),
            lambda batch: batch["x"][0].zero_(),  # through a view
            lambda batch: batch["names"].clear(),
            lambda batch: batch.pop("x"),
            lambda batch: batch["x"].requires_grad_().sum().backward(),
            lambda batch: batch["array"].fill(0),
        ],
    )
    @pytest.mark.parametrize("workers", [0, 1])
    def test_what_the_step_did_to_its_batch_is_not_there_when_it_is_done_again(
        self, loaders: Loaders, spoil: Callable[[Any], object], workers: int
    ) -> None:
        loader = loaders(collate_fn=as_dict, num_workers=workers)
        for step in range(4):
            batch = loader[step]
            expected = batch["x"].clone()
            spoil(batch)
            again = loader[step]
            assert torch.equal(again["x"], expected)
            assert again["names"] == ["a", "b"]
            assert again["array"].tolist() == [1.0, 1.0]
            assert not again["x"].requires_grad
            assert again["x"].grad is None

    def test_a_file_opened_here_is_not_shared_with_worker_processes(
        self, loaders: Loaders, tmp_path: Path
    ) -> None:
        """The first batch, fetched here, opens it; a forked copy would share its position."""
        (tmp_path / "data").write_bytes(bytes(range(256)))
        nested = ConcatDataset(
            [Subset(ReadsFile(tmp_path / "data"), range(128)), ReadsFile(tmp_path / "data")]
        )
        for dataset in (ReadsFile(tmp_path / "data"), nested):
            loader = loaders(dataset, num_workers=2)
            for step in range(5):
                _, opened_by = loader[step]
                expected = {os.getpid()} if step < 2 else {process.pid for process in worker_processes()}
                assert set(opened_by.tolist()) <= expected

    def test_another_share_of_the_batch_is_another_batch(self, loaders: Loaders) -> None:
        loader = loaders(num_workers=1)
        for step in range(3):
            loader[step]
        rng.set_replica(1, 2)
        assert content(loader[2])[0] == StepSampler(1000, 6).indices(2, 1, 2)
        assert content(loader[3])[0] == StepSampler(1000, 6).indices(3, 1, 2)


class TestFailures:
    def test_a_killed_worker_process_is_a_clear_error_and_the_next_request_works(
        self, loaders: Loaders
    ) -> None:
        loader, here = loaders(num_workers=2), loaders()
        for step in range(3):
            loader[step]
        victim = worker_processes()[0]
        victim.kill()
        os.waitid(os.P_PID, victim.pid, os.WEXITED | os.WNOWAIT)
        with pytest.raises(RuntimeError, match=rf"worker process {victim.pid} was killed by SIGKILL"):
            loader[3]
        for step in (3, 4, 5, 6):
            assert content(loader[step]) == content(here[step])
        assert not fetched_here(loader[7])

    def test_so_it_is_when_its_batch_is_being_waited_for(self, loaders: Loaders) -> None:
        loader = loaders(DiesInWorker(), num_workers=1)
        loader[0], loader[1]
        with pytest.raises(RuntimeError, match=r"was killed by SIGKILL .* before the batch of step 2"):
            loader[2]
        assert fetched_here(loader[2])

    def test_its_death_interrupts_nothing_else(self, loaders: Loaders) -> None:
        """torch's own handler would raise here, at any line: in optimizer.step(), say."""
        loader = loaders(num_workers=1)
        for step in range(3):
            loader[step]
        victim = worker_processes()[0]
        victim.kill()
        os.waitid(os.P_PID, victim.pid, os.WEXITED | os.WNOWAIT)
        signal.raise_signal(signal.SIGCHLD)
        sum(range(1000))

    def test_the_datasets_own_exception_comes_through(self, loaders: Loaders) -> None:
        loader = loaders(Broken(), num_workers=1)
        loader[0], loader[1]
        for _ in range(2):  # by a worker process, then here
            with pytest.raises(ValueError, match=r"sample .* is broken"):
                loader[2]
        assert content(loader[3])[0] == StepSampler(1000, 6).indices(3)

    def test_a_batch_that_takes_too_long_is_an_error(self, loaders: Loaders) -> None:
        loader = loaders(Slow(), num_workers=1, timeout=1)
        loader[0], loader[1]
        with pytest.raises(RuntimeError, match="timed out"):
            loader[2]
        assert fetched_here(loader[2])

    def test_a_loader_that_is_dropped_leaves_no_process(self) -> None:
        loader = StepLoader(Augmented(), 6, num_workers=2)
        loader[0], loader[1]
        left = worker_processes()
        assert len(left) == 2
        del loader
        assert not any(process.is_running() for process in left)

    def test_a_closed_loader_can_be_used_again(self, loaders: Loaders) -> None:
        loader = loaders(num_workers=1)
        loader[0], loader[1]
        loader.close()
        assert not worker_processes()
        assert fetched_here(loader[2])

    @pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
    def test_no_worker_process_outlives_a_training_process_that_is_killed(
        self, method: str, tmp_path: Path
    ) -> None:
        script = tmp_path / "train.py"
        script.write_text(TRAIN)
        training = subprocess.Popen([sys.executable, script, method], stdout=subprocess.PIPE, text=True)
        assert training.stdout is not None
        worker = psutil.Process(int(training.stdout.readline()))
        training.kill()
        training.wait()
        training.stdout.close()
        _, alive = psutil.wait_procs([worker], timeout=30)
        for process in alive:
            process.kill()
        assert not alive

    @pytest.mark.parametrize(
        ("make", "message"),
        [
            (lambda: StepLoader(Streamed(), 6), "Streamed is an IterableDataset"),
            (lambda: StepLoader(object(), 6), "object is not a map-style dataset"),  # type: ignore[arg-type]
            (lambda: StepLoader(Augmented(), 1001), "use a global_batch of at most 1000"),
            (lambda: StepLoader(Augmented(), 6, num_workers=-1), "num_workers=-1"),
            (
                lambda: StepLoader(Augmented(), 6, batch_size=2),
                r"StepLoader\(batch_size=...\): .*leave it out",
            ),
            (lambda: StepLoader(Augmented(), 6, shuffle=True), r"StepLoader\(shuffle=...\): .*leave it out"),
            (lambda: StepLoader(Augmented(), 6, sampler=[1]), r"StepLoader\(sampler=...\): .*leave it out"),
            (
                lambda: StepLoader(Augmented(), 6, in_order=False),
                r"StepLoader\(in_order=...\): not an option",
            ),
            (
                lambda: StepLoader(Augmented(), 6, generator=None),
                r"StepLoader\(generator=...\): not an option",
            ),
            (lambda: StepLoader(Augmented(), 6)[1.5], "step=1.5: an integer"),  # type: ignore[index]
            (lambda: StepLoader(Augmented(), 6)[-1], "steps count from 0"),
            (lambda: next(iter(StepLoader(Augmented(), 6))), "asked by step"),
        ],
    )
    def test_what_cannot_work_is_refused_in_one_line(self, make: Callable[[], object], message: str) -> None:
        with pytest.raises(UsageError, match=message) as refused:
            make()
        assert "\n" not in str(refused.value)

    def test_a_batch_too_small_for_the_replicas_is_refused_when_the_loader_is_made(self) -> None:
        rng.set_replica(0, 8)
        with pytest.raises(UsageError, match="use a global_batch of at least 8"):
            StepLoader(Augmented(), 6)


class Counted(Dataset[Any]):
    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self.whole_batches = 0

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("the whole batch is asked for by __getitems__")

    def __getitems__(self, indices: list[int]) -> Any:
        self.whole_batches += 1
        return [self.dataset[index] for index in indices]


class Broken(Augmented):
    def __getitem__(self, index: int) -> Any:
        if index == StepSampler(1000, 6).indices(2)[0]:
            raise ValueError(f"sample {index} is broken")
        return super().__getitem__(index)


class DiesInWorker(Slow):
    def __getitem__(self, index: int) -> Any:
        if os.getpid() != self.pid:
            time.sleep(0.2)  # so that it is waited for
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


class ReadsFile(Dataset[Any]):
    def __init__(self, path: Path) -> None:
        self.path = path
        self.file: Any = None

    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> tuple[int, int]:
        if self.file is None:
            self.file, self.opened_by = self.path.open("rb"), os.getpid()
        self.file.seek(index)
        return self.file.read(1)[0], self.opened_by


class Streamed(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(100))


def noisy(samples: list[Any]) -> Any:
    return torch.tensor([sample[0] for sample in samples]) + torch.rand(len(samples))


def as_dict(samples: list[Any]) -> dict[str, Any]:
    return {
        "x": torch.stack([sample[1] for sample in samples]),
        "names": ["a", "b"],
        "array": np.ones(2),
    }


TRAIN = """
import multiprocessing, os, sys, time
from everstep.recovery import StepLoader

class Blocks(list):  # a worker process never comes to the end of its first batch
    def __getitem__(self, index):
        if multiprocessing.parent_process() is not None:
            print(os.getpid(), flush=True)
            time.sleep(3600)
        return index

if __name__ == "__main__":
    loader = StepLoader(Blocks(range(100)), 4, num_workers=1, multiprocessing_context=sys.argv[1])
    loader[0], loader[1], loader[2]
"""
