"""The policy: what drains a node, what gives it back, and what never does."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from everstep.healthcheck.policy import (
    LONGEST_REASON,
    Action,
    History,
    InSlurm,
    Mode,
    Ours,
    Settings,
    actionable,
    fresh_pass,
    read_reason,
    reason_for,
    refuse,
)
from everstep.healthcheck.result import Severity, Status
from policy_model import DRAIN, HOUR, IDLE, Node, good, result

# --- what drains ---


def test_a_critical_result_drains_with_the_check_and_the_device_first() -> None:
    node = Node()
    node.run(result(reason="Xid 95: uncontained ECC error"), good("disk"))
    assert node.acts == [Action("drain", "DRAIN", "everstep: xid gpu3 reset: Xid 95: uncontained ECC error")]


@pytest.mark.parametrize("status", [Status.OK, Status.WARN, Status.SKIP])
def test_nothing_else_drains(status: Status) -> None:
    node = Node()
    node.run(result(status=status))
    assert node.acts == []


def test_the_gravest_finding_comes_first_and_the_others_are_counted() -> None:
    found = [
        result("disk", severity=Severity.MONITOR, device="/scratch"),
        result("ecc", severity=Severity.REPLACE),
    ]
    assert reason_for(actionable(found, DRAIN)) == "everstep: ecc gpu3 replace: Xid 95 (and 1 more)"


def test_a_finding_of_the_whole_node_says_so() -> None:
    assert reason_for([result("munge", device="", reason="munged is dead")]).startswith(
        "everstep: munge node "
    )


def test_a_reason_is_one_line_and_no_longer_than_people_read() -> None:
    reason = reason_for([result(reason="x\n\x1b[31my\u2028z " * 100)] * 3)
    assert reason.isprintable()
    assert len(reason) <= LONGEST_REASON
    assert reason.endswith("(and 2 more)")


def test_a_reason_of_ours_is_read_back() -> None:
    told = read_reason(reason_for([result()]))
    assert told is not None
    assert (told.check, told.device, told.do, told.text) == ("xid", "gpu3", "reset", "Xid 95")
    assert read_reason("NHC: xid gpu3 reset: no") is None


def test_the_same_finding_drains_once() -> None:
    node = Node()
    for value in range(5):
        node.run(result(reason=f"{90 + value} C"))
    assert node.kinds == ["drain"]


def test_a_finding_must_be_seen_as_often_as_the_site_wants() -> None:
    node = Node(replace(DRAIN, confirm=3))
    node.run(result())
    node.run(result())
    node.run(good())
    node.run(result())
    node.run(result())
    assert node.acts == []
    node.run(result())
    assert node.kinds == ["drain"]


def test_a_check_that_is_only_shown_does_not_drain() -> None:
    node = Node(replace(DRAIN, report_only=frozenset({"xid"})))
    node.run(result())
    assert node.acts == []
    assert refuse([result()], node.settings) == ""


def test_a_graver_finding_changes_the_reason_of_our_drain() -> None:
    node = Node()
    node.run(result(severity=Severity.RESET))
    node.run(result(severity=Severity.REPLACE, reason="row remap failed"))
    assert node.kinds == ["drain", "update"]
    assert node.slurm.reason == "everstep: xid gpu3 replace: row remap failed"


def test_a_change_of_the_reason_that_slurm_refused_is_asked_for_again() -> None:
    node = Node()
    node.run(result(severity=Severity.RESET))
    node.run(result(severity=Severity.REPLACE), refused=True)
    node.run(result(severity=Severity.REPLACE))
    assert node.kinds == ["drain", "update"]
    node.run(good())
    assert node.kinds == ["drain", "update", "undrain"]


def test_the_contract_hands_the_node_over_and_never_takes_it_back() -> None:
    node = Node(replace(DRAIN, contract=True))
    node.run(result(severity=Severity.REPLACE))
    assert node.acts == [Action("drain", "FAIL", "Action:Replace")]
    node.run(good())
    node.run(good())
    assert node.kinds == ["drain"]


def test_a_node_that_a_reboot_does_not_mend_is_not_rebooted_for_ever() -> None:
    node = Node(replace(DRAIN, contract=True))
    reasons = []
    for _ in range(6):
        node.run(result(severity=Severity.REBOOT))
        reasons.append(node.slurm.reason)
        if node.slurm.reason == "Action:Reboot":
            node.person_resumes()
    assert reasons.count("Action:Reboot") == 2
    assert "resume it by hand" in reasons[-1]


# --- what is not ours ---


def test_a_person_s_drain_is_left_alone_whatever_the_checks_say() -> None:
    node = Node()
    node.person_drains()
    said = node.run(result())
    node.run(good())
    assert node.acts == []
    assert said.notes == ("left alone: alice drained the node: bad DIMM",)


def test_a_person_who_changes_our_reason_takes_the_drain_over() -> None:
    node = Node()
    node.run(result())
    node.slurm = replace(node.slurm, reason=node.slurm.reason + ", ticket 7")
    node.run(good())
    node.run(good())
    assert node.kinds == ["drain"]


def test_a_person_who_drains_in_our_very_words_keeps_the_drain() -> None:
    node = Node()
    node.run(result())
    node.run(result())
    words = node.slurm.reason
    node.person_resumes()
    node.person_drains(words)
    node.run(good())
    assert node.kinds == ["drain"]


def test_a_drain_that_reads_like_ours_without_our_record_is_left_and_said_so() -> None:
    node = Node()
    node.run(result())
    node.history = History()
    said = node.run(good())
    assert node.kinds == ["drain"]
    assert "reads like ours" in said.notes[0]


@pytest.mark.parametrize(
    "word", ["DOWN", "NOT_RESPONDING", "MAINT", "REBOOT_ISSUED", "FAIL", "POWERING_DOWN"]
)
def test_a_node_that_slurm_itself_keeps_out_is_left_alone(word: str) -> None:
    node = Node(slurm=InSlurm(frozenset({"IDLE", word}), "Not responding", "slurm", 5.0))
    node.run(result())
    node.run(good())
    assert node.acts == []


def test_without_slurm_s_answer_nothing_is_done() -> None:
    node = Node()
    said = node.run(result(), unseen=True)
    assert node.acts == []
    assert "Slurm gave no answer" in said.notes[0]


# --- what gives a node back ---


def test_our_drain_is_lifted_when_the_check_passes() -> None:
    node = Node()
    node.run(result())
    node.run(good())
    assert node.kinds == ["drain", "undrain"]
    assert node.slurm == IDLE


@pytest.mark.parametrize("status", [Status.SKIP, Status.WARN])
def test_a_skip_or_a_warning_of_that_check_is_no_pass(status: Status) -> None:
    node = Node()
    node.run(result())
    node.run(result(status=status))
    assert node.kinds == ["drain"]


def test_a_run_without_that_check_is_no_pass() -> None:
    node = Node()
    node.run(result())
    node.run(good("disk"))
    node.run()
    assert node.kinds == ["drain"]


def test_a_pass_of_one_device_beside_a_warning_of_another_is_no_pass() -> None:
    node = Node()
    node.run(result())
    node.run(good(), result(status=Status.WARN, device="gpu1"))
    assert node.kinds == ["drain"]


def test_another_finding_keeps_the_node_out_and_is_told() -> None:
    node = Node()
    node.run(result())
    node.run(good(), result("disk", device="/"))
    assert node.kinds == ["drain", "update"]
    assert "disk" in node.slurm.reason
    node.run(good(), good("disk"))
    assert node.kinds[-1] == "undrain"


def test_a_finding_that_joined_later_must_pass_too() -> None:
    node = Node()
    node.run(result())
    node.run(result(), result("disk", device="/"))
    node.run(good())
    assert node.kinds == ["drain"]
    node.run(good(), good("disk"))
    assert node.kinds == ["drain", "undrain"]


def test_a_site_may_want_several_passes_in_a_row() -> None:
    node = Node(replace(DRAIN, passes=3))
    node.run(result())
    for each in (good(), good(), result(), good(), good()):
        node.run(each)
    assert node.kinds == ["drain"]
    node.run(good())
    assert node.kinds == ["drain", "undrain"]


def test_a_site_may_lift_all_drains_by_hand() -> None:
    node = Node(replace(DRAIN, undrain=False))
    node.run(result())
    said = node.run(good())
    assert node.kinds == ["drain"]
    assert "by hand" in said.notes[0]


def test_an_event_that_grew_old_mends_nothing_before_a_boot() -> None:
    node = Node(replace(DRAIN, after_boot=frozenset({"xid"})))
    node.run(result())
    node.run(good())
    assert node.kinds == ["drain"]
    node.boot = ""  # it cannot be told
    node.run(good())
    assert node.kinds == ["drain"]
    node.boot = "b"
    node.run(good())
    assert node.kinds == ["drain", "undrain"]


def test_a_fault_of_our_own_neither_drains_nor_gives_back() -> None:
    node = Node()
    node.run(faults=["the check raised"])
    assert node.acts == []
    node.run(result())
    node.run(good(), faults=["another check raised"])
    assert node.kinds == ["drain"]


def test_an_undrain_that_slurm_refused_is_asked_for_again() -> None:
    node = Node()
    node.run(result())
    node.run(good(), refused=True)
    node.run(good())
    assert node.kinds == ["drain", "undrain"]


def test_a_check_that_comes_and_goes_ends_in_a_drain_that_a_person_lifts() -> None:
    node = Node()
    for _ in range(20):
        node.run(result())
        node.run(good())
    assert node.kinds == ["drain", "undrain", "drain", "undrain", "drain"]
    assert "drained 3 times in 24 h: resume it by hand" in node.slurm.reason
    node.person_resumes()
    node.run(result())
    assert node.kinds[-1] == "drain"
    assert "by hand" not in node.slurm.reason


def test_a_request_that_slurm_refused_is_neither_a_drain_nor_a_person_s_resume() -> None:
    node = Node()
    for _ in range(2):
        node.run(result())
        node.run(good())
    for _ in range(3):
        node.run(result(), refused=True)
    assert len(node.history.drains) == 2
    node.run(result())
    assert "drained 3 times" in node.slurm.reason


def test_another_reason_for_the_same_drain_is_no_flapping() -> None:
    node = Node()
    for severity in (Severity.MONITOR, Severity.RESET, Severity.REBOOT, Severity.REPLACE):
        node.run(result(severity=severity))
    node.run(good())
    assert node.kinds == ["drain", "update", "update", "update", "undrain"]
    assert len(node.history.drains) == 1


def test_drains_a_day_apart_are_no_flapping() -> None:
    node = Node()
    for _ in range(5):
        node.run(result())
        node.run(good())
        node.now += 25 * HOUR
    assert node.kinds == ["drain", "undrain"] * 5


# --- modes ---


def test_mode_report_says_and_never_acts() -> None:
    node = Node(Settings())
    said = node.run(result())
    assert node.acts == []
    assert said.notes == ("mode report: xid gpu3 reset: Xid 95",)
    assert refuse([result()], node.settings) == ""


def test_mode_shadow_says_once_what_it_would_do() -> None:
    node = Node(replace(DRAIN, mode=Mode.SHADOW))
    first, again = node.run(result(reason="95 C")), node.run(result(reason="96 C"))
    assert first.action is not None
    assert first.action.shadow
    assert first.notes[0].startswith("shadow, not done: drained: xid")
    assert (again.action, again.notes) == (None, ())
    assert node.acts == []
    assert refuse([result()], node.settings) == ""
    node.run(good())
    assert node.run(result()).action is not None


def test_mode_drain_lets_a_prolog_refuse() -> None:
    assert refuse([result(), good("disk")], DRAIN) == "everstep: xid gpu3 reset: Xid 95"
    assert refuse([result(status=Status.WARN), result(status=Status.SKIP)], DRAIN) == ""


# --- the memory ---


def test_the_history_survives_being_written_down() -> None:
    ours = Ours("everstep: x gpu0 reset: y", 5.0, ("x",), Severity.RESET, "boot", 6.0, True, True, "before")
    history = History(ours, (1.0, 2.0), {"x gpu0": 3}, 2, "drain x")
    assert msgspec.json.decode(msgspec.json.encode(history), type=History) == history


@pytest.mark.parametrize(
    ("at", "boot", "passed", "fresh"),
    [
        (950, "a", True, True),
        (950, "b", True, False),
        (950, "a", False, False),
        (939, "a", True, False),
        (1001, "a", True, False),
    ],
)
def test_a_pass_is_kept_for_a_while_of_the_same_boot(at: float, boot: str, passed: bool, fresh: bool) -> None:
    assert fresh_pass(at, boot, passed, now=1000, now_boot="a", keep_s=60) is fresh
