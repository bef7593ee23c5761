"""Tools' outputs, whole and broken: what is absent or N/A is unsupported, and nothing breaks the reader."""

from __future__ import annotations

import copy
import json
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from everstep.healthcheck import profile as profiles
from everstep.healthcheck import registry
from everstep.healthcheck.checks.gpu_memory import uncorrectable
from everstep.healthcheck.examine import OWN_FAULT, Request, examine, run_check
from everstep.healthcheck.facts import Facts
from everstep.healthcheck.history import Nowhere
from everstep.healthcheck.readers import dcgm, links, neuron, proc, smi
from everstep.healthcheck.registry import Level
from everstep.healthcheck.result import Status
from everstep.healthcheck.runner import Ran, System
from hypothesis import given, settings
from hypothesis import strategies as st
from recorded import TEMPLATES, sound

GPU = (TEMPLATES / "gpu.xml").read_text()


def document(*gpus: str) -> bytes:
    body = "".join(gpus)
    head = f'<?xml version="1.0" ?>\n<nvidia_smi_log><attached_gpus>{len(gpus)}</attached_gpus>'
    return f"{head}{body}</nvidia_smi_log>".encode()


# nvidia-smi


def test_elements_are_read_with_their_units() -> None:
    (gpu,) = smi.parse(document(GPU)).gpus
    assert gpu.pci == "0000:10:00"
    assert gpu.number("temperature/gpu_temp") == 41
    assert gpu.number("pci/pci_gpu_link_info/link_widths/max_link_width") == 16
    assert gpu.number("gpu_power_readings/current_power_limit") == 700
    assert gpu.yes("remapped_rows/remapped_row_pending") is False


@pytest.mark.parametrize(
    "text",
    ["N/A", "[N/A]", "", "Not Supported", "[Not Supported]", "Requested functionality has been deprecated"],
)
def test_unsupported_is_neither_good_nor_bad(text: str) -> None:
    gpu = smi.parse(document(f"<gpu><a>{text}</a></gpu>")).gpus[0]
    assert gpu.text("a") is None and gpu.number("a") is None and gpu.yes("a") is None
    assert gpu.text("b") is None


def test_output_that_ends_early_gives_the_gpus_that_are_whole() -> None:
    text = document(GPU, GPU)
    read = smi.parse(text[: len(text) - 200])
    assert len(read.gpus) == 1 and not read.complete and read.attached == 2


def test_output_that_is_not_utf_8_is_read() -> None:
    text = document(GPU).replace(b"H100 80GB", b"H100 \xff\xfe\x00\x1b 80GB")
    read = smi.parse(text)
    assert read.complete and read.gpus[0].number("temperature/gpu_temp") == 41


@pytest.mark.parametrize("text", [b"", b"NVIDIA-SMI has failed", b"<gpu>", b"\xff\xfe"])
def test_what_is_no_answer_has_no_gpus(text: bytes) -> None:
    read = smi.parse(text)
    assert read.gpus == () and not read.complete


@settings(max_examples=40)
@given(st.integers(0, len(document(GPU))), st.binary(max_size=20))
def test_no_bytes_break_the_reader(at: int, noise: bytes) -> None:
    text = document(GPU)
    for gpu in smi.parse(text[:at] + noise + text[at:]).gpus:
        uncorrectable(gpu, "volatile")


def test_counters_of_older_drivers_are_read() -> None:
    old = (
        "<gpu><ecc_errors><volatile><double_bit><total>3</total></double_bit></volatile></ecc_errors>"
        "<clocks_throttle_reasons><clocks_throttle_reason_hw_slowdown>Active</clocks_throttle_reason_hw_slowdown>"
        "</clocks_throttle_reasons></gpu>"
    )
    from everstep.healthcheck.checks.gpu_load import throttling

    (gpu,) = smi.parse(document(old)).gpus
    assert uncorrectable(gpu, "volatile") == 3
    assert throttling(gpu) == {"hw_slowdown": 1.0}


@pytest.mark.parametrize("everything", ["N/A", "[N/A]", ""])
def test_a_gpu_that_tells_nothing_raises_no_alarm(everything: str, tmp_path: Path) -> None:
    node = sound("gpu", tmp_path)
    for gpu in node.gpus:
        for element in gpu.iter():
            if len(element) == 0 and element.tag != "product_name":
                element.text = everything
    node.print_gpus()
    report = examine(Request(root=tmp_path, site_checks=False), store=Nowhere())
    assert report.findings == () and report.faults == ()


