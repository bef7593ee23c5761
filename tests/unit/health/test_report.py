"""The report: what Slurm's JSON and the nodes' last results become, and how it is said."""

from __future__ import annotations

import dataclasses
import json
import os
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from everstep.healthcheck import ask, records, report, report_text
from everstep.healthcheck.errors import HealthError
from everstep.healthcheck.policy import InSlurm
from everstep.healthcheck.records import Record
from everstep.healthcheck.report import Overview, Row, accelerators, build, judge
from everstep.healthcheck.result import Report, Result, Severity, Status
from everstep.healthcheck.slurm_node import SlurmNode
from everstep.launcher.slurm.cli_json import CliJson
from everstep.launcher.slurm.client import Job, Node, SlurmBusy, SlurmError
from everstep.recovery.errors import UsageError

FIXTURES = Path(__file__).parents[2] / "fixtures" / "slurm"
NOW = 1796070000.0
OURS = "everstep: xid gpu3 reset: Xid 95: uncontained ECC error"
OLD_SCONTROL = '`scontrol show` failed: Try "scontrol --help" for more information'


class Recorded:
    """Slurm's commands, answering from a record; what is not recorded fails."""

    def __init__(self, answers: Mapping[str, str | UsageError]) -> None:
        self.answers = answers
        self.asked: list[str] = []

    def __call__(self, argv: Sequence[str], **_: Any) -> str:
        line = " ".join(argv)
        self.asked.append(line)
        for start, answer in self.answers.items():
            if line.startswith(start):
                if isinstance(answer, UsageError):
                    raise answer
                return answer
        raise SlurmError(f"`{line}` failed")


def text(name: str) -> str:
    return (FIXTURES / name).read_text()


def slurm_24() -> CliJson:
    return CliJson(
        Recorded(
            {
                "scontrol show nodes": text("nodes-24.11.json"),
                "scontrol show job": text("job-24.11.json"),
                "scontrol --version": "slurm-wlm 24.11.5\n",
            }
        ),
        {},
    )


def slurm_22() -> CliJson:
    """22.05's scontrol has no --json."""
    return CliJson(
        Recorded(
            {
                "scontrol show": SlurmError(OLD_SCONTROL),
                "sinfo --json": text("nodes-22.05.json"),
                "squeue --json": text("jobs-22.05.json"),
                "scontrol --version": "slurm-wlm 22.05.8\n",
            }
        ),
        {},
    )


def node(name: str = "n1", *state: str, **more: Any) -> Node:
    settings = {
        "partitions": ("main",),
        "gres": "gpu:h100:8(S:0-1)",
        "gres_used": "gpu:h100:0(IDX:N/A)",
        **more,
    }
    return Node(name, frozenset(state or ("IDLE",)), **settings)


def record(
    name: str = "n1", *results: Result, at: float = NOW - 60, mode: str = "report", source: str = "x"
) -> Record:
    found = results or (Result(Status.OK, "in order", check="gpu_count"),)
    return Record(Report(name, "p5", "full", found), at, "program", mode, source=source)


def bad(
    device: str = "gpu3",
    status: Status = Status.CRITICAL,
    severity: Severity = Severity.RESET,
    check: str = "xid",
) -> Result:
    return Result(status, "Xid 95", severity, device, check=check)


def plain(lines: list[str]) -> str:
    import click

    return click.unstyle("\n".join(lines))


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


@pytest.mark.parametrize(
    ("gres", "count"),
    [
        ("gpu:2", 2),
        ("gpu:h100:8(S:0-1)", 8),
        ("gpu:a100:4(S:0,2),gpu:v100:2(S:1),craynetwork:4", 6),
        ("gpu:h100:3(IDX:0-1,5)", 3),
        ("gpu:h100:0(IDX:N/A)", 0),
        ("neuron:16", 16),
        ("gpu", 1),
        ("(null)", 0),
        ("", 0),
        ("license:3", 0),
    ],
)
def test_accelerators_are_counted_in_every_form(gres: str, count: int) -> None:
    assert accelerators(gres) == count


# --- one node ---


