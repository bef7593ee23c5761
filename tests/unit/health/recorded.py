"""Recorded nodes, built from the templates in tests/fixtures/health, for `everstep health check --root`."""

from __future__ import annotations

import copy
import json
import os
import shutil
import stat
import sys
import xml.etree.ElementTree as ET
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

TEMPLATES = Path(__file__).resolve().parents[2] / "fixtures" / "health"
BOOT_ID = "3c0ffee0-0000-4000-8000-000000000001"
UPTIME = 20000.0
EFA_COUNTERS = {
    "rx_drops": 4,
    "rdma_read_wr_err": 0,
    "rdma_write_wr_err": 0,
    "retrans_timeout_events": 17,
    "impaired_remote_conn_events": 0,
    "unresponsive_remote_events": 2,
    "rx_bytes": 123456789,
}


@dataclass(frozen=True)
class Kind:
    """What a kind of node has."""

    gpus: int = 0
    product: str = ""
    links: int = 0
    efa: int = 0
    neurons: int = 0
    cores: int = 0
    instance: str = ""
    fabric: str = ""  # "", "alone" or "rack"


KINDS = {
    "p4d": Kind(8, "NVIDIA A100-SXM4-40GB", 12, efa=4, instance="p4d.24xlarge"),
    "p4de": Kind(8, "NVIDIA A100-SXM4-80GB", 12, efa=4, instance="p4de.24xlarge"),
    "p5": Kind(8, "NVIDIA H100 80GB HBM3", 18, efa=32, instance="p5.48xlarge", fabric="alone"),
    "p5e": Kind(8, "NVIDIA H200", 18, efa=32, instance="p5e.48xlarge", fabric="alone"),
    "p5en": Kind(8, "NVIDIA H200", 18, efa=16, instance="p5en.48xlarge", fabric="alone"),
    "p6-b200": Kind(8, "NVIDIA B200", 18, efa=8, instance="p6-b200.48xlarge", fabric="alone"),
    "gb200-nvl72": Kind(4, "NVIDIA GB200", 18, instance="p6e-gb200.36xlarge", fabric="rack"),
    "h100": Kind(8, "NVIDIA H100 80GB HBM3", 18, fabric="alone"),
    "h200": Kind(8, "NVIDIA H200", 18, fabric="alone"),
    "b200": Kind(8, "NVIDIA B200", 18, fabric="alone"),
    "a100": Kind(4, "NVIDIA A100-SXM4-40GB", 12),
    "gpu": Kind(2, "Tesla V100-SXM2-32GB"),
    "trn1": Kind(efa=8, neurons=16, cores=2, instance="trn1.32xlarge"),
    "trn1n": Kind(efa=16, neurons=16, cores=2, instance="trn1n.32xlarge"),
    "trn2": Kind(efa=16, neurons=16, cores=4, instance="trn2.48xlarge"),
    "cpu": Kind(),
}


