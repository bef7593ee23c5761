"""The command `everstep`: a click group whose subcommands are a few lines over functions elsewhere."""

from __future__ import annotations

import sys
from typing import Any

import click
from everstep.recovery.errors import EverstepError

_PASS_THROUGH = {"ignore_unknown_options": True, "allow_interspersed_args": False, "help_option_names": []}


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="everstep", prog_name="everstep")
def everstep() -> None:
    """Training on a Slurm cluster that survives its nodes.

    \b
    everstep run --nnodes 3 train.py                     try it on this machine, without Slurm
    everstep srun -N4 torchrun --nproc-per-node=8 train.py   on a cluster

    In an sbatch script, say `#SBATCH --no-kill` too: without it Slurm ends the job when a node dies.
    """


@everstep.command(context_settings=_PASS_THROUGH, options_metavar="[options] [torchrun options]")
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="script.py [args]")
def run(words: tuple[str, ...]) -> None:
    """Run a script on nodes played by this machine: no Slurm needed."""
    from everstep.launcher import start

    raise SystemExit(start.embedded(words))


@everstep.command(context_settings=_PASS_THROUGH, options_metavar="[options] [srun options]")
@click.argument(
    "words", nargs=-1, type=click.UNPROCESSED, metavar="torchrun [torchrun options] script.py [args]"
)
def srun(words: tuple[str, ...]) -> None:
    """Run torchrun's command on a Slurm cluster, under srun, so that it survives its nodes."""
    from everstep.launcher import start

    raise SystemExit(start.on_slurm(words))


@everstep.command(context_settings=_PASS_THROUGH, options_metavar="[command] [options]")
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="")
def health(words: tuple[str, ...]) -> None:
    """Which nodes and accelerators are fit for work, and why not: a report, and the checks themselves."""
    from everstep.healthcheck.cli import main

    raise SystemExit(main(words))


@everstep.command(hidden=True)
@click.option("--local", is_flag=True)
@click.option("--slurm", is_flag=True)
def agent(local: bool, slurm: bool) -> None:
    """The node agent. Started by `run` and `srun`, not by hand."""
    if slurm:
        from everstep.launcher.step import agent_main
    else:
        from everstep.launcher.local import agent_main
    raise SystemExit(agent_main())


def main(argv: list[str] | None = None, **extra: Any) -> None:
    """The entry point: errors of ours and of the command line are one line and exit code 64."""
    try:
        everstep.main(args=argv, standalone_mode=False, **extra)
    except click.exceptions.Abort:
        raise SystemExit(130) from None
    except click.exceptions.Exit as exit_:
        raise SystemExit(exit_.exit_code) from None
    except click.ClickException as error:
        click.echo(f"everstep: error: {error.format_message()} (see `everstep --help`)", err=True)
        raise SystemExit(64) from None
    except EverstepError as error:
        click.echo(f"everstep: error: {error}", err=True)
        raise SystemExit(error.exit_code) from None


if __name__ == "__main__":
    main(sys.argv[1:])
