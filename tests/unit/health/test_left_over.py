"""Left-over processes: on the job's own GPUs alone, and only those that do not end within a moment."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from everstep.healthcheck import child, idle
from everstep.healthcheck.examine import Request, examine
from everstep.healthcheck.history import Nowhere
from everstep.healthcheck.registry import Level
from everstep.healthcheck.result import Report, Severity, Status
from recorded import Node, sound

UUID = "GPU-00000003-1111-1111-1111-111111111111"  # of gpu3


def look(node: Node, words: str, total_s: float | None = 60.0, slept: list[float] | None = None) -> Report:
    naps: list[float] = [] if slept is None else slept
    request = Request(
        level=Level.LIGHT,
        names=("gpu_processes",),
        root=node.root,
        idle_gpus=idle.parse(words),
        total_s=total_s,
        site_checks=False,
    )
    return examine(request, store=Nowhere(), sleep=naps.append)


def found(report: Report) -> list[tuple[str, object]]:
    assert not report.faults
    return [(each.device, each.value) for each in report.findings if each.status is Status.CRITICAL]


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return sound("h100", tmp_path / "n")


# --- which GPUs are the job's ---


@pytest.mark.parametrize(
    ("words", "gpus"),
    [
        ("3", {3}),
        ("0,3", {0, 3}),
        ("0-3", {0, 1, 2, 3}),
        ("0, 2-3,7", {0, 2, 3, 7}),
        (UUID, {UUID.lower()}),
        (f"{UUID},5", {UUID.lower(), 5}),
        ("all", idle.ALL),
    ],
)
def test_gpus_are_named_by_numbers_ranges_and_uuids(words: str, gpus: set[int | str]) -> None:
    assert idle.parse(words) == gpus
    for context in ("prolog_slurmd", "epilog_slurmd"):
        environ = {"SLURM_JOB_GPUS": words, "SLURM_SCRIPT_CONTEXT": context}
        assert idle.of_job(environ) == (gpus, ())
    assert idle.of_job({"SLURM_JOB_GPUS": words}) == (None, ())  # we are in the job


@pytest.mark.parametrize("words", ["a", "0;1", "3-1", "0-999999999", "MIG-1f2e3d4c", "0,", "-1", "GPU-"])
def test_what_is_not_understood_is_said_and_the_other_checks_run(
    words: str,
    node: Node,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("SLURM_SCRIPT_CONTEXT", "epilog_slurmd")
    monkeypatch.setenv("SLURM_JOB_GPUS", words)
    (tmp_path / "health.toml").write_text(f"root = '{node.root}'\n")
    child.main(["--level", "light", "--config", str(tmp_path / "health.toml")])
    answer = child.parse(capsys.readouterr().out)
    assert answer.report is not None and answer.report.status is Status.OK
    assert any(f"SLURM_JOB_GPUS={words!r} is not understood" in fault for fault in answer.faults)


@pytest.mark.parametrize("words", ["3", "2-3", UUID, "GPU-00000003", "all", "0-7"])
def test_a_process_on_a_gpu_of_the_job_s_is_left_over(words: str, node: Node) -> None:
    node.run_on(3, 4242)
    report = look(node, words)
    assert found(report) == [("gpu3", 4242)]
    assert report.severity is Severity.RESET


@pytest.mark.parametrize("words", ["0-2,4-7", "GPU-00000002", "0"])
def test_a_process_on_another_job_s_gpu_is_none_of_ours(words: str, node: Node) -> None:
    node.run_on(3, 4242)
    assert look(node, words).status is Status.OK


def test_a_gpu_whose_device_file_has_another_number_is_not_taken_for_the_job_s(node: Node) -> None:
    """Slurm counts device files, nvidia-smi goes by the bus: on some boards they differ."""
    node.set_gpu(0, "minor_number", "3")
    node.set_gpu(3, "minor_number", "0")
    node.run_on(0, 4242)
    assert look(node, "0-2").status is Status.OK
    assert found(look(node, "0-3")) == [("gpu0", 4242)]


def test_a_uuid_that_is_not_here_is_said(node: Node) -> None:
    report = look(node, "GPU-deadbeef")
    assert [each.status for each in report.results] == [Status.WARN]
    assert "no GPU here is gpu-deadbeef" in report.results[0].reason


# --- MIG ---


def test_a_job_on_another_mig_instance_of_the_same_gpu_is_not_blamed(node: Node) -> None:
    node.set_all("mig_mode/current_mig", "Enabled")
    node.run_on(3, 4242)
    for words in ("3", "0-7", "all", UUID):
        (result,) = look(node, words).results
        assert result.status is Status.SKIP and "split by MIG and not looked at: gpu0" in result.reason


def test_where_one_gpu_is_split_numbers_name_no_gpus(node: Node) -> None:
    """Slurm numbers the instances: 3 is one of gpu0's then, and gpu3 another job's."""
    node.set_gpu(0, "mig_mode/current_mig", "Enabled")
    node.run_on(3, 4242)
    assert look(node, "3").status is Status.SKIP
    assert found(look(node, UUID)) == [("gpu3", 4242)]
    assert found(look(node, "all")) == [("gpu3", 4242)]


def test_what_is_sound_beside_a_split_gpu_is_said_with_it(node: Node) -> None:
    node.set_gpu(0, "mig_mode/current_mig", "Enabled")
    node.run_on(0, 4242)
    (result,) = look(node, "all").results
    assert result.status is Status.OK and "not looked at: gpu0" in result.reason


# --- a second look ---


def ends_after(node: Node, looks: int) -> None:
    """nvidia-smi lists the process so many times more."""
    node.write("/recorded/looks", "x" * looks)
    script = node.read("/usr/bin/nvidia-smi").replace(
        'cat "$HERE/recorded/apps" 2> /dev/null',
        'left=$(cat "$HERE/recorded/looks"); printf %s "${left#x}" > "$HERE/recorded/looks"; '
        'test -z "$left" || cat "$HERE/recorded/apps"',
    )
    node.write("/usr/bin/nvidia-smi", script)


def test_a_process_that_is_about_to_end_is_not_left_over(node: Node) -> None:
    node.run_on(3, 4242)
    ends_after(node, 3)
    slept: list[float] = []
    assert look(node, "3", slept=slept).status is Status.OK
    assert slept == [0.5] * 4  # and no longer than it took


def test_a_process_that_is_still_there_after_a_while_is(node: Node) -> None:
    node.run_on(3, 4242)
    slept: list[float] = []
    assert found(look(node, "3", slept=slept)) == [("gpu3", 4242)]
    assert 1 <= len(slept) <= 10 and sum(slept) <= 5


def test_of_two_the_one_that_stays_is_left_over(node: Node) -> None:
    node.run_on(3, 4242)
    node.run_on(3, 4243)
    node.write("/recorded/apps", "4243, python\n")
    assert found(look(node, "3")) == [("gpu3", 4243)]


def test_nothing_is_waited_for_where_nothing_runs(node: Node) -> None:
    slept: list[float] = []
    look(node, "all", slept=slept)
    assert slept == []


def test_a_second_look_that_cannot_be_had_changes_nothing(node: Node) -> None:
    node.run_on(3, 4242)
    script = node.read("/usr/bin/nvidia-smi").replace('cat "$HERE/recorded/apps" 2> /dev/null', "exit 9")
    node.write("/usr/bin/nvidia-smi", script)
    assert found(look(node, "3")) == [("gpu3", 4242)]


def test_the_second_look_ends_before_the_run_does(node: Node) -> None:
    node.run_on(3, 4242)
    script = node.read("/usr/bin/nvidia-smi").replace('cat "$HERE/recorded/apps" 2> /dev/null', "sleep 1000")
    node.write("/usr/bin/nvidia-smi", script)
    start = time.monotonic()
    assert found(look(node, "3", total_s=6.0)) == [("gpu3", 4242)]  # and no warning that it did not end
    assert time.monotonic() - start < 6.5


def test_a_look_at_this_moment_alone_reads_nothing_else(
    node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("SLURM_SCRIPT_CONTEXT", "epilog_slurmd")
    monkeypatch.setenv("SLURM_JOB_GPUS", "0-3")
    config = tmp_path / "health.toml"
    config.write_text(f"root = '{node.root}'\n")
    words = ["--level", "light", "--limit", "8", "--config", str(config), "--moment"]
    child.main(words)
    answer = child.parse(capsys.readouterr().out)
    assert answer.report is not None
    assert [(each.check, each.status) for each in answer.report.results] == [("gpu_processes", Status.OK)]
    config.write_text(f"root = '{node.root}'\n[checks.gpu_processes]\nact = 'off'\n")
    child.main(words)
    answer = child.parse(capsys.readouterr().out)
    assert answer.report is not None and answer.report.results == ()
    assert child.command("light", moment=True)[-1] == "--moment"