class Node:
    """A recorded node under a folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.gpus: list[ET.Element] = []
        self.links: list[list[bool]] = []
        self.link_errors: list[dict[str, int]] = []

    def write(self, path: str, text: str | bytes) -> Path:
        """A file of the node's."""
        where = self.root / path.lstrip("/")
        where.parent.mkdir(parents=True, exist_ok=True)
        where.write_bytes(text if isinstance(text, bytes) else text.encode())
        return where

    def read(self, path: str) -> str:
        """The text of a file of the node's."""
        return (self.root / path.lstrip("/")).read_text()

    def remove(self, path: str) -> None:
        """Take away a file or a folder of the node's."""
        where = self.root / path.lstrip("/")
        if where.is_dir() and not where.is_symlink():
            shutil.rmtree(where)
        else:
            where.unlink()

    def script(self, name: str, body: str) -> None:
        """A tool of the node's, as a shell script; `$HERE` is the node's root."""
        text = f'#!/bin/sh\nHERE="${{0%/usr/bin/*}}"\n{body}\n'
        where = self.write(f"/usr/bin/{name}", text)
        where.chmod(where.stat().st_mode | stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH)

    def tool(self, name: str, output: str | bytes, code: int = 0) -> None:
        """A tool that prints this, whatever it is asked."""
        self.write(f"/recorded/{name}", output)
        self.script(name, f'cat "$HERE/recorded/{name}"\nexit {code}')

    def hang(self, name: str) -> None:
        """A tool that never answers. Its child must not outlive it."""
        self.script(name, "sleep 1000")

    def set_gpu(self, index: int, path: str, text: str) -> None:
        """Change one element of one GPU."""
        found = self.gpus[index].find(path)
        if found is None:
            parent, _, tag = path.rpartition("/")
            above = self.gpus[index].find(parent) if parent else self.gpus[index]
            if above is None:
                raise KeyError(path)
            found = ET.SubElement(above, tag)
        found.text = text
        self.print_gpus()

    def set_all(self, path: str, text: str) -> None:
        """Change one element of all GPUs."""
        for index in range(len(self.gpus)):
            self.set_gpu(index, path, text)

    def print_gpus(self, code: int = 0) -> None:
        """Write what nvidia-smi prints."""
        document = ET.Element("nvidia_smi_log")
        ET.SubElement(document, "driver_version").text = "580.105.08"
        ET.SubElement(document, "attached_gpus").text = str(len(self.gpus))
        document.extend(self.gpus)
        xml = '<?xml version="1.0" ?>\n<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v13.dtd">\n'
        self.write("/recorded/smi.xml", xml + ET.tostring(document, encoding="unicode"))
        names = [
            f"GPU {i}: {gpu.findtext('product_name')} (UUID: GPU-{i})" for i, gpu in enumerate(self.gpus)
        ]
        status, errors = [], []
        for i, name in enumerate(names):
            status.append(name)
            errors.append(name)
            for link, up in enumerate(self.links[i] if i < len(self.links) else ()):
                status.append(f"\t Link {link}: {'26.562 GB/s' if up else '<inactive>'}")
                for kind in ("replay", "recovery", "crc"):
                    count = self.link_errors[i][kind] if link == 0 else 0
                    errors.append(
                        f"\t Link {link}: {kind.upper() if kind == 'crc' else kind.title()} Errors: {count}"
                    )
        self.write("/recorded/nvlink-s", "\n".join(status) + "\n")
        self.write("/recorded/nvlink-e", "\n".join(errors) + "\n")
        self.script(
            "nvidia-smi",
            'case "$*" in\n'
            '"-q -x") cat "$HERE/recorded/smi.xml" ;;\n'
            '"nvlink -s") cat "$HERE/recorded/nvlink-s" ;;\n'
            '"nvlink -e") cat "$HERE/recorded/nvlink-e" ;;\n'
            '--query-compute-apps*) cat "$HERE/recorded/apps" 2> /dev/null ;;\n'
            f"esac\nexit {code}",
        )

    def run_on(self, index: int, pid: int, name: str = "python") -> None:
        """A process on one of its GPUs."""
        processes = self.gpus[index].find("processes")
        assert processes is not None
        info = ET.SubElement(processes, "process_info")
        for tag, text in (("pid", str(pid)), ("type", "C"), ("process_name", name)):
            ET.SubElement(info, tag).text = text
        known = self.root / "recorded/apps"
        self.write("/recorded/apps", (known.read_text() if known.exists() else "") + f"{pid}, {name}\n")
        self.print_gpus()

    def log(self, *lines: str, at: float = UPTIME - 60) -> None:
        """More lines of the kernel's, a minute ago."""
        text = self.read("/recorded/dmesg")
        self.tool("dmesg", text + "".join(f"[{at:12.6f}] {line}\n" for line in lines))

    def process(self, pid: int, name: str, limits: str = "") -> None:
        """A process that runs."""
        self.write(f"/proc/{pid}/comm", f"{name}\n")
        self.write(f"/proc/{pid}/cmdline", f"/usr/sbin/{name}\0-D\0")
        if limits:
            self.write(f"/proc/{pid}/limits", limits)

    def mount(self, line: str) -> None:
        """One more line of /proc/mounts."""
        self.write("/proc/mounts", self.read("/proc/mounts") + line + "\n")

    def df(self, *lines: str, inodes: bool = False) -> None:
        """More file systems in df's answer."""
        name = "/recorded/df-i" if inodes else "/recorded/df-k"
        self.write(name, self.read(name) + "".join(f"{line}\n" for line in lines))


def limits_text(memlock: str = "unlimited", nofile: int = 1048576) -> str:
    """/proc/PID/limits, its parts that matter."""
    return (
        "Limit                     Soft Limit           Hard Limit           Units     \n"
        f"Max open files            {nofile:<20} {nofile:<20} files     \n"
        f"Max locked memory         {memlock:<20} {memlock:<20} bytes     \n"
    )


def sound(profile: str, root: Path) -> Node:
    """A node that nothing is wrong with."""
    kind = KINDS[profile]
    node = Node(root)
    root.mkdir(parents=True, exist_ok=True)
    _host(node, kind)
    if kind.gpus:
        _gpus(node, kind)
    for index in range(kind.efa):
        _efa(node, index)
    if not kind.efa and kind.fabric == "alone":
        infiniband(node, "mlx5_0", "4: ACTIVE", "5: LinkUp")
        infiniband(node, "mlx5_1", "1: DOWN", "3: Disabled")
        infiniband(node, "mlx5_bond_0", "1: DOWN", "2: Polling", "Ethernet")
    if kind.efa:
        node.tool("fi_info", (TEMPLATES / "fi_info-efa.txt").read_text())
    if kind.neurons:
        _neurons(node, kind)
    return node


