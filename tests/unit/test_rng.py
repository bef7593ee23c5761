"""Random numbers depend on (seed, replica, step) and on nothing else."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from everstep.recovery import rng
from everstep.recovery.errors import UsageError
from hypothesis import given
from hypothesis import strategies as st

Draws = tuple[float, float, float]


@pytest.fixture(autouse=True)
def _no_replica_set(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(rng, "_replica", None)
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with rng.kept():
        yield


def draw() -> Draws:
    return random.random(), float(np.random.random()), float(torch.rand(()))


def after_seeding(seed: int, replica: int, step: int, stream: str = "step") -> Draws:
    rng.seed_step(seed, replica, step, stream)
    return draw()


def test_a_step_done_again_draws_the_same_numbers() -> None:
    first = after_seeding(0, 1, 7)
    after_seeding(0, 1, 8)
    torch.rand(1000)
    assert after_seeding(0, 1, 7) == first


@given(st.integers(-(2**70), 2**70), st.integers(0, 2**20), st.integers(0, 2**40))
def test_any_seed_replica_and_step_will_do(seed: int, replica: int, step: int) -> None:
    assert after_seeding(seed, replica, step) == after_seeding(seed, replica, step)


def test_neighbours_have_nothing_in_common() -> None:
    """Seeds 0 to 5 times replicas 0 to 5 times steps 0 to 5, as would collide under seed + replica + step."""
    seen: set[float] = set()
    for seed in range(6):
        for replica in range(6):
            for step in range(6):
                seen.update(after_seeding(seed, replica, step))
    assert len(seen) == 3 * 6**3


def test_a_step_and_its_data_have_nothing_in_common() -> None:
    assert not set(after_seeding(0, 1, 2)) & set(after_seeding(0, 1, 2, stream="data"))


def test_gaussians_come_in_pairs_and_the_second_does_not_leak_into_the_next_step() -> None:
    rng.seed_step(0, 0, 0)
    fresh = random.gauss(0, 1), np.random.randn()
    random.gauss(0, 1), np.random.randn()
    random.gauss(0, 1), np.random.randn()  # leaves a spare in each generator
    rng.seed_step(0, 0, 0)
    assert (random.gauss(0, 1), np.random.randn()) == fresh


def test_the_model_is_built_from_the_seed_alone() -> None:
    rng.seed_all(3)
    first = draw()
    rng.set_replica(1, 2)
    rng.seed_all(3)
    assert draw() == first
    rng.seed_all(4)
    assert not set(draw()) & set(first)


def test_the_numbers_are_these_on_every_machine_and_in_every_release() -> None:
    """A newcomer may be another process on another machine; a checkpoint may be years old."""
    assert after_seeding(0, 1, 2) == (0.7642726135514142, 0.05474886546469304, 0.898850679397583)
    other = subprocess.run(
        [
            sys.executable,
            "-c",
            "import random, numpy as np, torch; from everstep.recovery import rng; rng.seed_step(0, 1, 2); "
            "print(random.random(), np.random.random(), float(torch.rand(())))",
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    assert tuple(map(float, other.stdout.split())) == after_seeding(0, 1, 2)


def test_kept_leaves_no_trace_even_of_an_exception() -> None:
    random.gauss(0, 1), np.random.randn()
    rng.seed_step(0, 0, 5)
    expected = draw()
    rng.seed_step(0, 0, 5)
    with pytest.raises(ValueError, match="in the middle"), rng.kept():
        rng.seed_step(9, 9, 9)
        draw()
        raise ValueError("in the middle")
    assert draw() == expected


def test_seeding_a_step_does_not_initialise_cuda() -> None:
    rng.seed_step(0, 0, 0)
    assert not torch.cuda.is_initialized()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_cuda_device_in_use_is_seeded_and_kept_too() -> None:
    def drawn() -> list[float]:
        rng.seed_step(0, 1, 2)
        return torch.rand(4, device="cuda").tolist()

    torch.rand(1, device="cuda")  # puts it in use
    first = drawn()
    assert drawn() == first
    rng.seed_step(0, 1, 2)
    with rng.kept():
        rng.seed_step(9, 9, 9)
        torch.rand(4, device="cuda")
    assert torch.rand(4, device="cuda").tolist() == first


class TestReplica:
    def test_alone_without_anybody_saying_so(self) -> None:
        assert rng.replica() == (0, 1)

    def test_is_the_rank_under_torchrun(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("RANK", "2")
        monkeypatch.setenv("WORLD_SIZE", "4")
        assert rng.replica() == (2, 4)

    def test_is_what_init_said_whatever_the_environment_says(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("RANK", "2")
        monkeypatch.setenv("WORLD_SIZE", "4")
        rng.set_replica(1, 3)
        assert rng.replica() == (1, 3)

    @pytest.mark.parametrize(("replica", "replicas"), [(3, 3), (-1, 3), (0, 0)])
    def test_must_exist(self, replica: int, replicas: int) -> None:
        with pytest.raises(UsageError, match="does not exist"):
            rng.set_replica(replica, replicas)
