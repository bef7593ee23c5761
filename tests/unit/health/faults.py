"""The faults that recorded nodes are given, and what the check that looks for each must say."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

from recorded import Node, infiniband, limits_text


@dataclass(frozen=True)
class Fault:
    """A fault: how a sound node gets it, and what is said of it."""

    check: str
    profile: str
    spoil: Callable[[Node], object]
    status: str = "critical"
    severity: str = "monitor"
    device: str = ""
    words: str = ""
    level: str = "full"
    growth: bool = False
    """It is in what has changed since an earlier run."""
    idle: bool = False
    """It is one where nothing may run on the GPUs."""


def _set(path: str, text: str, gpu: int = 3) -> Callable[[Node], None]:
    return lambda node: node.set_gpu(gpu, path, text)


def _smi_exits(code: int, words: str = "") -> Callable[[Node], None]:
    return lambda node: node.tool("nvidia-smi", words, code)


def _log(*lines: str) -> Callable[[Node], None]:
    return lambda node: node.log(*lines)


def _lose_gpu(node: Node) -> None:
    del node.gpus[5]
    node.print_gpus()


def _link_down(node: Node) -> None:
    node.links[2][7] = False
    node.print_gpus()


def _link_errors(kind: str, count: int) -> Callable[[Node], None]:
    def spoil(node: Node) -> None:
        node.link_errors[1][kind] += count
        node.print_gpus()

    return spoil


def _throttle(node: Node) -> None:
    node.set_gpu(4, "clocks_event_reasons/clocks_event_reason_hw_thermal_slowdown", "Active")
    # 500 of the 540 seconds since the first reading.
    counter = "clocks_event_reasons_counters/clocks_event_reasons_counters_hw_therm_slowdown"
    node.set_gpu(4, counter, "500000000 us")


def _busy(node: Node, *changes: tuple[str, str]) -> None:
    for path, text in (("utilization/gpu_util", "97 %"), *changes):
        node.set_gpu(0, path, text)


def _dcgm(level: int, **warning: object) -> Callable[[Node], None]:
    results = [{"gpu_id": "2", "status": "Fail", "warnings": [{"warning": "bandwidth is low", **warning}]}]
    categories = [{"category": "Hardware", "tests": [{"name": f"Memory r{level}", "results": results}]}]
    text = json.dumps({"DCGM Diagnostic": {"test_categories": categories}})
    return lambda node: node.tool("dcgmi", f"warning: something else\n{text}\n", 205)


def _load(**result: object) -> Callable[[Node], None]:
    results = [{"device": f"gpu{i}", "value": 9000.0, "wrong": False} for i in range(8)]
    results[6].update(result)
    return lambda node: node.tool("everstep-load", json.dumps({"results": results}))


def _append(path: str, text: str) -> Callable[[Node], object]:
    return lambda node: node.write(path, node.read(path) + text)


def _write(path: str, text: str) -> Callable[[Node], object]:
    return lambda node: node.write(path, text)


def _neuron(path: str, text: str = "1", index: int = 3) -> Callable[[Node], object]:
    return _write(f"/sys/devices/virtual/neuron_device/neuron{index}/{path}", text)


def _monitor(node: Node) -> None:
    text = node.read("/recorded/neuron-monitor")
    node.write(
        "/recorded/neuron-monitor", text.replace('"sram_ecc_uncorrected": 0', '"sram_ecc_uncorrected": 2', 1)
    )


def _stop(pid: int) -> Callable[[Node], None]:
    return lambda node: node.remove(f"/proc/{pid}")


XID = "NVRM: Xid (PCI:0000:43:00): "
_EFA = "/sys/class/infiniband/rdmap2s6/ports/1"
_CLIQUE = "fabric/cliqueId"

FAULTS: dict[str, Fault] = {
    # NVIDIA: the driver and what it tells
    "smi-hangs": Fault(
        "gpu_smi",
        "p6-b200",
        lambda n: n.hang("nvidia-smi"),
        severity="reboot",
        level="light",
        words="did not answer",
    ),
    "smi-9": Fault(
        "gpu_smi", "p6-b200", _smi_exits(9, "NVIDIA-SMI has failed"), severity="reboot", words="no driver"
    ),
    "smi-10": Fault("gpu_smi", "p6-b200", _smi_exits(10), severity="reboot", words="interrupt"),
    "smi-14": Fault("gpu_smi", "p6-b200", lambda n: n.print_gpus(14), "warn", words="InfoROM"),
    "smi-15": Fault(
        "gpu_smi",
        "p6-b200",
        _smi_exits(15, "Unable to determine the device handle"),
        severity="reboot",
        words="bus",
    ),
    "smi-lost": Fault(
        "gpu_smi",
        "p6-b200",
        _smi_exits(0, "Unable to determine the device handle for GPU0000:9B:00.0: GPU is lost."),
        severity="reboot",
    ),
    "smi-mismatch": Fault(
        "gpu_smi",
        "p6-b200",
        _smi_exits(18, "Failed to initialize NVML: Driver/library version mismatch"),
        severity="reboot",
    ),
    "smi-empty": Fault("gpu_smi", "p6-b200", lambda n: n.tool("nvidia-smi", ""), "warn", words="nothing"),
    "no-gpu-left": Fault(
        "gpu_count", "p6-b200", lambda n: (n.gpus.clear(), n.print_gpus()), severity="reboot", words="0 of 8"
    ),
    "gpu-missing": Fault("gpu_count", "p6-b200", _lose_gpu, severity="reboot", words="7 of 8"),
    "persistence-off": Fault(
        "gpu_persistence", "p6-b200", _set("persistence_mode", "Disabled"), "warn", device="gpu3"
    ),
    "ecc-volatile": Fault(
        "gpu_ecc",
        "p6-b200",
        _set("ecc_errors/volatile/sram_uncorrectable_secded", "1"),
        severity="reset",
        device="gpu3",
    ),
    "ecc-dram": Fault(
        "gpu_ecc", "p4d", _set("ecc_errors/volatile/dram_uncorrectable", "2"), severity="reset", device="gpu3"
    ),
    "repair-pending": Fault(
        "gpu_ecc",
        "p6-b200",
        _set("ecc_errors/channel_repair_pending", "Yes"),
        severity="reset",
        device="gpu3",
    ),
    "unrepairable": Fault(
        "gpu_ecc",
        "gb200-nvl72",
        _set("ecc_errors/unrepairable_memory", "Yes"),
        severity="replace",
        device="gpu3",
    ),
    "ecc-aggregate": Fault(
        "gpu_ecc_total",
        "p6-b200",
        _set("ecc_errors/aggregate/dram_uncorrectable", "1"),
        "warn",
        device="gpu3",
    ),
    "ecc-threshold": Fault(
        "gpu_ecc_total",
        "p6-b200",
        _set("ecc_errors/aggregate/sram_threshold_exceeded", "Yes"),
        severity="replace",
        device="gpu3",
        words="1650000000003",
    ),
    "pages-pending": Fault(
        "gpu_retired_pages",
        "gpu",
        _set("retired_pages/pending_retirement", "Yes", 1),
        severity="reboot",
        device="gpu1",
    ),
    "double-bit": Fault(
        "gpu_retired_pages",
        "gpu",
        _set("retired_pages/double_bit_retirement/retired_count", "1", 1),
        severity="replace",
        device="gpu1",
    ),
    "remap-pending": Fault(
        "gpu_row_remap",
        "p6-b200",
        _set("remapped_rows/remapped_row_pending", "Yes"),
        severity="reset",
        device="gpu3",
    ),
    "remap-failure": Fault(
        "gpu_row_remap",
        "p6-b200",
        _set("remapped_rows/remapped_row_failure", "Yes"),
        severity="replace",
        device="gpu3",
    ),
    "recovery-reset": Fault(
        "gpu_recovery_action",
        "p6-b200",
        _set("gpu_recovery_action", "Reset"),
        severity="reset",
        device="gpu3",
    ),
    "recovery-reboot": Fault(
        "gpu_recovery_action",
        "p6-b200",
        _set("gpu_recovery_action", "Reboot"),
        severity="reboot",
        device="gpu3",
    ),
    "recovery-p2p": Fault(
        "gpu_recovery_action",
        "p6-b200",
        _set("gpu_recovery_action", "Drain P2P"),
        severity="reset",
        device="gpu3",
    ),
    "gpu-lost": Fault(
        "gpu_answers",
        "p6-b200",
        _set("temperature/gpu_temp", "GPU is lost"),
        severity="reboot",
        device="gpu3",
    ),
    "gpu-err": Fault(
        "gpu_answers", "p6-b200", _set("gpu_power_readings/average_power_draw", "ERR!"), "warn", device="gpu3"
    ),
    "hot": Fault("gpu_temperature", "p6-b200", _set("temperature/gpu_temp_tlimit", "-3 C"), device="gpu3"),
    "throttled": Fault("gpu_throttle", "p6-b200", _throttle, device="gpu4", growth=True, words="HW thermal"),
    "power-limit": Fault(
        "gpu_power",
        "p6-b200",
        _set("gpu_power_readings/current_power_limit", "350.00 W"),
        "warn",
        device="gpu3",
    ),
    "clocks-set-low": Fault(
        "gpu_clocks", "p6-b200", _set("applications_clocks/graphics_clock", "1200 MHz"), "warn", device="gpu3"
    ),
    "clocks-crawl": Fault(
        "gpu_clocks", "p6-b200", lambda n: _busy(n, ("clocks/sm_clock", "345 MHz")), "warn", device="gpu0"
    ),
    "pcie-width": Fault(
        "gpu_pcie",
        "p6-b200",
        _set("pci/pci_gpu_link_info/link_widths/current_link_width", "8x"),
        severity="reboot",
        device="gpu3",
        words="x8 of x16",
    ),
    "pcie-generation": Fault(
        "gpu_pcie",
        "p6-b200",
        lambda n: _busy(n, ("pci/pci_gpu_link_info/pcie_gen/current_link_gen", "1")),
        "warn",
        device="gpu0",
    ),
    "left-over": Fault(
        "gpu_processes",
        "p6-b200",
        _write("/recorded/apps", "4242, python\n"),
        severity="reset",
        words="4242",
        idle=True,
    ),
    # NVIDIA: links
    "nvlink-down": Fault(
        "nvlink_count", "p6-b200", _link_down, severity="reset", device="gpu2", words="17 of 18"
    ),
    "nvlink-recovery": Fault(
        "nvlink_errors", "p6-b200", _link_errors("recovery", 1), severity="reset", device="gpu1", growth=True
    ),
    "nvlink-replays": Fault(
        "nvlink_errors", "p6-b200", _link_errors("replay", 5000), "warn", device="gpu1", growth=True
    ),
    "fabric-not-done": Fault(
        "gpu_fabric", "p6-b200", _set("fabric/state", "Not Started"), severity="reboot", device="gpu3"
    ),
    "fabric-short": Fault(
        "gpu_fabric",
        "gb200-nvl72",
        _set("fabric/status", "Insufficient Resources"),
        severity="reset",
        device="gpu3",
    ),
    "fabric-degraded": Fault(
        "gpu_fabric",
        "gb200-nvl72",
        _set("fabric/health/bandwidth", "Degraded"),
        severity="reset",
        device="gpu3",
    ),
    "fabric-manager": Fault("fabric_manager", "p6-b200", _stop(700), words="start nvidia-fabricmanager"),
    "no-clique": Fault("gpu_clique", "gb200-nvl72", _set(_CLIQUE, "0"), severity="reset", device="gpu3"),
    "another-clique": Fault("gpu_clique", "gb200-nvl72", _set(_CLIQUE, "7"), severity="reset", device="gpu3"),
    # NVIDIA: the kernel log and DCGM
    "xid-79": Fault(
        "gpu_xid",
        "p6-b200",
        _log(f"{XID}79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."),
        severity="reboot",
        device="0000:43:00",
        words="Xid 79",
    ),
    "xid-119": Fault(
        "gpu_xid",
        "p6-b200",
        _log(f"{XID}119, pid=7, name=x, Timeout after 6s"),
        severity="reset",
        device="0000:43:00",
    ),
    "xid-13": Fault(
        "gpu_xid", "p6-b200", _log(f"{XID}13, pid=7, name=x, Graphics Exception"), "warn", device="0000:43:00"
    ),
    "xid-45-alone": Fault(
        "gpu_xid", "p6-b200", _log(f"{XID}45, pid=7, name=x, Ch 00000008"), "warn", device="0000:43:00"
    ),
    "xid-154": Fault(
        "gpu_xid",
        "p6-b200",
        _log(f"{XID}154, GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot Required)"),
        severity="reboot",
        device="0000:43:00",
        words="Node Reboot Required",
    ),
    "off-the-bus": Fault(
        "gpu_off_bus",
        "p6-b200",
        _log("NVRM: GPU 0000:18:00.0: GPU has fallen off the bus."),
        severity="reboot",
        device="0000:18:00",
    ),
    "sxid-fatal": Fault(
        "nvswitch_sxid",
        "p6-b200",
        _log("nvidia-nvswitch0: SXid (PCI:0000:c3:00.0): 24007, Fatal, Link 28 sourcetrack timeout error"),
        severity="reset",
        device="0000:c3:00",
        words="24007",
    ),
    "sxid-not-fatal": Fault(
        "nvswitch_sxid",
        "p6-b200",
        _log("nvidia-nvswitch0: SXid (PCI:0000:c3:00.0): 12028, Non-fatal, Link 46 egress PRIV error"),
        "warn",
        device="0000:c3:00",
    ),
    "dcgm-r1": Fault(
        "dcgm_r1", "p6-b200", _dcgm(1), severity="reset", device="gpu2", words="bandwidth is low"
    ),
    "dcgm-isolate": Fault(
        "dcgm_r1", "p6-b200", _dcgm(1, error_severity=2), severity="replace", device="gpu2"
    ),
    "dcgm-r2": Fault("dcgm_r2", "p6-b200", _dcgm(2), severity="reset", device="gpu2", level="deep"),
    "dcgm-r3": Fault("dcgm_r3", "p6-b200", _dcgm(3), severity="reset", device="gpu2", level="deep"),
    "dcgm-r4": Fault("dcgm_r4", "p6-b200", _dcgm(4), severity="reset", device="gpu2", level="deep"),
    # Trainium
    "neuron-missing": Fault(
        "neuron_count",
        "trn1",
        lambda n: n.remove("/sys/devices/virtual/neuron_device/neuron9"),
        severity="reboot",
    ),
    "neuron-core-missing": Fault(
        "neuron_count", "trn2", _neuron("core_count", "3"), severity="reboot", device="neuron3"
    ),
    "neuron-sram": Fault(
        "neuron_ecc",
        "trn1",
        _neuron("stats/hardware/sram_ecc_uncorrected"),
        severity="replace",
        device="neuron3",
    ),
    "neuron-hbm": Fault(
        "neuron_ecc",
        "trn2",
        _neuron("stats/hardware/mem_ecc_uncorrected"),
        severity="replace",
        device="neuron3",
    ),
    "neuron-hbm-repairable": Fault(
        "neuron_ecc",
        "trn2",
        _neuron("stats/hardware/mem_ecc_repairable_uncorrected"),
        severity="reboot",
        device="neuron3",
    ),
    "neuron-dma": Fault(
        "neuron_status",
        "trn1",
        _neuron("neuron_core1/stats/status/hw_dma_abort_error/total", "2"),
        severity="replace",
        device="neuron3",
    ),
    "neuron-collectives": Fault(
        "neuron_status",
        "trn1",
        _neuron("neuron_core1/stats/status/hw_collectives_error/total", "2"),
        "warn",
        device="neuron3",
        words="other nodes first",
    ),
    "neuron-log": Fault(
        "neuron_log",
        "trn1",
        _log(
            "NEURON_HW_ERR=SRAM_UNCORRECTABLE_ERROR instance-id=i-0 hostname=n1 nd-id=4 nc-id=0 "
            "serial-num=00aa action=TERMINATE_INSTANCE"
        ),
        severity="replace",
        device="neuron4",
    ),
    "neuron-ls-short": Fault(
        "neuron_ls",
        "trn1",
        lambda n: n.tool("neuron-ls", '[{"neuron_device": 0, "nc_count": 2}]'),
        severity="reboot",
    ),
    "neuron-ls-hangs": Fault(
        "neuron_ls", "trn1", lambda n: n.hang("neuron-ls"), severity="reboot", words="did not answer"
    ),
    "neuron-monitor": Fault("neuron_monitor", "trn1", _monitor, severity="replace", device="neuron0"),
    # Network
    "efa-missing": Fault(
        "efa_count",
        "p5en",
        lambda n: n.remove("/sys/class/infiniband/rdmap7s6"),
        severity="reboot",
        words="15 of 16",
    ),
    "efa-port-down": Fault(
        "net_ports", "p4d", _write(f"{_EFA}/state", "1: DOWN\n"), severity="reboot", device="rdmap2s6/1"
    ),
    "infiniband-down": Fault(
        "net_ports",
        "h100",
        lambda n: infiniband(n, "mlx5_0", "1: DOWN", "2: Polling"),
        "warn",
        device="mlx5_0/1",
    ),
    "efa-errors": Fault(
        "net_errors",
        "p4d",
        _write(f"{_EFA}/hw_counters/retrans_timeout_events", "40\n"),
        "warn",
        device="rdmap2s6/1",
        growth=True,
        words="retrans_timeout_events +23",
    ),
    "efa-no-provider": Fault(
        "efa_provider",
        "p6-b200",
        lambda n: n.tool("fi_info", "fi_getinfo: -61 (No data available)\n", 61),
        severity="reboot",
        words="TCP",
    ),
    "efa-no-module": Fault(
        "efa_modules",
        "p6-b200",
        _write("/proc/modules", "ib_core 524288 0 - Live 0x0\n"),
        severity="reboot",
        words="efa",
    ),
    "memlock": Fault(
        "memlock", "p6-b200", lambda n: n.process(901, "slurmd", limits_text("65536")), words="LimitMEMLOCK"
    ),
    # The host
    "disk-full": Fault(
        "disk_space",
        "cpu",
        lambda n: n.df("/dev/nvme2n1 207474688 206474688 1000000 100% /var"),
        device="/var",
    ),
    "no-inodes": Fault(
        "disk_inodes",
        "cpu",
        lambda n: n.df("/dev/nvme2n1 25804800 25804800 0 100% /var", inodes=True),
        device="/var",
    ),
    "read-only": Fault(
        "disk_read_only",
        "cpu",
        lambda n: n.mount("/dev/nvme2n1 /data ext4 ro,relatime 0 0"),
        severity="reboot",
        device="/data",
    ),
    "nfs-stuck": Fault(
        "mount_stuck", "cpu", lambda n: n.hang("stat"), device="/home", level="light", words="did not answer"
    ),
    "memory-low": Fault(
        "host_memory",
        "cpu",
        _write("/proc/meminfo", "MemTotal: 263921664 kB\nMemAvailable: 900000 kB\n"),
        "warn",
    ),
    "shm-small": Fault(
        "host_shm", "p6-b200", lambda n: n.df("tmpfs 65536 0 65536 0% /dev/shm"), "warn", device="/dev/shm"
    ),
    "clock-off": Fault(
        "host_clock",
        "cpu",
        lambda n: n.tool(
            "chronyc", "System time     : 1.500000000 seconds fast of NTP time\nLeap status     : Normal\n"
        ),
        "warn",
    ),
    "clock-lost": Fault(
        "host_clock", "cpu", lambda n: n.tool("chronyc", "Leap status     : Not synchronised\n"), "warn"
    ),
    "slurmd-dead": Fault("host_slurmd", "cpu", _stop(901), words="start slurmd"),
    "munge-dead": Fault("host_munge", "cpu", _stop(812), words="start munge"),
    "few-files": Fault(
        "host_limits",
        "p6-b200",
        lambda n: n.process(901, "slurmd", limits_text(nofile=1024)),
        "warn",
        words="LimitNOFILE",
    ),
    "memory-errors": Fault(
        "host_memory_errors",
        "cpu",
        _write("/sys/devices/system/edac/mc/mc0/ue_count", "1\n"),
        severity="replace",
        device="mc0",
    ),
    "dmesg-hangs": Fault("host_kernel_log", "cpu", lambda n: n.hang("dmesg"), "warn", words="did not answer"),
    "oom": Fault(
        "host_oom",
        "cpu",
        _log("Out of memory: Killed process 4242 (python) total-vm:1kB"),
        "warn",
        device="python",
    ),
    "oom-daemon": Fault(
        "host_oom",
        "cpu",
        _log("Out of memory: Killed process 901 (slurmd) total-vm:1kB"),
        severity="reboot",
        device="slurmd",
    ),
    "machine-check": Fault(
        "host_machine_check",
        "cpu",
        _log("EDAC MC0: 1 UE memory read error on CPU_SrcID#0"),
        severity="replace",
    ),
    "machine-check-bank": Fault(
        "host_machine_check",
        "cpu",
        _log("mce: [Hardware Error]: CPU 10: Machine Check: 0 Bank 9: ee2000000040110a"),
        severity="replace",
    ),
    "machine-check-bank-corrected": Fault(
        "host_machine_check",
        "cpu",
        _log("mce: [Hardware Error]: CPU 10: Machine Check: 0 Bank 9: 8c00004000010091"),
        "warn",
    ),
    "machine-check-corrected": Fault(
        "host_machine_check", "cpu", _log("mce: [Hardware Error]: Machine check events logged"), "warn"
    ),
    "hung-task": Fault(
        "host_hung_task", "cpu", _log("INFO: task kworker/3:1:812 blocked for more than 122 seconds."), "warn"
    ),
    "soft-lockup": Fault(
        "host_soft_lockup",
        "cpu",
        _log("watchdog: BUG: soft lockup - CPU#7 stuck for 26s! [python:4242]"),
        severity="reboot",
        device="cpu7",
    ),
    "nvme": Fault(
        "host_nvme",
        "cpu",
        _log("nvme nvme1: I/O 812 QID 4 timeout, reset controller"),
        "warn",
        device="nvme1",
    ),
    "nfs-server": Fault(
        "host_nfs_log", "cpu", _log("nfs: server fs1 not responding, still trying"), device="fs1"
    ),
    "remounted": Fault(
        "host_remounted",
        "cpu",
        _log("EXT4-fs (nvme3n1): Remounting filesystem read-only"),
        severity="reboot",
        device="nvme3n1",
    ),
    # Active tests
    "slow-matmul": Fault(
        "load_matmul", "p6-b200", _load(value=200.0), severity="reset", device="gpu6", level="deep"
    ),
    "wrong-matmul": Fault(
        "load_matmul", "p6-b200", _load(wrong=True), severity="replace", device="gpu6", level="deep"
    ),
    "slow-memory": Fault(
        "load_memory", "p6-b200", _load(value=900.0), severity="reset", device="gpu6", level="deep"
    ),
    "slow-all-reduce": Fault(
        "load_all_reduce", "p6-b200", _load(value=40.0), severity="reset", device="gpu6", level="deep"
    ),
}
