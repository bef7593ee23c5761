"""Trainium: the driver's sysfs tree (read only: a write clears counters), neuron-ls and neuron-monitor."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from everstep.healthcheck.runner import Runner

TREE = "/sys/devices/virtual/neuron_device"
HARDWARE = (
    "sram_ecc_uncorrected",
    "mem_ecc_uncorrected",
    "mem_ecc_repairable_uncorrected",
    "sram_ecc_corrected",
    "mem_ecc_corrected",
)
STATUSES = (
    "hw_error",
    "hw_hbm_ue_error",
    "hw_nc_ue_error",
    "hw_dma_abort_error",
    "hw_collectives_error",
    "timeout",
)


@dataclass(frozen=True)
class Neuron:
    """One Neuron device."""

    index: int
    cores: int | None
    serial: str | None
    """Empty where the driver could not read it; None where it does not tell."""
    instance_type: str = ""
    hardware: dict[str, int] = field(default_factory=dict)
    statuses: dict[str, int] = field(default_factory=dict)
    """Each status counter, summed over the cores."""

    @property
    def name(self) -> str:
        """As in results: neuron3."""
        return f"neuron{self.index}"


def devices(runner: Runner) -> list[Neuron]:
    """All Neuron devices in sysfs."""
    found = []
    for name in runner.names(TREE):
        match = re.fullmatch(r"neuron(\d+)", name)
        if match:
            found.append(_device(runner, f"{TREE}/{name}", int(match[1])))
    return sorted(found, key=lambda each: each.index)


def _device(runner: Runner, folder: str, index: int) -> Neuron:
    statuses: dict[str, int] = {}
    for core in runner.names(folder):
        if re.fullmatch(r"neuron_core\d+", core):
            for status in STATUSES:
                counts = [
                    _number(runner, f"{folder}/{core}/stats/status/{status}/{kind}")
                    for kind in ("total", "present")
                ]
                known = [count for count in counts if count is not None]
                if known:
                    statuses[status] = statuses.get(status, 0) + max(known)
    hardware = {}
    for counter in HARDWARE:
        count = _number(runner, f"{folder}/stats/hardware/{counter}")
        if count is not None:
            hardware[counter] = count
    serial = runner.read(f"{folder}/info/serial_number")
    return Neuron(
        index,
        _number(runner, f"{folder}/core_count"),
        None if serial is None else serial.decode("utf-8", "replace").strip(),
        (runner.read(f"{folder}/info/architecture/instance_type") or b"").decode("utf-8", "replace").strip(),
        hardware,
        statuses,
    )


def listed(output: bytes) -> list[dict[str, Any]]:
    """The devices of `neuron-ls -j`. Raises ValueError."""
    data = json.loads(output.decode("utf-8", "replace"))
    if not isinstance(data, list):
        raise ValueError("neuron-ls printed no list")
    return [each for each in data if isinstance(each, dict)]


@dataclass(frozen=True)
class Monitor:
    """One report of neuron-monitor."""

    counters: dict[int, dict[str, int]]
    """For each device, its ECC counters."""
    hardware_errors: int
    """Executions that failed for the hardware."""
    errors: tuple[str, ...]
    """What the groups of the report complain of."""


def monitored(output: bytes) -> Monitor:
    """The first line of neuron-monitor's output. Raises ValueError."""
    line = next(
        (each for each in output.decode("utf-8", "replace").splitlines() if each.strip().startswith("{")), ""
    )
    data = json.loads(line) if line else json.loads(output.decode("utf-8", "replace"))
    counters: dict[int, dict[str, int]] = {}
    hardware = 0
    errors: list[str] = []
    for path, group in _groups(data, ""):
        if group.get("error") and isinstance(group["error"], str):
            errors.append(f"{path}: {group['error']}")
        for each in group.get("neuron_devices") or () if path.endswith("neuron_hw_counters") else ():
            if isinstance(each, dict) and isinstance(each.get("neuron_device_index"), int):
                counts = {k: v for k, v in each.items() if isinstance(v, int) and k != "neuron_device_index"}
                counters[each["neuron_device_index"]] = counts
        if path.endswith("error_summary") and isinstance(group.get("hardware"), int):
            hardware += group["hardware"]
    return Monitor(counters, hardware, tuple(errors))


def _groups(data: Any, path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    if isinstance(data, dict):
        yield path, data
        for name, value in data.items():
            yield from _groups(value, f"{path}.{name}".lstrip("."))
    elif isinstance(data, list):
        for value in data:
            yield from _groups(value, path)


def _number(runner: Runner, path: str) -> int | None:
    text = (runner.read(path) or b"").strip()
    return int(text) if text.isdigit() else None
