"""AWS Trainium: devices and cores, memory errors, status counters, the kernel log, Neuron's own tools."""

from __future__ import annotations

import re
from collections.abc import Iterable

from everstep.healthcheck.checks.each import each
from everstep.healthcheck.errors import Absent, TimedOut
from everstep.healthcheck.facts import Facts
from everstep.healthcheck.profile import Profile
from everstep.healthcheck.readers.kernel_log import Pattern, ago
from everstep.healthcheck.readers.neuron import Neuron
from everstep.healthcheck.registry import Level, check
from everstep.healthcheck.result import Result, Severity, critical, ok, skip, warn

STATUS = {
    "hw_nc_ue_error": ("uncorrectable errors in a core's memory: replace", Severity.REPLACE),
    "hw_hbm_ue_error": ("uncorrectable HBM errors: replace", Severity.REPLACE),
    "hw_dma_abort_error": ("DMA aborts: replace", Severity.REPLACE),
    "hw_error": ("hardware errors: reboot, and replace if they come again", Severity.REBOOT),
    "hw_collectives_error": ("collectives hung: look at the other nodes first", Severity.MONITOR),
    "timeout": ("timeouts: look at the job", Severity.MONITOR),
}
"""What each status counter means; those of severity monitor are warnings."""

LOG = Pattern(b"NEURON_HW_ERR", regex=rb"NEURON_HW_ERR=(\w+)[^\n]*?\bnd-id=(\d+)")
_ACTION = re.compile(r"\baction=(\w+)")
_SERIAL = re.compile(r"\bserial-num=(\w+)")


@check(
    "neuron_count",
    Level.LIGHT,
    source="sysfs: neuron_device/neuron*/core_count",
    action="reload the driver or reboot; replace what does not come back",
    about="neuron",
)
def neuron_count(facts: Facts, profile: Profile) -> Iterable[Result]:
    """All Neuron devices and cores are there."""
    wanted, cores = profile.neuron.count, profile.neuron.cores
    devices = facts.neurons
    if wanted is None and not devices:
        return [skip("no Neuron device, and none asked for")]
    if not devices and not facts.runner.names("/sys/devices"):
        return [skip("there is no /sys/devices")]
    results = []
    if wanted is not None and len(devices) < wanted:
        words = f"{len(devices)} of {wanted} Neuron devices: reboot, and replace what does not come back"
        results.append(critical(words, Severity.REBOOT, value=len(devices), limit=wanted))
    for device in devices:
        if cores is not None and device.cores is not None and device.cores < cores:
            words = f"{device.cores} of {cores} cores: reboot, and replace if it stays"
            results.append(critical(words, Severity.REBOOT, device.name, value=device.cores, limit=cores))
        if device.serial == "":
            results.append(warn("its serial number cannot be read", device.name))
    return results or [ok(f"{len(devices)} devices", value=len(devices), limit=wanted)]


@check(
    "neuron_ecc",
    Level.LIGHT,
    source="sysfs: stats/hardware",
    action="replace; reload the driver or reboot for repairable HBM",
    about="neuron",
)
def neuron_ecc(facts: Facts, profile: Profile) -> Iterable[Result]:
    """No uncorrectable memory error since the driver was loaded."""

    def judge(device: Neuron) -> list[Result] | None:
        return _memory(device.name, device.hardware) if device.hardware else None

    return each(
        facts.neurons, judge, sound="no uncorrectable error", unsupported="no Neuron device tells ECC counts"
    )


def _memory(device: str, counts: dict[str, int]) -> list[Result]:
    results = []
    for name, what in (("sram_ecc_uncorrected", "SRAM"), ("mem_ecc_uncorrected", "HBM")):
        count = counts.get(name, 0)
        if count:
            words = f"{count} uncorrectable {what} errors: replace"
            results.append(critical(words, Severity.REPLACE, device, value=count, limit=0))
    repairable = counts.get("mem_ecc_repairable_uncorrected", 0)
    if repairable:
        words = f"{repairable} repairable HBM errors: reload the driver or reboot"
        results.append(critical(words, Severity.REBOOT, device, value=repairable, limit=0))
    return results


@check(
    "neuron_status",
    Level.LIGHT,
    source="sysfs: neuron_core*/stats/status",
    action="replace; look at the other nodes first for collectives",
    about="neuron",
)
def neuron_status(facts: Facts, profile: Profile) -> Iterable[Result]:
    """No core counts a hardware error."""

    def judge(device: Neuron) -> list[Result] | None:
        if not device.statuses:
            return None
        results = []
        for name, (words, severity) in STATUS.items():
            count = device.statuses.get(name, 0)
            if not count:
                continue
            if name == "hw_hbm_ue_error" and device.hardware.get("mem_ecc_repairable_uncorrected"):
                words, severity = "repairable HBM errors: reload the driver or reboot", Severity.REBOOT
            if name == "hw_error" and len([other for other in STATUS if device.statuses.get(other)]) > 1:
                continue  # the sum of the others
            if severity is Severity.MONITOR:
                results.append(warn(f"{name} {count}: {words}", device.name, value=count, limit=0))
            else:
                results.append(
                    critical(f"{name} {count}: {words}", severity, device.name, value=count, limit=0)
                )
        return results

    return each(
        facts.neurons, judge, sound="no error counted", unsupported="no Neuron device tells status counters"
    )


