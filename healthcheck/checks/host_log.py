"""What else the kernel log tells: OOM kills, machine checks, hung tasks, lockups, NVMe, NFS, remounts."""

from __future__ import annotations

import re
from collections.abc import Iterable

from everstep.healthcheck.errors import Absent
from everstep.healthcheck.facts import Facts
from everstep.healthcheck.profile import Profile
from everstep.healthcheck.readers.kernel_log import Event, Pattern, ago
from everstep.healthcheck.registry import Level, check
from everstep.healthcheck.result import Result, Severity, critical, ok, warn

OOM = Pattern(
    b"ut of memory: Kill",
    regex=rb"(?<!cgroup )[Oo]ut of memory: Kill(?:ed)? process (\d+) \(([^)]*)\)",
)
MACHINE_CHECK = Pattern(
    b"[Hardware Error]",
    b"EDAC MC",
    b"mce: Uncorrected",
    regex=rb"\[Hardware Error\]: ([^\n]{0,60})|EDAC (MC\d+): \d+ (UE|CE)\b|(mce: Uncorrected[^\n]{0,60})",
)
HUNG_TASK = Pattern(
    b"blocked for more than", regex=rb"task ([^:\n]+):\d+[^\n]+?blocked for more than \d+ seconds"
)
SOFT_LOCKUP = Pattern(b"soft lockup", regex=rb"soft lockup - CPU#(\d+) stuck for")
NVME = Pattern(
    b"reset controller",
    b"aborting reset",
    b"Removing after probe failure",
    regex=rb"nvme (nvme\d+): (?:I/O [^\n]*?timeout, (reset controller)"
    rb"|[^\n]*?(aborting reset|Removing after probe failure))",
)
NFS = Pattern(b"nfs: server", regex=rb"nfs: server (\S+) (not responding|OK)")
REMOUNTED = Pattern(b"Remounting filesystem", regex=rb"(?:\(([^)\s]+)\):? ?)?Remounting filesystem read-only")

_DAEMONS = (
    "slurmd",
    "slurmstepd",
    "munged",
    "systemd",
    "sshd",
    "nv-hostengine",
    "nv-fabricmanage",
    "dbus-daemon",
)
_BANK = re.compile(r"\bBank \d+: ([0-9a-f]{16})\b")
_MCE_UNCORRECTED = 1 << 61  # of a bank's status
_CORRECTED = re.compile(r"\b[Cc]orrected|\bCE\b|Machine check events logged")
_UNCORRECTED = re.compile(r"[Uu]ncorrect|\bUE\b|\bfatal\b|panic")


def _within(profile: Profile) -> float:
    return profile.host.window_h * 3600


def _when(event: Event) -> str:
    return f" ({ago(event)})" if ago(event) else ""


@check(
    "host_kernel_log",
    Level.LIGHT,
    source="dmesg, journalctl -k -b",
    action="look at why the kernel log cannot be read",
    about="host",
)
def host_kernel_log(facts: Facts, profile: Profile) -> Result:
    """The kernel log since boot can be read."""
    log = facts.kernel_log
    lines = log.data.count(b"\n")
    return ok(f"{lines} lines of {log.source}{', its beginning lost' if log.wrapped else ''}", value=lines)


@check(
    "host_oom",
    Level.LIGHT,
    source="kernel log: Out of memory",
    action="reboot where a daemon was killed",
    about="host",
    events=True,
)
def host_oom(facts: Facts, profile: Profile) -> Iterable[Result]:
    """The host itself did not run out of memory; a job that ran out of its own is the job's affair."""
    events = facts.kernel_log.find(OOM, within=_within(profile), key=lambda groups: (groups[1],))
    results = []
    for event in events:
        name = event.key[0]
        words = f"out of memory: {name} was killed{_when(event)}"
        if name in _DAEMONS:
            results.append(critical(f"{words}: reboot", Severity.REBOOT, name))
        else:
            results.append(warn(f"{words}: look at what took the memory", name))
    return results or [ok("none")]