@pytest.mark.parametrize(
    ("state", "word", "status", "usable"),
    [
        (["IDLE"], "idle", Status.OK, True),
        (["MIXED"], "mixed", Status.OK, True),
        (["ALLOCATED", "COMPLETING"], "allocated", Status.OK, True),
        (["IDLE", "PLANNED"], "idle", Status.OK, True),
        (["IDLE", "POWERED_DOWN"], "powered-down", Status.OK, True),
        (["IDLE", "DRAIN"], "drained", Status.CRITICAL, False),
        (["MIXED", "DRAIN"], "draining", Status.CRITICAL, False),
        (["DOWN"], "down", Status.CRITICAL, False),
        (["DOWN", "DRAIN", "NOT_RESPONDING"], "down", Status.CRITICAL, False),
        (["IDLE", "NOT_RESPONDING"], "silent", Status.CRITICAL, False),
        (["UNKNOWN", "NOT_RESPONDING"], "silent", Status.CRITICAL, False),
        (["IDLE", "FAIL"], "fail", Status.CRITICAL, False),
        (["IDLE", "MAINT"], "maint", Status.WARN, False),
        (["IDLE", "REBOOT_ISSUED"], "reboot-issued", Status.WARN, False),
    ],
)
def test_slurm_s_words_become_one(state: list[str], word: str, status: Status, usable: bool) -> None:
    row = judge(node("n1", *state, reason="why"), None, now=NOW)
    assert (row.word, row.status, row.usable) == (word, status, usable)


@pytest.mark.parametrize(
    ("state", "reason", "why", "what"),
    [
        ("DRAIN", OURS, "xid gpu3 reset: Xid 95: uncontained ECC error", "reset the device"),
        ("DRAIN", OURS + " [drained 3 times in 24 h: resume it by hand]", "xid gpu3", "administrator"),
        ("DRAIN", "bad DIMM, ticket 7", "bad DIMM, ticket 7", "administrator"),
        ("DRAIN", "Prolog error", "Prolog error", "administrator"),
        ("FAIL", "Action:Replace", "Action:Replace", "is replaced by the cluster manager"),
        ("FAIL", "Action:Reboot", "Action:Reboot", "is rebooted by the cluster manager"),
        ("DOWN", "Not responding", "Not responding", "when it answers"),
        ("NOT_RESPONDING", "", "Slurm cannot reach it", "when it answers"),
        ("DRAIN", "", "no reason given", "administrator"),
    ],
)
def test_a_node_out_of_service_says_why_and_what_happens_next(
    state: str, reason: str, why: str, what: str
) -> None:
    row = judge(node("n1", "IDLE", state, reason=reason, reason_by="root", reason_at=NOW - 60), None, now=NOW)
    assert row.why.startswith(why)
    assert what in row.next
    assert (row.by, row.since, row.usable_accelerators) == ("root", NOW - 60, 0)


def test_a_prolog_s_drain_is_explained_by_what_everstep_found() -> None:
    row = judge(node("n1", "IDLE", "DRAIN", reason="Prolog error"), record("n1", bad()), now=NOW)
    assert row.why == "Prolog error; everstep found xid gpu3 reset: Xid 95"


def test_a_sick_node_that_slurm_still_gives_out_loses_the_accelerators_that_are_named() -> None:
    row = judge(node("n1", "MIXED", gres_used="gpu:4"), record("n1", bad("gpu3"), bad("0000:9b:00")), now=NOW)
    assert (row.word, row.status, row.usable) == ("sick", Status.CRITICAL, True)
    assert (row.accelerators, row.usable_accelerators, row.free_accelerators) == (8, 6, 2)
    assert "avoid it" in row.next


def test_a_finding_of_the_whole_node_takes_all_its_accelerators() -> None:
    row = judge(node(), record("n1", bad("/scratch"), bad("gpu1"), mode="drain"), now=NOW)
    assert row.usable_accelerators == 0
    assert "drains it" in row.next