def _host(node: Node, kind: Kind) -> None:
    node.write("/etc/hostname", "n1\n")
    vendor, product = ("Amazon EC2", kind.instance) if kind.instance else ("Supermicro", "SYS-821GE-TNHR")
    node.write("/sys/devices/virtual/dmi/id/sys_vendor", f"{vendor}\n")
    node.write("/sys/devices/virtual/dmi/id/product_name", f"{product}\n")
    (node.root / "sys/class/infiniband").mkdir(parents=True)
    (node.root / "home").mkdir()
    node.write("/sys/devices/system/edac/mc/mc0/ue_count", "0\n")
    node.write("/sys/devices/system/edac/mc/mc0/ce_count", "12\n")
    node.write("/proc/uptime", f"{UPTIME:.2f} 99999.00\n")
    node.write("/proc/sys/kernel/random/boot_id", f"{BOOT_ID}\n")
    node.write(
        "/proc/meminfo", "MemTotal:  263921664 kB\nMemFree: 200000000 kB\nMemAvailable: 240000000 kB\n"
    )
    node.write(
        "/proc/modules",
        "efa 131072 0 - Live 0x0\nib_uverbs 200704 1 efa, Live 0x0\nib_core 524288 2 efa, Live 0x0\n",
    )
    node.write(
        "/proc/mounts",
        "/dev/nvme0n1p1 / ext4 rw,relatime,errors=remount-ro 0 0\n"
        "tmpfs /dev/shm tmpfs rw,nosuid,nodev 0 0\n"
        "/dev/nvme1n1 /scratch xfs rw,noatime 0 0\n"
        "fs1:/home /home nfs4 rw,vers=4.1 0 0\n"
        "/dev/loop1 /snap/core/1 squashfs ro,nodev 0 0\n"
        "/dev/nvme0n1p15 /boot/efi vfat rw 0 0\n",
    )
    node.write("/etc/fstab", "LABEL=root / ext4 defaults 0 1\n")
    node.write(
        "/recorded/df-k",
        "Filesystem     1024-blocks      Used Available Capacity Mounted on\n"
        "/dev/nvme0n1p1   203056560  44012312 159027864      22% /\n"
        "tmpfs            131960832         0 131960832       0% /dev/shm\n"
        "/dev/nvme1n1    3748905484 812345678 2936559806     22% /scratch\n"
        "/dev/loop1           65536     65536         0     100% /snap/core/1\n",
    )
    node.write(
        "/recorded/df-i",
        "Filesystem        Inodes   IUsed     IFree IUse% Mounted on\n"
        "/dev/nvme0n1p1  25804800  412345  25392455    2% /\n"
        "tmpfs           32990208       1  32990207    1% /dev/shm\n"
        "/dev/nvme1n1   375027072   81234 374945838    1% /scratch\n",
    )
    node.script(
        "df", 'case "$*" in\n*-i*) cat "$HERE/recorded/df-i" ;;\n*) cat "$HERE/recorded/df-k" ;;\nesac'
    )
    node.tool("dmesg", (TEMPLATES / "kernel-sound.log").read_text())
    node.tool("chronyc", (TEMPLATES / "chronyc-tracking.txt").read_text())
    node.script("stat", "echo nfs")
    node.process(1, "systemd")
    node.process(812, "munged")
    node.process(901, "slurmd", limits_text())
    node.write("/run/slurmd.pid", "901\n")
    node.write("/etc/munge/munge.key", "")