@check(
    "host_machine_check",
    Level.LIGHT,
    source="kernel log: Hardware Error, EDAC, mce",
    action="replace for uncorrected errors",
    about="host",
    events=True,
)
def host_machine_check(facts: Facts, profile: Profile) -> Iterable[Result]:
    """The kernel tells of no uncorrected hardware error."""
    events = facts.kernel_log.find(
        MACHINE_CHECK, within=_within(profile), key=lambda groups: (_kind(groups),)
    )
    results = []
    for event in events:
        if event.key[0] == "uncorrected":
            words = f"uncorrected hardware error: replace: {event.text[:120]}{_when(event)}"
            results.append(critical(words, Severity.REPLACE))
    others = [event for event in events if event.key[0] == "corrected"] or events
    if not results and others:
        last = others[-1]
        words = f"corrected hardware error: {last.text[:120]}{_when(last)}"
        results.append(warn(words, value=sum(event.count for event in others)))
    return results or [ok("none")]


def _kind(groups: tuple[str, ...]) -> str:
    line, _, edac, mce = groups
    text = f"{line} {edac} {mce}"
    bank = _BANK.search(text)
    if _UNCORRECTED.search(text) or (bank and int(bank[1], 16) & _MCE_UNCORRECTED):
        return "uncorrected"
    return "corrected" if bank or _CORRECTED.search(text) else "detail"


@check(
    "host_hung_task",
    Level.LIGHT,
    source="kernel log: blocked for more than",
    action="look at what it waits for",
    about="host",
    events=True,
)
def host_hung_task(facts: Facts, profile: Profile) -> Iterable[Result]:
    """No task waits for minutes for the kernel."""
    events = facts.kernel_log.find(HUNG_TASK, within=_within(profile))
    results = [warn(f"task {e.key[0]} hung{_when(e)}: {e.text[:120]}", e.key[0]) for e in events]
    return results or [ok("none")]


@check(
    "host_soft_lockup",
    Level.LIGHT,
    source="kernel log: soft lockup",
    action="reboot",
    about="host",
    events=True,
)
def host_soft_lockup(facts: Facts, profile: Profile) -> Iterable[Result]:
    """No CPU is stuck in the kernel."""
    events = facts.kernel_log.find(SOFT_LOCKUP, within=_within(profile))
    results = [critical(f"soft lockup{_when(e)}: reboot", Severity.REBOOT, f"cpu{e.key[0]}") for e in events]
    return results or [ok("none")]


@check(
    "host_nvme",
    Level.LIGHT,
    source="kernel log: nvme timeout",
    action="reboot; replace if it comes again",
    about="host",
    events=True,
)
def host_nvme(facts: Facts, profile: Profile) -> Iterable[Result]:
    """No NVMe disk had to be reset."""
    events = facts.kernel_log.find(
        NVME, within=_within(profile), key=lambda groups: (groups[0], "gone" if groups[2] else "reset")
    )
    results = []
    for event in events:
        device, kind = event.key
        if kind == "gone":
            words = (
                f"the disk is gone{_when(event)}: reboot; replace it if it comes again: {event.text[:100]}"
            )
            results.append(critical(words, Severity.REBOOT, device))
        else:
            results.append(
                warn(f"a timeout, and a reset of the controller{_when(event)}", device, value=event.count)
            )
    return results or [ok("none")]


@check(
    "host_nfs_log",
    Level.LIGHT,
    source="kernel log: nfs: server not responding",
    action="look at the server",
    about="host",
)
def host_nfs_log(facts: Facts, profile: Profile) -> Iterable[Result]:
    """Every NFS server that did not respond is back."""
    last: dict[str, Event] = {}
    for event in facts.kernel_log.find(NFS, within=_within(profile)):  # in the order of their last coming
        last[event.key[0].rstrip(",")] = event
    results = [
        critical(f"NFS server {server} does not respond{_when(event)}: look at it", Severity.MONITOR, server)
        for server, event in last.items()
        if event.key[1] != "OK"
    ]
    return results or [ok("none")]


@check(
    "host_remounted",
    Level.LIGHT,
    source="kernel log: Remounting filesystem read-only, /proc/mounts",
    action="check the file system and reboot; replace the disk if it comes again",
    about="host",
    events=True,
)
def host_remounted(facts: Facts, profile: Profile) -> Iterable[Result]:
    """No file system was remounted read-only for an error."""
    try:
        writable = {mount.device.removeprefix("/dev/") for mount in facts.mounts if not mount.read_only}
    except Absent:
        writable = set()
    results = []
    for event in facts.kernel_log.find(REMOUNTED, within=_within(profile)):
        device = event.key[0]
        words = f"remounted read-only for an error{_when(event)}"
        if device in writable:
            results.append(warn(f"{words}, and is writable again", device))
        else:
            results.append(critical(f"{words}: check it and reboot", Severity.REBOOT, device))
    return results or [ok("none")]
