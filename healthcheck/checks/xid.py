"""What the GPUs' driver writes into the kernel log: Xids by NVIDIA's table, SXids, GPUs off the bus."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from everstep.healthcheck.checks.gpu_memory import recovery
from everstep.healthcheck.errors import Absent
from everstep.healthcheck.facts import Facts
from everstep.healthcheck.profile import Profile
from everstep.healthcheck.readers.kernel_log import Event, Pattern, ago
from everstep.healthcheck.readers.smi import pci
from everstep.healthcheck.registry import Level, check
from everstep.healthcheck.result import Result, Severity, Status, critical, ok, warn

# On a GPU split by MIG the instance is told too: `(PCI:0000:9b:00 GPU-I:05)`, `(… GPU-CI:02)`.
XID = Pattern(
    b"NVRM: Xid",
    regex=rb"NVRM: Xid \(((?:PCI:)?[0-9a-fA-F:.]+)(?: GPU-C?I:\d+)*\)(?:: |[^\n]{0,400}?: )(\d+),",
)
SXID = Pattern(b"SXid", regex=rb"SXid(?: \(((?:PCI:)?[0-9a-fA-F:.]+)\))?[^\n]{0,400}?: (\d+),")
_ADDRESS = rb"((?:PCI:)?[0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}(?:\.[0-7])?)"
# In one line, or in up to four: `NVRM: The NVIDIA GPU 0000:9a:00.0 (PCI ID: 10de:28a0)`,
# `NVRM: installed in this system has`, `NVRM: fallen off the bus and is not responding to commands.`
OFF_THE_BUS = Pattern(
    b"fallen off the bus",
    regex=rb"NVRM: GPU (?:at )?" + _ADDRESS + rb"[^\n]{0,80}? has fallen off the bus"
    rb"|NVRM: The NVIDIA GPU " + _ADDRESS + rb"(?:(?!The NVIDIA GPU)[\s\S]){0,400}?fallen off the bus",
)
NOT_INITIALISED = Pattern(
    b"RmInitAdapter failed", regex=rb"NVRM:(?: GPU " + _ADDRESS + rb":)? RmInitAdapter failed"
)
_FATAL = re.compile(r"\b(?<!non-)(?<!non )fatal\b", re.IGNORECASE)
_NOT_FATAL = re.compile(r"\bnon[- ]?fatal\b", re.IGNORECASE)
_CHANGED_TO = re.compile(
    r"\bto 0x[0-9a-f]+ \(([^)]+)\)|(Node Reboot Required|GPU Reset Required|Drain and Reset|Drain P2P)"
)


@dataclass(frozen=True)
class Action:
    """What an Xid asks for."""

    words: str
    status: Status
    severity: Severity


RESTART = Action("restart the application", Status.WARN, Severity.MONITOR)
IGNORE = Action("nothing to do", Status.OK, Severity.OK)
RESET = Action("reset the GPU", Status.CRITICAL, Severity.RESET)
REBOOT = Action("reboot the host", Status.CRITICAL, Severity.REBOOT)
RESTART_VM = Action("restart the VM", Status.CRITICAL, Severity.REBOOT)
MECHANICS = Action("check power cables and seating, or replace", Status.CRITICAL, Severity.REPLACE)
DOUBLE_BIT = Action("reset the GPU; replace it if it comes again", Status.CRITICAL, Severity.RESET)
NVLINK = Action(
    "an NVLink error: reset the GPU, and look at the link if it comes again", Status.CRITICAL, Severity.RESET
)
NVLINK_WARN = Action(
    "an NVLink error that is not fatal: look at the link if it comes again", Status.WARN, Severity.MONITOR
)
PREEMPTED = Action(
    "a channel was preempted with no Xid before it: look at the application", Status.WARN, Severity.MONITOR
)
UNKNOWN = Action("not in NVIDIA's table of 2025-10: look it up", Status.WARN, Severity.MONITOR)


def _codes(words: str) -> frozenset[int]:
    found: set[int] = set()
    for word in words.split():
        first, _, last = word.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)


TABLE: dict[int, Action] = {
    code: action
    for action, codes in {
        RESTART: "8 11 13 25 31 32 39-41 60 68-72 75-77 80 82-86 88 89 94 96-105 126-135 139",
        IGNORE: "37 38 43 44 63 66 67 92 93 106 107 121 137 141 152 153 157 160 161",
        RESET: "46 62 64 95 109 110 119 120 136 140 143 155 156 158",
        REBOOT: "79",
        RESTART_VM: "151",
        MECHANICS: "54",
        DOUBLE_BIT: "48",
        NVLINK: "74 144-150",
        PREEMPTED: "45",
    }.items()
    for code in _codes(codes)
}
"""NVIDIA's catalogue of 2025-10. 154 is read by its text, 144 to 150 by theirs too."""


def action_for(code: int, text: str = "") -> Action:
    """What an Xid asks for, by its code and, where that decides, its text."""
    if 144 <= code <= 150 and _NOT_FATAL.search(text):
        return NVLINK_WARN
    return TABLE.get(code, UNKNOWN)


