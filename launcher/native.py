"""`everstep native`: what the SPANK plugin starts in a stock srun's place, to come back as the srun to run.

    srun --auto-resume=1 -N3 torchrun train.py
      -> (plugin) everstep native … -- srun --auto-resume=1 -N3 torchrun train.py
      -> (here)   srun --no-kill … --auto-resume=1 -N3 torchrun train.py

The process stays the same one throughout, so terminals, signals and whoever waits for srun notice nothing.
The line is checked as `everstep srun` checks it. The agents' orders travel under names that srun passes on
whatever --export says; on the nodes the plugin puts `everstep agent --task` before the command (see task.py).
"""

from __future__ import annotations

import importlib.metadata
import os
import shlex
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from everstep.launcher import options as own
from everstep.launcher import srun, torchrun
from everstep.launcher.keys import new_secret
from everstep.launcher.slurm.cli_json import CliJson
from everstep.launcher.slurm.getopt import Given
from everstep.launcher.slurm.srun_table import Arity, OptionTable, installed_table
from everstep.launcher.voice import say
from everstep.recovery.errors import UsageError

INTERFACE = "1"
"""What the plugin and the launcher agree on; EVERSTEP_INTERFACE in slurm_spank/everstep.h."""

CARRIED = "SLURM_"
"""Before the name of each of the agents' variables on their way: srun passes SLURM_ on in any case."""

PATH_VARIABLE = "SLURM_EVERSTEP_PATH"
NO_KILL_VARIABLE = "SLURM_EVERSTEP_NO_KILL"
MORE_OPTIONS = "EVERSTEP_OPTIONS"
"""Everstep's options that the plugin has no option for: EVERSTEP_OPTIONS="--events run.jsonl"."""

PLUGIN_OPTIONS = {
    "auto-resume": Arity.OPTIONAL,
    "standby": Arity.REQUIRED,
    "spare-nodes": Arity.REQUIRED,
    "resume-policy": Arity.REQUIRED,
}
WHOLE_RETRIES = 3
"""How often a command that is not torchrun's is started again, on all nodes, after one of them failed."""


@dataclass(frozen=True)
class Line:
    """A stock srun line as Slurm's own parser has taken it apart."""

    program: str
    """srun's full path."""
    name: str
    """What srun was called as."""
    options: tuple[str, ...]
    separator: bool
    """Whether `--` stood before the command."""
    command: tuple[str, ...]

    @classmethod
    def cut(cls, program: str, words: Sequence[str], command_at: int) -> Line:
        """Cut srun's words where its command begins."""
        options = list(words[1:command_at])
        separator = bool(options) and options[-1] == "--"
        if separator:
            del options[-1]
        return cls(program, words[0], tuple(options), separator, tuple(words[command_at:]))


def take_over(
    words: Sequence[str],
    *,
    interface: str,
    program: str,
    command_at: int,
    inherited: bool,
    settings: Mapping[str, str],
) -> NoReturn:
    """Check the line and become the srun that runs it. Raises UsageError."""
    if interface != INTERFACE:
        raise UsageError(
            f"the SPANK plugin speaks to Everstep by interface {interface}, and everstep "
            f"{importlib.metadata.version('everstep')} ({sys.prefix}) by {INTERFACE}: install the plugin of "
            "this Everstep, or name the other one (everstep= in plugstack.conf)"
        )
    line = Line.cut(program, words, command_at)
    if "EVERSTEP_AGENT" in os.environ:
        raise UsageError("EVERSTEP_AGENT is set: this is inside an agent, which starts its workers itself")
    table = _table()
    why_not = left_alone(line, inherited, table)
    if why_not is not None:
        if why_not:
            say(why_not)
        _become(line, (), {}, ())
    _prepare(line, settings, table)


def left_alone(line: Line, inherited: bool, table: OptionTable) -> str | None:
    """PURE. Why this srun is none of ours after all (empty: nobody wonders); None where it is."""
    if "pty" in Given.of(line.options, table):
        return "" if inherited else "--pty: an interactive step is left as it is, without --auto-resume"
    if inherited and not srun.starts_torchrun(line.command):
        return ""  # the job's option means its training, not every command of its script
    return None


