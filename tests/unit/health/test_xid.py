"""Xids: each code asks for what NVIDIA's table says, once for each GPU, and floods cost nothing."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from everstep.healthcheck.checks.xid import TABLE, action_for
from everstep.healthcheck.examine import Request, examine
from everstep.healthcheck.history import Nowhere
from everstep.healthcheck.result import Result, Severity, Status
from recorded import UPTIME, sound


def codes(words: str) -> set[int]:
    found: set[int] = set()
    for word in words.split():
        first, _, last = word.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found


RESTART = codes("8 11 13 25 31 32 39-41 60 68-72 75-77 80 82-86 88 89 94 96-105 126-135 139")
IGNORE = codes("37 38 43 44 63 66 67 92 93 106 107 121 137 141 152 153 157 160 161")
RESET = codes("46 62 64 95 109 110 119 120 136 140 143 155 156 158")


def findings(tmp_path: Path, *lines: str, at: float = UPTIME - 60) -> list[Result]:
    node = sound("h100", tmp_path)
    node.log(*lines, at=at)
    report = examine(Request(root=tmp_path, names=("gpu_xid",), site_checks=False), store=Nowhere())
    assert not report.faults
    return list(report.findings)


def xid(code: int, text: str = "pid=7, name=python, details", gpu: str = "PCI:0000:43:00") -> str:
    return f"NVRM: Xid ({gpu}): {code}, {text}"


@pytest.mark.parametrize(
    ("group", "status", "severity"),
    [
        (RESTART, Status.WARN, Severity.MONITOR),
        (IGNORE, Status.OK, Severity.OK),
        (RESET, Status.CRITICAL, Severity.RESET),
        ({79, 151}, Status.CRITICAL, Severity.REBOOT),
        ({48, 74}, Status.CRITICAL, Severity.RESET),
        ({54}, Status.CRITICAL, Severity.REPLACE),
    ],
)
def test_each_code_asks_for_what_the_table_says(group: set[int], status: Status, severity: Severity) -> None:
    for code in group:
        action = action_for(code)
        assert (action.status, action.severity) == (status, severity), code


def test_no_code_is_in_two_rows() -> None:
    assert not RESTART & IGNORE and not RESTART & RESET and not IGNORE & RESET
    assert RESTART | IGNORE | RESET | {79, 151, 48, 74, 54, 45} | set(range(144, 151)) == set(TABLE)


def test_every_code_of_the_table_is_found_in_a_log(tmp_path: Path) -> None:
    asked = RESTART | RESET | {79, 151, 48, 74, 54} | set(range(144, 151))
    found = findings(tmp_path, *(xid(code) for code in asked | IGNORE))
    assert {each.value for each in found} == asked
    assert {each.value for each in found if each.severity is Severity.RESET} >= RESET


def test_nvlink_5_errors_that_are_not_fatal_are_warnings(tmp_path: Path) -> None:
    (found,) = findings(
        tmp_path, "NVRM: Xid (PCI:0000:00:08.0): 145, RLW_REMAP Nonfatal XC1 i0 Link 10 (0x00000004 0x0)"
    )
    assert (found.status, found.device, found.value) == (Status.WARN, "0000:00:08", 145)
    assert "Link 10" in found.reason


@pytest.mark.parametrize("instance", ["GPU-I:05", "GPU-CI:02", "GPU-I:05 GPU-CI:02"])
def test_an_xid_of_a_mig_instance_is_the_gpu_s(instance: str, tmp_path: Path) -> None:
    (found,) = findings(tmp_path, xid(95, gpu=f"PCI:0000:9b:00 {instance}"))
    assert (found.status, found.device, found.value) == (Status.CRITICAL, "0000:9b:00", 95)


def test_a_code_that_is_not_in_the_table_is_to_be_looked_up(tmp_path: Path) -> None:
    (found,) = findings(tmp_path, xid(999))
    assert found.status is Status.WARN and "look it up" in found.reason


def test_45_after_another_xid_says_nothing_new(tmp_path: Path) -> None:
    found = findings(tmp_path, xid(31), *[xid(45)] * 672)
    assert [each.value for each in found] == [31]


def test_45_on_another_gpu_stands_alone(tmp_path: Path) -> None:
    found = findings(tmp_path, xid(31), xid(45, gpu="PCI:0000:9b:00"))
    assert {(each.value, each.device) for each in found} == {(31, "0000:43:00"), (45, "0000:9b:00")}


@pytest.mark.parametrize(
    ("text", "severity"),
    [
        ("GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)", Severity.RESET),
        ("GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot Required)", Severity.REBOOT),
        ("GPU recovery action changed from 0x0 (None) to 0x3 (Drain P2P)", Severity.RESET),
        ("GPU recovery action changed from 0x0 (None) to 0x4 (Drain and Reset)", Severity.RESET),
    ],
)
def test_154_is_read_by_its_text(text: str, severity: Severity, tmp_path: Path) -> None:
    (found,) = findings(tmp_path, xid(154, text))
    assert (found.status, found.severity, found.value) == (Status.CRITICAL, severity, 154)


def test_154_that_asks_for_nothing_any_more_is_over(tmp_path: Path) -> None:
    assert not findings(
        tmp_path,
        xid(154, "GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)"),
        xid(154, "GPU recovery action changed from 0x1 (GPU Reset Required) to 0x0 (None)"),
    )


def test_what_is_older_than_the_window_is_over(tmp_path: Path) -> None:
    node = sound("h100", tmp_path)
    node.write("/proc/uptime", f"{100 * 3600:.2f} 1.0\n")
    node.log(xid(31), at=10 * 3600.0)
    node.log(xid(119), at=90 * 3600.0)
    report = examine(Request(root=tmp_path, names=("gpu_xid",), site_checks=False), store=Nowhere())
    assert [each.value for each in report.findings] == [119]


def test_what_came_before_this_boot_is_over(tmp_path: Path) -> None:
    node = sound("h100", tmp_path)
    old = f"[  500.000000] {xid(79)}\n"
    node.tool("dmesg", old + node.read("/recorded/dmesg"))
    report = examine(Request(root=tmp_path, names=("gpu_xid",), site_checks=False), store=Nowhere())
    assert report.findings == ()


def test_a_gpu_that_fell_off_the_bus_is_told_once(tmp_path: Path) -> None:
    node = sound("h100", tmp_path)
    node.log(xid(79, "GPU has fallen off the bus."), "NVRM: GPU 0000:43:00.0: GPU has fallen off the bus.")
    request = Request(root=tmp_path, names=("gpu_xid", "gpu_off_bus"), site_checks=False)
    report = examine(request, store=Nowhere())
    assert [(each.check, each.device) for each in report.findings] == [("gpu_xid", "0000:43:00")]


def test_a_flood_is_as_many_findings_as_it_has_faults(tmp_path: Path) -> None:
    """80,000 lines here; a site logged 800,000 lines with 29 distinct faults."""
    chance = random.Random(1)
    faults = [
        (f"PCI:0000:{bus:02x}:00", code)
        for bus in (0x18, 0x3B, 0x9B, 0xAF)
        for code in (13, 31, 48, 62, 79, 94, 119)
    ]
    faults += [("PCI:0000:d8:00", 95)]
    lines = [xid(code, f"pid={n}, name=x, Ch {n:08x}", gpu) for n, (gpu, code) in enumerate(faults)]
    for n in range(80_000):
        gpu, code = chance.choice(faults)
        lines.append(xid(code, f"pid={n}, name=x, Ch {n:08x}", gpu))
    found = findings(tmp_path, *lines)
    assert {(each.device, each.value) for each in found} == {
        (gpu.removeprefix("PCI:"), code) for gpu, code in faults
    }
    assert len(found) == 29
