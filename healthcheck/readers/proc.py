"""/proc and df: mounts, memory, processes, limits, file systems."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

SHM = "/dev/shm"  # noqa: S108  (a name to look for, not a file of ours)
LOCAL = frozenset({"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "jfs", "reiserfs", "bcachefs"})
NETWORK = frozenset(
    {
        "nfs",
        "nfs4",
        "lustre",
        "cifs",
        "smb3",
        "ceph",
        "gpfs",
        "beegfs",
        "beegfs_nodev",
        "wekafs",
        "panfs",
        "glusterfs",
    }
    | {"fuse.glusterfs", "fuse.ceph", "fuse.sshfs", "9p", "afs", "orangefs", "pvfs2"}
)


@dataclass(frozen=True)
class Mount:
    """One line of /proc/mounts."""

    device: str
    path: str
    kind: str
    options: frozenset[str]

    @property
    def read_only(self) -> bool:
        """Whether it is mounted so."""
        return "ro" in self.options


@dataclass(frozen=True)
class Usage:
    """How full a file system is. Bytes; inodes are 0 where it has no fixed number of them."""

    path: str
    size: int
    used: int
    free: int
    """What an ordinary user may still take."""
    inodes: int = 0
    inodes_used: int = 0

    @property
    def percent(self) -> float:
        """As df says it: of what an ordinary user may take."""
        return 100.0 * self.used / (self.used + self.free) if self.used + self.free else 0.0

    @property
    def inodes_percent(self) -> float:
        """Of all inodes."""
        return 100.0 * self.inodes_used / self.inodes if self.inodes else 0.0


def mounts(text: str) -> list[Mount]:
    """What is mounted where; of several on one path, the last covers the others."""
    found: dict[str, Mount] = {}
    for line in text.splitlines():
        fields = line.split()
        if len(fields) >= 4:
            path = _unescaped(fields[1])
            found[path] = Mount(_unescaped(fields[0]), path, fields[2], frozenset(fields[3].split(",")))
    return list(found.values())


def in_fstab(fstab: str) -> dict[str, frozenset[str]]:
    """The paths in /etc/fstab, and the options it mounts each with."""
    return {
        _unescaped(fields[1]): frozenset(fields[3].split(","))
        for line in fstab.splitlines()
        if len(fields := line.split("#")[0].split()) >= 4
    }


def memory(text: str) -> dict[str, int]:
    """/proc/meminfo in bytes."""
    found = {}
    for line in text.splitlines():
        match = re.match(r"(\w[\w()]*):\s+(\d+)(?: kB)?", line)
        if match:
            found[match[1]] = int(match[2]) * 1024
    return found


def limits(text: str) -> dict[str, tuple[float, float]]:
    """/proc/PID/limits: soft and hard, `unlimited` as infinity, by name such as `Max open files`."""
    found = {}
    for line in text.splitlines():
        match = re.match(r"(Max .+?)\s{2,}(unlimited|\d+)\s+(unlimited|\d+)", line)
        if match:
            found[match[1]] = (_limit(match[2]), _limit(match[3]))
    return found


def df(output: str) -> Iterable[tuple[str, str, int, int, int]]:
    """The lines of `df -P -k` or `df -P -i`: which (blocks or inodes), path, size, used, free."""
    which, scale = "blocks", 1024
    for line in output.splitlines():
        fields = line.split()
        if fields[:1] == ["Filesystem"]:
            which = "inodes" if "inode" in fields[1].lower() else "blocks"
            unit = re.match(r"(\d+)", fields[1])
            scale = int(unit[1]) if unit and which == "blocks" else 1024
            scale = 1 if which == "inodes" else scale
        elif len(fields) >= 6 and all(re.fullmatch(r"\d+|-", each) for each in fields[1:4]):
            size, used, free = (int(each) if each != "-" else 0 for each in fields[1:4])
            yield which, " ".join(fields[5:]), size * scale, used * scale, free * scale


def size(text: str) -> int | None:
    """A mount option's size such as `65536k`, in bytes; None where it is none."""
    match = re.fullmatch(r"(\d+)([kKmMgG]?)", text)
    if match is None:
        return None
    return int(match[1]) << {"": 0, "k": 10, "m": 20, "g": 30}[match[2].lower()]


def _limit(word: str) -> float:
    return float("inf") if word == "unlimited" else float(word)


def _unescaped(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), text)
