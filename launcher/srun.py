"""PURE planning of `everstep srun`: the user's command line -> Slurm's, with a reason for each change.

    everstep srun [everstep options] [any srun options] torchrun [torchrun options] script.py [args]

srun starts one node agent on each node; the agents start the workers, as torchrun's would. Every srun
option is passed through as it was written; what is added keeps the step alive when a node or a
worker dies, and gives each agent its whole node.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from everstep.launcher.options import (
    ORDERS_VARIABLE,
    REPORT_VARIABLE,
    SECRET_VARIABLE,
    SPEC_VARIABLE,
    AgentOrders,
    RunOptions,
    encode_orders,
    names,
)
from everstep.launcher.slurm.client import Job, SlurmClient, expand, fold
from everstep.launcher.slurm.getopt import Given, read
from everstep.launcher.slurm.share import cpus, whole_share
from everstep.launcher.slurm.srun_table import BUILTIN, OptionTable
from everstep.recovery.errors import UsageError


class Split(NamedTuple):
    """A command line of `everstep srun` in its three parts; each word is in exactly one, in its order."""

    everstep: tuple[str, ...]
    srun: tuple[str, ...]
    command: tuple[str, ...]


def split(argv: Sequence[str], table: OptionTable = BUILTIN) -> Split:
    """Tell everstep's options, srun's options and the user's command apart.

    Everstep's own options may stand anywhere before the command, spelled in full. A `--` between
    options and command is left out.

    Raises
    ------
    UsageError
        There is no command, or it cannot be told where it begins.
    """
    own = names()
    reading = read(argv, table, own)
    everstep: list[str] = []
    srun: list[str] = []
    for piece in reading.pieces:
        (everstep if piece.words[0].partition("=")[0] in own else srun).extend(piece.words)
    command = reading.rest
    if not command and any(option.name in ("help", "usage", "version") for option in reading.options):
        return Split(tuple(everstep), tuple(srun), ())
    if not command:
        raise UsageError(
            "no command after srun's options: "
            "everstep srun [srun options] torchrun [torchrun options] script.py"
        )
    if ":" in command:
        raise UsageError(
            "a word `:` begins another component of a heterogeneous step for srun, and Everstep runs only "
            "one: start one `everstep srun` for it, without `:`"
        )
    return Split(tuple(everstep), tuple(srun), tuple(command))


def starts_torchrun(command: Sequence[str]) -> bool:
    """Does the user's command start torchrun?"""
    try:
        torchrun_arguments(command)
    except UsageError:
        return False
    return True


def torchrun_arguments(command: Sequence[str]) -> tuple[str, ...]:
    """What follows `torchrun` (or `python -m torch.distributed.run`) in the user's command.

    Raises UsageError where the command starts something else.
    """
    program = command[0].rpartition("/")[2]
    if program == "torchrun":
        return tuple(command[1:])
    if re.fullmatch(r"python[\d.]*", program):
        options = [word for word in command[1:] if word not in ("-u", "-O", "-I", "-s", "-E")]
        if options[:2] in (["-m", "torch.distributed.run"], ["-m", "torch.distributed.launch"]):
            return tuple(options[2:])
    raise UsageError(
        f"everstep srun starts torchrun, not {command[0]!r}: put `torchrun` (with its options) before your "
        "script: everstep srun -N4 torchrun --nproc-per-node=8 train.py"
    )


@dataclass(frozen=True)
class Allocation:
    """The job that a step is started in, as far as it is known."""

    job_id: str
    nodes: int | None = None
    hosts: tuple[str, ...] = ()
    cpus_per_node: str = ""
    no_kill: bool | None = None
    no_kill_reason: str = ""
    lost: tuple[str, ...] = ()
    """Nodes that it was given and that are of no use any more; they are not among `hosts`."""

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> Allocation | None:
        """The allocation that this process is in, by its environment; None on a login node."""
        job_id = environ.get("SLURM_JOB_ID") or environ.get("SLURM_JOBID")
        if not job_id:
            return None
        nodes = environ.get("SLURM_JOB_NUM_NODES") or environ.get("SLURM_NNODES")
        return cls(
            job_id=job_id,
            nodes=int(nodes) if nodes and nodes.isdigit() else None,
            hosts=expand(environ.get("SLURM_JOB_NODELIST", "")),
            cpus_per_node=environ.get("SLURM_JOB_CPUS_PER_NODE", ""),
        )

    @classmethod
    def from_job(cls, job: Job, lost: Iterable[str] = ()) -> Allocation:
        """The allocation as Slurm itself describes it, without the nodes that are `lost`."""
        lost = set(lost)
        hosts = tuple(host for host in job.nodes if host not in lost)
        return cls(
            job_id=str(job.job_id),
            nodes=len(hosts),
            hosts=hosts,
            lost=tuple(sorted(lost)),
            cpus_per_node=job.cpus_per_node,
            no_kill=job.no_kill,
            no_kill_reason=job.no_kill_reason,
        )


