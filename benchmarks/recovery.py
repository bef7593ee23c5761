"""Recovery, pace and transfer, both sides in one run: `python -m benchmarks.recovery --json FILE`."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks import runs, transfer, turns

WORLD = 3
# About 100 MB of state: parameters and two moments of AdamW, 4 bytes each.
LARGE = ("--width", "384", "--batch", "3", "--context", "32")
LARGE_LAYERS = ("--layers", "5")

console = Console(highlight=False)


def main() -> int:
    """Measure everything; 0 when every digest was the undisturbed one."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--rounds", type=int, default=5, help="runs of each kind, interleaved")
    parser.add_argument("--kills", type=int, default=2, help="kills in each run")
    parser.add_argument("--launches", type=int, default=7, help="for the undisturbed step time")
    parser.add_argument("--pairs", type=int, default=12, help="pairs of turns in each launch")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="everstep-bench-") as folder:
        figures = measure(options, Path(folder))
    show(figures)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(figures, indent=2) + "\n")
    return 0 if figures["identical"] else 1


def measure(options: argparse.Namespace, folder: Path) -> dict:
    """All figures, as they go to the JSON file."""
    steps = 30 + 40 * options.kills
    say("undisturbed runs, for their digests")
    calm = undisturbed(folder / "calm", steps)
    calm_large = undisturbed(folder / "calm-large", steps, *LARGE, *LARGE_LAYERS)
    ours: list[float] = []
    large: list[float] = []
    theirs: list[float] = []
    identical = True
    for i in range(options.rounds):
        say(f"kills, round {i + 1} of {options.rounds}")
        times, digest = recover(folder / f"ours{i}", steps, options.kills, i)
        ours += times
        identical &= digest == calm
        times, digest = recover(folder / f"large{i}", steps, options.kills, i, *LARGE, *LARGE_LAYERS)
        large += times
        identical &= digest == calm_large
        theirs += restart(folder / f"theirs{i}", steps, options.kills, i)
        for kind, times in (("everstep", ours), ("with 100 MB", large), ("torchrun", theirs)):
            console.print(f"  {kind} {', '.join(f'{t:.2f}' for t in times[-options.kills :])} s")
    paces = []
    for i in range(options.launches):
        say(f"undisturbed step time, launch {i + 1} of {options.launches}")
        paces.append(turns.measure(folder / f"turns{i}", options.pairs))
        took = ", ".join(f"{side} {seconds * 1e3:.1f} ms" for side, seconds in paces[-1]["step_s"].items())
        console.print(f"  {took}, ratio {paces[-1]['ratio']:.3f}")
    say("state transfer")
    return {
        "kill_to_step_s": {"everstep": ours, "torchrun": theirs, "everstep_100mb": large},
        "step_ratio": statistics.median(pace["ratio"] for pace in paces),
        "step_launches": paces,
        "transfer": transfer.measure(),
        "identical": identical,
    }


def undisturbed(folder: Path, steps: int, *script: str) -> str:
    """The digest of a run that nothing happens to."""
    return runs.everstep(folder, WORLD, steps, *script, standby=0).start().finish()


def recover(folder: Path, steps: int, kills: int, seed: int, *script: str) -> tuple[list[float], str]:
    """Kill workers of one everstep run, one after the other: seconds each, and the digest."""
    job = runs.everstep(folder, WORLD, steps, *script).start()
    try:
        times = [
            runs.kill_and_time(job, (seed + k) % WORLD, runs.ready_standbys(job, k, WORLD), after=5)
            for k in range(kills)
        ]
        return times, job.finish()
    finally:
        job.stop()


def restart(folder: Path, steps: int, kills: int, seed: int) -> list[float]:
    """The same under torchrun, which starts all anew from a checkpoint that is made every 10 steps."""
    job = runs.torchrun(folder, WORLD, steps, "--checkpoint", str(folder / "ckpt"), restarts=kills).start()
    try:
        times = [
            runs.kill_and_time(
                job, (seed + k) % WORLD, lambda: any(c.step >= 12 for c in job.commits()), after=5
            )
            for k in range(kills)
        ]
        job.finish()
        return times
    finally:
        job.stop()


def show(figures: dict) -> None:
    """The figures as people read them."""
    table = Table(title="kill -9 of a worker -> its rank's next committed step", title_justify="left")
    for column in ("", "median s", "min", "max", "n"):
        table.add_column(column, justify="left" if not column else "right")
    for name, times in figures["kill_to_step_s"].items():
        table.add_row(
            name, f"{statistics.median(times):.2f}", f"{min(times):.2f}", f"{max(times):.2f}", str(len(times))
        )
    console.print(table)
    kill = figures["kill_to_step_s"]
    factor = statistics.median(kill["torchrun"]) / statistics.median(kill["everstep"])
    console.print(f"torchrun's restart takes {factor:.1f} times as long")
    console.print(f"undisturbed step, everstep over plain torchrun DDP: {figures['step_ratio']:.3f}")
    for row in figures["transfer"]:
        share = row["gbps"] / row["raw_gbps"]
        speeds = f"{row['gbps']:.2f} GB/s, raw TCP {row['raw_gbps']:.2f} GB/s ({share:.0%})"
        console.print(f"transfer of {row['bytes'] / 1e6:.0f} MB: {speeds}")
    console.print(
        "digests [bold green]identical[/]" if figures["identical"] else "digests [bold red]different[/]"
    )


def say(text: str) -> None:
    console.print(f"[dim]{text}[/]")
    sys.stdout.flush()


if __name__ == "__main__":
    raise SystemExit(main())
