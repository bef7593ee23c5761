"""The faults of NVIDIA nodes."""

from __future__ import annotations

import json
from collections.abc import Callable

from fault import Fault, log, stop, write
from recorded import Node

XID = "NVRM: Xid (PCI:0000:43:00): "
_CLIQUE = "fabric/cliqueId"


def _set(path: str, text: str, gpu: int = 3) -> Callable[[Node], None]:
    return lambda node: node.set_gpu(gpu, path, text)


def _smi_exits(code: int, words: str = "") -> Callable[[Node], None]:
    return lambda node: node.tool("nvidia-smi", words, code)


def _no_interpreter(node: Node) -> None:
    node.write("/usr/bin/nvidia-smi", "#!/opt/gone/bin/python\n")


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


GPU_FAULTS: dict[str, Fault] = {
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
    "smi-cannot-be-run": Fault(
        "gpu_smi",
        "p6-b200",
        _smi_exits(127, "libnvidia-ml.so.1: cannot open shared object file"),
        "warn",
        words="exit code 127): mend the tool",
    ),
    "smi-of-no-interpreter": Fault(
        "gpu_smi",
        "p6-b200",
        _no_interpreter,
        "warn",
        words="exit code 126): mend the tool",
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
        write("/recorded/apps", "4242, python\n"),
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
    "fabric-manager": Fault("fabric_manager", "p6-b200", stop(700), words="start nvidia-fabricmanager"),
    "no-clique": Fault("gpu_clique", "gb200-nvl72", _set(_CLIQUE, "0"), severity="reset", device="gpu3"),
    "another-clique": Fault("gpu_clique", "gb200-nvl72", _set(_CLIQUE, "7"), severity="reset", device="gpu3"),
    # NVIDIA: the kernel log and DCGM
    "xid-79": Fault(
        "gpu_xid",
        "p6-b200",
        log(f"{XID}79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."),
        severity="reboot",
        device="0000:43:00",
        words="Xid 79",
    ),
    "xid-119": Fault(
        "gpu_xid",
        "p6-b200",
        log(f"{XID}119, pid=7, name=x, Timeout after 6s"),
        severity="reset",
        device="0000:43:00",
    ),
    "xid-13": Fault(
        "gpu_xid", "p6-b200", log(f"{XID}13, pid=7, name=x, Graphics Exception"), "warn", device="0000:43:00"
    ),
    "xid-45-alone": Fault(
        "gpu_xid", "p6-b200", log(f"{XID}45, pid=7, name=x, Ch 00000008"), "warn", device="0000:43:00"
    ),
    "xid-154": Fault(
        "gpu_xid",
        "p6-b200",
        log(f"{XID}154, GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot Required)"),
        severity="reboot",
        device="0000:43:00",
        words="Node Reboot Required",
    ),
    "off-the-bus": Fault(
        "gpu_off_bus",
        "p6-b200",
        log("NVRM: GPU 0000:18:00.0: GPU has fallen off the bus."),
        severity="reboot",
        device="0000:18:00",
    ),
    "off-the-bus-by-another-driver": Fault(
        "gpu_off_bus",
        "p6-b200",
        log("NVRM: GPU at PCI:0000:18:00: GPU-1f2e3d4c-0000-0000-0000-000000000000 has fallen off the bus."),
        severity="reboot",
        device="0000:18:00",
    ),
    "off-the-bus-in-one-line": Fault(
        "gpu_off_bus",
        "p6-b200",
        log(
            "NVRM: The NVIDIA GPU 0000:18:00.0 (PCI ID: 10de:2901) installed in this system has fallen off "
            "the bus and is not responding to commands."
        ),
        severity="reboot",
        device="0000:18:00",
    ),
    "off-the-bus-in-four-lines": Fault(
        "gpu_off_bus",
        "p6-b200",
        log(
            "NVRM: The NVIDIA GPU 0000:21:00.0",
            "NVRM: (PCI ID: 10de:2901)",
            "NVRM: installed in this system is not supported by open nvidia.ko",
            "NVRM: The NVIDIA GPU 0000:18:00.0",
            "NVRM: (PCI ID: 10de:2901)",
            "NVRM: installed in this system has",
            "NVRM: fallen off the bus and is not responding to commands.",
        ),
        severity="reboot",
        device="0000:18:00",
    ),
    "not-initialised": Fault(
        "gpu_init",
        "p6-b200",
        log("NVRM: GPU 0000:18:00.0: RmInitAdapter failed! (0x22:0x65:884)"),
        severity="reboot",
        device="0000:18:00",
    ),
    "not-initialised-once": Fault(
        "gpu_init",
        "p6-b200",
        log("NVRM: GPU 0000:10:00.0: RmInitAdapter failed! (0x22:0x65:884)"),
        "warn",
        device="0000:10:00",
        words="now can",
    ),
    "sxid-fatal": Fault(
        "nvswitch_sxid",
        "p6-b200",
        log("nvidia-nvswitch0: SXid (PCI:0000:c3:00.0): 24007, Fatal, Link 28 sourcetrack timeout error"),
        severity="reset",
        device="0000:c3:00",
        words="24007",
    ),
    "sxid-not-fatal": Fault(
        "nvswitch_sxid",
        "p6-b200",
        log("nvidia-nvswitch0: SXid (PCI:0000:c3:00.0): 12028, Non-fatal, Link 46 egress PRIV error"),
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
}
