"""The report's question put to Slurm of two releases, and to the last results that nodes have left."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

import pytest
from everstep.healthcheck import ask, records, trust
from everstep.healthcheck.errors import HealthError
from everstep.healthcheck.policy import InSlurm
from everstep.healthcheck.records import Record
from everstep.healthcheck.result import Result, Status
from everstep.healthcheck.slurm_node import SlurmNode
from everstep.launcher.slurm.cli_json import CliJson
from everstep.launcher.slurm.client import SlurmBusy, SlurmError
from everstep.recovery.errors import UsageError
from report_model import NOW, OLD_SCONTROL, Recorded, bad, record, slurm_22, slurm_24, text

# --- what Slurm says ---


def test_slurm_24_11_is_read() -> None:
    nodes = slurm_24().nodes()
    assert [each.name for each in nodes] == ["n1", "n2", "n3", "n4"][: len(nodes)]
    assert nodes[0].partitions == ("main",)
    assert (nodes[0].gres, nodes[0].gres_used, nodes[0].reason_at) == ("gpu:2", "gpu:0", 0.0)


def test_slurm_22_05_is_read_by_sinfo_since_its_scontrol_has_no_json() -> None:
    by_name = {each.name: each for each in slurm_22().nodes()}
    assert by_name["gpu001"].state == {"UNKNOWN", "DRAIN", "NOT_RESPONDING"}
    assert by_name["gpu001"].reason.startswith("everstep: xid gpu3 reset: Xid 95")
    assert by_name["gpu001"].reason_by == "root"
    assert by_name["gpu001"].reason_at > 1e9
    assert by_name["gpu001"].partitions == ("train", "all")
    assert by_name["gpu004"].state == {"MIXED", "DRAIN"}
    assert by_name["gpu004"].comment == "site words"
    assert [each.name for each in slurm_22().nodes(["gpu004", "cpu1"])] == ["gpu004", "cpu1"]


def test_slurm_22_05_s_jobs_are_read_by_squeue() -> None:
    job = slurm_22().job_parts("1")[0]
    assert (job.state, job.nodes, job.waits_for) == ({"RUNNING"}, ("gpu004",), "")
    assert slurm_22().job_parts("2")[0].waits_for == "JobHeldUser"
    assert [each.job_id for each in slurm_22().job_parts("3")] == [3]
    with pytest.raises(UsageError, match="no job 99"):
        slurm_22().job_parts("99")


def test_an_error_that_is_not_of_an_old_release_is_not_asked_again() -> None:
    runner = Recorded(
        {"scontrol show": SlurmBusy("`scontrol show nodes` failed: Unable to contact controller")}
    )
    with pytest.raises(UsageError, match="contact"):
        CliJson(runner, {}).nodes()
    assert len(runner.asked) == 1


def test_our_own_node_is_looked_up_with_its_field() -> None:
    runner = Recorded({"scontrol show": SlurmError(OLD_SCONTROL), "sinfo --json": text("nodes-22.05.json")})
    seen, held = SlurmNode("extra", runner).look("gpu004")
    assert seen == InSlurm(frozenset({"MIXED", "DRAIN"}), "NHC: bad DIMM", "root", seen.since)
    assert held.startswith("everstep ok ok 1796057276")


# --- the question put to Slurm and to the folder ---


def test_a_question_about_a_job_asks_for_its_nodes_alone() -> None:
    overview = ask.overview(ask.Question(job="12"), slurm_24(), clock=lambda: NOW)
    assert [row.name for row in overview.rows] == ["n1", "n2"]
    assert overview.jobs[0].nodes == ("n1", "n2")
    assert overview.slurm == "24.11.5"


@pytest.mark.parametrize(
    ("question", "said"),
    [
        (ask.Question(partition="nope"), "no partition 'nope'.*: main"),
        (ask.Question(nodes="n[1-9]"), r"no node n\[\d+-9\]"),
        (ask.Question(nodes="n["), "no list of hosts"),
        (ask.Question(nodes=","), "names no node"),
    ],
)
def test_what_slurm_does_not_know_is_one_line(question: ask.Question, said: str) -> None:
    with pytest.raises(HealthError, match=said) as error:
        ask.overview(question, slurm_24(), clock=lambda: NOW)
    assert error.value.exit_code == 3


def test_a_host_without_slurm_is_told_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(HealthError, match=r"no Slurm here.*module load slurm.*everstep health check"):
        ask.slurm_is_here()


def test_last_results_are_read_from_a_shared_folder(tmp_path: Path) -> None:
    (tmp_path / "n1.json").write_bytes(record("n1", bad()).to_json())
    question = ask.Question(shared_dir=str(tmp_path))
    overview = ask.overview(question, slurm_24(), clock=lambda: NOW)
    assert overview.rows[0].word == "sick"
    assert overview.rows[0].sources[1].name == str(tmp_path)
    assert overview.rows[1].status is Status.OK


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"{}", "not believed: no result"),
        (b"[]", "not believed"),
        (b"\xff", "not believed"),
        (record("n2").to_json(), "it is of n2"),
        (record("n1").to_json().replace(b'"ok"', b'"fine"'), "'fine' is no status"),
    ],
)
def test_a_file_that_is_no_last_result_is_named_and_harms_nothing(
    tmp_path: Path, content: bytes, said: str
) -> None:
    (tmp_path / "n1.json").write_bytes(content)
    overview = ask.overview(ask.Question(shared_dir=str(tmp_path)), slurm_24(), clock=lambda: NOW)
    assert overview.rows[0].status is Status.OK
    assert said in overview.faults[0]


def test_nobody_else_speaks_for_a_node(tmp_path: Path) -> None:
    (tmp_path / "n1.json").write_bytes(record("n1", bad()).to_json())
    tmp_path.chmod(0o777)
    found, faults = records.read_folder(tmp_path, ["n1"])
    assert found == {}
    assert "anybody can write there" in faults[0]
    tmp_path.chmod(0o755)
    (tmp_path / "n2.json").symlink_to(tmp_path / "n1.json")
    assert records.read_folder(tmp_path, ["n2", "../n1"])[0] == {}


def test_a_result_that_is_none_costs_the_report_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "n1.json").write_bytes(b"[" * 200_000)
    (tmp_path / "n2.json").write_bytes(
        re.sub(rb'"at": ?[0-9.]+', b'"at": NaN', record("n2", bad()).to_json())
    )
    (tmp_path / "n3.json").write_bytes(record("n3", bad()).to_json())
    found, faults = records.read_folder(tmp_path, ["n1", "n2", "n3"])
    assert list(found) == ["n3"]
    assert ["nested too deeply" in faults[0], "at nan" in faults[1]] == [True, True], faults


@pytest.mark.skipif(os.geteuid() != 0, reason="to give a file to somebody else takes root")
def test_a_result_of_another_user_is_not_believed(tmp_path: Path) -> None:
    path = tmp_path / "n1.json"
    path.write_bytes(record("n1", bad()).to_json())
    os.chown(path, 1000, 1000)
    found, faults = records.read_folder(tmp_path, ["n1"])
    assert found == {}
    assert "belongs to user 1000" in faults[0]


def test_a_folder_that_is_not_there_is_a_note_and_not_the_end() -> None:
    overview = ask.overview(ask.Question(shared_dir="/nowhere"), slurm_24(), clock=lambda: NOW)
    assert "/nowhere cannot be read" in overview.faults[0]
    assert overview.rows


def test_of_a_last_result_the_report_keeps_what_was_found_and_the_status(tmp_path: Path) -> None:
    passes = tuple(Result(Status.OK, "in order", check=f"check{i}") for i in range(3))
    (tmp_path / "n1.json").write_bytes(record("n1", *passes, bad()).to_json())
    (tmp_path / "n2.json").write_bytes(
        record("n2", Result(Status.SKIP, "none", check="a"), *passes).to_json()
    )
    found, _ = records.read_folder(tmp_path, ["n1", "n2"])
    assert [each.check for each in found["n1"].report.results] == ["xid"]
    assert (found["n1"].report.status, found["n2"].report.status) == (Status.CRITICAL, Status.OK)


def test_the_newest_of_several_results_counts(tmp_path: Path) -> None:
    (tmp_path / "gpu004.json").write_bytes(record("gpu004", bad(), at=NOW).to_json())
    overview = ask.overview(
        ask.Question(nodes="gpu004", shared_dir=str(tmp_path)), slurm_22(), clock=lambda: NOW
    )
    assert overview.rows[0].record is not None
    assert overview.rows[0].record.at == NOW
    without = ask.overview(ask.Question(nodes="gpu004"), slurm_22(), clock=lambda: NOW)
    assert without.rows[0].sources[1].name == "Slurm's extra"


# --- last results ---


def test_a_record_survives_being_written_down() -> None:
    one = Record(record("n1", bad()).report, 5.0, "program", "drain", "boot", "drain it", ("a", "b"))
    assert records.from_json(one.to_json()) == one


@pytest.mark.parametrize("results", [(), (bad(),), (bad(""), bad("gpu1")), (bad("/", Status.WARN),)])
def test_a_record_s_short_form_in_slurm_s_books_is_read_back(results: tuple[Result, ...]) -> None:
    one = record("n1", *results)
    short = records.to_slurm(one)
    read = records.from_slurm("n1", short, "Slurm")
    assert read is not None
    assert len(short) <= records.IN_SLURM_LONGEST
    assert (read.report.status, read.report.severity, read.at) == (
        one.report.status,
        one.report.severity,
        one.at,
    )
    if results:
        assert read.report.findings[0].device == results[0].device


@pytest.mark.parametrize("words", ["", "rack 7", "everstep", "everstep fine ok 1 full p5 -"])
def test_other_words_in_slurm_s_books_are_no_result(words: str) -> None:
    assert records.from_slurm("n1", words, "Slurm") is None


def test_files_are_not_writable_by_others(tmp_path: Path) -> None:
    trust.write(tmp_path / "x.json", b"{}", uid=1000)
    assert stat.S_IMODE((tmp_path / "x.json").stat().st_mode) == 0o644
