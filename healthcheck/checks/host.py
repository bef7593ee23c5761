"""The host: memory, shared memory, the clock, the services that a compute node needs, limits."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from everstep.healthcheck.errors import Absent
from everstep.healthcheck.facts import Facts
from everstep.healthcheck.profile import Profile
from everstep.healthcheck.readers.proc import SHM
from everstep.healthcheck.registry import Level, check
from everstep.healthcheck.result import Result, Severity, critical, ok, skip, warn

_GIB = float(2**30)


@check("host_memory", Level.LIGHT, source="/proc/meminfo", action="replace for a lost module", about="host")
def host_memory(facts: Facts, profile: Profile) -> Iterable[Result]:
    """The memory is all there, and some of it is free."""
    memory = facts.memory
    total, free = memory.get("MemTotal", 0), memory.get("MemAvailable")
    if not total:
        return [skip("/proc/meminfo tells no MemTotal")]
    wanted = profile.host.memory_gib
    if wanted is not None and total / _GIB < wanted:
        words = f"{total / _GIB:.0f} of {wanted:.0f} GiB of memory: a module is lost; replace"
        return [critical(words, Severity.REPLACE, value=round(total / _GIB), limit=wanted)]
    if free is None:
        return [ok(f"{total / _GIB:.0f} GiB")]
    percent = 100.0 * free / total
    if percent < profile.host.memory_free_percent:
        words = f"{free / _GIB:.1f} of {total / _GIB:.0f} GiB available: look at what takes it"
        return [warn(words, value=round(percent, 1), limit=profile.host.memory_free_percent)]
    return [ok(f"{free / _GIB:.0f} of {total / _GIB:.0f} GiB available", value=round(percent, 1))]


@check(
    "host_shm",
    Level.LIGHT,
    source="/proc/mounts, statvfs or df: /dev/shm",
    action="remount with size=, or remove what was left there",
    about="host",
)
def host_shm(facts: Facts, profile: Profile) -> Result:
    """Shared memory is large enough for NCCL and data loaders, and not full."""
    usage = facts.usage_of(SHM)
    size = usage.size if usage else facts.shm_size
    if size is None:
        return skip(f"nothing is told of {SHM}")
    wanted = profile.host.shm_gib
    if wanted is not None and size < wanted * _GIB:
        words = (
            f"{SHM} has {size / _GIB:.2f} GiB, and {wanted:g} are needed: mount -o remount,size= it larger"
        )
        return warn(words, SHM, value=round(size / _GIB, 2), limit=wanted)
    if usage and usage.percent >= profile.host.disk_warn:
        words = f"{SHM} is {usage.percent:.0f} % full: remove what was left there"
        return warn(words, SHM, value=round(usage.percent, 1), limit=profile.host.disk_warn)
    return ok(f"{size / _GIB:.1f} GiB", value=round(size / _GIB, 2), limit=wanted)


@check(
    "host_clock",
    Level.FULL,
    source="chronyc tracking",
    action="look at chronyd and its servers",
    about="host",
)
def host_clock(facts: Facts, profile: Profile) -> Result:
    """The clock is right."""
    text = facts.tool("chronyc", "-n", "tracking")
    offset = re.search(r"^System time\s*:\s*([\d.eE+-]+) seconds (slow|fast)", text, re.MULTILINE)
    leap = re.search(r"^Leap status\s*:\s*(.+?)\s*$", text, re.MULTILINE)
    if leap and leap[1] == "Not synchronised":
        return warn("the clock is not synchronised: look at chronyd's servers", value=leap[1], limit="Normal")
    if offset is None:
        return skip("chronyc tells no offset")
    seconds = float(offset[1])
    words = f"{seconds:.3g} s {offset[2]}: look at chronyd's servers"
    if seconds >= profile.host.clock_critical_s:
        return critical(words, Severity.MONITOR, value=seconds, limit=profile.host.clock_critical_s)
    if seconds >= profile.host.clock_warn_s:
        return warn(words, value=seconds, limit=profile.host.clock_warn_s)
    return ok(f"{seconds:.3g} s {offset[2]}", value=seconds, limit=profile.host.clock_warn_s)


@check(
    "host_slurmd",
    Level.LIGHT,
    source="/proc, systemctl is-active slurmd",
    action="start slurmd",
    about="host",
)
def host_slurmd(facts: Facts, profile: Profile) -> Result:
    """slurmd runs where this is a compute node."""
    return service(
        facts,
        unit="slurmd",
        names=("slurmd",),
        evidence=("/run/slurmd.pid", "/var/run/slurmd.pid", "/var/spool/slurmd", "/var/spool/slurm/d"),
        action="start slurmd",
    )


@check(
    "host_munge", Level.LIGHT, source="/proc, systemctl is-active munge", action="start munge", about="host"
)
def host_munge(facts: Facts, profile: Profile) -> Result:
    """munged runs where Slurm authenticates by it."""
    for path in ("/etc/slurm/slurm.conf", "/run/slurm/conf/slurm.conf", "/opt/slurm/etc/slurm.conf"):
        found = re.search(r"^\s*AuthType\s*=\s*(\S+)", facts.text(path) or "", re.MULTILINE | re.IGNORECASE)
        if found and found[1] != "auth/munge":
            return skip(f"Slurm authenticates by {found[1]}")
    return service(
        facts,
        unit="munge",
        names=("munged",),
        evidence=("/etc/munge/munge.key", "/run/munge"),
        action="start munge",
    )


def service(facts: Facts, *, unit: str, names: Sequence[str], evidence: Sequence[str], action: str) -> Result:
    """Whether a service runs: by its processes, else by systemd; a skip where nothing says it should."""
    try:
        running = [name for name in names if name in facts.processes]
        hidden = False
    except Absent:
        running, hidden = [], True
    if running:
        return ok(f"{running[0]} runs")
    said = facts.runner.run(["systemctl", "is-active", unit], facts.limits.tool)
    state = said.out.decode("utf-8", "replace").strip()
    words = f"{unit} does not run: {action}"
    if state in ("active", "reloading"):
        return ok(f"{unit} is {state}")
    if state in ("activating", "deactivating"):
        return warn(f"{unit} is {state}", value=state, limit="active")
    if state == "failed":
        return critical(f"{words} (systemd: failed)", Severity.MONITOR, value=state, limit="active")
    wanted = any(facts.runner.exists(path) for path in evidence)
    if hidden and state != "inactive":
        return skip(f"nothing tells whether {unit} runs")
    if wanted or (state == "inactive" and facts.runner.recorded):
        return critical(words, Severity.MONITOR, value=state or "no process", limit="active")
    return skip(f"nothing says that {unit} should run here")


@check(
    "host_limits",
    Level.LIGHT,
    source="/proc/PID/limits of slurmd, else of this process",
    action="LimitNOFILE= in slurmd's unit",
    about="host",
)
def host_limits(facts: Facts, profile: Profile) -> Result:
    """Jobs may open as many files as data loaders need."""
    wanted = profile.host.nofile
    if wanted is None:
        return skip(f"the profile {profile.name} asks for none")
    whose, limits = facts.limits_of_jobs
    found = limits.get("Max open files")
    if found is None:
        return skip(f"{whose} has no such limit")
    if found[1] < wanted:
        words = f"{whose} may open {found[1]:.0f} files of {wanted}: set LimitNOFILE=1048576 in its unit"
        return warn(words, value=found[1], limit=wanted)
    return ok(
        f"{'unlimited' if found[1] == float('inf') else int(found[1])} open files for {whose}", limit=wanted
    )


@check(
    "host_memory_errors",
    Level.LIGHT,
    source="sysfs: /sys/devices/system/edac/mc/mc*",
    action="replace for uncorrected errors",
    about="host",
)
def host_memory_errors(facts: Facts, profile: Profile) -> Iterable[Result]:
    """The memory controllers count no uncorrected error, and few corrected ones."""
    folder = "/sys/devices/system/edac/mc"
    controllers = [name for name in facts.runner.names(folder) if re.fullmatch(r"mc\d+", name)]
    if not controllers:
        return [skip("no memory controller counts errors")]
    results = []
    for name in controllers:
        uncorrected, corrected = (facts.text(f"{folder}/{name}/{kind}_count") or "" for kind in ("ue", "ce"))
        if uncorrected.isdigit() and int(uncorrected):
            words = f"{uncorrected} uncorrected memory errors: replace the module"
            results.append(critical(words, Severity.REPLACE, name, value=int(uncorrected), limit=0))
        if corrected.isdigit():
            _, grown = facts.history.growth(f"edac/{name}", facts.now, {"ce": float(corrected)})
            limit = profile.host.corrected_memory_errors_per_hour
            if grown.get("ce", 0.0) > limit:
                words = f"{grown['ce']:.0f} corrected memory errors in an hour: plan to replace the module"
                results.append(warn(words, name, value=grown["ce"], limit=limit))
    return results or [ok("none uncorrected")]