@check(
    "gpu_xid",
    Level.LIGHT,
    source="kernel log: NVRM: Xid",
    action="NVIDIA's table: restart the application, reset, reboot",
    about="gpu",
    events=True,
)
def gpu_xid(facts: Facts, profile: Profile) -> Iterable[Result]:
    """No Xid since boot that asks for more than a look, each GPU and code once."""
    log = facts.kernel_log
    within = profile.gpu.xid_window_h * 3600
    events = log.find(XID, within=within, key=lambda groups: (_device(groups[0]), groups[1]))
    troubled = {event.key[0] for event in events if event.key[1] != "45"}
    results = []
    ignored = set()
    for event in events:
        device, code = event.key[0], int(event.key[1])
        result = _judged(event, device, code)
        if result.status is Status.OK or (code == 45 and device in troubled):
            ignored.add(code)
        else:
            results.append(result)
    if results:
        return results
    words = f"; nothing to do for {', '.join(map(str, sorted(ignored)))}" if ignored else ""
    return [ok(f"no Xid that matters in {profile.gpu.xid_window_h:.0f} h of {log.source}{words}")]


def _judged(event: Event, device: str, code: int) -> Result:
    detail = _detail(event.text, code)
    about = f"Xid {code}"
    when = f" ({ago(event)})" if ago(event) else ""
    if code == 154:
        changed = _CHANGED_TO.findall(event.text)
        wanted = next((word for word in changed[-1] if word), "") if changed else ""
        if wanted.lower() == "none":
            return ok(f"{about}: none asked for any more", device)
        asked = recovery(wanted or detail, device)
        return Result(asked.status, f"{about}: {asked.reason}{when}", asked.severity, device, code, None)
    action = action_for(code, event.text)
    reason = f"{about}: {action.words}: {detail}{when}"
    return Result(action.status, reason, action.severity, device, code, None)


@check(
    "gpu_off_bus",
    Level.LIGHT,
    source="kernel log: fallen off the bus",
    action="reboot; replace if it comes again",
    about="gpu",
    events=True,
)
def gpu_off_bus(facts: Facts, profile: Profile) -> Iterable[Result]:
    """No GPU has fallen off the bus since boot."""
    log = facts.kernel_log
    within = profile.gpu.xid_window_h * 3600
    events = log.find(OFF_THE_BUS, within=within, key=lambda groups: (_device(groups[0] or groups[1]),))
    # The driver says the same by Xid 79: one fault, one finding.
    told = {_device(event.key[0]) for event in log.find(XID, within=within) if event.key[1] == "79"}
    words = "fallen off the bus: reboot; replace it if it comes again"
    results = [
        critical(f"{words}{f' ({ago(event)})' if ago(event) else ''}", Severity.REBOOT, event.key[0])
        for event in events
        if event.key[0] not in told
    ]
    return results or [ok("told by gpu_xid" if told else "none")]


@check(
    "gpu_init",
    Level.LIGHT,
    source="kernel log: RmInitAdapter failed; nvidia-smi -q -x",
    action="reboot; replace if it comes again",
    about="gpu",
    events=True,
)
def gpu_init(facts: Facts, profile: Profile) -> Iterable[Result]:
    """The driver could initialise every GPU since boot, or can by now."""
    log = facts.kernel_log
    within = profile.gpu.xid_window_h * 3600
    keyed = log.find(NOT_INITIALISED, within=within, key=lambda groups: (_device(groups[0]),))
    if not keyed:
        return [ok("none")]
    try:
        shown = {gpu.pci for gpu in facts.gpus}
    except Absent:  # no driver answers, or no GPU
        shown = set()
    results = []
    for event in keyed:
        device = event.key[0] if pci(event.key[0]) else ""
        when = f" ({ago(event)})" if ago(event) else ""
        if device in shown or (shown and not device):
            results.append(warn(f"the driver could not initialise it once, and now can{when}", device))
        else:
            words = f"the driver cannot initialise it{when}: reboot; replace it if it comes again"
            results.append(critical(words, Severity.REBOOT, device))
    return results


@check(
    "nvswitch_sxid",
    Level.LIGHT,
    source="kernel log: SXid",
    action="reset all GPUs and NVSwitches together, or reboot",
    about="gpu",
    events=True,
)
def nvswitch_sxid(facts: Facts, profile: Profile) -> Iterable[Result]:
    """No fatal error of an NVSwitch since boot, each switch and code once."""
    log = facts.kernel_log
    within = profile.gpu.xid_window_h * 3600
    results = []
    for event in log.find(SXID, within=within, key=lambda groups: (_device(groups[0]), groups[1])):
        device, code = event.key[0], int(event.key[1])
        detail = _detail(event.text, code)
        when = f" ({ago(event)})" if ago(event) else ""
        if _FATAL.search(event.text) and not _NOT_FATAL.search(event.text):
            words = f"SXid {code}: reset all GPUs and NVSwitches together, or reboot: {detail}{when}"
            results.append(critical(words, Severity.RESET, device, value=code))
        else:
            results.append(warn(f"SXid {code}, not fatal: {detail}{when}", device, value=code))
    return results or [ok(f"none in {profile.gpu.xid_window_h:.0f} h of {log.source}")]


def _device(text: str) -> str:
    return pci(text) or text.removeprefix("PCI:").lower() or "nvswitch"


def _detail(text: str, code: int) -> str:
    _, _, rest = text.partition(f": {code},")
    words = re.sub(r"\s*pid='?<?[\w ]+>?'?,\s*name=[^,]*,\s*", "", rest).strip(" ,.")
    return words[:120] or "no details"