def job_of(srun_argv: Sequence[str], environ: Mapping[str, str], table: OptionTable = BUILTIN) -> int | None:
    """The job that this step is to run in: --jobid, or else the job that we are in; None for a new one."""
    given = Given.of(srun_argv, table).value("jobid") or environ.get("SLURM_JOB_ID", "")
    return int(given) if given.isdigit() else None


def find_allocation(
    srun_argv: Sequence[str], environ: Mapping[str, str], client: SlurmClient, table: OptionTable = BUILTIN
) -> Allocation | None:
    """The job that the step will run in, as Slurm describes it; None where srun is to make a new one.

    Where Slurm does not answer for the job that we are in, the environment's word is taken.
    """
    job = job_of(srun_argv, environ, table)
    if job is None:
        return None
    known = Allocation.from_environ(environ)
    try:
        found = client.job(job)
        given = known.hosts if known is not None and known.job_id == str(job) else ()
        dead = [node.name for node in client.nodes(found.nodes) if not node.usable]
        return Allocation.from_job(found, [*dead, *(set(given) - set(found.nodes))])
    except UsageError as error:
        if known is None or known.job_id != str(job):
            raise
        return replace(known, no_kill_reason=str(error))


@dataclass(frozen=True)
class SrunPlan:
    """The srun command line to execute."""

    argv: tuple[str, ...]
    env: Mapping[str, str] = field(repr=False)
    """To be added to the environment; it holds the run's secret, so it is not shown."""
    unset: tuple[str, ...]
    """Variables to take out of srun's environment."""
    nodes: int
    """Nodes in the step, spare nodes included."""
    chdir: str | None
    """Where the agents will run (--chdir), for finding the script; None: here."""
    reasons: tuple[str, ...]
    """One line for each thing added, and why."""
    warnings: tuple[str, ...]


KEEP_ALIVE = ("--no-kill", "--kill-on-bad-exit=0", "--wait=0")
"""With these a step outlives its tasks and its nodes."""


def plan(
    srun_argv: Sequence[str],
    command: Sequence[str],
    options: RunOptions,
    environ: Mapping[str, str],
    everstep_path: str,
    *,
    version: str,
    secret: str,
    allocation: Allocation | None = None,
    table: OptionTable = BUILTIN,
    native: bool = False,
) -> SrunPlan:
    """Plan the srun that starts an agent on each node.

    Parameters
    ----------
    srun_argv, command
        As `split` gives them.
    options
        Everstep's own.
    environ
        The environment that srun would inherit.
    everstep_path
        Full path of the `everstep` command, the same on all nodes.
    version, secret
        This everstep's version and the run's secret, for the agents.
    allocation
        What Slurm says of the job, where it was asked; the environment's word otherwise.
    table
        The installed srun's options.
    native
        The SPANK plugin puts the agent before the user's command on each node: srun keeps that command, which
        may be any, and passes the agents' variables on by itself.

    Raises
    ------
    UsageError
        Options that cannot work with one agent a node; the message names the cure.
    """
    given = Given.of(srun_argv, table)
    if allocation is None and "jobid" not in given:
        allocation = Allocation.from_environ(environ)
    if not native:
        torchrun_arguments(command)
    _refuse(given)
    nodes = _nodes(given, allocation)
    _check_tasks(given, nodes)
    if options.spare_nodes >= nodes:
        raise UsageError(
            f"--spare-nodes {options.spare_nodes} leaves no node of {nodes} to train on: "
            f"ask for more with -N{options.spare_nodes + 1}, or fewer spares"
        )

    reasons: list[str] = []
    added, warnings = _keep_alive(given)
    if added:
        reasons.append(f"{' '.join(added)}: the step goes on when a worker or a node dies")
    if allocation is not None and allocation.lost:
        named = _name_nodes(given, allocation, nodes)
        added += named
        if named:
            reasons.append(f"{named[0]}: srun might wait for {fold(allocation.lost)}, which the job has lost")
    layout = _layout(given, nodes)
    added += layout
    if layout:
        reasons.append(f"{' '.join(layout)}: one agent on each node, which starts the node's workers")
    per_node = allocation.cpus_per_node if allocation else ""
    bind, why, cpu_warnings = cpus(given, environ, in_job=allocation is not None, cpus_per_node=per_node)
    added += bind
    reasons += why
    warnings += cpu_warnings
    unset: tuple[str, ...] = ()
    if allocation is not None:
        share, why, unset = whole_share(given, environ)
        added += share
        reasons += why
    kept, export = (tuple(srun_argv), None) if native else _export(srun_argv, given, environ, table)
    if export:
        added.append(export)
        reasons.append(f"{export}: your --export would keep the agents' orders from them")
    if allocation is not None:
        warnings += _allocation_warnings(allocation)

    orders = AgentOrders(
        options=options,
        command=tuple(command),
        nnodes=nodes,
        everstep=version,
        worker_env={name: environ[name] for name in unset},
    )
    return SrunPlan(
        argv=("srun", *added, *kept, *(command if native else (everstep_path, "agent", "--slurm"))),
        env={ORDERS_VARIABLE: encode_orders(orders), SECRET_VARIABLE: secret},
        unset=unset,
        nodes=nodes,
        chdir=given.value("chdir"),
        reasons=tuple(reasons),
        warnings=tuple(warnings),
    )