@check(
    "neuron_log",
    Level.LIGHT,
    source="kernel log: NEURON_HW_ERR",
    action="replace; reboot for repairable HBM",
    about="neuron",
    events=True,
)
def neuron_log(facts: Facts, profile: Profile) -> Iterable[Result]:
    """The Neuron driver has written of no hardware error since boot, each device and error once."""
    log = facts.kernel_log
    results = []
    for event in log.find(LOG, within=profile.gpu.xid_window_h * 3600):
        error, device = event.key[0], f"neuron{event.key[1]}"
        action = _ACTION.search(event.text)
        serial = _SERIAL.search(event.text)
        severity = neuron_severity(error, action[1] if action else "")
        more = ", ".join(each for each in (f"serial {serial[1]}" if serial else "", ago(event)) if each)
        words = f"{error}: {neuron_action(severity)}{f' ({more})' if more else ''}"
        if severity is Severity.MONITOR:
            results.append(warn(words, device, value=error))
        else:
            results.append(critical(words, severity, device, value=error))
    return results or [ok(f"none in {log.source}")]


def neuron_severity(error: str, action: str) -> Severity:
    """How grave an error of the Neuron driver's is, by its name and the action that it names. Pure."""
    words = f"{error} {action}".upper()
    if "HANG" in words or "COLLECTIVE" in words:
        return Severity.MONITOR
    if "TERMINATE" in action.upper() or "REPLACE" in action.upper():
        return Severity.REPLACE
    if "REPAIRABLE" in words and "UNREPAIRABLE" not in words:
        return Severity.REBOOT
    if any(each in words for each in ("SRAM", "HBM", "DMA", "UNREPAIRABLE")):
        return Severity.REPLACE
    return Severity.REBOOT


def neuron_action(severity: Severity) -> str:
    """In words."""
    return {
        Severity.MONITOR: "look at the other nodes first",
        Severity.REBOOT: "reload the driver or reboot",
    }.get(severity, "replace")


@check(
    "neuron_ls",
    Level.FULL,
    source="neuron-ls -j",
    action="reload the driver or reboot",
    about="neuron",
)
def neuron_ls(facts: Facts, profile: Profile) -> Iterable[Result]:
    """Neuron's own list shows all devices and cores."""
    try:
        listed = facts.neuron_ls
    except TimedOut as silent:
        return [critical(f"{silent}: the driver hangs; reboot", Severity.REBOOT)]
    wanted, cores = profile.neuron.count, profile.neuron.cores
    if wanted is not None and len(listed) < wanted:
        words = f"neuron-ls lists {len(listed)} of {wanted} devices: reload the driver or reboot"
        return [critical(words, Severity.REBOOT, value=len(listed), limit=wanted)]
    results = []
    for device in listed:
        count, together = device.get("nc_count"), device.get("logical_neuroncore_config")
        if not isinstance(count, int) or cores is None:
            continue
        physical = count * (together if isinstance(together, int) and together > 0 else 1)
        if physical < cores:
            name = f"neuron{device.get('neuron_device', '?')}"
            words = f"neuron-ls lists {physical} of {cores} cores: reboot"
            results.append(critical(words, Severity.REBOOT, name, value=physical, limit=cores))
    return results or [ok(f"{len(listed)} devices", value=len(listed), limit=wanted)]


@check(
    "neuron_monitor",
    Level.FULL,
    source="neuron-monitor: neuron_hw_counters, error_summary, error",
    action="replace; look at the monitor where it complains",
    about="neuron",
)
def neuron_monitor(facts: Facts, profile: Profile) -> Iterable[Result]:
    """neuron-monitor counts no hardware error, and has nothing to complain of."""
    report = facts.neuron_monitor
    repairable = {
        device.index: device.hardware.get("mem_ecc_repairable_uncorrected", 0) for device in _known(facts)
    }
    results = []
    for index, counts in sorted(report.counters.items()):
        counted = dict(counts)
        if repairable.get(index) and counted.get("mem_ecc_uncorrected"):
            # The monitor does not tell these apart; sysfs does.
            counted["mem_ecc_repairable_uncorrected"] = counted.pop("mem_ecc_uncorrected")
        results += _memory(f"neuron{index}", counted)
    if report.hardware_errors:
        words = (
            f"{report.hardware_errors} executions failed for the hardware: reboot; replace if it comes again"
        )
        results.append(critical(words, Severity.REBOOT, value=report.hardware_errors, limit=0))
    results += [warn(f"neuron-monitor complains: {words[:160]}") for words in report.errors]
    return results or [ok("no error counted")]


def _known(facts: Facts) -> list[Neuron]:
    try:
        return facts.neurons
    except Absent:
        return []
