"""One more node for a run that has lost one: a one-node job, and the agent in it that joins the run.

What is asked for is a pure function of the run's own job (`request`). `Recruiter` submits it, watches
it, and cancels whatever is left of it when the run ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from everstep.launcher.roster import Recruit, RecruitFailed
from everstep.launcher.slurm.client import Job, SlurmBusy, SlurmClient, fold
from everstep.launcher.slurm.commands import outside_job
from everstep.recovery.errors import EverstepError

_POLL = 1.0  # seconds between two looks at a job that waits; up to _SLOW for one that waits long
_SLOW = 10.0
_ARRIVE = 60.0  # seconds from a job's start until its agent must have introduced itself
_MINUTES = 60.0


@dataclass(frozen=True)
class Terms:
    """What a replacement job needs to know of the run."""

    job_id: int
    script: str
    """The batch script: it becomes the agent."""
    env: Mapping[str, str]
    """The agent's environment, the run's secret in it. It is never on a command line."""
    cwd: str
    output: Path | None
    """Folder for the job's own output; None: nowhere."""
    within: float
    """Seconds until the search is given up."""
    own_nodes: tuple[str, ...] = ()


def job_name(job_id: int) -> str:
    """All replacement jobs of a run have this name."""
    return f"everstep-{job_id}"


def request(job: Job, terms: Terms, exclude: Sequence[str], now: float) -> tuple[str, ...]:
    """sbatch's options for a node like those of the run's own job, but none of its own or of the bad ones."""
    words = [
        f"--job-name={job_name(terms.job_id)}",
        *("--nodes=1", "--ntasks=1", "--no-requeue", "--parsable"),
        f"--chdir={terms.cwd}",
        f"--output={terms.output / 'replacement-%j.out' if terms.output else '/dev/null'}",
        f"--comment=a node in place of one that job {terms.job_id} has lost",
    ]
    for name, value in (
        ("partition", job.partition),
        ("account", job.account),
        ("qos", job.qos),
        ("constraint", job.constraint),
        ("gres", job.gres),
        ("reservation", job.reservation),
    ):
        if value:
            words.append(f"--{name}={value}")
    if job.exclusive:
        words.append("--exclusive")
    elif cpus := _cpus(job):
        words.append(f"--cpus-per-task={cpus}")
    if job.memory_per_node is not None:
        words.append(f"--mem={job.memory_per_node}M")
    elif job.memory_per_cpu is not None:
        words.append(f"--mem-per-cpu={job.memory_per_cpu}M")
    if job.end_time:
        words.append(f"--time={max(2, int((job.end_time - now) // _MINUTES))}")
    away = {*exclude, *terms.own_nodes, *job.nodes, *job.excluded}
    if away:
        words.append(f"--exclude={fold(away)}")
    return tuple(words)


def _cpus(job: Job) -> int:
    """CPUs that the job has on each of its nodes; where they differ, the least."""
    counts = [part.partition("(")[0] for part in job.cpus_per_node.split(",")]
    return min((int(count) for count in counts if count.isdigit()), default=0)


class Recruiter:
    """The replacement jobs of one run."""

    def __init__(
        self,
        client: SlurmClient,
        terms: Terms,
        failed: Callable[[RecruitFailed], None],
        say: Callable[[str], None],
    ) -> None:
        self._client = client
        self._terms = terms
        self._failed = failed
        self._say = say
        self._jobs: set[int] = set()
        self._deadline = 0.0
        self._task: asyncio.Task[None] | None = None
        self._submitting: asyncio.Future[int] | None = None

    def ask(self, recruit: Recruit) -> None:
        """Ask for a node."""
        if not self._deadline:
            self._deadline = time.monotonic() + self._terms.within
        self._task = asyncio.ensure_future(self._search(recruit))

    def joined(self) -> None:
        """A node has come: the next search has its own time."""
        self._deadline = 0.0
        if self._task is not None:
            self._task.cancel()
            self._task = None

    async def close(self) -> None:
        """The run is over: no job of ours may be left."""
        if self._task is not None:
            self._task.cancel()
        if self._submitting is not None:  # a thread that cannot be called back
            with contextlib.suppress(EverstepError):
                self._jobs.add(await self._submitting)
        for number in sorted(self._jobs):
            try:
                await asyncio.to_thread(self._client.cancel, number)
            except EverstepError as error:
                self._say(
                    f"WARNING: replacement job {number} could not be cancelled: {error}: scancel {number}"
                )

    async def _search(self, recruit: Recruit) -> None:
        final, number = False, 0
        try:
            await asyncio.sleep(min(recruit.pause, max(0.0, self._deadline - time.monotonic())))
            self._submitting = asyncio.ensure_future(asyncio.to_thread(self._submit, recruit.exclude))
            number = await asyncio.shield(self._submitting)
            self._submitting = None
            self._jobs.add(number)
            why, final = await self._watch(number)
        except SlurmBusy as error:
            self._submitting = None
            why = str(error)
        except EverstepError as error:  # asked again, it would say the same
            self._submitting = None
            final, why = True, f"Slurm has no other node for this run ({str(error).rpartition('error: ')[2]})"
        if number:
            with contextlib.suppress(EverstepError):  # it is tried again at the end
                await asyncio.to_thread(self._client.cancel, number)
                self._jobs.discard(number)
        self._failed(RecruitFailed(why, final))

    def _submit(self, exclude: Sequence[str]) -> int:
        job = self._client.job(self._terms.job_id)
        env = outside_job(self._terms.env)
        options = request(job, self._terms, exclude, time.time())
        return self._client.submit(options, script=self._terms.script, env=env, cwd=self._terms.cwd)

    async def _watch(self, number: int) -> tuple[str, bool]:
        """Look at the job until it has failed us: why, and whether the time is up too."""
        told, wait, started = "", _POLL, 0.0
        limit = self._terms.within
        while True:
            job = await asyncio.to_thread(self._client.job, number)
            now = time.monotonic()
            if job.over:
                return f"replacement job {number} ended ({'+'.join(sorted(job.state))})", False
            if job.running:
                started = started or now
                word = f"replacement job {number} has started on {fold(job.nodes)}"
                if now - started > _ARRIVE:
                    return f"{word}, and no agent has come from there in {_ARRIVE:.0f} s", False
            else:
                reason = f" ({job.reason})" if job.reason not in ("", "None") else ""
                word = f"replacement job {number} is queued{reason}; --replace-within {limit:g} s"
                if now > self._deadline:
                    return f"no node was free for replacement job {number} in {limit:g} s", True
            if word != told:
                self._say(word)
                told = word
            await asyncio.sleep(max(0.05, min(wait, self._deadline - now if not started else wait)))
            wait = min(wait * 1.3, _SLOW)
