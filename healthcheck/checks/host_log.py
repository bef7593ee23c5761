"""What else the kernel log tells of the host: OOM kills, machine checks, hung tasks, lockups, NFS."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from everstep.healthcheck.errors import Absent
from everstep.healthcheck.facts import Facts
from everstep.healthcheck.profile import Profile
from everstep.healthcheck.readers.kernel_log import Event, KernelLog, Pattern, ago
from everstep.healthcheck.registry import Level, check
from everstep.healthcheck.result import Result, Severity, critical, ok, warn
from everstep.healthcheck.runner import Ran

# `… Killed process 901 (sshd) total-vm:…kB, …, UID:1000 pgtables:…`; RHEL's older ones `(sshd), UID 1000, …`.
OOM = Pattern(
    b"ut of memory: Kill",
    regex=rb"(?<!cgroup )[Oo]ut of memory: Kill(?:ed)? process (\d+) \(([^)\n]{0,64})\)"
    rb"(?:[^\n]{0,200}?\bUID[: ](\d+))?",
)
MACHINE_CHECK = Pattern(
    b"[Hardware Error]",
    b"EDAC MC",
    b"mce: Uncorrected",
    regex=rb"\[Hardware Error\]: ([^\n]{0,60})|EDAC (MC\d+): \d+ (UE|CE)\b|(mce: Uncorrected[^\n]{0,60})",
)
# A record of the firmware's has many lines: how grave it is comes before what it is about.
MULTI_BIT = Pattern(
    b"multi-bit ECC",
    regex=rb"event severity: (\w{1,20})[^\n]{0,80}\n"
    rb"(?:(?![^\n]{0,200}event severity:)[^\n]{0,300}\n){0,20}?[^\n]{0,200}(?:multi-bit ECC)",
)
BERT = Pattern(b"BERT: Error records", regex=rb"(BERT: Error records)")
HUNG_TASK = Pattern(
    b"blocked for more than",
    regex=rb"task ([^:\n]{1,64}):\d+[^\n]{1,80}?blocked for more than \d+ seconds",
)
LOCKUP = Pattern(
    b"soft lockup",
    b"hard LOCKUP",
    regex=rb"soft lockup - CPU#(\d+) stuck for|Watchdog detected hard LOCKUP on cpu (\d+)",
)
NFS = Pattern(
    b"nfs: server",
    regex=rb"nfs: server ([^\s,]{1,255}),? (OK\b|not responding)(?:, (timed out))?",
)

_ROOTS = ("slurmd", "slurmstepd", "systemd", "sshd", "nv-hostengine", "nv-fabricmanage", "dbus-daemon")
"""Daemons that the node needs where they are root's: users have a systemd, an sshd and a dbus-daemon too."""
_NEVER_USERS = ("slurmd", "slurmstepd", "munged", "nv-hostengine", "nv-fabricmanage")
"""Daemons that no user has, so that they count where the kernel does not say whose they were."""
_FIRST_USER = 1000
_BOOTING_S = 30.0
"""Hardware errors that are told of so soon after a boot were left over from before it."""
_BERT_S = 5.0
_RECENT_S = 300.0
_NOT_CORRECTED = ("recoverable", "fatal")
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
    events = facts.kernel_log.find(
        OOM, within=_within(profile), key=lambda groups: (groups[1], "yes" if _needed(*groups[1:]) else "")
    )
    results = []
    for event in events:
        name, needed = event.key
        words = f"out of memory: {name} was killed{_when(event)}"
        if needed:
            results.append(critical(f"{words}: reboot", Severity.REBOOT, name))
        else:
            results.append(warn(f"{words}: look at what took the memory", name))
    return results or [ok("none")]


