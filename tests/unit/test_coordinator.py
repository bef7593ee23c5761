"""Why a run is told to stop decides whether its job is requeued, whoever hears of the signal first."""

from __future__ import annotations

import asyncio
import signal
from typing import Any, cast

import pytest
import zmq.asyncio
from everstep.launcher import membership as ms
from everstep.launcher.coordinator import Coordinator
from everstep.launcher.jobside import JobSide
from everstep.launcher.keys import keys_from, new_secret


class Slurm:
    """A job as far as it is asked why it ends."""

    def __init__(self, preempted: bool) -> None:
        self.answer, self.asked = preempted, 0

    async def preempted(self) -> bool:
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
    (asked,) = answer(Slurm(preempted=False), signal.SIGUSR1)
    assert asked.requeue and asked.why == "told to stop (SIGUSR1)"


@pytest.mark.parametrize("preempted", [True, False])
def test_sigterm_is_answered_by_a_requeue_where_slurm_says_that_the_job_makes_room(preempted: bool) -> None:
    job = Slurm(preempted)
    (asked,) = answer(job, signal.SIGTERM, signal.SIGTERM)
    assert asked.requeue is preempted
    assert job.asked == 1, "Slurm is asked once, however many agents tell of it"


def test_without_slurm_there_is_no_queue_to_go_back_to() -> None:
    (asked,) = answer(None, signal.SIGTERM)
    assert not asked.requeue and asked.code == 143