def test_a_warning_leaves_the_node_usable() -> None:
    row = judge(node(), record("n1", bad(status=Status.WARN, severity=Severity.MONITOR)), now=NOW)
    assert (row.status, row.usable, row.usable_accelerators) == (Status.WARN, True, 8)


def test_a_result_that_is_too_old_is_shown_and_not_believed() -> None:
    row = judge(node(), record("n1", bad(), at=NOW - 2 * report.STALE_S), now=NOW)
    assert (row.word, row.status) == ("idle", Status.OK)
    assert row.sources[1].stale
    assert "1 too old to count" in plain(report_text.summary(build([node()], {"n1": row.record}, now=NOW)))  # type: ignore[dict-item]


def test_a_node_of_the_future_is_left_out() -> None:
    assert build([node("n1", "FUTURE"), node("n2")], {}, now=NOW).rows[0].name == "n2"


# --- all of them ---


def cluster() -> Overview:
    drained = {"reason": OURS, "reason_by": "root", "reason_at": NOW - 7200}
    nodes = [
        node("gpu001", "MIXED", gres_used="gpu:h100:4(IDX:0-3)"),
        node("gpu002"),
        node("gpu003", "IDLE", "DRAIN", **drained),
        node("gpu004", "MIXED", "DRAIN", **{**drained, "reason": OURS + " twice", "reason_at": NOW - 60}),
        node(
            "gpu005",
            "DOWN",
            "NOT_RESPONDING",
            reason="Not responding",
            reason_by="slurm",
            reason_at=NOW - 300,
        ),
        node("gpu006", partitions=("main", "debug")),
        node("cpu1", gres="", gres_used="", partitions=("cpu",)),
    ]
    return build(
        nodes, {"gpu006": record("gpu006", bad(), source="/shared/health")}, now=NOW, slurm="24.11.5"
    )


def test_partitions_are_counted() -> None:
    main, debug, cpu = cluster().partitions
    assert dataclasses.astuple(main) == ("main", 6, 3, 1, 4, 48, 23, 19)
    assert dataclasses.astuple(debug) == ("debug", 1, 1, 0, 1, 8, 7, 7)
    assert dataclasses.astuple(cpu) == ("cpu", 1, 1, 0, 0, 0, 0, 0)


def test_the_exit_code_is_the_worst_node_s() -> None:
    assert cluster().exit_code == 2
    assert build([node()], {}, now=NOW).exit_code == 0
    assert build([node("n1", "IDLE", "MAINT"), node("n2")], {}, now=NOW).exit_code == 1


def test_the_summary_folds_nodes_by_their_state_and_reason() -> None:
    shown = plain(report_text.summary(cluster()))
    lines = shown.splitlines()
    assert lines[0].split() == ["PARTITION", "NODES", "USABLE", "BUSY", "BAD", "ACCELS", "USABLE", "FREE"]
    assert lines[1].split() == ["main", "6", "3", "1", "4", "48", "23", "19"]
    assert [line.split()[:2] for line in lines if line.startswith("gpu")] == [
        ["gpu003", "drained"],
        ["gpu004", "draining"],
        ["gpu005", "down"],
        ["gpu006", "sick"],
    ]
    assert "  next: reset the device; the node comes back once the check passes" in lines
    assert lines[-1] == (
        "Slurm 24.11.5 asked just now; last results of 1 of 7 nodes from /shared/health, 1m old"
    )


def test_bad_nodes_of_one_reason_are_one_line() -> None:
    told = {"reason_by": "root", "reason_at": NOW - 7200}
    nodes = [node(f"gpu{i:03}", "IDLE", "DRAIN", reason=f"{OURS} {i}", **told) for i in (1, 2, 3, 7)]
    shown = plain(report_text.by_reason(build(nodes, {}, now=NOW)))
    assert shown.splitlines()[1].split()[:4] == ["gpu[001-003,007]", "drained", "2h", "root"]
    assert shown.splitlines()[1].endswith("Xid 95: uncontained ECC error 1 ...")


def test_a_cluster_in_order_says_so() -> None:
    assert "every node is in order" in plain(report_text.summary(build([node()], {}, now=NOW)))
    assert "every node is in order" in plain(report_text.by_reason(build([node()], {}, now=NOW)))


