"""`everstep health` as it is typed, with a scontrol that answers from a record."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from everstep.healthcheck import cli, cli_report
from everstep.healthcheck.errors import HealthError
from report_model import FIXTURES, bad, record


@pytest.fixture(autouse=True)
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A host with Slurm's commands, and without a site's file."""
    folder = tmp_path / "bin"
    folder.mkdir()
    script = folder / "scontrol"
    script.write_text(
        "#!/bin/sh\n"
        'case "$*" in\n'
        "--version) echo slurm-wlm 24.11.5 ;;\n"
        f"'show nodes'*) cat {FIXTURES}/nodes-24.11.json ;;\n"
        f"'show job 3 '*) cat {FIXTURES}/job-24.11.json ;;\n"
        "*) echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1 ;;\n"
        "esac\n"
    )
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
    monkeypatch.setenv("EVERSTEP_HEALTH_CONFIG", "")
    monkeypatch.setattr("everstep.healthcheck.site.DEFAULT", str(tmp_path / "none.toml"))
    monkeypatch.setattr("everstep.healthcheck.site.STATE_DIR", str(tmp_path / "state"))
    return folder


@pytest.fixture
def results(tmp_path: Path) -> str:
    """A folder of last results in which n2 is sick."""
    folder = tmp_path / "results"
    folder.mkdir()
    (folder / "n2.json").write_bytes(record("n2", bad(), at=time.time()).to_json())
    return str(folder)


def test_without_options_it_is_the_summary(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 0
    said = capsys.readouterr().out
    assert said.splitlines()[1].split() == ["main", "2", "2", "2", "0", "4", "4", "4"]
    assert "\x1b" not in said  # colour is for terminals


@pytest.mark.parametrize("words", [["-N"], ["-R"], ["-w", "n[1-2]"], ["-p", "main"], ["-j", "3"], ["--json"]])
def test_each_question_ends_with_the_worst_node_s_code(
    capsys: pytest.CaptureFixture[str], results: str, words: list[str]
) -> None:
    assert cli.main([*words, "--results", results]) == 2
    assert "n2" in capsys.readouterr().out


def test_a_question_about_sound_nodes_alone_is_in_order(results: str) -> None:
    assert cli.main(["-w", "n1", "--results", results]) == 0


def test_json_is_one_object_a_look(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    naps: list[float] = []

    def nap(seconds: float) -> None:
        naps.append(seconds)
        if len(naps) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(cli_report, "time", SimpleNamespace(sleep=nap))
    assert cli.main(["--json", "--watch", "7"]) == 0
    looks = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [len(look["nodes"]) for look in looks] == [2, 2, 2]
    assert naps == [7.0] * 3


def test_watch_alone_looks_every_ten_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    def nap(seconds: float) -> None:
        assert seconds == 10
        raise KeyboardInterrupt

    monkeypatch.setattr(cli_report, "time", SimpleNamespace(sleep=nap))
    assert cli.main(["--watch"]) == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["-p", "nope"], "no partition 'nope'"),
        (["-w", "n9"], "no node n9"),
        (["-j", "99"], "Invalid job id"),
        (["--config", "/nowhere/x.toml"], "no file /nowhere/x.toml"),
        (["--watch", "0.1"], "--watch 0.1"),
        (["--watch", "nan"], "--watch nan: give seconds"),
        (["--watch", "inf"], "--watch inf: give seconds"),
        (["--watch", "1e300"], "--watch 1e+300: give seconds"),
        (["--watch", "-5"], "No such option '-5'"),
        (["-w", "n[1-999999999]"], "999,999,999 hosts"),
        (["--nope"], "No such option"),
        (["nope"], "No such command 'nope'"),
    ],
)
def test_what_cannot_be_answered_is_one_line_and_exit_code_3(words: list[str], said: str) -> None:
    with pytest.raises(HealthError) as error:
        cli.main(words)
    assert said in str(error.value)
    assert "\n" not in str(error.value)
    assert error.value.exit_code == 3
