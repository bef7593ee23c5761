"""Undisturbed step time, everstep beside plain torchrun DDP: both train by turns, some steps each.

Runs one after the other do not show a difference of one percent on a machine whose speed changes by five
within a minute. Here both jobs are there at once, and only one of them computes: the other one's ranks
wait for their turn. Two turns next to each other are a pair, and the order within pairs alternates.
What the waiting job still uses (the agents' heartbeats) slows both alike, so it is measured and added.
A process keeps some percent of luck (where its memory lies) for all its life, so both are launched anew
some times.
"""

from __future__ import annotations

import itertools
import os
import statistics
from collections.abc import Iterator
from pathlib import Path

import psutil

from benchmarks import runs

WORLD = 2
TURN = 10


def measure(folder: Path, pairs: int) -> dict:
    """One launch of both.

    `ratio` (median of the pairs, with `agents_share` added), `step_s` of both (medians, seconds), and
    `agents_share`: of the cores that train, the part that everstep's agents use.
    """
    steps = TURN * (pairs + 2)  # not counted: the first turns, warming up, and the last, when one job ends
    folder.mkdir()
    fifos = {side: Fifos(folder / side) for side in ("everstep", "torchrun")}
    jobs = {
        "everstep": runs.everstep(folder / "ours", WORLD, steps, *fifos["everstep"].words, standby=0),
        "torchrun": runs.torchrun(folder / "theirs", WORLD, steps, "--plain", *fifos["torchrun"].words),
    }
    try:
        for job in jobs.values():
            job.start()
        used: list[float] = []
        for i in range(pairs + 2):
            for side in sorted(fifos, reverse=bool(i % 2)):
                before = _agents(jobs["everstep"])
                fifos[side].take_a_turn(jobs[side])
                if 0 < i <= pairs:
                    used.append(_agents(jobs["everstep"]) - before)
        for job in jobs.values():
            job.finish()
    finally:
        for job in jobs.values():
            job.stop()
        for fifo in fifos.values():
            fifo.close()
    turns = {side: list(_turns(job))[1:-1] for side, job in jobs.items()}
    lengths = {side: [sum(turn) for turn in all_] for side, all_ in turns.items()}
    took = sum(map(sum, lengths.values())) * TURN / (TURN - 1)
    medians = {side: [statistics.median(turn) for turn in all_] for side, all_ in turns.items()}
    ratios = [a / b for a, b in zip(medians["everstep"], medians["torchrun"], strict=True)]
    share = sum(used) / took / min(WORLD, os.cpu_count() or 1)
    return {
        "ratio": statistics.median(ratios) + share,
        "step_s": {side: statistics.median(all_) for side, all_ in medians.items()},
        "agents_share": share,
    }


class Fifos:
    """Where the ranks of a job wait for their turn."""

    def __init__(self, prefix: Path) -> None:
        self.words = ("--turns", str(prefix), "--turn", str(TURN))
        *self._ranks, self._done = (_fifo(f"{prefix}.{name}") for name in (*range(WORLD), "done"))
        os.set_blocking(self._done, False)

    def take_a_turn(self, job: runs.Job) -> None:
        """Let the ranks do their steps; return when all have."""
        for fd in self._ranks:
            os.write(fd, b"x")
        said: list[bytes] = []

        def all_done() -> bool:
            try:
                said.append(os.read(self._done, WORLD))
            except BlockingIOError:
                return False
            return len(b"".join(said)) == WORLD

        job.wait_for(all_done, "the end of its turn")

    def close(self) -> None:
        for fd in (*self._ranks, self._done):
            os.close(fd)


def _fifo(path: str) -> int:
    os.mkfifo(path, 0o600)
    return os.open(path, os.O_RDWR)  # for both ways, so that neither side waits for the other to open it


def _turns(job: runs.Job) -> Iterator[list[float]]:
    """Seconds of rank 0's steps, turn by turn; the first of each, which waited, left out."""
    times = [c.t for c in job.commits() if c.rank == 0]
    for i in range(0, len(times), TURN):
        yield [b - a for a, b in itertools.pairwise(times[i : i + TURN])]


def _agents(job: runs.Job) -> float:
    """CPU seconds so far of all of a job's processes that are not its workers."""
    if job.process is None:
        return 0.0
    total = 0.0
    for process in psutil.Process(job.process.pid).children(recursive=True):
        try:
            if str(runs.TRAIN) not in process.cmdline():
                total += sum(process.cpu_times()[:2])
        except psutil.Error:
            continue
    return total