def _needed(name: str, uid: str) -> bool:
    """Whether it was a daemon that the node cannot do without, and no user's process of that name."""
    if uid == "0" and name in _ROOTS:
        return True
    return name in _NEVER_USERS and (not uid or int(uid) < _FIRST_USER)


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
    log, within = facts.kernel_log, _within(profile)
    events = log.find(MACHINE_CHECK, within=within, key=lambda groups: (_kind(groups),))
    # Several bits are a module's own fault, of which EDAC says UE, unless the firmware could correct them.
    records = [event for event in log.find(MULTI_BIT, within=within) if event.key[0] in _NOT_CORRECTED]
    uncorrected = [event for event in events if event.key[0] == "uncorrected"] + records
    if uncorrected:
        # One after the boot says more than those that were left over from before it.
        last = min(uncorrected, key=lambda event: -1.0 if event.age is None else event.age)
        about = "multi-bit ECC, " if last in records else ""
        words = f"{about}{last.text[:120]}{_when(last)}"
        if _left_over(log, last):
            return [
                warn(f"uncorrected hardware error before this boot: replace it if it comes again: {words}")
            ]
        return [critical(f"uncorrected hardware error: replace: {words}", Severity.REPLACE)]
    for kind, what in (
        ("recovered", "hardware error that the kernel recovered from"),
        ("corrected", "corrected hardware error"),
        ("detail", "corrected hardware error"),
    ):
        if others := [event for event in events if event.key[0] == kind]:
            text = f"{what}: {others[-1].text[:120]}{_when(others[-1])}"
            return [warn(text, value=others[-1].count)]
    return [ok("none")]


def _kind(groups: tuple[str, ...]) -> str:
    line, _, edac, mce = groups
    text = f"{line} {edac} {mce}"
    bank = _BANK.search(text)
    if _UNCORRECTED.search(text) or (bank and int(bank[1], 16) & _MCE_UNCORRECTED):
        return "uncorrected"
    if "severity: recoverable" in text:  # of a PCIe device or a bus, say
        return "recovered"
    return "corrected" if bank or _CORRECTED.search(text) else "detail"


def _left_over(log: KernelLog, event: Event) -> bool:
    """Whether it was printed at the boot, of what happened before: firmware and banks keep records."""
    at = log.since_boot(event)
    if at is None:
        return False
    printed = [log.since_boot(each) for each in log.find(BERT)]
    return at <= _BOOTING_S or any(each is not None and 0 <= at - each <= _BERT_S for each in printed)


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
    source="kernel log: soft lockup, hard LOCKUP",
    action="reboot",
    about="host",
    events=True,
)
def host_soft_lockup(facts: Facts, profile: Profile) -> Iterable[Result]:
    """No CPU is stuck in the kernel."""
    events = facts.kernel_log.find(LOCKUP, within=_within(profile))
    results = []
    for event in events:
        soft, hard = event.key
        words = f"{'soft' if soft else 'hard'} lockup{_when(event)}: reboot"
        results.append(critical(words, Severity.REBOOT, f"cpu{soft or hard}"))
    return results or [ok("none")]


@check(
    "host_nfs_log",
    Level.LIGHT,
    source="kernel log: nfs: server not responding; stat -f on its mounts",
    action="look at the server",
    about="host",
)
def host_nfs_log(facts: Facts, profile: Profile) -> Iterable[Result]:
    """Every NFS server that did not respond is back."""
    silent: dict[str, dict[str, Event]] = {}
    for event in facts.kernel_log.find(NFS, within=_within(profile)):  # in the order of their last coming
        server, said, soft = event.key
        if said == "OK":
            silent.pop(server, None)
        else:
            silent.setdefault(server, {})["soft" if soft else "hard"] = event
    answers = _answers(facts) if silent else {}
    results = []
    for server, events in silent.items():
        event = events.get("hard") or events["soft"]
        words = f"NFS server {server} does not respond{_when(event)}: look at it"
        if "hard" in events and _stuck(answers.get(server), events["hard"]):
            results.append(critical(words, Severity.MONITOR, server))
        elif "hard" in events:
            results.append(warn(f"NFS server {server} did not respond{_when(event)}", server))
        else:  # the kernel gave up on one request, and never says OK afterwards
            results.append(warn(f"NFS server {server} did not respond, timed out{_when(event)}", server))
    return results or [ok("none")]


def _stuck(answers: Sequence[Ran] | None, event: Event) -> bool:
    """Whether a server is silent now: a mount of it hangs, or it was just told of and none answers."""
    if answers and any(ran.timed_out for ran in answers):
        return True
    if answers and all(ran.code == 0 for ran in answers):
        return False
    return event.age is not None and event.age <= _RECENT_S


def _answers(facts: Facts) -> dict[str, list[Ran]]:
    """What the network mounts answer, by their server."""
    found: dict[str, list[Ran]] = {}
    try:
        answers = facts.network_mounts
        servers = {mount.path: mount.device.rpartition(":/")[0].strip("[]") for mount in facts.mounts}
    except Absent:
        return {}
    for path, ran in answers.items():
        if not ran.missing:
            found.setdefault(servers.get(path, ""), []).append(ran)
    return found
