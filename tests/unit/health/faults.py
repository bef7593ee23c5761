"""All faults that recorded nodes are given: these, and those of NVIDIA nodes."""

from __future__ import annotations

import json
from collections.abc import Callable

from fault import Fault, log, stop, write
from faults_gpu import GPU_FAULTS
from recorded import Node, infiniband, limits_text

_KILLED = "total-vm:1kB, anon-rss:1kB, file-rss:0kB, shmem-rss:0kB"
_EFA = "/sys/class/infiniband/rdmap2s6/ports/1"


def _load(**result: object) -> Callable[[Node], None]:
    results = [{"device": f"gpu{i}", "value": 9000.0, "wrong": False} for i in range(8)]
    results[6].update(result)
    return lambda node: node.tool("everstep-load", json.dumps({"results": results}))


def _neuron(path: str, text: str = "1", index: int = 3) -> Callable[[Node], object]:
    return write(f"/sys/devices/virtual/neuron_device/neuron{index}/{path}", text)


def _monitor(node: Node) -> None:
    text = node.read("/recorded/neuron-monitor")
    node.write(
        "/recorded/neuron-monitor", text.replace('"sram_ecc_uncorrected": 0', '"sram_ecc_uncorrected": 2', 1)
    )


FAULTS: dict[str, Fault] = {
    **GPU_FAULTS,
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
        log(
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
        "net_ports", "p4d", write(f"{_EFA}/state", "1: DOWN\n"), severity="reboot", device="rdmap2s6/1"
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
        write(f"{_EFA}/hw_counters/retrans_timeout_events", "40\n"),
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
        write("/proc/modules", "ib_core 524288 0 - Live 0x0\n"),
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
        lambda n: (
            n.mount("/dev/nvme2n1 /data ext4 ro,relatime 0 0"),
            n.write("/etc/fstab", "LABEL=root / ext4 defaults 0 1\nLABEL=d /data ext4 defaults,nofail 0 2\n"),
        ),
        severity="reboot",
        device="/data",
    ),
    "nfs-stuck": Fault(
        "mount_stuck", "cpu", lambda n: n.hang("stat"), device="/home", level="light", words="did not answer"
    ),
    "memory-low": Fault(
        "host_memory",
        "cpu",
        write("/proc/meminfo", "MemTotal: 263921664 kB\nMemAvailable: 900000 kB\n"),
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
    "slurmd-dead": Fault("host_slurmd", "cpu", stop(901), words="start slurmd"),
    "munge-dead": Fault("host_munge", "cpu", stop(812), words="start munge"),
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
        write("/sys/devices/system/edac/mc/mc0/ue_count", "1\n"),
        severity="replace",
        device="mc0",
    ),
    "dmesg-hangs": Fault("host_kernel_log", "cpu", lambda n: n.hang("dmesg"), "warn", words="did not answer"),
    "oom": Fault(
        "host_oom",
        "cpu",
        log("Out of memory: Killed process 4242 (python) total-vm:1kB"),
        "warn",
        device="python",
    ),
    "oom-daemon": Fault(
        "host_oom",
        "cpu",
        log("Out of memory: Kill process 901 (slurmd) score 5 or sacrifice child"),
        severity="reboot",
        device="slurmd",
    ),
    "oom-root-s-sshd": Fault(
        "host_oom",
        "cpu",
        log(f"Out of memory: Killed process 812 (sshd) {_KILLED}, UID:0 pgtables:84kB oom_score_adj:0"),
        severity="reboot",
        device="sshd",
    ),
    "oom-munged": Fault(
        "host_oom",
        "cpu",
        log(f"Out of memory: Killed process 812 (munged) {_KILLED}, UID:971 pgtables:84kB oom_score_adj:0"),
        severity="reboot",
        device="munged",
    ),
    "oom-user-s-sshd": Fault(
        "host_oom",
        "cpu",
        log(f"Out of memory: Killed process 812 (sshd) {_KILLED}, UID:1000 pgtables:84kB oom_score_adj:0"),
        "warn",
        device="sshd",
    ),
    "oom-user-s-systemd-on-rhel-8": Fault(
        "host_oom",
        "cpu",
        log("Out of memory: Killed process 812 (systemd), UID 1000, total-vm:1kB, anon-rss:1kB"),
        "warn",
        device="systemd",
    ),
    "machine-check": Fault(
        "host_machine_check",
        "cpu",
        log("EDAC MC0: 1 UE memory read error on CPU_SrcID#0"),
        severity="replace",
    ),
    "machine-check-bank": Fault(
        "host_machine_check",
        "cpu",
        log("mce: [Hardware Error]: CPU 10: Machine Check: 0 Bank 9: ee2000000040110a"),
        severity="replace",
    ),
    "machine-check-bank-corrected": Fault(
        "host_machine_check",
        "cpu",
        log("mce: [Hardware Error]: CPU 10: Machine Check: 0 Bank 9: 8c00004000010091"),
        "warn",
    ),
    "machine-check-corrected": Fault(
        "host_machine_check", "cpu", log("mce: [Hardware Error]: Machine check events logged"), "warn"
    ),
    "hung-task": Fault(
        "host_hung_task", "cpu", log("INFO: task kworker/3:1:812 blocked for more than 122 seconds."), "warn"
    ),
    "soft-lockup": Fault(
        "host_soft_lockup",
        "cpu",
        log("watchdog: BUG: soft lockup - CPU#7 stuck for 26s! [python:4242]"),
        severity="reboot",
        device="cpu7",
    ),
    "hard-lockup": Fault(
        "host_soft_lockup",
        "cpu",
        log("watchdog: Watchdog detected hard LOCKUP on cpu 12"),
        severity="reboot",
        device="cpu12",
        words="hard lockup",
    ),
    "nvme-disabled": Fault(
        "host_nvme",
        "cpu",
        log("nvme nvme1: Disabling device after reset failure: -19"),
        severity="reboot",
        device="nvme1",
        words="gone",
    ),
    "nvme": Fault(
        "host_nvme",
        "cpu",
        log("nvme nvme1: I/O 812 QID 4 timeout, reset controller"),
        "warn",
        device="nvme1",
    ),
    "nfs-server": Fault(
        "host_nfs_log", "cpu", log("nfs: server fs2 not responding, still trying"), device="fs2"
    ),
    "nfs-server-soft": Fault(
        "host_nfs_log", "cpu", log("nfs: server fs2 not responding, timed out"), "warn", device="fs2"
    ),
    "remounted": Fault(
        "host_remounted",
        "cpu",
        log("EXT4-fs (nvme3n1): Remounting filesystem read-only"),
        severity="reboot",
        device="nvme3n1",
    ),
    "xfs-shut-down": Fault(
        "host_remounted",
        "cpu",
        log("XFS (nvme1n1): Filesystem has been shut down due to log error (0x2)."),
        severity="reboot",
        device="nvme1n1",
    ),
    "xfs-shut-down-by-an-older-kernel": Fault(
        "host_remounted",
        "cpu",
        log(
            "XFS (nvme1n1): Log I/O Error (0x2) detected at xlog_ioend_work+0x6e/0x70 [xfs] "
            "(fs/xfs/xfs_log.c:1378).  Shutting down filesystem."
        ),
        severity="reboot",
        device="nvme1n1",
    ),
    "pcie-fatal": Fault(
        "host_pcie",
        "cpu",
        log("nvme 0000:34:00.0: PCIe Bus Error: severity=Uncorrectable (Fatal), type=Data Link Layer"),
        severity="reboot",
        device="0000:34:00.0",
    ),
    "pcie-fatal-elsewhere": Fault(
        "host_pcie",
        "cpu",
        log("pcieport 0000:00:01.0: AER: PCIe Bus Error: severity=Uncorrected (Fatal), type=Transaction"),
        "warn",
        device="0000:00:01.0",
    ),
    "machine-check-multi-bit": Fault(
        "host_machine_check",
        "cpu",
        log(
            "{7}[Hardware Error]: event severity: recoverable",
            "{7}[Hardware Error]:  Error 0, type: recoverable",
            "{7}[Hardware Error]:   section_type: memory error",
            "{7}[Hardware Error]:   error_type: 3, multi-bit ECC",
        ),
        severity="replace",
    ),
    "machine-check-recovered": Fault(
        "host_machine_check",
        "cpu",
        log(
            "{7}[Hardware Error]: event severity: recoverable",
            "{7}[Hardware Error]:   section_type: PCIe error",
        ),
        "warn",
        words="recovered from",
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