def world_nodes(step_nodes: int, options: RunOptions, nnodes: int | None) -> int:
    """Nodes that train: all of the step but the spare ones.

    Raises UsageError where torchrun's --nnodes, if the user gave it, says another number.
    """
    training = step_nodes - options.spare_nodes
    if nnodes is None or nnodes == training:
        return training
    spares = f", {options.spare_nodes} of them spare" if options.spare_nodes else ""
    cure = "leave --nnodes out"
    if 0 < nnodes < step_nodes:
        cure = f"add --spare-nodes {step_nodes - nnodes}, or leave --nnodes out"
    raise UsageError(
        f"torchrun's --nnodes is {nnodes}, but srun's step has {step_nodes} nodes{spares}: {cure}"
    )


def _refuse(given: Given) -> None:
    for name in ("ntasks-per-gpu", "ntasks-per-tres", "ntasks-per-core"):
        if name in given:
            raise UsageError(
                f"{given.shown(name)}: Everstep starts one task (its agent) on each node, and torchrun's "
                "--nproc-per-node says how many workers that starts: leave it out"
            )
    if "multi-prog" in given:
        raise UsageError("--multi-prog: Everstep starts one program on all nodes: name it after torchrun")
    for name in ("het-group", "pack-group"):
        if re.search(r"[,-]", given.value(name) or ""):
            raise UsageError(
                f"{given.shown(name)}: Everstep runs in one component of a heterogeneous job: name one"
            )


def _nodes(given: Given, allocation: Allocation | None) -> int:
    """How many nodes the step has: -N, or what the other options and the allocation come to."""
    if (said := given.value("nodes")) is not None:
        low, dash, high = said.partition("-")
        if not low.isdigit() or (dash and not high.isdigit()) or int(low) < 1:
            raise UsageError(f"{given.shown('nodes')}: a number of nodes is wanted, such as -N4")
        if dash and low != high:
            raise UsageError(
                f"{given.shown('nodes')}: Everstep needs to know the number of nodes (a world that grows and "
                f"shrinks comes later): say -N{high}, with --spare-nodes for those that may stand by"
            )
        return int(low)
    chosen = given.value("nodelist")
    if chosen is not None and ("/" in chosen or given.shown("nodelist").startswith(("-F", "--nodef"))):
        raise UsageError(f"{given.shown('nodelist')}: say how many nodes that is, with -N")
    if chosen is not None:
        return len(expand(chosen))
    if allocation is None or allocation.nodes is None:
        if given.any("jobid"):
            raise UsageError(f"{given.shown('jobid')}: say how many of that job's nodes to use, with -N")
        return 1  # srun's own default
    excluded = given.value("exclude")
    nodes = allocation.nodes
    if excluded is not None and "/" in excluded:
        raise UsageError(f"{given.shown('exclude')}: say how many nodes that leaves, with -N")
    if excluded is not None:
        nodes = len(set(allocation.hosts) - set(expand(excluded)))
    if (relative := given.value("relative")) is not None and relative.isdigit():
        nodes -= int(relative)
    if nodes < 1:
        raise UsageError(f"job {allocation.job_id} has no node left that these options allow")
    return nodes


