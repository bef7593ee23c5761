"""The run's own Slurm job, seen from inside: asked for nodes, told of lost ones, given back to the queue.

Everything that a coordinator wants of Slurm goes through here, in threads, so that a slow
controller never holds up the run.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from everstep.launcher import blame, history
from everstep.launcher.recruit import Recruiter, Terms
from everstep.launcher.roster import Recruit, RecruitFailed
from everstep.launcher.slurm.client import Job, Partition, SlurmClient, fold
from everstep.recovery.errors import EverstepError

_AT_ONCE = 2.0  # seconds that Slurm is asked for why it ends a job, which has KillWait seconds in all


@dataclass(frozen=True)
class Here:
    """The job that we are in, as the resume ladder needs to know it."""

    job_id: int = 0
    """0: none, or Slurm does not answer for it."""
    can_requeue: bool = False
    why_not: str = "this is no batch job"


def look(environ: Mapping[str, str], client: SlurmClient) -> Here:
    """What the job that we are in can be asked for. Never raises: a run begins without Slurm's word, too."""
    number = environ.get("SLURM_JOB_ID", "")
    if not number.isdigit():
        return Here()
    try:
        job = client.job(int(number))
    except EverstepError as error:
        return Here(int(number), False, f"Slurm did not say whether it may be requeued ({error})")
    return judge(job)


def judge(job: Job) -> Here:
    """Whether a job can be requeued, and why not."""
    if job.batch is False:
        return Here(job.job_id, False, f"job {job.job_id} is no batch job, so it cannot be requeued")
    if job.requeue is False:
        return Here(job.job_id, False, f"job {job.job_id} may not be requeued (sbatch --requeue lets it)")
    return Here(job.job_id, True, "")


@dataclass(frozen=True)
class Preempted:
    """The job has to make room for another one."""

    comes_back: bool
    """Slurm itself puts it back into the queue, as soon as it has ended."""
    why: str


def how_preempted(job: Job, partitions: Iterable[Partition]) -> Preempted:
    """Who puts a preempted job back into the queue.

    Where Slurm means to, it must be let: it remembers that beyond a requeue that comes before (GRACE_PREEMPT,
    up to 26.05), and would run the finished job once more.
    """
    mode = next((each.preempt_mode for each in partitions if each.name == job.partition), "")
    if "REQUEUE" in mode.upper() and job.requeue is not False and job.batch is not False:
        return Preempted(True, "preempted (SIGTERM), and Slurm puts the job back into the queue")
    return Preempted(False, "preempted (SIGTERM)")


class JobSide:
    """What the coordinator wants of Slurm."""

    def __init__(
        self,
        client: SlurmClient,
        job_id: int,
        terms: Terms,
        failed: Callable[[RecruitFailed], None],
        say: Callable[[str], None],
    ) -> None:
        self._client = client
        self._job_id = job_id
        self._say = say
        self._recruiter = Recruiter(client, terms, failed, say)
        self._chronicle: history.Chronicle | None = None
        self._pen = ThreadPoolExecutor(1)  # a file system may take its time, and heartbeats may not wait
        self._blames: list[asyncio.Future[None]] = []

    def begin(self, folder: Path | None, restart: int, events: Path | None) -> int:
        """Open the history; how many attempts before this one have brought the run no further."""
        if folder is None:
            return 0
        try:
            self._chronicle = history.Chronicle(folder, str(self._job_id), restart, events)
        except OSError as error:
            why = error.strerror or str(error)
            self._say(
                f"WARNING: {folder} cannot be written ({why}): a requeued job will not know of this one"
            )
            return 0
        if self._chronicle.earlier:
            self._say(self._chronicle.earlier)
        return self._chronicle.fruitless

    def recruit(self, recruit: Recruit) -> None:
        """Ask for a node."""
        if self._chronicle is not None:
            earlier = self._chronicle.history.bad_nodes()
            recruit = replace(recruit, exclude=tuple({*recruit.exclude, *earlier}))
        self._recruiter.ask(recruit)

    def joined(self) -> None:
        """A node that was asked for is here."""
        self._recruiter.joined()

    def lost(self, node: str, how: str) -> None:
        """A node was lost."""
        self._record(lambda chronicle: chronicle.lost(node, how))
        self._blames.append(asyncio.ensure_future(self._blame(node, how)))

    async def _blame(self, node: str, how: str) -> None:
        try:
            word = await asyncio.to_thread(self._report, node, how)
        except EverstepError as error:
            word = str(error)
        if word:
            self._say(word)

    def _report(self, node: str, how: str) -> str:
        return blame.report(blame.read(), self._client, node, str(self._job_id), how)

    async def preempted(self) -> Preempted | None:
        """How the job makes room for another one; None where it does not, or Slurm does not say at once."""
        try:
            return await asyncio.wait_for(asyncio.to_thread(self._preempted), _AT_ONCE)
        except (EverstepError, asyncio.TimeoutError):
            return None

    def _preempted(self) -> Preempted | None:
        job = self._client.job(self._job_id)
        return how_preempted(job, self._client.partitions()) if job.running and job.preempted else None

    async def close(self, committed: int, reason: str) -> None:
        """The run is over."""
        self._record(lambda chronicle: chronicle.ended(committed, reason))
        await asyncio.to_thread(self._pen.shutdown)
        await self._recruiter.close()
        if self._blames:
            await asyncio.wait(self._blames, timeout=5)

    async def requeue(self, exclude: tuple[str, ...]) -> None:
        """Give the job back to the queue, without these nodes; say how that went."""
        # Slurm now ends every process of the job, this one too: it has KillWait seconds, and what it starts
        # must not heed SIGTERM either.
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_IGN)
        try:
            before = await asyncio.to_thread(self._client.job, self._job_id)
            await asyncio.to_thread(self._client.requeue, self._job_id)
        except EverstepError as error:
            self._say(f"the job could not be requeued: {error}: scontrol requeue {self._job_id}")
            return
        away = fold({*before.excluded, *exclude}) if exclude else ""
        self._say(f"job {self._job_id} is requeued{', without ' + fold(exclude) if exclude else ''}")
        if away:
            # Only a pending job's nodes can be changed, and it is one as soon as it is requeued.
            try:
                await asyncio.to_thread(self._client.update_job, self._job_id, ExcNodeList=away)
            except EverstepError as error:
                self._say(f"WARNING: nodes {fold(exclude)} could not be excluded: {error}")

    def _record(self, write: Callable[[history.Chronicle], None]) -> None:
        """In the order of the calls, and without waiting for the disk."""
        self._pen.submit(self._write, write)

    def _write(self, write: Callable[[history.Chronicle], None]) -> None:
        if self._chronicle is None:
            return
        try:
            write(self._chronicle)
        except OSError as error:
            self._say(f"WARNING: the run's history cannot be written any more: {error}")
            self._chronicle = None


def restart_count(environ: Mapping[str, str] | None = None) -> int:
    """How often Slurm has put this job back into the queue."""
    count = (os.environ if environ is None else environ).get("SLURM_RESTART_COUNT", "0")
    return int(count) if count.isdigit() else 0
