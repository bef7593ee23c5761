"""The command `everstep`: a click group whose subcommands are a few lines over functions elsewhere."""

from __future__ import annotations

import sys
from pathlib import Path
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


@everstep.command(context_settings=_PASS_THROUGH, options_metavar="[options] [sbatch options]")
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="TEMPLATE|script [args]")
def sbatch(words: tuple[str, ...]) -> None:
    """Check and submit a batch script, or a template, as a job that survives its nodes."""
    from everstep.launcher.sbatch import run_sbatch

    raise SystemExit(run_sbatch(words))


@everstep.command()
@click.argument("job", required=False, metavar="JOBID")
@click.option("--events", type=click.Path(path_type=Path), metavar="FILE", help="The run's events file.")
@click.option("--watch", is_flag=True, help="Go on showing it until the run is over.")
@click.option("--json", "as_json", is_flag=True, help="For programs.")
def status(job: str | None, events: Path | None, watch: bool, as_json: bool) -> None:
    """Show a run: who holds which rank, who stands by, what was lost and how long it took."""
    from everstep.launcher.status import run_status

    raise SystemExit(run_status(job, events, watch=watch, as_json=as_json))


@everstep.command()
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="[-- srun options]")
@click.option("--json", "as_json", is_flag=True, help="For programs.")
@click.option("--facts", is_flag=True, hidden=True)
def doctor(words: tuple[str, ...], as_json: bool, facts: bool) -> None:
    """Tell whether this cluster, and this job, are ready. Nothing is changed.

    Inside a job its nodes are asked too. Outside of one, srun options after `--` start a job of a second
    to ask nodes: everstep doctor -- -N4

    Exit code 0: all well; 1: something to look at; 2: something will go wrong.
    """
    from everstep.launcher.doctor.report import run_doctor

    raise SystemExit(run_doctor(words, as_json=as_json, facts_only=facts))


@everstep.command(context_settings=_PASS_THROUGH, options_metavar="[command] [options]")
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="")
def health(words: tuple[str, ...]) -> None:
    """Which nodes and accelerators are fit for work, and why not: a report, and the checks themselves."""
    from everstep.healthcheck.cli import main

    raise SystemExit(main(words))


@everstep.command(hidden=True)
@click.option("--local", is_flag=True)
@click.option("--slurm", is_flag=True)
@click.option("--join", is_flag=True)
@click.option("--task", is_flag=True)
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
def agent(local: bool, slurm: bool, join: bool, task: bool, command: tuple[str, ...]) -> None:
    """The node agent. Started by `run`, by `srun` and by the SPANK plugin, not by hand."""
    if task:  # the command is there for people to see: the agent has its orders from srun
        from everstep.launcher.task import agent_main
    elif join:
        from everstep.launcher.step import joiner_main as agent_main
    elif slurm:
        from everstep.launcher.step import agent_main
    else:
        from everstep.launcher.local import agent_main
    raise SystemExit(agent_main())


@everstep.command(hidden=True)
@click.option("--interface", required=True)
@click.option("--program", required=True)
@click.option("--command-at", type=int, required=True)
@click.option("--inherited", is_flag=True)
@click.option("--standby")
@click.option("--spare-nodes")
@click.option("--resume-policy")
@click.argument("words", nargs=-1, type=click.UNPROCESSED)
def native(
    words: tuple[str, ...],
    interface: str,
    program: str,
    command_at: int,
    inherited: bool,
    **settings: str | None,
) -> None:
    """A stock srun line made Everstep's. Started by the SPANK plugin, not by hand."""
    from everstep.launcher.native import take_over

    take_over(
        words,
        interface=interface,
        program=program,
        command_at=command_at,
        inherited=inherited,
        settings={name: value for name, value in settings.items() if value is not None},
    )


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