def _name_nodes(given: Given, allocation: Allocation, nodes: int) -> list[str]:
    """The nodes that are left, by name: srun in a job that has lost some may choose the lost ones again."""
    if given.any("nodelist", "exclude", "relative", "het-group", "pack-group"):
        return []
    if nodes > len(allocation.hosts):
        raise UsageError(
            f"{given.shown('nodes')}: job {allocation.job_id} has lost {fold(allocation.lost)}, and "
            f"{len(allocation.hosts)} nodes are left: say -N{len(allocation.hosts)}, or submit the job again"
        )
    return [f"--nodelist={fold(allocation.hosts[:nodes])}"]


def _check_tasks(given: Given, nodes: int) -> None:
    per_node, tasks = given.value("ntasks-per-node"), given.value("ntasks")
    if per_node is not None and per_node != "1":
        raise UsageError(
            f"{given.shown('ntasks-per-node')}: Everstep starts one task (its agent) on each node, which "
            f"starts the workers: leave it out and say torchrun --nproc-per-node={per_node}"
        )
    if tasks is not None and tasks != str(nodes):
        workers = int(tasks) // nodes if tasks.isdigit() and int(tasks) % nodes == 0 else None
        cure = f"torchrun --nproc-per-node={workers}" if workers else "torchrun --nproc-per-node=WORKERS"
        raise UsageError(
            f"{given.shown('ntasks')} is not one task on each of {nodes} node{'s' * (nodes != 1)}: "
            f"Everstep's agent on each node starts the workers: leave it out and say -N{nodes} with {cure}"
        )


def _keep_alive(given: Given) -> tuple[list[str], list[str]]:
    costs = {
        "no-kill": "Slurm ends the step when one node fails",
        "kill-on-bad-exit": "Slurm ends the step when one node's agent fails",
        "wait": "Slurm ends the step so many seconds after its first agent ends",
    }
    added, warnings = [], []
    for switch in KEEP_ALIVE:
        name, _, wanted = switch[2:].partition("=")
        cost, value = costs[name], given.value(name)
        if name not in given:
            added.append(switch)
        elif value != wanted if wanted else (value or "").lower() == "off":
            warnings.append(
                f"{given.shown(name)} is kept as you gave it, and it costs you the recovery: {cost}, "
                f"whatever Everstep could have saved. Leave it out, and {switch} is used"
            )
    return added, warnings


def _layout(given: Given, nodes: int) -> list[str]:
    # All three are said, since an allocation's variables (SLURM_NTASKS, …) say other things.
    wanted = {"nodes": nodes, "ntasks": nodes, "ntasks-per-node": 1}
    return [f"--{name}={value}" for name, value in wanted.items() if name not in given]


def _export(
    srun_argv: Sequence[str], given: Given, environ: Mapping[str, str], table: OptionTable
) -> tuple[tuple[str, ...], str | None]:
    """See to it that the agents get their variables: srun's options to keep, the --export to use instead."""
    said = given.value("export") if "export" in given else environ.get("SLURM_EXPORT_ENV")
    listed = [word for word in (said or "ALL").split(",") if word]
    if "ALL" in (word.upper() for word in listed):
        return tuple(srun_argv), None
    ours = [ORDERS_VARIABLE, SECRET_VARIABLE, SPEC_VARIABLE, REPORT_VARIABLE]
    theirs = [word for word in listed if word.upper() not in ("NONE", "NIL") and word not in ours]
    kept: list[str] = []
    for piece in read(srun_argv, table).pieces:
        if not any(option.name == "export" for option in piece.options):
            kept += piece.words
    return tuple(kept), f"--export={','.join([*theirs, *ours])}"


def _allocation_warnings(allocation: Allocation) -> list[str]:
    cure = f"submit with `sbatch --no-kill`, or `#SBATCH --no-kill` in the script (job {allocation.job_id})"
    if allocation.no_kill is True:
        return []
    if allocation.no_kill is False:
        return [
            "THIS JOB WILL NOT SURVIVE A LOST NODE: it was made without --no-kill "
            f"({allocation.no_kill_reason}), so Slurm kills all of it SlurmdTimeout (300 s by default) after "
            f"a node dies. Lost workers are still replaced. The cure: {cure}"
        ]
    reason = f" ({allocation.no_kill_reason})" if allocation.no_kill_reason else ""
    return [
        f"whether this job was made with --no-kill cannot be seen{reason}. If it was not, IT WILL NOT "
        f"SURVIVE A LOST NODE: Slurm kills all of it SlurmdTimeout (300 s by default) after. "
        f"To be sure: {cure}"
    ]
