"""Kill a worker in mid-training, and compare the result with a run that nothing happened to: `make demo`."""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from everstep.launcher.timeline import Recovery, recoveries
from rich.console import Console
from rich.table import Table

EXAMPLE = Path(__file__).with_name("char_gpt.py")
EVERSTEP = Path(sys.executable).with_name("everstep")
console = Console(highlight=False)


class Failed(RuntimeError):
    """A run of the demo did not do what it is meant to show."""


def main() -> int:
    """Run the demo; 0 when the digests are identical."""
    parser = argparse.ArgumentParser(prog="make demo", description=__doc__)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--kill-at", type=int, default=20, help="kill once this step is done")
    parser.add_argument("--rank", type=int, default=1, help="the rank whose worker is killed")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="everstep-demo-") as folder:
        try:
            return demonstrate(options, Path(folder))
        except Failed as failure:
            console.print(f"[bold red]demo failed:[/] {failure}")
            return 1


def demonstrate(options: argparse.Namespace, folder: Path) -> int:
    """Two runs and the table."""
    title("1. An undisturbed run", "3 nodes of 1 worker and 1 standby each, all played by this machine")
    calm = run(folder / "calm.jsonl", options.steps)

    title("2. The same run, and a worker is killed on the way")
    events = folder / "killed.jsonl"
    killed: list[float] = []

    def watch(line: str) -> None:
        step = re.search(r"^\[rank 0\] step +(\d+)", line)
        if step and int(step[1]) >= options.kill_at and not killed:
            threading.Thread(target=kill, daemon=True).start()
            killed.append(0.0)

    def kill() -> None:
        wait_for_standbys(events)
        pid = next(
            e["pid"] for e in read(events) if e["event"] == "worker_started" and e["rank"] == options.rank
        )
        console.print(f"[bold red]>>> kill -9 {pid}[/]   (the worker of rank {options.rank})")
        killed[0] = time.time()
        os.kill(pid, signal.SIGKILL)

    disturbed = run(events, options.steps, watch)
    done = [r for r in recoveries(read(events)) if r.first_step is not None]
    if not killed or not done:
        raise Failed("no recovery was seen")

    title("3. What happened")
    console.print(table(done[-1], killed[0]))
    console.print(f"digest, undisturbed   {calm}")
    console.print(f"digest, disturbed     {disturbed}")
    if calm != disturbed:
        console.print("[bold red]different[/]")
        return 1
    console.print("[bold green]identical[/]")
    return 0


def title(text: str, more: str = "") -> None:
    """A headline."""
    console.print(f"\n[bold]{text}[/]" + (f"  [dim]{more}[/]" if more else ""))


def run(events: Path, steps: int, watch: Callable[[str], None] = lambda line: None) -> str:
    """Run the example under `everstep run`, showing its output; the digest that all ranks agree on."""
    command = [
        EVERSTEP,
        "run",
        "--nnodes",
        "3",
        "--standby",
        "1",
        "--events",
        events,
        EXAMPLE,
        "--steps",
        steps,
    ]
    # One thread a worker, as torchrun has it where there are several on a node.
    env = {"OMP_NUM_THREADS": "1", **os.environ}
    process = subprocess.Popen(
        [str(word) for word in command], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    digests = set()
    try:
        for line in process.stdout or ():
            line = line.rstrip("\n")
            if line.startswith("everstep:"):
                console.print(f"[cyan]{line}[/]")
            else:
                console.print(line, markup=False)
            if found := re.search(r"digest ([0-9a-f]{64})", line):
                digests.add(found[1])
            watch(line)
        code = process.wait()
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()
    if code != 0 or len(digests) != 1:
        raise Failed(f"`everstep run` ended with exit code {code} and {len(digests)} different digests")
    return digests.pop()


def wait_for_standbys(events: Path, timeout: float = 30.0) -> None:
    """A standby takes seconds to be ready after a start; wait until all have started and slept a while."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if sum(e["event"] == "standby_ready" for e in read(events)) >= 3:
            return
        time.sleep(0.05)


def read(events: Path) -> list[dict]:
    """The events so far."""
    lines = events.read_text().splitlines() if events.exists() else []
    return [json.loads(line) for line in lines]


def table(recovery: Recovery, killed: float) -> Table:
    """The phases of a recovery, in milliseconds."""
    said = {
        "noticed": "the node's agent sees that its worker is gone",
        "aborted": "the survivors' collectives are broken off",
        "restored": "the standby has the state, from a peer's memory",
        "regrouped": "all ranks stand in a new process group",
        "first step": "the interrupted step is committed, on the new worker too",
    }
    made = Table(title=recovery.reason, title_justify="left")
    made.add_column("phase")
    made.add_column("ms after the kill", justify="right")
    made.add_column("ms", justify="right")
    made.add_column("", style="dim")
    before = 0.0
    for name, at in recovery.phases(killed):
        if at is not None:
            made.add_row(name, f"{at:.0f}", f"{at - before:.0f}", said[name])
            before = at
    return made


if __name__ == "__main__":
    raise SystemExit(main())
