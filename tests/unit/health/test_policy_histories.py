"""The policy over thousands of histories of results, crashes and people's doings: what never happens."""

from __future__ import annotations

from dataclasses import replace

from everstep.healthcheck.policy import Decision, History, InSlurm, Mode, Settings
from everstep.healthcheck.result import Result, Severity, Status
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_model import DRAIN, HOUR, IDLE, Node, good, result

CHECKS = ("xid", "disk", "temperature")
POOL = [
    result(check, status, severity, device)
    for check in CHECKS
    for device in ("", "gpu0")
    for status, severity in (
        (Status.CRITICAL, Severity.MONITOR),
        (Status.CRITICAL, Severity.RESET),
        (Status.CRITICAL, Severity.REPLACE),
        (Status.WARN, Severity.OK),
        (Status.SKIP, Severity.OK),
        (Status.OK, Severity.OK),
        (Status.OK, Severity.OK),
        (Status.OK, Severity.OK),
    )
]
all_well = st.just([good(check) for check in CHECKS])
results_ = st.one_of(all_well, st.lists(st.sampled_from(POOL), max_size=4))
runs = st.tuples(
    st.just("run"), results_, st.sampled_from(["", "", "", "refused", "killed", "unseen", "fault"])
)
events = st.lists(
    st.one_of(
        runs,
        runs,
        st.sampled_from(
            [
                ("drain",),
                ("retitle",),
                ("resume",),
                ("down",),
                ("up",),
                ("boot",),
                ("lose memory",),
                ("a day",),
            ]
        ),
    ),
    max_size=30,
)
sites = st.builds(
    Settings,
    mode=st.sampled_from([Mode.DRAIN, Mode.DRAIN, Mode.SHADOW, Mode.REPORT]),
    confirm=st.integers(1, 2),
    passes=st.integers(1, 2),
    contract=st.booleans(),
    report_only=st.sampled_from([frozenset(), frozenset({"disk"})]),
    after_boot=st.sampled_from([frozenset(), frozenset({"xid"})]),
)


def happen(node: Node, event: tuple[object, ...]) -> Decision | None:
    if event[0] == "run":
        how = str(event[2])
        faults = ["a check of ours raised"] if how == "fault" else []
        results: list[Result] = event[1]  # type: ignore[assignment]
        return node.run(
            *results, faults=faults, refused=how == "refused", killed=how == "killed", unseen=how == "unseen"
        )
    if event[0] == "drain":
        node.person_drains()
    elif event[0] == "retitle" and node.slurm.drained:
        node.person_drains(node.slurm.reason + " (mine)")
    elif event[0] == "resume":
        node.person_resumes()
    elif event[0] == "down":
        node.slurm = InSlurm(frozenset({"DOWN", "NOT_RESPONDING"}), "Not responding", "slurm", node.now)
    elif event[0] == "up" and "DOWN" in node.slurm.state:
        node.slurm = IDLE
    elif event[0] == "boot":
        node.boot += "'"
    elif event[0] == "lose memory":
        node.history = History()
    elif event[0] == "a day":
        node.now += 24 * HOUR
    return None


@settings(max_examples=1000, deadline=None)
@given(events, sites)
def test_no_history_ever_lifts_a_drain_that_is_not_ours_or_drains_without_a_finding(
    happenings: list[tuple[object, ...]], site: Settings
) -> None:
    node = Node(site)
    ours = False  # whether the drain in place, if there is one, was made by us in this very wording and time
    for event in happenings:
        before = node.slurm
        done = len(node.acts)
        decision = happen(node, event)
        acted = node.acts[done:]
        for action in acted:
            assert site.mode is Mode.DRAIN
            if action.kind == "undrain":
                assert ours
                assert decision is not None
                found: list[Result] = event[1]  # type: ignore[assignment]
                assert not [
                    each
                    for each in found
                    if each.status is Status.CRITICAL and each.check not in site.report_only
                ]
                assert event[2] != "fault"
            else:
                assert not before.drained or ours
                assert not before.state & {"DOWN", "FAIL"}
                found = event[1]  # type: ignore[assignment]
                assert any(
                    each.status is Status.CRITICAL and each.check not in site.report_only for each in found
                )
            ours = action.kind != "undrain" and action.state == "DRAIN"
        if not acted and node.slurm != before:
            ours = False
        if event[0] == "lose memory":
            ours = False


@settings(max_examples=300, deadline=None)
@given(st.lists(results_, max_size=60), st.integers(2, 4))
def test_without_a_person_a_node_is_given_back_less_often_than_the_limit(
    runs_: list[list[Result]], limit: int
) -> None:
    node = Node(replace(DRAIN, flap_limit=limit))
    for each in runs_:
        node.run(*each)
    assert node.kinds.count("undrain") < limit
    assert node.kinds.count("drain") <= limit


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from(["fault", "killed", "unseen", "none"]), max_size=20), results_)
def test_crashes_of_ours_never_drain(how: list[str], found: list[Result]) -> None:
    node = Node()
    sound = [each for each in found if each.status is not Status.CRITICAL]
    for each in how:
        happen(node, ("run", [] if each == "none" else sound, each))
    assert node.acts == []
