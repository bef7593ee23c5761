"""File systems: full, out of inodes, read-only, or not answering."""

from __future__ import annotations

import re
from collections.abc import Iterable

from everstep.healthcheck.checks.disk_log import device_names, troubled
from everstep.healthcheck.errors import Absent
from everstep.healthcheck.facts import Facts
from everstep.healthcheck.profile import Profile
from everstep.healthcheck.readers.proc import LOCAL, SHM, Mount, in_fstab
from everstep.healthcheck.registry import Level, check
from everstep.healthcheck.result import Result, Severity, critical, ok, skip, warn

_GIB = float(2**30)


@check(
    "disk_space", Level.LIGHT, source="statvfs, or df on a recorded node", action="make room", about="host"
)
def disk_space(facts: Facts, profile: Profile) -> Iterable[Result]:
    """No local file system is full."""
    host = profile.host
    results = []
    usages = [each for each in facts.usages if each.path != SHM]
    for usage in usages:
        free = usage.free / _GIB
        words = f"{usage.path} is {usage.percent:.0f} % full ({free:.1f} GiB left): make room"
        if usage.percent >= host.disk_critical and free < host.disk_free_gib:
            results.append(
                critical(
                    words,
                    Severity.MONITOR,
                    usage.path,
                    value=round(usage.percent, 1),
                    limit=host.disk_critical,
                )
            )
        elif usage.percent >= host.disk_warn and free < 5 * host.disk_free_gib:
            results.append(warn(words, usage.path, value=round(usage.percent, 1), limit=host.disk_warn))
    if not usages:
        return [skip("no file system tells how full it is")]
    return results or [ok(f"{len(usages)} file systems with room")]


@check(
    "disk_inodes",
    Level.LIGHT,
    source="statvfs, or df -i on a recorded node",
    action="remove files",
    about="host",
)
def disk_inodes(facts: Facts, profile: Profile) -> Iterable[Result]:
    """No local file system is out of inodes."""
    host = profile.host
    results = []
    usages = [each for each in facts.usages if each.inodes]
    for usage in usages:
        percent = usage.inodes_percent
        words = f"{usage.path} has used {percent:.0f} % of its inodes: remove files"
        if percent >= host.disk_critical:
            results.append(
                critical(
                    words, Severity.MONITOR, usage.path, value=round(percent, 1), limit=host.disk_critical
                )
            )
        elif percent >= host.disk_warn:
            results.append(warn(words, usage.path, value=round(percent, 1), limit=host.disk_warn))
    if not usages:
        return [skip("no file system tells of inodes")]
    return results or [ok(f"{len(usages)} file systems with inodes left")]


@check(
    "disk_read_only",
    Level.LIGHT,
    source="/proc/mounts, /etc/fstab, kernel log",
    action="check the file system and reboot",
    about="host",
)
def disk_read_only(facts: Facts, profile: Profile) -> Iterable[Result]:
    """No local file system is read-only that should not be."""
    local = [each for each in facts.mounts if each.kind in LOCAL and not each.device.startswith("/dev/loop")]
    # A disk that is writable elsewhere is sound: this is a bind mount, such as containers have.
    writable = {each.device for each in local if not each.read_only}
    suspects = [each for each in local if each.read_only and each.device not in writable]
    results = []
    for each in suspects:
        if why := _should_be_writable(facts, profile, each):
            words = f"{each.path} ({each.device}) is read-only, and {why}: check it and reboot"
            results.append(critical(words, Severity.REBOOT, each.path))
    if not local:
        return [skip("no local file system is mounted")]
    return results or [ok(f"{len(local)} file systems")]


def _should_be_writable(facts: Facts, profile: Profile, mount: Mount) -> str:
    """Why it should be; empty where nothing says so: data disks and whole systems are read-only by design."""
    options = in_fstab(facts.text("/etc/fstab") or "").get(mount.path, frozenset())
    if "ro" in options:
        return ""
    if options & {"rw", "defaults"}:
        return "/etc/fstab mounts it writable"
    if "errors=remount-ro" in mount.options:
        return "it is to be so after an error (errors=remount-ro)"
    try:
        devices = troubled(facts.kernel_log, profile.host.window_h * 3600)
    except Absent:
        return ""
    if any(_on(name, device) for device in devices for name in device_names(facts, mount)):
        return "the kernel log tells of its errors"
    return ""


def _on(name: str, device: str) -> bool:
    """Whether `nvme0n1p1` is `nvme0n1p1`, or a partition of `nvme0n1`; of `sda` it is `sda1`."""
    return bool(re.fullmatch(re.escape(device) + (r"(p\d+)?" if device[-1].isdigit() else r"\d*"), name))


@check(
    "mount_stuck",
    Level.LIGHT,
    source="stat -f on each network mount, in a child that can be left behind",
    action="look at the server; unmount or reboot",
    about="host",
)
def mount_stuck(facts: Facts, profile: Profile) -> Iterable[Result]:
    """Every network file system answers in its time."""
    answers = facts.network_mounts
    results = []
    asked = 0
    for path, ran in sorted(answers.items()):
        if ran.missing:
            continue
        asked += 1
        if ran.timed_out:
            words = f"{path} did not answer in {ran.seconds:.0f} s: look at the server, unmount it or reboot"
            results.append(
                critical(words, Severity.MONITOR, path, value=round(ran.seconds, 1), limit=facts.limits.mount)
            )
        elif ran.code and b"Stale file handle" in ran.err + ran.out:
            results.append(
                critical(f"{path} is stale: mount it again", Severity.MONITOR, path, value="stale")
            )
        elif ran.code:
            results.append(warn(f"{path} cannot be asked: {ran.said}", path))
    if not asked:
        return [skip("no network file system is mounted")]
    return results or [ok(f"{asked} answer")]
