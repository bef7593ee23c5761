"""The report: what Slurm's nodes and their last results become, and how it is said."""

from __future__ import annotations

import dataclasses
import json

import click
import pytest
from everstep.healthcheck import report, report_text
from everstep.healthcheck.report import Overview, Row, accelerators, build, judge
from everstep.healthcheck.result import Severity, Status
from everstep.launcher.slurm.client import Job
from report_model import NOW, OURS, bad, node, record


def plain(lines: list[str]) -> str:
    return click.unstyle("\n".join(lines))


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


def test_a_long_list_of_nodes_has_a_line_of_its_own() -> None:
    nodes = [node(f"gpu{i:03}", "DOWN", reason="Not responding") for i in range(0, 40, 2)]
    lines = plain(report_text.by_reason(build(nodes, {}, now=NOW))).splitlines()
    assert lines[1].startswith("20 nodes  down")
    assert lines[2].startswith("  nodes: gpu[000,002,")


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


# --- what others wrote ---


def test_a_reason_cannot_speak_to_the_terminal_nor_make_a_line_of_its_own() -> None:
    hostile = node("n1", "IDLE", "DRAIN", reason="evil \x1b[2J\nforged\u202e 0", reason_by="b\x1b]0;x\x07")
    row = judge(hostile, None, now=NOW)
    assert "evil [2J forged 0" in row.why
    assert all(letter.isprintable() for letter in row.why + row.by + row.group)


def test_a_result_of_the_future_is_not_believed() -> None:
    early = dataclasses.replace(record("n1", bad()), at=NOW + 1e9)
    assert judge(node("n1", "IDLE"), early, now=NOW).status is Status.OK
