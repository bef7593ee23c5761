"""A sound node of every kind raises no alarm, at any level, and is known for what it is."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from everstep.healthcheck.examine import Request, examine
from everstep.healthcheck.history import FileStore, Nowhere
from everstep.healthcheck.registry import Level
from everstep.healthcheck.result import Status
from recorded import KINDS, sound

REPO = Path(__file__).resolve().parents[3]
CAPTURES = next(
    (
        folder
        for folder in (
            Path(os.environ.get("EVERSTEP_SHARED", "/nowhere")) / "data/health",
            REPO.parent / "shared/data/health",
            REPO / "shared/data/health",
        )
        if folder.is_dir()
    ),
    None,
)
captures = pytest.mark.skipif(
    CAPTURES is None, reason="the captures of real nodes are not here (../shared/data/health)"
)


@pytest.mark.parametrize("profile", KINDS)
def test_no_alarm(profile: str, tmp_path: Path) -> None:
    sound(profile, tmp_path / "n")
    store = FileStore(tmp_path / "state" / "counters.json")
    for now, level in ((1000.0, Level.LIGHT), (1060.0, Level.FULL), (1120.0, Level.DEEP)):
        request = Request(level=level, root=tmp_path / "n", site_checks=False)
        report = examine(request, store=store, now=now)
        assert report.findings == ()
        assert report.faults == ()
        assert (report.profile, report.node, report.status) == (profile, "n1", Status.OK)


def captured(tmp_path: Path, tools: dict[str, str]) -> Path:
    """A node whose tools print what real ones printed."""
    assert CAPTURES is not None
    folder = tmp_path / "usr/bin"
    folder.mkdir(parents=True)
    for tool, file in tools.items():
        script = folder / tool
        script.write_text(
            f'#!/bin/sh\ncase "$*" in\n*nvlink*) exit 6 ;;\n*) cat "{CAPTURES / file}" ;;\nesac\n'
        )
        script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return tmp_path


@captures
@pytest.mark.parametrize(
    ("name", "profile", "count"), [("a100", "a100", 1), ("h100", "h100", 8), ("gb200", "gb200-nvl72", 4)]
)
def test_a_real_node_that_is_sound_raises_no_alarm(
    name: str, profile: str, count: int, tmp_path: Path
) -> None:
    root = captured(tmp_path, {"nvidia-smi": f"nvidia-smi-qx-{name}.xml", "dmesg": "kmsg.log"})
    report = examine(Request(root=root, site_checks=False), store=Nowhere())
    assert report.findings == ()
    assert report.faults == ()
    assert report.profile == profile
    assert next(each.value for each in report.results if each.check == "gpu_count") == count
    judged = {each.check for each in report.results if each.status is Status.OK}
    assert judged >= {
        "gpu_ecc",
        "gpu_row_remap",
        "gpu_recovery_action",
        "gpu_temperature",
        "gpu_pcie",
        "gpu_power",
    }
    assert judged >= {"gpu_xid", "gpu_throttle", "gpu_persistence", "gpu_clocks", "gpu_answers"}


@captures
def test_real_nvlinks_are_all_up(tmp_path: Path) -> None:
    root = captured(tmp_path, {"nvidia-smi": "nvidia-smi-qx-a100.xml"})
    script = root / "usr/bin/nvidia-smi"
    script.write_text(
        script.read_text().replace("exit 6", f'cat "{CAPTURES}/nvidia-smi-nvlink-status-a100.txt"')
    )
    report = examine(Request(root=root, names=("nvlink_count",), site_checks=False), store=Nowhere())
    assert [(each.status, each.limit) for each in report.results] == [(Status.OK, 12)]


@captures
def test_a_real_infiniband_port_is_up(tmp_path: Path) -> None:
    assert CAPTURES is not None
    (tmp_path / "sys/class").mkdir(parents=True)
    (tmp_path / "sys/class/infiniband").symlink_to(CAPTURES / "sys-class-infiniband-h100.0")
    request = Request(root=tmp_path, names=("net_ports", "net_errors"), profile="h100", site_checks=False)
    store = FileStore(tmp_path / "state" / "counters.json")
    for now in (1000.0, 1060.0):
        report = examine(request, store=store, now=now)
        assert report.findings == ()
    assert [each.status for each in report.results] == [Status.OK, Status.OK]


@captures
def test_a_real_log_of_a_gpu_that_hangs_asks_for_a_reset(tmp_path: Path) -> None:
    root = captured(tmp_path, {"nvidia-smi": "nvidia-smi-qx-h100.xml", "dmesg": "dmesg-xid-119.log"})
    report = examine(Request(root=root, level=Level.LIGHT, site_checks=False), store=Nowhere())
    assert [(each.check, each.device, each.value, each.severity.word) for each in report.findings] == [
        ("gpu_xid", "0000:9b:00", 119, "reset")
    ]