def _gpus(node: Node, kind: Kind) -> None:
    template = ET.fromstring((TEMPLATES / "gpu.xml").read_text())  # noqa: S314  (our own file)
    node.process(700, "nv-fabricmanage")
    node.write("/usr/bin/nv-fabricmanager", "")
    for index in range(kind.gpus):
        gpu = copy.deepcopy(template)
        bus = f"00000000:{16 + 17 * index:02X}:00.0"
        gpu.set("id", bus)
        values = {"product_name": kind.product, "pci/pci_bus_id": bus, "minor_number": str(index)}
        values["uuid"] = f"GPU-{index:08x}-1111-1111-1111-111111111111"
        values["serial"] = f"16500000000{index:02d}"
        if not kind.fabric:
            values |= dict.fromkeys(
                ("fabric/state", "fabric/status", "fabric/cliqueId", "fabric/clusterUuid"), "N/A"
            )
        if "V100" in kind.product:  # it retires pages, and remaps no rows
            pages, rows = "retired_pages", "remapped_rows"
            values |= {f"{pages}/pending_retirement": "No", f"{pages}/pending_blacklist": "No"}
            values |= {f"{pages}/double_bit_retirement/retired_count": "0"}
            values |= {f"{rows}/remapped_row_pending": "N/A", f"{rows}/remapped_row_failure": "N/A"}
        if kind.fabric == "rack":
            values |= {
                "fabric/cliqueId": "2",
                "fabric/clusterUuid": "00000001-0000-0000-0000-000000000001",
                "fabric/health/summary": "Healthy",
                "fabric/health/bandwidth": "Full",
                "fabric/health/route_unhealthy": "False",
            }
        for path, text in values.items():
            element = gpu.find(path)
            if element is None:
                raise KeyError(path)
            element.text = text
        node.gpus.append(gpu)
        node.links.append([True] * kind.links)
        node.link_errors.append({"replay": 3, "recovery": 0, "crc": 100})
    node.tool("dcgmi", (TEMPLATES / "dcgmi-diag-r1.json").read_text())
    good = {"results": [{"device": f"gpu{i}", "value": 9000.0, "wrong": False} for i in range(kind.gpus)]}
    node.tool("everstep-load", json.dumps(good))
    node.print_gpus()


def _efa(node: Node, index: int) -> None:
    folder = f"/sys/class/infiniband/rdmap{index}s6"
    node.write(f"{folder}/device/vendor", "0x1d0f\n")
    node.write(f"{folder}/ports/1/state", "4: ACTIVE\n")
    node.write(f"{folder}/ports/1/phys_state", "5: LinkUp\n")
    node.write(f"{folder}/ports/1/rate", "100 Gb/sec (4X EDR)\n")
    for name, value in EFA_COUNTERS.items():
        node.write(f"{folder}/ports/1/hw_counters/{name}", f"{value}\n")


def infiniband(node: Node, device: str, state: str, physical: str, layer: str = "InfiniBand") -> None:
    """A port of a Mellanox card."""
    folder = f"/sys/class/infiniband/{device}/ports/1"
    values = {"state": state, "phys_state": physical, "link_layer": layer, "rate": "400 Gb/sec (4X NDR)"}
    values |= {"counters/link_downed": "0", "counters/symbol_error": "7", "counters/port_rcv_errors": "14"}
    for name, text in values.items():
        node.write(f"{folder}/{name}", f"{text}\n")


def _neurons(node: Node, kind: Kind) -> None:
    listed = []
    for index in range(kind.neurons):
        folder = f"/sys/devices/virtual/neuron_device/neuron{index}"
        node.write(f"{folder}/core_count", str(kind.cores))
        node.write(f"{folder}/connected_devices", "12, 3, 4, 1")
        node.write(f"{folder}/info/serial_number", f"{0xABC000 + index:016x}\n")
        node.write(f"{folder}/info/architecture/instance_type", "Trn2\n" if kind.cores == 4 else "Trn1\n")
        node.write(f"{folder}/stats/power/utilization", "POWER_STATUS_VALID,1700000000,1.00,9.00,5.00\n")
        for name in ("sram_ecc_uncorrected", "mem_ecc_uncorrected", "mem_ecc_repairable_uncorrected"):
            node.write(f"{folder}/stats/hardware/{name}", "0\n")
        for core in range(kind.cores):
            for name in ("hw_error", "hw_hbm_ue_error", "hw_nc_ue_error", "hw_dma_abort_error", "timeout"):
                for part in ("total", "present"):
                    node.write(f"{folder}/neuron_core{core}/stats/status/{name}/{part}", "0")
        listed.append(
            {
                "neuron_device": index,
                "bdf": f"{index:02x}:00.0",
                "nc_count": kind.cores,
                "neuron_processes": [],
            }
        )
    node.tool("neuron-ls", json.dumps(listed))
    # As the real one does, it goes on for ever after its first report.
    node.write("/recorded/neuron-monitor", (TEMPLATES / "neuron-monitor.json").read_text())
    node.script("neuron-monitor", 'cat "$HERE/recorded/neuron-monitor"\nsleep 1000')


Spoil = Callable[[Node], object]


def main(words: list[str]) -> int:
    """Write a recorded node to a folder."""
    from faults import FAULTS

    if len(words) < 2:
        print(
            f"usage: recorded.py PROFILE DIR [FAULT]\nprofiles: {' '.join(KINDS)}\nfaults: {' '.join(FAULTS)}"
        )
        return 64
    node = sound(words[0], Path(words[1]))
    for name in words[2:]:
        FAULTS[name].spoil(node)
    print(os.path.abspath(node.root))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