def test_a_gpu_with_no_elements_raises_no_alarm(tmp_path: Path) -> None:
    node = sound("gpu", tmp_path)
    node.gpus = [ET.Element("gpu", {"id": "00000000:10:00.0"})]
    node.print_gpus()
    report = examine(Request(root=tmp_path, site_checks=False), store=Nowhere())
    assert report.findings == () and report.faults == ()


@pytest.mark.parametrize("cut", [0, 10, 500, 3000, 9000])
def test_output_that_ends_early_is_a_warning_not_a_drain(cut: int, tmp_path: Path) -> None:
    node = sound("h100", tmp_path)
    node.tool("nvidia-smi", node.read("/recorded/smi.xml")[:cut])
    report = examine(
        Request(root=tmp_path, profile="h100", names=("gpu_smi", "gpu_ecc"), site_checks=False),
        store=Nowhere(),
    )
    assert report.status is Status.WARN and report.faults == ()


def test_a_card_with_fewer_lanes_by_design_is_sound(tmp_path: Path) -> None:
    node = sound("gpu", tmp_path)
    node.set_all("pci/pci_gpu_link_info/link_widths/current_link_width", "8x")
    report = examine(Request(root=tmp_path, names=("gpu_pcie",), site_checks=False), store=Nowhere())
    assert report.status is Status.OK
    node.set_gpu(1, "pci/pci_gpu_link_info/link_widths/current_link_width", "4x")
    report = examine(Request(root=tmp_path, names=("gpu_pcie",), site_checks=False), store=Nowhere())
    assert [(each.device, each.value, each.limit) for each in report.findings] == [("gpu1", 4, 8)]


def test_mig_keeps_dcgm_away(tmp_path: Path) -> None:
    node = sound("h100", tmp_path)
    node.set_gpu(0, "mig_mode/current_mig", "Enabled")
    report = examine(Request(root=tmp_path, names=("dcgm_r1",), site_checks=False), store=Nowhere())
    assert report.status is Status.SKIP and "MIG" in report.results[0].reason


class OnlySmi(System):
    """A node of which nothing is known but what nvidia-smi prints."""

    def __init__(self, root: Path, output: bytes) -> None:
        super().__init__(root)
        self.output = output

    def run(self, argv: Sequence[str], seconds: float, *, first_line: bool = False) -> Ran:
        return Ran(0, self.output) if list(argv) == ["nvidia-smi", "-q", "-x"] else Ran(None, missing=True)


def leaves(element: ET.Element, path: str = "") -> Iterator[str]:
    for each in element:
        below = f"{path}/{each.tag}".lstrip("/")
        if len(each):
            yield from leaves(each, below)
        else:
            yield below


@pytest.mark.parametrize("text", ["N/A", "[Not Supported]", "Unknown Error", None])
def test_no_element_is_missed_so_much_that_it_raises_an_alarm(text: str | None, tmp_path: Path) -> None:
    checks = [
        each
        for each in registry.load(sites=False)[0].values()
        if "nvidia-smi -q -x" in each.source and each.name != "gpu_count"  # here is one of four
    ]
    profile = profiles.read_all(profiles.ours())["gb200-nvl72"]
    whole = ET.fromstring(GPU)  # noqa: S314  (our own file)
    for path in leaves(whole):
        gpu = copy.deepcopy(whole)
        fabric = gpu.find("fabric")
        assert fabric is not None
        for tag, value in (("cliqueId", "2"), ("clusterUuid", "00000001-0000-0000-0000-000000000001")):
            next(fabric.iter(tag)).text = value
        above = gpu.find(path.rpartition("/")[0]) if "/" in path else gpu
        element = gpu.find(path)
        assert above is not None and element is not None
        if text is None:
            above.remove(element)
        else:
            element.text = text
        output = document(ET.tostring(gpu, encoding="unicode"))
        facts = Facts(OnlySmi(tmp_path, output), Level.LIGHT)
        for each in checks:
            for result in run_check(each, facts, profile):
                assert result.status < Status.WARN and OWN_FAULT not in result.reason, (path, result)


# NVLink


def test_links_up_and_down_are_told_apart() -> None:
    text = "GPU 0: NVIDIA X (UUID: GPU-1)\n\t Link 0: 26.562 GB/s\n\t Link 1: <inactive>\nGPU 1: NVIDIA X\n"
    assert links.status(text) == {0: {0: True, 1: False}, 1: {}}


