"""What looks like a fault and is none: a sound node is never drained for it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from everstep.healthcheck.examine import Request, examine
from everstep.healthcheck.history import Nowhere
from everstep.healthcheck.registry import Level
from everstep.healthcheck.result import Report, Status
from fault import log, stop, write
from recorded import UPTIME, Node, sound

MINUTE = 60.0


@dataclass(frozen=True)
class Harmless:
    """Something on a node of this kind, what is looked at, and what may be said of it at the most."""

    check: str
    profile: str
    do: Callable[[Node], object]
    status: str = "ok"
    words: str = ""


def both(*ways: Callable[[Node], object]) -> Callable[[Node], None]:
    def do(node: Node) -> None:
        for way in ways:
            way(node)

    return do


def ago(seconds: float, *lines: str) -> Callable[[Node], None]:
    return lambda node: node.log(*lines, at=UPTIME - seconds)


def at_boot(seconds: float, *lines: str) -> Callable[[Node], None]:
    return lambda node: node.log(*lines, at=seconds)


def mounted(*lines: str) -> Callable[[Node], None]:
    return both(*(lambda node, line=line: node.mount(line) for line in lines))  # type: ignore[misc]


def root_is(options: str) -> Callable[[Node], None]:
    def do(node: Node) -> None:
        node.write("/proc/mounts", f"/dev/nvme0n1p1 / ext4 {options} 0 0\n")
        node.write("/etc/fstab", "")

    return do


def device(
    node: Node, address: str, kind: str, number: str, driver: str = "", vendor: str = "0x10de"
) -> None:
    folder = f"/sys/bus/pci/devices/{address}"
    for name, text in (("vendor", vendor), ("class", kind), ("device", number)):
        node.write(f"{folder}/{name}", f"{text}\n")
    if driver:
        os.symlink(f"../../../../bus/pci/drivers/{driver}", node.root / folder[1:] / "driver")


def gpus_and_a(kind: str, number: str) -> Callable[[Node], None]:
    """Two GPUs with their driver, and another card without one."""

    def do(node: Node) -> None:
        for bus in ("10", "21"):
            device(node, f"0000:{bus}:00.0", "0x030200", "0x1db1", "nvidia")
        device(node, "0000:03:00.0", kind, number)

    return do


def just_booted(node: Node) -> None:
    node.write("/proc/uptime", "240.00 1.00\n")
    node.tool("dmesg", "[    0.000000] Linux version 6.8.0\n[  200.000000] a line\n")


HARMLESS = {
    # Disks that are read-only by design
    "a data disk that nobody writes": Harmless(
        "disk_read_only", "cpu", mounted("/dev/sdb1 /data ext4 ro 0 0")
    ),
    "a disk below /mnt": Harmless("disk_read_only", "cpu", mounted("/dev/sdb1 /mnt/x xfs ro,noatime 0 0")),
    "an immutable root": Harmless("disk_read_only", "cpu", root_is("ro,relatime")),
    "an option list of fstab's that says neither": Harmless(
        "disk_read_only",
        "cpu",
        both(mounted("/dev/sdb1 /data ext4 ro 0 0"), write("/etc/fstab", "LABEL=a /data ext4 noatime 0 2\n")),
    ),
    "errors of another disk of nearly the same name": Harmless(
        "disk_read_only",
        "cpu",
        both(
            mounted("/dev/nvme1n12 /data ext4 ro 0 0"),
            log("blk_update_request: I/O error, dev nvme1n1, sector 8 op 0x0:(READ)"),
        ),
    ),
    # NFS
    "a soft mount's blip": Harmless(
        "host_nfs_log", "cpu", ago(5, "nfs: server fs1 not responding, timed out"), "warn", "timed out"
    ),
    "a hard mount whose OK was lost, and which answers": Harmless(
        "host_nfs_log", "cpu", ago(5, "nfs: server fs1 not responding, still trying"), "warn"
    ),
    "a server of old that is mounted no more": Harmless(
        "host_nfs_log", "cpu", ago(20 * MINUTE, "nfs: server fs9 not responding, still trying"), "warn"
    ),
    "a server that came back": Harmless(
        "host_nfs_log",
        "cpu",
        both(
            ago(90, "nfs: server fs9 not responding, still trying"),
            ago(80, "nfs: server fs9 not responding, timed out"),
            ago(60, "nfs: server fs9 OK"),
        ),
    ),
    # Out of memory
    "a user's systemd": Harmless(
        "host_oom",
        "cpu",
        log("Out of memory: Killed process 7 (systemd) total-vm:1kB, anon-rss:1kB, UID:1000 pgtables:8kB"),
        "warn",
    ),
    "a user's own slurmd": Harmless(
        "host_oom",
        "cpu",
        log("Out of memory: Killed process 7 (slurmd) total-vm:1kB, anon-rss:1kB, UID:1000 pgtables:8kB"),
        "warn",
    ),
    "a dbus-daemon of whom it is not said": Harmless(
        "host_oom",
        "cpu",
        log("Out of memory: Kill process 7 (dbus-daemon) score 3 or sacrifice child"),
        "warn",
    ),
    # Hardware errors of the boot before
    "records of the boot before": Harmless(
        "host_machine_check",
        "cpu",
        both(
            at_boot(41, "BERT: Error records from previous boot:"),
            at_boot(41, "[Hardware Error]: event severity: fatal", "[Hardware Error]:  Error 0, type: fatal"),
        ),
        "warn",
        "before this boot",
    ),
    "banks of the boot before": Harmless(
        "host_machine_check",
        "cpu",
        at_boot(1.5, "mce: [Hardware Error]: CPU 5: Machine Check: 0 Bank 5: bea0000000000108"),
        "warn",
        "before this boot",
    ),
    "several bits that were corrected": Harmless(
        "host_machine_check",
        "cpu",
        log(
            "{2}[Hardware Error]: event severity: recoverable",
            "{2}[Hardware Error]:   section_type: PCIe error",
            "{3}[Hardware Error]: event severity: corrected",
            "{3}[Hardware Error]:   error_type: 3, multi-bit ECC",
        ),
        "warn",
    ),
    "several bits of the boot before": Harmless(
        "host_machine_check",
        "cpu",
        both(
            at_boot(41, "BERT: Error records from previous boot:"),
            at_boot(
                41.1,
                "[Hardware Error]: event severity: recoverable",
                "[Hardware Error]:   error_type: 3, multi-bit ECC",
            ),
        ),
        "warn",
        "before this boot",
    ),
    # File systems
    "a file system that was shut down, mended and mounted again": Harmless(
        "host_remounted",
        "cpu",
        both(
            ago(90, "XFS (nvme1n1): Filesystem has been shut down due to log error (0x2)."),
            ago(60, "XFS (nvme1n1): Mounting V5 Filesystem 3f5a8a5c"),
        ),
    ),
    "a user's image that was shut down": Harmless(
        "host_remounted",
        "cpu",
        log("XFS (loop5): Filesystem has been shut down due to log error (0x2)."),
        "warn",
    ),
    "a remount that was mended, of a mapped disk": Harmless(
        "host_remounted",
        "cpu",
        both(
            log("EXT4-fs (dm-3): Remounting filesystem read-only"),
            mounted("/dev/mapper/vg-data /data ext4 rw 0 0"),
            lambda node: node.write("/dev/mapper/.here", ""),
            lambda node: os.symlink("../dm-3", node.root / "dev/mapper/vg-data"),
        ),
        "warn",
        "writable again",
    ),
    "a PCIe error that was recovered from": Harmless(
        "host_pcie",
        "cpu",
        both(
            ago(
                90, "nvme 0000:34:00.0: PCIe Bus Error: severity=Uncorrectable (Fatal), type=Data Link Layer"
            ),
            ago(89, "pcieport 0000:30:03.0: AER: device recovery successful"),
        ),
        "warn",
        "recovered from",
    ),
    # GPUs
    "a card for a console": Harmless("gpu_count", "gpu", gpus_and_a("0x030000", "0x1ff2")),
    "a card for a console with its sound": Harmless("gpu_count", "gpu", gpus_and_a("0x040300", "0x10fa")),
    "a fabric soon after boot": Harmless(
        "gpu_fabric",
        "h100",
        both(just_booted, lambda node: node.set_gpu(3, "fabric/state", "Not Started")),
        "warn",
        "soon after boot",
    ),
    "a fabric manager soon after boot": Harmless(
        "fabric_manager", "h100", both(just_booted, stop(700)), "warn", "soon after boot"
    ),
    "an nvidia-smi whose child keeps its output open": Harmless(
        "gpu_smi",
        "h100",
        lambda node: node.script("nvidia-smi", 'sleep 1000 &\ncat "$HERE/recorded/smi.xml"'),
    ),
    "an nvidia-smi that cannot be run": Harmless(
        "gpu_smi",
        "h100",
        lambda node: node.script("nvidia-smi", "/opt/gone/nvidia-smi"),
        "warn",
        "exit code 127",
    ),
}


def look(root: Path, *names: str, profile: str = "auto") -> Report:
    request = Request(level=Level.LIGHT, names=names, root=root, profile=profile, site_checks=False)
    return examine(request, store=Nowhere(), sleep=lambda _: None)


@pytest.mark.parametrize("name", HARMLESS)
def test_it_drains_nothing(name: str, tmp_path: Path) -> None:
    harmless = HARMLESS[name]
    harmless.do(sound(harmless.profile, tmp_path))
    report = look(tmp_path, harmless.check, profile=harmless.profile)
    assert [each.status.word for each in report.results] == [harmless.status], report.results
    assert harmless.words in report.results[0].reason
    assert not report.faults
    assert look(tmp_path).status < Status.CRITICAL  # nor does any other check


# --- and what is a fault next to it ---


@pytest.mark.parametrize(
    "line",
    [
        "EXT4-fs (nvme3n1p1): Remounting filesystem read-only",
        "XFS (nvme3n1p1): Log I/O Error (0x2) detected at x [xfs].  Shutting down filesystem.",
        "I/O error, dev nvme3n1, sector 499204104 op 0x1:(WRITE) flags 0x0",
        "Buffer I/O error on dev nvme3n1p1, logical block 20639616, async page read",
    ],
)
def test_a_read_only_disk_of_whose_errors_the_kernel_tells_is_a_fault(line: str, tmp_path: Path) -> None:
    node = sound("cpu", tmp_path)
    node.mount("/dev/nvme3n1p1 /data ext4 ro 0 0")
    node.log(line)
    (found,) = look(tmp_path, "disk_read_only").findings
    assert (found.status, found.device) == (Status.CRITICAL, "/data")


def test_a_root_that_fstab_wants_writable_is_a_fault_when_it_is_not(tmp_path: Path) -> None:
    node = sound("cpu", tmp_path)
    root_is("ro,relatime")(node)
    node.write("/etc/fstab", "LABEL=root / ext4 rw,noatime 0 1\n")
    assert look(tmp_path, "disk_read_only").status is Status.CRITICAL


def test_a_kernel_log_that_cannot_be_read_makes_no_read_only_disk_a_fault(tmp_path: Path) -> None:
    node = sound("cpu", tmp_path)
    node.mount("/dev/sdb1 /data ext4 ro 0 0")
    node.remove("/usr/bin/dmesg")
    (result,) = look(tmp_path, "disk_read_only").results
    assert result.status is Status.OK


def test_a_server_whose_mount_hangs_is_a_fault_however_long_ago_it_was_told(tmp_path: Path) -> None:
    node = sound("cpu", tmp_path)
    node.log("nfs: server fs1 not responding, still trying", at=UPTIME - 3600)
    node.hang("stat")
    (found,) = look(tmp_path, "host_nfs_log").findings
    assert (found.status, found.device) == (Status.CRITICAL, "fs1")


def test_an_uncorrected_error_after_the_boot_counts_next_to_one_before_it(tmp_path: Path) -> None:
    node = sound("cpu", tmp_path)
    node.log("mce: [Hardware Error]: CPU 5: Machine Check: 0 Bank 5: bea0000000000108", at=1.5)
    node.log("mce: [Hardware Error]: CPU 5: Machine Check: 0 Bank 5: bea0000000000108", at=9000.0)
    assert look(tmp_path, "host_machine_check").status is Status.CRITICAL


def test_a_gpu_that_its_driver_has_let_go_is_missed_by_its_siblings(tmp_path: Path) -> None:
    node = sound("gpu", tmp_path)
    gpus_and_a("0x030000", "0x1db1")(node)  # a workstation's card is a display controller
    (found,) = look(tmp_path, "gpu_count", profile="gpu").findings
    assert (found.value, found.limit) == (2, 3)


def test_a_compute_card_without_a_driver_is_missed(tmp_path: Path) -> None:
    node = sound("gpu", tmp_path)
    gpus_and_a("0x030200", "0x20b5")(node)
    assert look(tmp_path, "gpu_count", profile="gpu").status is Status.CRITICAL


def test_a_driver_that_answers_nothing_has_initialised_no_gpu(tmp_path: Path) -> None:
    node = sound("gpu", tmp_path)
    node.log("NVRM: RmInitAdapter failed! (0x62:0x65:2028)")
    assert look(tmp_path, "gpu_init").status is Status.WARN  # it names none, and all of them answer
    node.tool("nvidia-smi", "No devices were found\n", 6)
    assert look(tmp_path, "gpu_init").status is Status.CRITICAL


def test_a_fabric_manager_that_failed_gets_no_grace(tmp_path: Path) -> None:
    node = sound("h100", tmp_path)
    just_booted(node)
    node.remove("/proc/700")
    node.tool("systemctl", "failed\n", 3)
    assert look(tmp_path, "fabric_manager").status is Status.CRITICAL


def test_a_pcie_error_whose_recovery_failed_is_a_fault(tmp_path: Path) -> None:
    node = sound("cpu", tmp_path)
    node.log("nvme 0000:34:00.0: PCIe Bus Error: severity=Uncorrectable (Fatal), type=Data Link Layer")
    node.log("pcieport 0000:20:03.0: AER: device recovery successful", at=UPTIME - 50)
    node.log("pcieport 0000:30:03.0: AER: device recovery failed", at=UPTIME - 40)
    assert look(tmp_path, "host_pcie").status is Status.CRITICAL


def test_a_device_is_known_by_its_class_whatever_its_driver(tmp_path: Path) -> None:
    node = sound("cpu", tmp_path)
    device(node, "0000:9b:00.0", "0x020700", "0x1021", vendor="0x15b3")
    node.log("pcieport 0000:9b:00.0: PCIe Bus Error: severity=Uncorrected (Fatal), type=Transaction Layer")
    assert look(tmp_path, "host_pcie").status is Status.CRITICAL


# --- and a log that nobody should have written ---


@pytest.mark.parametrize(
    "words",
    [
        "SXid ",
        "NVRM: Xid (PCI:0000:43:00) ",
        "task a:1 blocked for more than ",
        "nvme nvme0: I/O reset controller ",
        "aborting reset nvme nvme0 ",
        "NVRM: The NVIDIA GPU 0000:18:00.0 ",
        "[Hardware Error]: ",
        "event severity: recoverable multi-bit ECC ",
        "Out of memory: Killed process 1 (a) ",
        "nfs: server ",
        "pcieport 0000:9b:00.0: PCIe Bus Error: severity=Uncorrect ",
        "XFS (sda): Shutting down filesystem ",
        "Linux version ",
    ],
)
def test_a_line_of_four_megabytes_is_read_in_no_time(words: str, tmp_path: Path) -> None:
    node = sound("cpu", tmp_path)
    piece = words + "x: " * ((4_000_000 // 1000 - len(words)) // 3)
    node.tool("dmesg", node.read("/recorded/dmesg") + piece * 1000 + "\n")
    before = time.process_time()
    assert not look(tmp_path).faults
    # Of processor time; to go through such a line again at each of its words takes minutes.
    assert time.process_time() - before < 10
