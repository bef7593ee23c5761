"""From the words of a command line to a running run: `everstep run` and `everstep srun`."""

from __future__ import annotations

from collections.abc import Sequence

import click
from everstep.launcher import options as own
from everstep.launcher import torchrun
from everstep.launcher.local import run_local
from everstep.launcher.voice import say

RUN_HELP = """\
Usage: everstep run [options] [torchrun options] script.py [args]

Run a script on nodes played by this machine, with workers, standbys and recovery as on a cluster.

  everstep run --nnodes 3 train.py
  everstep run --nnodes 2 --nproc-per-node 2 --standby 1 --events run.jsonl train.py --epochs 3
  everstep run --nnodes 2 --spare-nodes 1 -m package.train

Everstep's options:
{own}
torchrun's options mean what they mean there (--nnodes, --nproc-per-node, --max-restarts, --log-dir,
--tee, --redirects, -m, --no-python, …): see `torchrun --help`.
"""


SRUN_HELP = """\
Usage: everstep srun [options] [any srun options] torchrun [torchrun options] script.py [args]

Run torchrun's command on a Slurm cluster, from a login node or inside an sbatch script.

  everstep srun -N4 -c16 --gres=gpu:8 torchrun --nproc-per-node=8 train.py
  everstep srun -N9 --spare-nodes 1 --events run.jsonl torchrun --nproc-per-node=8 train.py --epochs 3

In an sbatch script, say `#SBATCH --no-kill`: without it Slurm ends the job when a node dies.

Everstep's options:
{own}
srun's options are passed on as they are, but for the switches that keep the step alive
(--no-kill --kill-on-bad-exit=0 --wait=0) and one task a node: see `srun --help`.
torchrun's options mean what they mean there: see `torchrun --help`.
"""


def embedded(words: Sequence[str]) -> int:
    """`everstep run`: the exit code. Raises UsageError."""
    if not words or words[0] in ("-h", "--help"):
        print(RUN_HELP.format(own=_own_help()), end="")
        return 0 if words else 64
    ours, spec = torchrun.parse_run(words, own.names())
    options = own.parse(ours)
    if options.interface is not None:
        say("--interface: not used by `everstep run`, whose nodes are all this machine")
    for note in spec.notes:
        say(note)
    return run_local(options, spec)


def on_slurm(words: Sequence[str]) -> int:
    """`everstep srun`: the exit code. Raises UsageError."""
    if not words or words[0] in ("-h", "--help"):
        print(SRUN_HELP.format(own=_own_help()), end="")
        return 0 if words else 64
    from everstep.launcher.step import run_step

    return run_step(words)


def _own_help() -> str:
    formatter = click.HelpFormatter(width=100)
    with click.Context(own._probe) as context:
        rows = [record for p in own._probe.params if (record := p.get_help_record(context)) is not None]
    formatter.indent()
    formatter.write_dl(rows)
    return formatter.getvalue()
