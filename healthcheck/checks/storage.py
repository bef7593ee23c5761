"""File systems: full, out of inodes, read-only, or not answering."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from everstep.healthcheck.facts import Facts
from everstep.healthcheck.profile import Profile
from everstep.healthcheck.readers.proc import LOCAL, SHM, Mount, in_fstab
from everstep.healthcheck.registry import Level, check
from everstep.healthcheck.result import Result, Severity, critical, ok, skip, warn

_GIB = float(2**30)
_WORKED_IN = re.compile(r"/|/(scratch|local|tmp|var|home|data|work|nvme|mnt)\w*(/.*)?")
"""Where jobs and daemons write. Elsewhere a mount may be read-only by design."""


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
    source="/proc/mounts, /etc/fstab",
    action="check the file system and reboot",
    about="host",
)
def disk_read_only(facts: Facts, profile: Profile) -> Iterable[Result]:
    """No local file system is read-only that should not be."""
    fstab = in_fstab(facts.text("/etc/fstab") or "")
    local = [each for each in facts.mounts if each.kind in LOCAL and not each.device.startswith("/dev/loop")]
    # A disk that is writable elsewhere is sound: this is a bind mount, such as containers have.
    writable = {each.device for each in local if not each.read_only}
    results = [
        critical(f"{each.path} ({each.device}) is read-only: check it and reboot", Severity.REBOOT, each.path)
        for each in local
        if each.read_only and each.device not in writable and _should_be_writable(each, fstab)
    ]
    if not local:
        return [skip("no local file system is mounted")]
    return results or [ok(f"{len(local)} file systems")]


def _should_be_writable(mount: Mount, fstab: Mapping[str, bool]) -> bool:
    if mount.path in fstab:
        return fstab[mount.path]
    return "errors=remount-ro" in mount.options or bool(_WORKED_IN.fullmatch(mount.path))


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