def test_errors_are_summed_over_links() -> None:
    counts = ("0: Replay Errors: 2", "0: Recovery Errors: 0", "0: CRC Errors: 7", "1: Replay Errors: 3")
    text = "GPU 0: X\n" + "".join(f"\t Link {count}\n" for count in counts)
    assert links.errors(text) == {0: {"replay": 5, "recovery": 0, "crc": 7}}


def test_dcgm_tells_links_too() -> None:
    text = (
        "+---+\n|  NvLink Link Status |\nGPUs:\n    gpuId 0:\n        U U D X\n    gpuId 1:\n"
        "        U U U _\n"
        "NvSwitches:\n    physicalId 8:\n        X X D\n"
    )
    assert links.dcgm_status(text) == {0: {0: True, 1: True, 2: False}, 1: {0: True, 1: True, 2: True}}


# DCGM


def test_every_result_of_dcgm_is_read() -> None:
    outcomes = dcgm.parse((TEMPLATES / "dcgmi-diag-r1.json").read_bytes())
    assert [each.status for each in outcomes].count("pass") == 5
    assert outcomes[-1].gpu == "gpu2" and outcomes[-1].status == "skip"


@pytest.mark.parametrize("text", [b"", b"{}", b"Error: unable to connect", b'{"DCGM": 1}', b"{"])
def test_what_is_no_diagnostic_is_refused(text: bytes) -> None:
    with pytest.raises(ValueError):
        dcgm.parse(text)


def test_dcgm_without_its_daemon_is_a_skip(tmp_path: Path) -> None:
    node = sound("h100", tmp_path)
    node.tool("dcgmi", "Error: unable to establish a connection to the specified host: localhost\n", 1)
    report = examine(Request(root=tmp_path, names=("dcgm_r1",), site_checks=False), store=Nowhere())
    assert report.status is Status.SKIP and "unable to establish" in report.results[0].reason


# Neuron


def test_neuron_monitor_is_read_group_by_group() -> None:
    data = json.loads((TEMPLATES / "neuron-monitor.json").read_text())
    broken = copy.deepcopy(data)
    broken["system_data"]["neuron_hw_counters"]["error"] = "no driver"
    broken["neuron_runtime_data"][0]["report"]["execution_stats"]["error_summary"]["hardware"] = 3
    report = neuron.monitored(json.dumps(broken).encode())
    assert report.hardware_errors == 3
    assert report.errors == ("system_data.neuron_hw_counters: no driver",)
    assert report.counters[0]["mem_ecc_corrected"] == 2
    assert neuron.monitored(json.dumps(data).encode()).errors == ()


# /proc


def test_mounts_are_unescaped_and_the_last_covers() -> None:
    found = proc.mounts(
        "/dev/a /my\\040disk ext4 ro 0 0\n/dev/b /x xfs rw 0 0\n/dev/c /x xfs ro,noatime 0 0\nbad\n"
    )
    assert [(each.device, each.path, each.read_only) for each in found] == [
        ("/dev/a", "/my disk", True),
        ("/dev/c", "/x", True),
    ]


def test_limits_are_read_with_infinity() -> None:
    found = proc.limits(
        "Max open files            1024                 524288               files     \n"
        "Max locked memory         unlimited            unlimited            bytes     \n"
    )
    assert found == {"Max open files": (1024, 524288), "Max locked memory": (float("inf"), float("inf"))}


@pytest.mark.parametrize(
    "mount",
    [
        "/dev/nvme0n1p1 /repo ext4 ro,relatime 0 0",  # a bind mount of a disk that is writable elsewhere
        "/dev/sdb1 /opt/images ext4 ro 0 0",  # where nobody writes
        "/dev/loop3 /scratch/image ext4 ro 0 0",
        "tmpfs /sys/firmware tmpfs ro 0 0",
    ],
)
def test_what_is_read_only_by_design_is_sound(mount: str, tmp_path: Path) -> None:
    node = sound("cpu", tmp_path)
    node.mount(mount)
    report = examine(Request(root=tmp_path, names=("disk_read_only",), site_checks=False), store=Nowhere())
    assert report.status is Status.OK


def test_what_fstab_says_decides(tmp_path: Path) -> None:
    node = sound("cpu", tmp_path)
    node.mount("/dev/sdb1 /data ext4 ro 0 0")
    node.mount("/dev/sdc1 /opt/images ext4 ro 0 0")
    node.write("/etc/fstab", "LABEL=a /data ext4 ro,noauto 0 2\nLABEL=b /opt/images ext4 defaults 0 2 # rw\n")
    report = examine(Request(root=tmp_path, names=("disk_read_only",), site_checks=False), store=Nowhere())
    assert [each.device for each in report.findings] == ["/opt/images"]
