"""Who sends what to whom: the plan that every worker computes from the same table."""

from __future__ import annotations

from collections import Counter

import msgspec
from everstep.launcher.messages import Member
from everstep.recovery.restore import Impossible, Plan, plan
from hypothesis import given
from hypothesis import strategies as st


def member(rank: int, committed: int = 5, *, worker: str = "", **fields: object) -> Member:
    row = Member(worker or f"w{rank}", rank, committed, True, False, "host", 1000, "layout")
    return msgspec.structs.replace(row, **fields)


@st.composite
def tables(draw: st.DrawFn) -> list[Member]:
    """Ranks 0 … n-1 and some donors without a rank, in any order, in any state."""
    rows = []
    for number, rank in enumerate([*range(draw(st.integers(1, 8))), *([-1] * draw(st.integers(0, 3)))]):
        rows.append(
            member(
                rank,
                draw(st.integers(0, 3)),
                worker=f"w{number}",
                whole=draw(st.booleans()),
                fresh=draw(st.booleans()),
                host=draw(st.sampled_from("ab")),
                checkpoint=draw(st.sampled_from([-1, -1, 0, 4, 8])),
                fingerprint=draw(st.sampled_from(["", "x", "y"])),
            )
        )
    return draw(st.permutations(rows))


def holds(x: Member, step: int) -> bool:
    return x.whole and not x.fresh and x.committed == step


@given(tables(), st.booleans())
def test_every_rank_ends_with_the_winning_step(rows: list[Member], progress: bool) -> None:
    decision = plan(rows, progress=progress)
    if isinstance(decision, Impossible):
        return
    receivers = {t.receiver for t in decision.transfers}
    for x in rows:
        if x.rank < 0:
            continue
        if decision.source == "peer":
            assert x.worker in receivers or holds(x, decision.committed)
        elif decision.source == "disk":
            assert x.worker in receivers or x.worker == decision.loader


@given(tables(), st.booleans())
def test_donors_hold_what_they_give_and_nobody_receives_twice(rows: list[Member], progress: bool) -> None:
    decision = plan(rows, progress=progress)
    if isinstance(decision, Impossible):
        return
    by_name = {x.worker: x for x in rows}
    donors = {t.donor for t in decision.transfers}
    receivers = [t.receiver for t in decision.transfers]
    assert not donors & set(receivers)
    assert len(set(receivers)) == len(receivers)
    assert all(by_name[name].rank >= 0 for name in receivers)
    for name in donors:
        if decision.source == "peer":
            assert holds(by_name[name], decision.committed)
        elif decision.source == "disk":
            assert name == decision.loader
        else:
            assert by_name[name].whole


@given(tables(), st.booleans())
def test_the_winner_is_the_highest_step_that_a_whole_member_has_committed(
    rows: list[Member], progress: bool
) -> None:
    decision = plan(rows, progress=progress)
    steps = [x.committed for x in rows if x.whole and not x.fresh]
    if steps:
        assert isinstance(decision, Plan)
        assert (decision.source, decision.committed) == ("peer", max(steps))
    else:
        assert isinstance(decision, Impossible) or decision.source != "peer"


@given(tables(), st.booleans())
def test_receivers_are_spread_evenly_over_all_donors(rows: list[Member], progress: bool) -> None:
    decision = plan(rows, progress=progress)
    if isinstance(decision, Impossible) or decision.source != "peer":
        return
    load = Counter({x.worker: 0 for x in rows if holds(x, decision.committed)})
    load.update(t.donor for t in decision.transfers)
    assert max(load.values()) - min(load.values()) <= 1


@given(st.data(), tables(), st.booleans())
def test_the_order_of_the_table_does_not_matter_to_what_is_restored(
    data: st.DataObject, rows: list[Member], progress: bool
) -> None:
    one, other = plan(rows, progress=progress), plan(data.draw(st.permutations(rows)), progress=progress)
    assert type(one) is type(other)
    if isinstance(one, Plan) and isinstance(other, Plan):
        assert (one.source, one.committed, one.loader) == (other.source, other.committed, other.loader)


@given(tables(), st.booleans())
def test_the_newest_checkpoint_counts_when_nobody_holds_the_state(rows: list[Member], progress: bool) -> None:
    rows = [msgspec.structs.replace(x, whole=False) for x in rows]
    newest = max(x.checkpoint for x in rows if x.rank >= 0)
    decision = plan(rows, progress=progress)
    if newest >= 0:
        assert isinstance(decision, Plan)
        loader = next(x for x in rows if x.worker == decision.loader)
        assert (decision.source, decision.committed, loader.checkpoint) == ("disk", newest, newest)
        assert loader.rank == min(x.rank for x in rows if x.rank >= 0 and x.checkpoint == newest)
    else:
        assert isinstance(decision, Impossible)


def test_two_survivors_a_step_apart_take_the_later_one() -> None:
    decision = plan([member(0, 5), member(1, 6), member(2, 5)], progress=True)
    assert isinstance(decision, Plan)
    assert [(t.donor, t.receiver) for t in decision.transfers] == [("w1", "w0"), ("w1", "w2")]
    assert decision.reason == "ranks 0, 2 restored to step 6 from rank 1"


def test_a_rank_in_the_middle_of_a_step_receives_and_never_gives() -> None:
    decision = plan([member(0, 7, whole=False), member(1, 6)], progress=True)
    assert isinstance(decision, Plan)
    assert (decision.committed, [(t.donor, t.receiver) for t in decision.transfers]) == (6, [("w1", "w0")])


def test_a_newcomer_on_a_donors_host_gets_its_state_from_there() -> None:
    rows = [member(0, host="a"), member(1, host="b"), member(2, 0, fresh=True, host="b")]
    decision = plan(rows, progress=True)
    assert isinstance(decision, Plan)
    assert [(t.donor, t.receiver) for t in decision.transfers] == [("w1", "w2")]


def test_a_worker_that_raised_gives_its_state_to_whoever_takes_its_rank() -> None:
    decision = plan([member(0, 0, fresh=True), member(-1, 5, worker="old")], progress=True)
    assert isinstance(decision, Plan)
    assert [(t.donor, t.receiver) for t in decision.transfers] == [("old", "w0")]
    assert decision.reason == "rank 0 restored to step 5 from a worker that is leaving"


def test_when_all_hold_the_step_nothing_is_sent() -> None:
    decision = plan([member(0), member(1)], progress=True)
    assert isinstance(decision, Plan)
    assert (decision.source, decision.transfers) == ("peer", ())


def test_a_run_that_begins_takes_rank_0s_initial_state_where_others_differ() -> None:
    rows = [member(r, 0, fresh=True, fingerprint=f) for r, f in enumerate(["x", "x", "y"])]
    decision = plan(rows, progress=False)
    assert isinstance(decision, Plan)
    assert decision.source == "start"
    assert [(t.donor, t.receiver) for t in decision.transfers] == [("w0", "w2")]


def test_an_initial_state_that_a_broken_transfer_has_spoilt_starts_nothing() -> None:
    rows = [member(0, 0, fresh=True, whole=False), member(1, 0, fresh=True, fingerprint="x")]
    decision = plan(rows, progress=False)
    assert isinstance(decision, Plan)
    assert [(t.donor, t.receiver) for t in decision.transfers] == [("w1", "w0")]


def test_lost_progress_without_a_checkpoint_is_never_begun_anew_silently() -> None:
    decision = plan([member(0, 0, fresh=True), member(1, 0, fresh=True)], progress=True)
    assert isinstance(decision, Impossible)
    assert "run.checkpoint" in decision.reason
