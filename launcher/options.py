"""Everstep's own options: what `everstep run` and `everstep srun` share, as plain data."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import click
import msgspec
from everstep.launcher.ladder import parse_policy
from everstep.recovery.errors import UsageError

Resume = Literal["auto", "none"]
Health = Literal["auto", "off", "light", "full"]
Command = TypeVar("Command", bound=Callable[..., Any])

ORDERS_VARIABLE = "EVERSTEP_AGENT"
"""The environment variable in which an agent under srun finds its orders (JSON, no secret in it)."""

SPEC_VARIABLE = "EVERSTEP_SPEC"
"""The environment variable with the workers' specification, so that agents need not parse it again."""

REPORT_VARIABLE = "EVERSTEP_REPORT"
"""The environment variable that says where `everstep srun` listens for the run's exit code."""

COORDINATOR_VARIABLE = "EVERSTEP_COORDINATOR"
"""The environment variable that tells a replacement node's agent where the coordinator is (host:port)."""

SECRET_VARIABLE = "EVERSTEP_SECRET"  # noqa: S105 - the variable's name, not a secret
"""The environment variable that carries the run's secret; never on a command line."""


@dataclass(frozen=True)
class RunOptions:
    """What the user asked of everstep itself; torchrun's and srun's options are kept elsewhere."""

    standby: int = 1
    """Standbys on each node."""
    spare_nodes: int = 0
    """Nodes whose workers are all standbys: of the step's nodes under srun, on top of --nnodes embedded."""
    events: Path | None = None
    """File that one JSON object a line is appended to."""
    resume: Resume = "auto"
    """Whether a run that finds no state in memory goes on from its newest checkpoint."""
    nnodes: int | None = None
    """Embedded mode only: how many nodes this machine plays."""
    interface: str | None = None
    """Network interface (`ib0`) or address that state and groups travel over; None: the host's own choice."""
    heartbeat: float = 0.25
    """Seconds between an agent's signs of life; four missed ones mean the node is lost."""
    resume_policy: str = "all"
    """Rungs of the resume ladder that may be used, as `ladder.parse_policy` reads them."""
    replace_within: float = 600.0
    """Seconds that a run waits for a replacement node."""
    grace: float = 10.0
    """Seconds that the step under way is given to finish when the run is told to stop."""
    health: Health = "auto"
    """The level of health checks before the run (light ones follow). auto: light under Slurm, else off."""
    health_every: float = 30.0
    """Seconds between two light health checks while the run is under way."""
    run_dir: Path | None = None
    """Shared directory for what outlives an attempt: its history and events. None: the default one."""


class AgentOrders(msgspec.Struct, frozen=True, kw_only=True):
    """What `everstep srun` tells the agents that it starts, by way of the environment."""

    options: RunOptions
    command: tuple[str, ...]
    """The user's command from `torchrun` on: each agent parses it on its own node, with its own devices."""
    nnodes: int
    """Nodes in the step, spare nodes included."""
    everstep: str
    """The version that gave the orders; an agent of another one refuses them."""
    worker_env: dict[str, str] = {}
    """Variables that srun had to do without and workers may read (SLURM_CPUS_PER_TASK): set in each."""


def encode_orders(orders: AgentOrders) -> str:
    """Orders as JSON, for the environment variable `EVERSTEP_AGENT`."""
    return msgspec.json.encode(orders, enc_hook=str).decode()


def decode_orders(text: str) -> AgentOrders:
    """The orders that `encode_orders` wrote.

    Raises UsageError where the text is not such orders.
    """
    try:
        return msgspec.json.decode(
            text, type=AgentOrders, dec_hook=lambda kind, value: kind(value) if kind is Path else value
        )
    except (msgspec.DecodeError, TypeError) as error:
        raise UsageError(
            f"{ORDERS_VARIABLE} does not hold an agent's orders ({error}): "
            "`everstep agent` is started by `everstep srun`, not by hand"
        ) from error


def _file(**kwargs: Any) -> click.Path:
    # Resolved here: an agent under srun may have another working directory (--chdir).
    return click.Path(resolve_path=True, path_type=Path, **kwargs)


