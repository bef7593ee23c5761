"""A run of the checks: what breaks is ours and drains nothing, what hangs is named, and time is kept."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path

import psutil
import pytest
from everstep.healthcheck import registry
from everstep.healthcheck.checks.gpu_links import across
from everstep.healthcheck.errors import Absent, HealthError, TimedOut
from everstep.healthcheck.examine import OWN_FAULT, Request, examine
from everstep.healthcheck.facts import Facts
from everstep.healthcheck.history import FileStore, Nowhere
from everstep.healthcheck.profile import Profile
from everstep.healthcheck.registry import REGISTER, Level
from everstep.healthcheck.result import Report, Result, Severity, Status, critical, ok, warn
from recorded import Node, sound


@pytest.fixture(autouse=True)
def _register() -> Iterator[None]:
    registry.load(sites=False)
    before = dict(REGISTER)
    yield
    REGISTER.clear()
    REGISTER.update(before)


def run(root: Path, *names: str, **more: object) -> Report:
    return examine(Request(root=root, names=names, site_checks=False, **more), store=Nowhere())  # type: ignore[arg-type]


def site_check(name: str, level: Level = Level.LIGHT) -> object:
    return registry.check(name, level, source="a site", action="ask the site")


def test_a_site_adds_a_check_of_its_own(tmp_path: Path) -> None:
    @site_check("site_scratch")  # type: ignore[operator]
    def site_scratch(facts: Facts, profile: Profile) -> Iterable[Result]:
        """The scratch disk is there."""
        yield warn("no scratch", "/scratch") if facts.text("/scratch/here") is None else ok("here")

    report = run(tmp_path, "site_scratch")
    assert [(each.check, each.device, each.status) for each in report.results] == [
        ("site_scratch", "/scratch", Status.WARN)
    ]
    assert report.results[0].seconds >= 0


def test_two_checks_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="two checks are called gpu_ecc"):
        site_check("gpu_ecc")(lambda facts, profile: ok(""))  # type: ignore[operator]


def test_a_check_that_breaks_is_a_fault_of_ours_and_no_failure(tmp_path: Path) -> None:
    @site_check("site_broken")  # type: ignore[operator]
    def site_broken(facts: Facts, profile: Profile) -> Iterable[Result]:
        yield critical("never seen", Severity.REPLACE)
        raise KeyError("x")

    report = run(tmp_path, "site_broken", "gpu_count")
    assert [each.status for each in report.results] == [Status.SKIP, Status.SKIP]
    assert report.results[0].reason.startswith(OWN_FAULT)
    assert len(report.faults) == 1 and "KeyError" in report.faults[0]
    assert report.exit_code == 0


def test_a_check_that_finds_nothing_passes(tmp_path: Path) -> None:
    site_check("site_empty")(lambda facts, profile: [])  # type: ignore[operator]
    assert run(tmp_path, "site_empty").status is Status.OK


def test_what_is_absent_is_a_skip_and_what_is_silent_a_warning(tmp_path: Path) -> None:
    def raising(error: Exception) -> object:
        def check(facts: Facts, profile: Profile) -> Result:
            raise error

        return check

    for name, error in (
        ("a", Absent("no tool")),
        ("b", TimedOut("slow")),
        ("c", TimedOut("slow", owner="gpu_smi")),
    ):
        site_check(name)(raising(error))  # type: ignore[operator]
    report = run(tmp_path, "a", "b", "c")
    assert [(each.status, each.reason) for each in report.results] == [
        (Status.SKIP, "no tool"),
        (Status.WARN, "slow"),
        (Status.SKIP, "slow (see gpu_smi)"),
    ]


def test_a_check_that_never_ends_is_named_and_holds_nothing_up(tmp_path: Path) -> None:
    go = threading.Event()

    @site_check("site_stuck")  # type: ignore[operator]
    def site_stuck(facts: Facts, profile: Profile) -> Result:
        go.wait(60)
        return ok("")

    site_check("site_quick")(lambda facts, profile: ok("quick"))  # type: ignore[operator]
    try:
        report = run(tmp_path, "site_stuck", "site_quick", total_s=0.3)
    finally:
        go.set()
    assert [(each.check, each.status) for each in report.results] == [
        ("site_stuck", Status.WARN),
        ("site_quick", Status.OK),
    ]
    assert "did not end" in report.results[0].reason


def test_no_tool_outlives_the_run(tmp_path: Path) -> None:
    node = sound("h100", tmp_path)
    for tool in ("nvidia-smi", "dmesg", "stat", "dcgmi"):
        node.script(tool, 'echo $$ >> "$HERE/pids"; sleep 1000')
    run(tmp_path, total_s=1.0, level=Level.FULL)
    for pid in node.read("/pids").split():
        with contextlib.suppress(psutil.NoSuchProcess):
            psutil.Process(int(pid)).wait(5)  # TimeoutExpired where it lives on; None where it was reaped


def test_an_unknown_check_is_answered_with_what_is_close(tmp_path: Path) -> None:
    with pytest.raises(HealthError, match="did you mean gpu_ecc") as caught:
        run(tmp_path, "gpu_eccc")
    assert caught.value.exit_code == 3


def test_a_folder_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(HealthError, match="is no folder"):
        run(tmp_path / "nowhere")


def test_checks_are_switched_off_by_profile_and_by_request(tmp_path: Path) -> None:
    node = sound("cpu", tmp_path)
    node.write("/etc/everstep/health/profiles/mine.toml", 'extends = "cpu"\noff = ["host_clock"]\n')
    request = Request(root=tmp_path, profile="mine", off=frozenset({"disk_space"}), site_checks=False)
    ran = {each.check for each in examine(request, store=Nowhere()).results}
    assert "host_memory" in ran and not ran & {"host_clock", "disk_space"}


def test_levels_hold_those_before_them(tmp_path: Path) -> None:
    node = sound("cpu", tmp_path)
    node.remove("/usr/bin/stat")
    ran = {}
    for level in (Level.LIGHT, Level.FULL, Level.DEEP):
        report = examine(Request(root=tmp_path, level=level, site_checks=False), store=Nowhere())
        ran[level] = {each.check for each in report.results}
        assert report.level == level.word
    assert ran[Level.LIGHT] < ran[Level.FULL] < ran[Level.DEEP]
    assert not ran[Level.DEEP] & {"dcgm_r3", "dcgm_r4"}


def test_the_report_is_as_documented(tmp_path: Path) -> None:
    node = sound("h100", tmp_path)
    node.set_gpu(3, "remapped_rows/remapped_row_failure", "Yes")
    data = run(tmp_path, "gpu_row_remap", "host_memory").as_dict()
    assert list(data) == ["node", "profile", "level", "status", "severity", "results"]
    assert (data["node"], data["profile"], data["level"]) == ("n1", "h100", "full")
    assert (data["status"], data["severity"]) == ("critical", "replace")
    for result in data["results"]:
        assert list(result) == [
            "check",
            "device",
            "status",
            "severity",
            "reason",
            "value",
            "limit",
            "seconds",
        ]
        assert result["status"] in ("ok", "warn", "critical", "skip")
        assert result["severity"] in ("ok", "monitor", "reset", "reboot", "replace")
    assert Report.from_dict(data).as_dict() == data


def test_counters_that_cannot_be_kept_are_a_fault_of_ours(tmp_path: Path) -> None:
    sound("h100", tmp_path / "n")
    (tmp_path / "file").write_text("")
    store = FileStore(tmp_path / "file" / "x.json")
    report = examine(Request(root=tmp_path / "n", names=("net_ports",), site_checks=False), store=store)
    assert report.status is Status.OK
    assert "not remembered" in report.faults[0]


def test_site_checks_are_found_by_entry_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_site_checks.py").write_text(
        "from everstep.healthcheck.registry import Level, check\n"
        "from everstep.healthcheck.result import ok\n"
        "@check('my_check', Level.LIGHT, source='x', action='y')\n"
        "def my_check(facts, profile):\n    return ok('mine')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    entries = metadata.EntryPoints(
        [
            metadata.EntryPoint("mine", "my_site_checks", registry.GROUP),
            metadata.EntryPoint("bad", "not_there_at_all", registry.GROUP),
        ]
    )
    monkeypatch.setattr(metadata, "entry_points", lambda group: entries.select(group=group))
    registry._load_sites.cache_clear()
    try:
        (tmp_path / "n").mkdir()
        report = examine(Request(root=tmp_path / "n", names=("my_check",)), store=Nowhere())
    finally:
        registry._load_sites.cache_clear()
    assert report.results[0].reason == "mine"
    assert any("bad (not_there_at_all) cannot be loaded" in fault for fault in report.faults)


# EFA comes up late


def efa(node: Node, root: Path, up_after: int, level: Level) -> tuple[Report, list[float]]:
    slept: list[float] = []
    source = node.root / "sys/class/infiniband/rdmap1s6"
    source.rename(root / "late")

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == up_after:
            (root / "late").rename(source)

    request = Request(root=node.root, names=("efa_count",), level=level, site_checks=False)
    return examine(request, store=Nowhere(), sleep=sleep), slept


def test_an_efa_device_that_comes_up_late_is_waited_for(tmp_path: Path) -> None:
    report, slept = efa(sound("p4d", tmp_path / "n"), tmp_path, 2, Level.FULL)
    assert report.status is Status.OK and slept == [5.0, 5.0]


def test_three_tries_are_enough(tmp_path: Path) -> None:
    report, slept = efa(sound("p4d", tmp_path / "n"), tmp_path, 9, Level.FULL)
    assert report.status is Status.CRITICAL and "in 3 tries" in report.results[0].reason and len(slept) == 2


def test_a_light_check_does_not_wait(tmp_path: Path) -> None:
    report, slept = efa(sound("p4d", tmp_path / "n"), tmp_path, 9, Level.LIGHT)
    assert report.status is Status.CRITICAL and slept == []


# A port that was up


def test_a_port_that_went_down_is_told_from_one_that_was_never_cabled(tmp_path: Path) -> None:
    node = sound("h100", tmp_path / "n")
    store = FileStore(tmp_path / "s" / "f.json")
    request = Request(root=node.root, names=("net_ports",), site_checks=False)
    examine(request, store=store, now=1000.0)
    node.write("/sys/class/infiniband/mlx5_0/ports/1/state", "1: DOWN\n")
    (found,) = examine(request, store=store, now=1060.0).findings
    assert (found.status, found.device) == (Status.CRITICAL, "mlx5_0/1") and "went down" in found.reason


# Throttling


def test_one_sample_of_throttling_decides_nothing(tmp_path: Path) -> None:
    node = sound("h100", tmp_path / "n")
    node.set_all("clocks_event_reasons/clocks_event_reason_hw_slowdown", "Active")
    assert run(node.root, "gpu_throttle").status is Status.OK


@pytest.mark.parametrize(("minutes", "status"), [(6, Status.OK), (7, Status.CRITICAL)])
def test_more_than_six_minutes_of_ten_are_too_many(minutes: int, status: Status, tmp_path: Path) -> None:
    node = sound("h100", tmp_path / "n")
    store = FileStore(tmp_path / "s" / "f.json")
    request = Request(root=node.root, names=("gpu_throttle",), site_checks=False)
    for minute in range(10):
        active = "Active" if minute >= 10 - minutes else "Not Active"
        node.set_gpu(2, "clocks_event_reasons/clocks_event_reason_hw_slowdown", active)
        report = examine(request, store=store, now=6000.0 + 60 * minute)
    assert report.status is status


# NVL72


def test_a_node_in_another_clique_than_its_segment_is_astray() -> None:
    found = across({"n1": "c/1", "n2": "c/1", "n3": "c/2", "n4": ""})
    assert {node: each.status for node, each in found.items()} == {
        "n1": Status.OK,
        "n2": Status.OK,
        "n3": Status.CRITICAL,
        "n4": Status.SKIP,
    }
    assert across({"n1": ""})["n1"].status is Status.SKIP


def test_light_checks_are_quick_on_a_node_with_much_to_read(tmp_path: Path) -> None:
    node = sound("p5", tmp_path)
    line = "IPv6: ADDRCONF(NETDEV_CHANGE): cali16b7bb8d9d5: link becomes ready"
    node.tool(
        "dmesg", node.read("/recorded/dmesg") + "".join(f"[{at:12.6f}] {line}\n" for at in range(50_000))
    )
    before = time.process_time()
    report = run(tmp_path, level=Level.LIGHT)
    assert report.findings == ()
    # Processor time, which others' load does not change; Slurm and the Prolog count in seconds.
    assert time.process_time() - before < 2.5


def test_a_daemon_that_has_executed_itself_anew_still_runs(tmp_path: Path) -> None:
    """slurmd does, told to reconfigure, and then the kernel calls it slurmd-wlm."""
    node = sound("cpu", tmp_path)
    node.write("/proc/901/comm", "slurmd-wlm\n")
    report = examine(Request(root=tmp_path, level=Level.LIGHT, site_checks=False), store=Nowhere())
    assert [each.status for each in report.results if each.check == "host_slurmd"] == [Status.OK]