def test_by_node_is_a_line_a_node() -> None:
    shown = plain(report_text.by_node(cluster())).splitlines()
    assert len([line for line in shown if line.startswith(("gpu", "cpu"))]) == 7
    assert shown[1].split() == ["gpu001", "main", "mixed", "8", "8", "4", "-", "-", "-", "-"]
    assert shown[6].split()[:10] == [
        "gpu006",
        "main,debug",
        "sick",
        "8",
        "7",
        "7",
        "1m",
        "program",
        "critical",
        "1m",
    ]


def test_only_a_partition() -> None:
    overview = build([node("a"), node("b", partitions=("x", "y"))], {}, now=NOW, partition="x")
    assert [row.name for row in overview.rows] == ["b"]
    assert [part.name for part in overview.partitions] == ["x"]


def test_colour_is_for_bad_lines_only() -> None:
    lines = report_text.by_node(cluster())
    assert "\x1b[31m" in lines[3]
    assert "\x1b" not in lines[1]


def test_json_has_the_age_and_the_source_of_all_that_is_known() -> None:
    said = json.loads(json.dumps(report.as_dict(cluster())))
    assert set(said) == {"at", "slurm", "status", "partitions", "nodes", "jobs", "faults"}
    last = next(each for each in said["nodes"] if each["node"] == "gpu006")
    assert last["sources"] == [
        {"source": "Slurm", "at": NOW, "age_s": 0.0, "stale": False},
        {"source": "/shared/health", "at": NOW - 60, "age_s": 60.0, "stale": False},
    ]
    assert last["accelerators"] == {"total": 8, "usable": 7, "used": 0, "free": 7}
    assert last["last_result"]["results"][0]["check"] == "xid"


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(-5, "0s"), (0, "0s"), (59, "59s"), (60, "1m"), (7199, "119m"), (7200, "2h"), (3e5, "3d")],
)
def test_ages_are_one_unit(seconds: float, said: str) -> None:
    assert report_text.ago(seconds) == said


# --- my job ---


def job(*nodes: str, state: str = "RUNNING", waits_for: str = "") -> Job:
    return Job(12, frozenset({state}), nodes, waits_for=waits_for)


def by_job(one: Job) -> str:
    overview = cluster()
    rows: tuple[Row, ...] = tuple(row for row in overview.rows if row.name in one.nodes)
    return plain(report_text.by_job(dataclasses.replace(overview, rows=rows, jobs=(one,))))


def test_a_job_is_told_which_of_its_nodes_are_bad() -> None:
    shown = by_job(job("gpu001", "gpu003", "gpu004"))
    assert shown.startswith(
        "job 12 is RUNNING and runs on gpu[001,003-004]: touched, 2 of its 3 nodes: gpu[003-004]"
    )
    assert "xid gpu3 reset" in shown


def test_a_job_on_sound_nodes_is_told_so() -> None:
    assert by_job(job("gpu001", "gpu002")).startswith(
        "job 12 is RUNNING and runs on gpu[001-002]: none of its nodes is bad"
    )


def test_a_job_that_waits_says_for_what_and_a_held_one_how_to_go_on() -> None:
    assert by_job(job(state="PENDING", waits_for="Resources")).startswith(
        "job 12 is PENDING (Resources) and has no nodes"
    )
    assert "scontrol release 12" in by_job(job(state="PENDING", waits_for="JobHeldAdmin"))


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


def test_a_long_list_of_nodes_has_a_line_of_its_own() -> None:
    nodes = [node(f"gpu{i:03}", "DOWN", reason="Not responding") for i in range(0, 40, 2)]
    lines = plain(report_text.by_reason(build(nodes, {}, now=NOW))).splitlines()
    assert lines[1].startswith("20 nodes  down")
    assert lines[2].startswith("  nodes: gpu[000,002,")


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
    from everstep.healthcheck import trust

    trust.write(tmp_path / "x.json", b"{}", uid=1000)
    assert stat.S_IMODE((tmp_path / "x.json").stat().st_mode) == 0o644
