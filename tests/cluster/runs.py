"""What tests of runs on the cluster share: the script, its events, its digest."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from pathlib import Path

from slurm_cluster import Cluster, Running

SCRIPT = (Path(__file__).parent / "scripts" / "train.py").read_text()
STEPS = 80
_calm: dict[str, str] = {}


def events(cluster: Cluster, folder: str) -> list[dict]:
    """What the run's events file says so far."""
    text = cluster.exec("login", ["sh", "-c", f"cat {folder}/events.jsonl 2>/dev/null || true"]).stdout
    return [json.loads(line) for line in text.splitlines() if line.endswith("}")]


def wait_for_event(
    cluster: Cluster,
    folder: str,
    run: Running | Follower,
    wanted: Callable[[list[dict]], bool],
    timeout: float = 180,
) -> list[dict]:
    """Wait until the events so far are as wanted; the run's output is shown where they never are."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        so_far = events(cluster, folder)
        if wanted(so_far):
            return so_far
        time.sleep(0.1)
    raise AssertionError("waited in vain; the run said:\n" + run.output)


def standbys(count: int) -> Callable[[list[dict]], bool]:
    return lambda es: sum(e["event"] == "standby_ready" for e in es) >= count


def worker_of(es: list[dict], rank: int) -> dict:
    return next(e for e in es if e["event"] == "worker_started" and e["rank"] == rank)


def digests(output: str) -> set[str]:
    return set(re.findall(r"digest ([0-9a-f]{64})", output))


def calm_digest(cluster: Cluster, folder: str, world: int) -> str:
    """The digest of an undisturbed run, from embedded mode on the login node: the same numbers, no Slurm."""
    key = str(world)
    if key not in _calm:
        done = cluster.exec(
            "login",
            f"cd {folder} && everstep run --nnodes {world} --standby 0 train.py --steps {STEPS} --pace 0",
            timeout=180,
        )
        (_calm[key],) = digests(done.stdout)
    return _calm[key]


class Follower:
    """The output of a batch job, with the part of `Running` that the helpers above use."""

    def __init__(self, cluster: Cluster, folder: str) -> None:
        self._cluster, self._folder = cluster, folder

    @property
    def output(self) -> str:
        return self._cluster.exec(
            "login", ["sh", "-c", f"cat {self._folder}/out.txt 2>/dev/null || echo nothing yet"]
        ).stdout

    def wait_for_line(self, pattern: str, timeout: float) -> None:
        """Wait until the output has a line that `pattern` is found in."""
        deadline = time.monotonic() + timeout
        while not re.search(pattern, self.output):
            if time.monotonic() > deadline:
                raise AssertionError(f"no line like {pattern!r}; the job said:\n{self.output}")
            time.sleep(0.3)

    def wait_for_last_line(self, start: str, timeout: float) -> None:
        """Wait until the last line begins so."""
        self.wait_for_line(rf"(?:\A|\n){re.escape(start)}.*\n\Z", timeout)


def is_step_of(event: dict, rank: int) -> bool:
    return event["event"] == "step" and event["rank"] == rank and event["generation"] > 1
