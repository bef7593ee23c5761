"""What the kernel log tells of disks and the PCIe bus: NVMe resets, file systems given up, fatal errors."""

from __future__ import annotations

import re
from collections.abc import Iterable

from everstep.healthcheck.errors import Absent
from everstep.healthcheck.facts import Facts
from everstep.healthcheck.profile import Profile
from everstep.healthcheck.readers.kernel_log import Event, KernelLog, Pattern, ago
from everstep.healthcheck.readers.proc import LOCAL, Mount
from everstep.healthcheck.registry import Level, check
from everstep.healthcheck.result import Result, Severity, critical, ok, warn

NVME = Pattern(
    b"reset controller",
    b"aborting reset",
    b"Removing after probe failure",
    b"Disabling device after reset failure",
    regex=rb"nvme (nvme\d+): (?:I/O [^\n]{0,200}?timeout, (reset controller)"
    rb"|[^\n]{0,200}?(aborting reset|Removing after probe failure|Disabling device after reset failure))",
)
REMOUNTED = Pattern(
    b"Remounting filesystem", regex=rb"(?:\(([^)\s]{1,64})\):? ?)?Remounting filesystem read-only"
)
XFS = Pattern(
    b"Filesystem has been shut down",
    b"Shutting down filesystem",
    b"Mounting V",
    regex=rb"XFS \(([^)\s]{1,64})\): (?:(Mounting V\d)"
    rb"|[^\n]{0,300}?(?:Filesystem has been shut down|Shutting down filesystem))",
)
IO_ERROR = Pattern(b"I/O error", regex=rb"I/O error,? (?:on )?dev(?:ice)? ([^\s,]{1,64})")
PCIE = Pattern(
    b"PCIe Bus Error: severity=Uncorrect",  # `ed` or `able`
    regex=rb"(?<![\w-])([\w-]{1,32}) ([0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.[0-7]): (?:AER: )?"
    rb"PCIe Bus Error: severity=Uncorrect(?:ed|able) \(Fatal\)",
)
RECOVERED = Pattern(b"AER: device recovery", regex=rb"AER: device recovery (successful|failed)")

_MATTER = re.compile(r"0x(03|02|0108|12)")
"""PCI classes of what jobs work with: GPUs, network cards, NVMe disks, accelerators."""
_DRIVERS = ("nvidia", "nvme", "mlx4_core", "mlx5_core", "efa", "ena", "bnxt_en", "ice", "neuron")
"""The same by their drivers, for a device that has gone from the bus."""


def _within(profile: Profile) -> float:
    return profile.host.window_h * 3600


def _when(event: Event) -> str:
    return f" ({ago(event)})" if ago(event) else ""


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
    "host_remounted",
    Level.LIGHT,
    source="kernel log: Remounting filesystem read-only, Shutting down filesystem; /proc/mounts",
    action="check the file system and reboot; replace the disk if it comes again",
    about="host",
    events=True,
)
def host_remounted(facts: Facts, profile: Profile) -> Iterable[Result]:
    """No file system was remounted read-only or shut down for an error."""
    try:
        mounts = facts.mounts
    except Absent:
        mounts = []
    writable = {name for mount in mounts if not mount.read_only for name in device_names(facts, mount)}
    results = []
    for event in facts.kernel_log.find(REMOUNTED, within=_within(profile)):
        device = event.key[0]
        words = f"remounted read-only for an error{_when(event)}"
        if device in writable:
            results.append(warn(f"{words}, and is writable again", device))
        else:
            results.append(critical(f"{words}: check it and reboot", Severity.REBOOT, device))
    local = {name for mount in mounts if mount.kind in LOCAL for name in device_names(facts, mount)}
    for device, event in shut_down(facts.kernel_log, _within(profile)).items():
        words = f"shut down for an error{_when(event)}"
        if device in local and not device.startswith("loop"):
            results.append(critical(f"{words}: check it and reboot", Severity.REBOOT, device))
        else:
            results.append(warn(f"{words}, and is not mounted", device))
    return results or [ok("none")]


def device_names(facts: Facts, mount: Mount) -> set[str]:
    """What the kernel may call a mount's device: `nvme0n1p1`; `dm-0` for `/dev/mapper/data`."""
    target = facts.runner.link(mount.device) if mount.device.startswith("/dev/") else None
    return {mount.device.removeprefix("/dev/"), *([target] if target else [])}


def shut_down(log: KernelLog, within: float | None) -> dict[str, Event]:
    """The devices whose XFS was shut down for an error and has not been mounted again."""
    found: dict[str, Event] = {}
    for event in log.find(XFS, within=within):  # in the order of their last coming
        device, mounted = event.key
        if mounted:
            found.pop(device, None)
        else:
            found[device] = event
    return found


def troubled(log: KernelLog, within: float | None) -> set[str]:
    """The devices of whose errors the kernel told: read-only for an error, shut down, I/O errors."""
    found = {event.key[0] for pattern in (REMOUNTED, IO_ERROR) for event in log.find(pattern, within=within)}
    return (found | set(shut_down(log, within))) - {""}


@check(
    "host_pcie",
    Level.LIGHT,
    source="kernel log: PCIe Bus Error, /sys/bus/pci",
    action="reboot; reseat or replace if it comes again",
    about="host",
    events=True,
)
def host_pcie(facts: Facts, profile: Profile) -> Iterable[Result]:
    """No PCIe device that jobs work with had a fatal error."""
    log = facts.kernel_log
    outcomes = {event.key[0]: event for event in log.find(RECOVERED, within=_within(profile))}
    events = log.find(PCIE, within=_within(profile), key=lambda groups: (groups[1].lower(), groups[0]))
    results = []
    for event in events:
        device, driver = event.key
        if not _matters(facts, device, driver):
            results.append(warn(f"fatal PCIe error of {driver}{_when(event)}", device, value=event.count))
        elif _recovered(event, outcomes):
            results.append(warn(f"fatal PCIe error of {driver}, recovered from{_when(event)}", device))
        else:
            words = (
                f"fatal PCIe error of {driver}{_when(event)}: reboot; reseat or replace it if it comes again"
            )
            results.append(critical(words, Severity.REBOOT, device, value=event.count))
    return results or [ok("none")]


def _matters(facts: Facts, device: str, driver: str) -> bool:
    kind = facts.text(f"/sys/bus/pci/devices/{device}/class") or ""
    return driver in _DRIVERS or bool(_MATTER.match(kind))


def _recovered(event: Event, outcomes: dict[str, Event]) -> bool:
    """Whether the kernel has recovered devices since, and failed with none: it does not say with which."""
    good, bad = outcomes.get("successful"), outcomes.get("failed")
    return _since(good, event) and not _since(bad, event)


def _since(later: Event | None, event: Event) -> bool:
    return later is not None and (later.age is None or event.age is None or later.age <= event.age)
