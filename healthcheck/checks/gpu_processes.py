"""Processes that are left over on GPUs that should be idle: looked for twice, for one may be about to end."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from everstep.healthcheck.errors import Absent
from everstep.healthcheck.facts import Facts
from everstep.healthcheck.idle import ALL
from everstep.healthcheck.profile import Profile
from everstep.healthcheck.readers.smi import Gpu
from everstep.healthcheck.registry import Level, check
from everstep.healthcheck.result import Result, Severity, critical, ok, skip, warn

SERVICES = (
    "nvidia-cuda-mps-server",
    "nvidia-cuda-mps-control",
    "nv-hostengine",
    "nvidia-persistenced",
    "dcgm",
)

_QUERY = "--query-compute-apps=pid,name", "--format=csv,noheader"
_AGAIN_S = 5.0
"""For so long a process that was seen may still be about to end."""
_EVERY_S = 0.5
_SPARE_S = 0.7
"""Of the time that is left, what it takes to answer."""


@check(
    "gpu_processes",
    Level.LIGHT,
    source="nvidia-smi -q -x and --query-compute-apps=pid, on the GPUs of this job alone",
    action="end the processes",
    about="gpu",
    moment=True,
)
def gpu_processes(facts: Facts, profile: Profile) -> Iterable[Result]:
    """Nothing is left over on GPUs that should be idle, as in a Prolog or an Epilog."""
    idle = facts.idle_gpus
    if idle is None:
        return [skip("judged in a Prolog and an Epilog, or with --idle-gpus")]
    gpus = facts.gpus
    split = [gpu.name for gpu in gpus if gpu.mig]
    asked = [gpu for gpu in gpus if not gpu.mig and _asked(gpu, idle, numbered=not split)]
    known = {pid for gpu in gpus for pid, _, _ in gpu.processes()}
    seen = [
        (pid, name, gpu.name) for gpu in asked for pid, name, _ in gpu.processes() if not _is_service(name)
    ]
    if len(asked) == len(gpus):
        # This list does not say on which GPU a process is: it serves where the job has them all.
        seen += [(pid, name, "") for pid, name in _queried(facts) if pid not in known]
    there = _still_there(facts, {pid for pid, _, _ in seen})
    results = [_left_over(*each) for each in seen if each[0] in there]
    results += [
        warn(f"no GPU here is {uuid}: nothing looked for left-over processes on it")
        for uuid in _unknown(gpus, idle)
    ]
    # On a GPU that MIG has split, nvidia-smi shows the processes of other jobs' instances too.
    mig = f"split by MIG and not looked at: {', '.join(split)}" if split else ""
    if split and not idle >= ALL:
        mig += "; numbers name MIG instances, and no GPUs, here"
    if not results and not asked:
        return [skip(mig or "none of these GPUs is here")]
    return results or [ok(f"nothing is left over{f'; {mig}' if mig else ''}")]


def _asked(gpu: Gpu, idle: frozenset[int | str], *, numbered: bool) -> bool:
    """Whether a GPU should be idle. Slurm numbers MIG instances and not GPUs where one is split."""
    if idle >= ALL or any(isinstance(each, str) and gpu.uuid.startswith(each) for each in idle):
        return True
    # Slurm's numbers are those of the device files, which may not be in nvidia-smi's order.
    minor = gpu.number("minor_number")
    return numbered and gpu.index in idle and (minor is None or int(minor) in idle)


def _unknown(gpus: Sequence[Gpu], idle: frozenset[int | str]) -> list[str]:
    uuids = sorted(each for each in idle if isinstance(each, str))
    return [each for each in uuids if not any(gpu.uuid.startswith(each) for gpu in gpus)]


def _still_there(facts: Facts, pids: set[int]) -> set[int]:
    """Those of the processes that do not end within a moment; all of them where that cannot be seen."""
    end = time.monotonic() + min(_AGAIN_S, facts.left() - _SPARE_S)
    for _ in range(round(_AGAIN_S / _EVERY_S)):
        if not pids or time.monotonic() + _EVERY_S >= end:
            break
        facts.sleep(_EVERY_S)
        ran = facts.runner.run(["nvidia-smi", *_QUERY], max(0.1, end - time.monotonic()))
        if ran.code == 0:
            pids = pids & {pid for pid, _ in _listed(ran.out.decode("utf-8", "replace"))}
    return pids


def _is_service(name: str) -> bool:
    return any(each in name for each in SERVICES)


def _left_over(pid: int, name: str, device: str) -> Result:
    words = f"process {pid}{f' ({name})' if name else ''} is left over: end it, or reset the GPU"
    return critical(words, Severity.RESET, device, value=pid)


def _queried(facts: Facts) -> list[tuple[int, str]]:
    try:
        return [each for each in _listed(facts.smi_tool(*_QUERY)) if not _is_service(each[1])]
    except Absent:
        return []


def _listed(text: str) -> list[tuple[int, str]]:
    found = []
    for line in text.splitlines():
        pid, _, name = line.partition(",")
        if pid.strip().isdigit():
            found.append((int(pid), name.strip()))
    return found