_SHARED = (
    click.option(
        "--standby",
        type=click.IntRange(min=0),
        default=1,
        show_default=True,
        metavar="N",
        help="Workers kept warm on each node, imports done, to take a rank whose worker dies.",
    ),
    click.option(
        "--spare-nodes",
        type=click.IntRange(min=0),
        default=0,
        show_default=True,
        metavar="N",
        help="Nodes that hold only standbys until a node is lost. Under srun they are of the step's nodes "
        "(-N9 --spare-nodes 1 trains on 8), under run they come on top of --nnodes.",
    ),
    click.option(
        "--events",
        type=_file(dir_okay=False),
        metavar="FILE",
        help="Append one JSON object a line to FILE: faults, generations, restores, first steps.",
    ),
    click.option(
        "--resume",
        type=click.Choice(["auto", "none"]),
        default="auto",
        show_default=True,
        help="Where nobody holds the state in memory: auto goes on from the newest valid checkpoint, "
        "none begins at step 0.",
    ),
    click.option(
        "--interface",
        metavar="NAME",
        help="Network interface or address for state and process groups, such as ib0 or 10.1.2.3.",
    ),
    click.option(
        "--resume-policy",
        default="all",
        show_default=True,
        metavar="RUNGS",
        help="Rungs of the resume ladder that may be used, of standby,spare,replace,requeue; all or none.",
    ),
    click.option(
        "--replace-within",
        type=click.FloatRange(min=0),
        default=600.0,
        show_default=True,
        metavar="SECONDS",
        help="How long a run waits for a replacement node before it is requeued.",
    ),
    click.option(
        "--grace",
        type=click.FloatRange(min=0),
        default=10.0,
        show_default=True,
        metavar="SECONDS",
        help="How long the step under way may take to finish when the run is told to stop.",
    ),
    click.option(
        "--health",
        type=click.Choice(["auto", "off", "light", "full"]),
        default="auto",
        show_default=True,
        help="Health checks of each node: of this level before the run, light ones every 30 s while it is "
        "under way. Work is moved off a node that is not fit for it. auto: light under Slurm, else off.",
    ),
    click.option(
        "--health-every",
        type=click.FloatRange(min=1),
        default=30.0,
        metavar="SECONDS",
        hidden=True,
        help="Seconds between two light health checks while the run is under way.",
    ),
    click.option(
        "--run-dir",
        type=_file(file_okay=False),
        metavar="DIR",
        help="Directory that all nodes share, for what outlives an attempt: its history, and the events "
        "where --events is not given. Under srun by default .everstep/JOBID in the job's directory.",
    ),
    click.option(
        "--heartbeat",
        type=click.FloatRange(min=0.05, max=60),
        default=0.25,
        metavar="SECONDS",
        hidden=True,
        help="Seconds between an agent's signs of life.",
    ),
)


def shared_options(command: Command) -> Command:
    """Decorate a click command with the options that `everstep run` and `everstep srun` share."""
    for option in reversed(_SHARED):
        command = option(command)
    return command


@click.command(add_help_option=False)
@shared_options
def _probe(**_: Any) -> None:
    """Carries the shared options outside of any command line, for parsing and for listing."""


@functools.cache
def names() -> Mapping[str, bool]:
    """Every spelling of everstep's own options, and whether a value follows it."""
    return {
        spelling: not parameter.is_flag
        for parameter in _probe.params
        if isinstance(parameter, click.Option)
        for spelling in parameter.opts
    }


def from_click(**params: Any) -> RunOptions:
    """The options of a click command decorated with `shared_options`; parameters not ours are left out."""
    known = {field.name for field in dataclasses.fields(RunOptions)}
    return RunOptions(**{name: value for name, value in params.items() if name in known})


def parse(argv: Sequence[str]) -> RunOptions:
    """Everstep's options from words of the command line, as `split` sets them apart.

    Raises UsageError, in one line, where an option is unknown or its value will not do.
    """
    try:
        context = _probe.make_context("everstep", list(argv))
    except click.ClickException as error:
        raise UsageError(f"{error.format_message()} (see --help)") from error
    options = from_click(**context.params)
    parse_policy(options.resume_policy)
    if options.events is not None and not options.events.parent.is_dir():
        raise UsageError(f"--events {options.events}: there is no directory {options.events.parent}")
    return options
