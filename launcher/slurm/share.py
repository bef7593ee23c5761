"""PURE: one task, the agent, holds all the workers of its node, so it is to have the whole node's share."""

from __future__ import annotations

import re
from collections.abc import Mapping

from everstep.launcher.slurm.getopt import Given

PER_TASK_VARIABLES = (
    "SLURM_CPUS_PER_TASK",
    "SRUN_CPUS_PER_TASK",
    "SLURM_TRES_PER_TASK",
    "SLURM_GPUS_PER_TASK",
    "SLURM_NTASKS_PER_GPU",
    "SLURM_NTASKS_PER_TRES",
    "SLURM_NTASKS_PER_SOCKET",
    "SLURM_NTASKS_PER_CORE",
    "SLURM_GPU_BIND",
    "SLURM_TRES_BIND",
)
"""How sbatch tells srun what one *task* of the job gets. One agent is one task with all the workers of
its node, so it would be squeezed into a single worker's share. Seen with srun 24.11: in a job of `sbatch
-c2 --ntasks-per-node=2` an agent got 2 of 4 CPUs, and all 4 without SLURM_CPUS_PER_TASK and
SLURM_TRES_PER_TASK; with `--gpus-per-task=1` it got 1 of 2 GPUs until the step asked for 2."""


_CPU_OPTIONS = ("cpus-per-task", "cpus-per-gpu", "tres-per-task")
_GPU_OPTIONS = ("gpus", "gpus-per-node", "gpus-per-task", "gpus-per-socket", "gres", "tres-per-task")


def cpus(
    given: Given, environ: Mapping[str, str], *, in_job: bool, cpus_per_node: str
) -> tuple[list[str], list[str], list[str]]:
    """Let the agent use all CPUs of the step on its node: (added, reasons, warnings).

    Inside a job a step gets all the job's CPUs of its nodes, unless it asks for some (-c) or for exactness;
    binding a single task to a single core (a site's default, perhaps) is switched off.
    """
    added: list[str] = []
    reasons: list[str] = []
    warnings: list[str] = []
    hinted = given.any("hint") or "SLURM_HINT" in environ  # srun refuses --cpu-bind beside it
    if not hinted and "cpu-bind" not in given:
        added.append("--cpu-bind=none")
        reasons.append("--cpu-bind=none: a node's one task holds all its workers, so it is bound to no core")
    if given.any(*_CPU_OPTIONS):
        return added, reasons, warnings
    exact = next((name for name in ("exact", "exclusive") if name in given), None)
    variable = next((name for name in ("SLURM_EXACT", "SLURM_EXCLUSIVE") if name in environ), None)
    if not in_job:
        warnings.append(
            "no CPUs were asked for: Slurm gives the step one core a node, and all workers of a node share "
            f"it{' (--exclusive keeps others out, no more)' if exact else ''}: add -c CPUS_A_NODE"
        )
    elif exact or variable:
        how = given.shown(exact) if exact else f"{variable} in the environment"
        count = uniform(cpus_per_node)
        warnings.append(
            f"{how} without -c gives the step one core a node, and all workers of a node share it: "
            f"add -c{count or ' CPUS_A_NODE'}, or leave it out"
        )
    return added, reasons, warnings


def whole_share(given: Given, environ: Mapping[str, str]) -> tuple[list[str], list[str], tuple[str, ...]]:
    """Undo, inside a job, what sbatch said of one task's share: (added, reasons, variables to unset)."""
    unset = tuple(name for name in PER_TASK_VARIABLES if name in environ)
    if not unset:
        return [], [], ()
    reasons = [
        f"without {', '.join(unset)}: these say what one task of the job gets, and an agent holds all the "
        "workers of a node"
    ]
    gpus = _gpus_on_node(environ)
    if not gpus or given.any(*_GPU_OPTIONS):
        return [], reasons, unset
    reasons.append(f"--gpus-per-node={gpus}: all GPUs of the job's nodes, not one task's")
    return [f"--gpus-per-node={gpus}"], reasons, unset


def _gpus_on_node(environ: Mapping[str, str]) -> int | None:
    """The job's GPUs on each node, where they were asked for by the task (--gpus-per-task)."""
    per_task = environ.get("SLURM_GPUS_PER_TASK", "").rpartition(":")[2]
    for part in environ.get("SLURM_TRES_PER_TASK", "").split(","):
        if found := re.match(r"gres[/:]gpu(?::[^=:]*)?[=:](\d+)$", part):
            per_task = found[1]
    if not per_task.isdigit():
        return None
    if (here := environ.get("SLURM_GPUS_ON_NODE", "")).isdigit():
        return int(here)
    tasks = uniform(environ.get("SLURM_TASKS_PER_NODE", ""))
    return tasks * int(per_task) if tasks else None


def uniform(cpus_per_node: str) -> int | None:
    """The CPUs of each node where all have the same: `4(x2)` or `4,4` is 4; None where they differ."""
    counts = {part.partition("(")[0] for part in cpus_per_node.split(",")}
    count = counts.pop() if len(counts) == 1 else ""
    return int(count) if count.isdigit() else None
