"""`everstep health check` as people and scripts use it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from everstep.healthcheck import cli
from everstep.healthcheck.errors import HealthError
from faults import FAULTS
from recorded import sound


@pytest.fixture(autouse=True)
def _state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test leaves anything in this machine's own state."""
    from everstep.healthcheck import examine, history

    store = history.FileStore(tmp_path / "state" / "counters.json")
    monkeypatch.setattr(examine, "default_store", lambda root: store)


def check(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = cli.main(["check", *words])
    out, err = capsys.readouterr()
    return code, out, err


def test_json_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sound("p5en", tmp_path / "n")
    code, out, err = check(capsys, "--root", str(tmp_path / "n"), "--json")
    data = json.loads(out)
    assert (code, err, out.count("\n")) == (0, "", 1)
    assert (data["node"], data["profile"], data["level"], data["status"], data["severity"]) == (
        "n1", "p5en", "full", "ok", "ok",
    )  # fmt: skip


@pytest.mark.parametrize(("fault", "code"), [(None, 0), ("power-limit", 1), ("remap-failure", 2)])
def test_exit_codes_are_nagios(
    fault: str | None, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    node = sound("h100", tmp_path / "n")
    if fault:
        FAULTS[fault].spoil(node)
    assert check(capsys, "--root", str(node.root))[0] == code


def test_findings_come_first_with_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    node = sound("h100", tmp_path / "n")
    FAULTS["power-limit"].spoil(node)
    FAULTS["remap-failure"].spoil(node)
    _, out, _ = check(capsys, "--root", str(node.root))
    lines = out.splitlines()
    assert lines[0].split() == ["STATUS", "CHECK", "DEVICE", "DO", "REASON"]
    assert lines[1].split()[:4] == ["critical", "gpu_row_remap", "gpu3", "replace"]
    assert any(line.split()[:3] == ["warn", "gpu_power", "gpu3"] for line in lines[2:])
    assert "n1 (h100, full): critical, do: replace; 1 critical, 1 warnings" in out
    assert "\x1b" not in out  # no terminal, no colours


def test_one_check_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    node = sound("h100", tmp_path / "n")
    FAULTS["remap-failure"].spoil(node)
    words = ("--root", str(node.root), "--json")
    assert check(capsys, *words, "--check", "gpu_count")[0] == 0
    code, out, _ = check(capsys, *words, "--check", "gpu_count", "--check", "gpu_row_remap")
    assert code == 2 and {each["check"] for each in json.loads(out)["results"]} == {
        "gpu_count",
        "gpu_row_remap",
    }


def test_what_is_left_over_is_looked_for_in_a_prolog_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    node = sound("h100", tmp_path / "n")
    node.write("/recorded/apps", "4242, python\n")
    words = ("--root", str(node.root), "--check", "gpu_processes")
    assert check(capsys, *words)[0] == 0
    assert check(capsys, *words, "--idle-gpus", "all")[0] == 2
    monkeypatch.setenv("SLURM_SCRIPT_CONTEXT", "prolog_slurmd")
    monkeypatch.setenv("SLURM_JOB_GPUS", "0,1,2,3,4,5,6,7")
    assert check(capsys, *words)[0] == 2


def test_a_job_of_two_gpus_is_not_troubled_by_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    node = sound("h100", tmp_path / "n")
    node.run_on(1, 421)
    node.run_on(5, 425)
    words = (
        "--root",
        str(node.root),
        "--level",
        "light",
        "--check",
        "gpu_processes",
        "--json",
        "--idle-gpus",
    )
    code, out, _ = check(capsys, *words, "0,1")
    assert code == 2 and [each["device"] for each in json.loads(out)["results"]] == ["gpu1"]
    assert check(capsys, *words, "2,3")[0] == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--check", "nope"], "there is no check 'nope'"),
        (["--profile", "p9"], "there is no profile 'p9'"),
        (["--level", "x"], "'x' is not one of"),
        (["--root", "/nowhere/at/all"], "is no folder"),
        (["--idle-gpus", "a,b"], "--idle-gpus wants numbers"),
        (["--bogus"], "No such option"),
        (["extra"], "unexpected extra argument"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_3(words: list[str], said: str, tmp_path: Path) -> None:
    root = [] if "--root" in words else ["--root", str(tmp_path)]
    with pytest.raises(HealthError) as caught:
        cli.main(["check", *root, *words])
    assert said in str(caught.value) and "\n" not in str(caught.value)
    assert caught.value.exit_code == 3


def test_the_checks_there_are_are_listed_with_source_and_action(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["checks"]) == 0
    out = capsys.readouterr().out
    assert "gpu_row_remap" in out and "nvidia-smi -q -x: remapped_rows" in " ".join(out.split())
    assert cli.main(["check", "--list"]) == 0
    assert capsys.readouterr().out == out


def test_a_check_that_is_ended_leaves_no_tool_behind(tmp_path: Path) -> None:
    node = sound("h100", tmp_path / "n")
    node.script("nvidia-smi", 'echo $$ > "$HERE/pid.new"; mv "$HERE/pid.new" "$HERE/pid"; sleep 1000')
    words = ["-m", "everstep.launcher.cli", "health", "check", "--root", str(node.root), "--check", "gpu_smi"]
    ran = subprocess.Popen([sys.executable, *words], env={**os.environ, "XDG_STATE_HOME": str(tmp_path)})
    while not (node.root / "pid").exists():
        assert ran.poll() is None
        time.sleep(0.02)
    tool = psutil.Process(int(node.read("/pid")))
    ran.terminate()
    assert ran.wait(30) == 128 + 15
    tool.wait(30)


def test_the_nodes_of_a_segment_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = []
    for name, number in (("n1", "2"), ("n2", "2"), ("n3", "5")):
        node = sound("gb200-nvl72", tmp_path / name)
        node.write("/etc/hostname", name)
        node.set_all("fabric/cliqueId", number)
        lines.append(check(capsys, "--root", str(node.root), "--check", "gpu_clique", "--json")[1])
    (tmp_path / "all").write_text("".join(lines))
    assert cli.main(["segment", str(tmp_path / "all")]) == 2
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith("n3: critical: in another clique") and len(out) == 3
    (tmp_path / "all").write_text("no JSON\n")
    with pytest.raises(HealthError, match="line 1 is no result"):
        cli.main(["segment", str(tmp_path / "all")])


def test_neither_help_nor_training_imports_the_checks() -> None:
    program = (
        "import sys\nfrom everstep.launcher import cli\n"
        "try: cli.main(['--help'])\nexcept SystemExit: pass\n"
        "import everstep.launcher.start\n"
        "sys.exit(any(name.startswith('everstep.healthcheck') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True).returncode == 0


def test_a_check_of_this_machine_needs_nothing() -> None:
    words = [
        sys.executable,
        "-m",
        "everstep.launcher.cli",
        "health",
        "check",
        "--check",
        "host_memory",
        "--json",
    ]
    ran = subprocess.run(words, capture_output=True, text=True, timeout=60)
    data = json.loads(ran.stdout)
    assert ran.returncode in (0, 1) and ran.stderr == ""
    assert [each["check"] for each in data["results"]] == ["host_memory"]