def _prepare(line: Line, settings: Mapping[str, str], table: OptionTable) -> NoReturn:
    options = own_options(settings, os.environ)
    environ = dict(os.environ)
    if NO_KILL_VARIABLE in environ:
        environ.setdefault("SBATCH_NO_KILL", "set")  # ours, which --export=NONE has kept out of the job
    if ":" in line.command:
        raise UsageError(
            "a word `:` begins another component of a heterogeneous step, and Everstep runs only one: "
            "start one srun for it, without `:`"
        )
    allocation = srun.find_allocation(line.options, environ, CliJson(environ=environ), table)
    plan = srun.plan(
        line.options,
        line.command,
        options,
        environ,
        "",
        version=importlib.metadata.version("everstep"),
        secret=new_secret(),
        allocation=allocation,
        table=table,
        native=True,
    )
    worker_env = _python_of(line.command, environ)
    environ.update(worker_env)
    os.environ.update(worker_env)
    if srun.starts_torchrun(line.command):
        cwd = Path(plan.chdir) if plan.chdir else None
        spec = torchrun.parse(srun.torchrun_arguments(line.command), cwd=cwd, on_node=False)
    else:
        spec = plain_spec(
            line.command, retries=0 if settings.get("resume_policy") == "none" else WHOLE_RETRIES
        )
    srun.world_nodes(plan.nodes, options, spec.nnodes)
    if not Given.of(line.options, table).any("quiet"):
        for reason in plan.reasons:
            say(reason)
    for warning in (*plan.warnings, *spec.notes):
        say(f"WARNING: {warning}")
    env = {CARRIED + name: value for name, value in plan.env.items()}
    env[CARRIED + own.SPEC_VARIABLE] = torchrun.encode_spec(spec)
    env[PATH_VARIABLE] = _everstep_path()
    _become(line, plan.argv[1 : len(plan.argv) - len(line.options) - len(line.command)], env, plan.unset)


def own_options(settings: Mapping[str, str], environ: Mapping[str, str]) -> own.RunOptions:
    """PURE but for paths. The plugin's options, and those in EVERSTEP_OPTIONS, as Everstep's own."""
    known = own.names()
    try:
        words = shlex.split(environ.get(MORE_OPTIONS, ""))
    except ValueError as error:
        raise UsageError(
            f"{MORE_OPTIONS} cannot be read ({error}): it holds options, as on a command line"
        ) from error
    for name, value in settings.items():
        spelling = "--" + name.replace("_", "-")
        if spelling in known:
            words += [spelling, value]
    return own.parse(words)


def plain_spec(command: Sequence[str], retries: int) -> torchrun.WorkerSpec:
    """PURE. A command that is not torchrun's: one on each node as it is, all again where one fails."""
    script = next((word for word in command if word.endswith(".py")), None)
    return torchrun.WorkerSpec(
        nproc_per_node=1, max_restarts=retries, command=tuple(command), script=script, plain=True
    )


def _table() -> OptionTable:
    table = installed_table()
    return OptionTable({**table.longs, **PLUGIN_OPTIONS}, table.letters)


def _python_of(command: Sequence[str], environ: Mapping[str, str]) -> dict[str, str]:
    """The Python that the user's torchrun belongs to, where it is another than ours: workers run under it."""
    found = shutil.which(command[0], path=environ.get("PATH"))
    if found is None or "PYTHON_EXEC" in environ or not srun.starts_torchrun(command):
        return {}
    python = found
    if Path(found).name == "torchrun":
        with open(found, "rb") as file:
            first = file.readline(512)
        words = first[2:].split() if first.startswith(b"#!") else []
        if len(words) != 1:
            return {}
        python = os.fsdecode(words[0])
    ours = Path(sys.executable).parent
    if Path(python).parent in (ours, ours.resolve()) or not os.access(python, os.X_OK):
        return {}
    return {"PYTHON_EXEC": python}


def _everstep_path() -> str:
    from everstep.launcher.step import everstep_path

    return everstep_path()


def _become(line: Line, added: Sequence[str], env: Mapping[str, str], unset: Sequence[str]) -> NoReturn:
    """srun in this process's place."""
    environ = {name: value for name, value in os.environ.items() if name not in unset}
    environ.update(env)
    separator = ["--"] if line.separator else []
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores these, and exec keeps that
        signal.signal(number, signal.SIG_DFL)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(line.program, [line.name, *added, *line.options, *separator, *line.command], environ)  # noqa: S606
