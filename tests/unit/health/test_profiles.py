"""Profiles: known by what the node is, named, extended by a site; what is wrong in one is said in a line."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from everstep.healthcheck import profile as profiles
from everstep.healthcheck.errors import HealthError
from everstep.healthcheck.examine import Request, examine
from everstep.healthcheck.history import FileStore, Nowhere
from everstep.healthcheck.profile import Profile, of_instance_type, of_products, read_all
from recorded import KINDS, sound

ALL = read_all(profiles.ours())


def test_there_is_one_for_every_kind_of_node() -> None:
    assert set(ALL) == set(KINDS)


@pytest.mark.parametrize(
    ("name", "gpus", "links", "efa", "neurons", "cores"),
    [
        ("p4d", 8, 12, 4, None, None),
        ("p4de", 8, 12, 4, None, None),
        ("p5", 8, 18, 32, None, None),
        ("p5e", 8, 18, 32, None, None),
        ("p5en", 8, 18, 16, None, None),
        ("p6-b200", 8, 18, 8, None, None),
        ("gb200-nvl72", 4, 18, None, None, None),
        ("trn1", None, None, 8, 16, 2),
        ("trn1n", None, None, 16, 16, 2),
        ("trn2", None, None, 16, 16, 4),
        ("h100", None, 18, None, None, None),
        ("a100", None, 12, None, None, None),
        ("cpu", None, None, None, None, None),
    ],
)
def test_what_each_should_have(
    name: str, gpus: int | None, links: int | None, efa: int | None, neurons: int | None, cores: int | None
) -> None:
    found = ALL[name]
    assert (found.gpu.count, found.gpu.nvlinks, found.network.efa) == (gpus, links, efa)
    assert (found.neuron.count, found.neuron.cores) == (neurons, cores)
    assert found.network.memlock_gib == (16 if efa else None)
    assert found.gpu.clique == (name == "gb200-nvl72")


@pytest.mark.parametrize(
    ("products", "name"),
    [
        (["NVIDIA A100-SXM4-40GB"], "a100"),
        (["NVIDIA A100-SXM4-80GB"] * 8, "a100"),
        (["NVIDIA A100-PCIE-40GB"], "gpu"),
        (["NVIDIA H100 80GB HBM3"] * 8, "h100"),
        (["NVIDIA H100 PCIe"], "gpu"),
        (["NVIDIA H100 NVL"], "gpu"),
        (["NVIDIA H200"] * 8, "h200"),
        (["NVIDIA H200 NVL"], "gpu"),
        (["NVIDIA GH200 480GB"], "gpu"),
        (["NVIDIA B200"] * 8, "b200"),
        (["NVIDIA GB200"] * 4, "gb200-nvl72"),
        (["NVIDIA H100 80GB HBM3", "Tesla T4"], "gpu"),
        (["Tesla T4"], "gpu"),
        ([], "cpu"),
    ],
)
def test_a_box_is_known_by_its_gpus(products: list[str], name: str) -> None:
    assert of_products(ALL, products).name == name


def test_an_instance_type_decides_before_the_gpus_do() -> None:
    found = of_instance_type(ALL, "p5en.48xlarge")
    assert found is not None and found.name == "p5en"
    assert of_instance_type(ALL, "c7i.large") is None
    assert of_instance_type(ALL, "") is None


def test_a_node_whose_driver_hangs_is_known_by_its_pci_bus(tmp_path: Path) -> None:
    node = sound("h100", tmp_path)
    node.remove("/usr/bin/nvidia-smi")
    for index in range(8):
        folder = f"/sys/bus/pci/devices/0000:{index:02x}:00.0"
        for name, text in (("vendor", "0x10de"), ("class", "0x030200"), ("device", "0x2330")):
            node.write(f"{folder}/{name}", f"{text}\n")
    report = examine(Request(root=tmp_path, names=("host_memory",), site_checks=False), store=Nowhere())
    assert report.profile == "h100"


def test_the_driver_tells_of_gpus_without_nvidia_smi(tmp_path: Path) -> None:
    node = sound("cpu", tmp_path)
    node.write("/proc/driver/nvidia/gpus/0000:10:00.0/information", "Model: \t\t NVIDIA H200\nIRQ: 1\n")
    report = examine(Request(root=tmp_path, names=("host_memory",), site_checks=False), store=Nowhere())
    assert report.profile == "h200"


def test_a_gpu_that_the_driver_has_lost_is_missed_on_a_plain_box_too(tmp_path: Path) -> None:
    node = sound("h100", tmp_path)
    for index in range(9):
        folder = f"/sys/bus/pci/devices/0000:{index:02x}:00.0"
        for name, text in (("vendor", "0x10de"), ("class", "0x030200"), ("device", "0x2330")):
            node.write(f"{folder}/{name}", f"{text}\n")
    report = examine(Request(root=tmp_path, names=("gpu_count",), site_checks=False), store=Nowhere())
    assert [(each.status.word, each.value, each.limit) for each in report.results] == [("critical", 8, 9)]


def test_a_gpu_that_nvidia_smi_counts_and_does_not_show_is_missed(tmp_path: Path) -> None:
    node = sound("h100", tmp_path)
    node.write(
        "/recorded/smi.xml", node.read("/recorded/smi.xml").replace("<attached_gpus>8", "<attached_gpus>9")
    )
    report = examine(Request(root=tmp_path, names=("gpu_count",), site_checks=False), store=Nowhere())
    assert [(each.status.word, each.value, each.limit) for each in report.results] == [("critical", 8, 9)]


def test_a_gpu_that_was_there_before_is_missed(tmp_path: Path) -> None:
    node = sound("h100", tmp_path / "n")
    store = FileStore(tmp_path / "s" / "f.json")
    request = Request(root=node.root, names=("gpu_count",), site_checks=False)
    assert examine(request, store=store, now=1000.0).findings == ()
    del node.gpus[2]
    node.print_gpus()
    (found,) = examine(request, store=store, now=1060.0).findings
    assert (found.value, found.limit) == (7, 8)


@pytest.mark.parametrize("name", ["trn1", "trn1n", "trn2"])
def test_a_trainium_node_is_known_by_its_driver_too(name: str, tmp_path: Path) -> None:
    node = sound(name, tmp_path)
    node.remove("/sys/devices/virtual/dmi")
    for index in range(16):
        folder = f"/sys/devices/virtual/neuron_device/neuron{index}/info/architecture"
        node.write(f"{folder}/instance_type", name.capitalize())
    report = examine(Request(root=tmp_path, names=("neuron_count",), site_checks=False), store=Nowhere())
    assert (report.profile, report.findings) == (name, ())


def test_a_small_trainium_instance_is_not_taken_for_the_large_one(tmp_path: Path) -> None:
    node = sound("trn1", tmp_path)
    node.remove("/sys/devices/virtual/dmi")
    for index in range(1, 16):
        node.remove(f"/sys/devices/virtual/neuron_device/neuron{index}")
    report = examine(Request(root=tmp_path, names=("neuron_count",), site_checks=False), store=Nowhere())
    assert (report.profile, report.findings) == ("cpu", ())


# Extended by a site


def with_site(**texts: str) -> dict[str, Profile]:
    return read_all(profiles.ours(), {name.replace("_", "-"): text for name, text in texts.items()})


def test_a_site_extends_a_profile() -> None:
    found = with_site(ours='extends = "p5"\noff = ["host_clock"]\n[gpu]\nxid_window_h = 1\n')["ours"]
    assert (found.gpu.count, found.network.efa, found.gpu.xid_window_h) == (8, 32, 1.0)
    assert found.off == {"host_clock"}
    assert found.detect.instance_types == ()


def test_a_site_changes_one_of_ours() -> None:
    changed = with_site(p5='extends = "p5"\n[host]\ndisk_warn = 80\n')
    assert changed["p5"].host.disk_warn == 80.0
    assert changed["p5"].network.efa == 32
    assert changed["p5"].detect.instance_types == ("p5.48xlarge",)
    assert changed["p5e"].host.disk_warn == 80.0
    assert with_site(p5="[host]\ndisk_warn = 80\n")["p5"].network.efa == 32


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("gpu = [", "no TOML"),
        ('extends = "p6"', "extends 'p6', which there is not"),
        ('extends = "mine2"', "by way of"),
        ("[gpu]\ncuont = 8", "there is no 'cuont'"),
        ('[gpu]\ncount = "8"', "count should be int"),
        ("[gpu]\ncount = true", "count should be int"),
        ("gpu = 8", "should be a table"),
        ("off = [1]", "list of words"),
        ('[host]\ndisk_warn = "90"', "should be float"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(text: str, words: str) -> None:
    with pytest.raises(HealthError, match=re.escape(words)) as caught:
        read_all({"mine": text, "mine2": 'extends = "mine"'})
    assert caught.value.exit_code == 3 and "\n" not in str(caught.value)


def test_a_sites_profile_on_a_recorded_node_is_read(tmp_path: Path) -> None:
    node = sound("p5", tmp_path)
    node.write("/etc/everstep/health/profiles/big.toml", 'extends = "p5"\n[gpu]\ncount = 16\n')
    report = examine(
        Request(root=tmp_path, profile="big", names=("gpu_count",), site_checks=False), store=Nowhere()
    )
    assert [(each.value, each.limit) for each in report.findings] == [(8, 16)]


def test_a_profile_that_is_not_there_is_named_with_those_that_are(tmp_path: Path) -> None:
    with pytest.raises(HealthError, match="there is no profile 'p7'; there are: a100, b200"):
        examine(Request(root=tmp_path, profile="p7"), store=Nowhere())
