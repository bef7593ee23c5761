"""Why a run is told to stop decides whether its job is requeued, whoever hears of the signal first."""

from __future__ import annotations

import asyncio
import signal
from typing import Any, cast

import pytest
import zmq.asyncio
from everstep.launcher import membership as ms
from everstep.launcher.coordinator import Coordinator
from everstep.launcher.jobside import JobSide, Preempted
from everstep.launcher.keys import keys_from, new_secret


class Slurm:
    """A job as far as it is asked why it ends."""

    def __init__(self, answer: Preempted | None) -> None:
        self.answer, self.asked = answer, 0

    async def preempted(self) -> Preempted | None:
        self.asked += 1
        return self.answer


def answer(job: Slurm | None, *signals: int) -> list[ms.StopAsked]:
    """What a coordinator tells its membership when that wants to know why these signals came."""

    async def life() -> list[ms.StopAsked]:
        context = zmq.asyncio.Context()
        config = ms.Config(nnodes=2, nproc=1, environment=lambda place: {}, token=lambda: b"")
        coordinator = Coordinator(
            context, keys_from(new_secret()), config, 0.25, None, cast(JobSide | None, job)
        )
        noticed: list[Any] = []
        coordinator.notice = noticed.append  # type: ignore[method-assign]
        coordinator._act([ms.AskWhy(number) for number in signals])
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        coordinator._authenticator.stop()
        context.destroy(linger=0)
        return noticed

    return asyncio.run(life())


def test_a_warning_ahead_of_the_time_limit_is_answered_by_a_requeue() -> None:
    (asked,) = answer(Slurm(None), signal.SIGUSR1)
    assert asked.requeue and asked.why == "told to stop (SIGUSR1)"


@pytest.mark.parametrize(
    ("found", "requeue"),
    [(None, False), (Preempted(False, "preempted"), True), (Preempted(True, "preempted, comes back"), False)],
)
def test_sigterm_is_answered_by_a_requeue_where_the_job_makes_room_and_slurm_does_not_requeue_it(
    found: Preempted | None, requeue: bool
) -> None:
    job = Slurm(found)
    (asked,) = answer(job, signal.SIGTERM, signal.SIGTERM)
    assert asked.requeue is requeue
    assert asked.why == (found.why if found else "told to stop (SIGTERM)")
    assert job.asked == 1, "Slurm is asked once, however many agents tell of it"


def test_without_slurm_there_is_no_queue_to_go_back_to() -> None:
    (asked,) = answer(None, signal.SIGTERM)
    assert not asked.requeue and asked.code == 143
