"""A run that is told to stop, or that goes back to the queue: nothing that is held is lost."""

from __future__ import annotations

from typing import Any

import pytest
from everstep.launcher import membership as ms
from everstep.launcher import messages as m
from hypothesis import given
from hypothesis import strategies as st
from run_model import Fault, Run, Shape
from test_membership import Play, end_of, noises, orders, said, seeds, strikes, told

TERM = ms.StopAsked("told to stop (SIGTERM)", 143)


class Stopping(Play):
    """`Play`, with what concerns the run as a whole."""

    def notice(self, event: ms.RunEvent) -> list[ms.Action]:
        got = self.machine.notice(event)
        self.out += got
        return got

    def up(self, name: str) -> list[ms.Action]:
        return self.notice(ms.TimeUp(name, self.machine.generation))

    def ready(
        self, worker: str, committed: int, whole: bool = True, checkpoints: bool = True
    ) -> list[ms.Action]:
        held = (committed, whole, False, "h", 1, "layout")
        return self.say(worker, m.Ready(self.machine.generation, *held, checkpoints=checkpoints))

    def held(self, committed: int) -> list[ms.Action]:
        actions: list[ms.Action] = []
        for worker in self.holders():
            actions += self.say(worker, m.Held(1, committed))
        return actions


def test_the_step_under_way_is_finished_then_rank_0_writes_a_checkpoint_and_the_run_ends_with_75() -> None:
    play = Stopping().begin()
    actions = play.notice(TERM)
    assert said(actions) == ["told to stop (SIGTERM): the step under way is finished first (--grace 10 s)"]
    assert [w for w, _ in told(actions, m.Hold)] == ["n1/0", "n2/0"]
    assert [w for w, _ in told(play.held(7), m.Abort)] == ["n1/0", "n2/0"], "nobody goes on alone"
    assert told(play.ready("n1/0", 7), m.Save) == [], "not before all have said what they hold"
    assert [w for w, _ in told(play.ready("n2/0", 7), m.Save)] == ["n1/0"]
    end = end_of(play.say("n1/0", m.Saved(7)))
    assert end == ms.End(75, "told to stop (SIGTERM); a checkpoint of step 7 was written")


def test_a_rank_that_cannot_finish_its_step_goes_back_to_the_one_before() -> None:
    play = Stopping().begin()
    play.notice(TERM)
    play.say("n1/0", m.Held(1, 7))
    actions = play.up("hold")
    assert [w for w, _ in told(actions, m.Abort)] == ["n1/0", "n2/0"]


def test_the_furthest_whole_rank_writes_whichever_it_is() -> None:
    play = Stopping(3).begin()
    play.notice(TERM)
    play.up("hold")
    play.ready("n1/0", 7, whole=False)
    play.ready("n2/0", 7)
    actions = play.ready("n3/0", 6)
    kills = [a.message for a in actions if isinstance(a, ms.To) and isinstance(a.message, m.Kill)]
    assert [k.worker for k in kills] == ["n1/0"], "rank 0 holds the directory's lock"
    assert [w for w, _ in told(play.exit("n1/0", -9), m.Save)] == ["n2/0"]


def test_the_writer_dies_and_another_rank_writes() -> None:
    play = Stopping().begin()
    play.notice(TERM)
    play.up("hold")
    play.ready("n1/0", 7)
    play.ready("n2/0", 7)
    assert [w for w, _ in told(play.exit("n1/0", -9), m.Save)] == ["n2/0"]


def test_a_rank_that_never_answers_is_not_waited_for_for_ever() -> None:
    play = Stopping().begin()
    play.notice(TERM)
    play.up("hold")
    play.ready("n1/0", 7)
    assert [w for w, _ in told(play.up("ready"), m.Save)] == ["n1/0"]
    end = end_of(play.up("save"))
    assert end is not None
    assert end.reason.endswith("no checkpoint was written in 120 s")


def test_what_is_on_disk_already_is_not_written_again() -> None:
    play = Stopping().begin()
    play.say("n1/0", m.Saved(7))
    play.notice(TERM)
    play.held(7)
    play.ready("n1/0", 7)
    end = end_of(play.ready("n2/0", 7))
    assert end == ms.End(75, "told to stop (SIGTERM); the newest checkpoint is of step 7")


@pytest.mark.parametrize("how", [{"checkpoints": False}, {}])
def test_a_run_that_asks_for_the_queue_and_has_nothing_to_go_on_from_is_not_requeued(
    how: dict[str, Any],
) -> None:
    play = Stopping(in_job=True, can_requeue=True).begin()
    for worker in play.holders():
        play.say(worker, m.Committed(1, 1))
    play.notice(ms.StopAsked("told to stop (SIGUSR1)", 138, requeue=True))
    play.held(7)
    play.ready("n1/0", 7, **how)
    actions = play.ready("n2/0", 7, **how)
    if not how:
        actions = play.say("n1/0", m.Saved(7, "the disk is full"))
    end = end_of(actions)
    assert end is not None
    assert (end.code, end.requeue) == (75, False)
    assert "would begin at step 0" in end.reason


def test_all_steps_were_done_when_the_word_came_so_the_run_is_finished() -> None:
    play = Stopping().begin()
    play.finish_steps(9)
    play.notice(TERM)
    for worker in play.holders():
        play.leave(worker, 9)
    for worker in play.holders():
        play.exit(worker, 0)
    assert end_of(play.out) == ms.End(0, "finished")


def test_before_anything_has_begun_a_stop_is_just_that() -> None:
    assert end_of(Stopping().notice(TERM)) == ms.End(143, "told to stop (SIGTERM)")


def test_one_agent_that_is_told_to_stop_is_no_end_of_the_run_but_most_of_them_are() -> None:
    play = Stopping(3).begin()
    assert play.tell("n2", m.Told(15)) == []
    actions = play.tell("n3", m.Told(15))
    assert actions == [ms.AskWhy(15)], "Slurm is asked why, as if the coordinator's own agent had been told"
    actions = play.notice(TERM)
    assert [w for w, _ in told(actions, m.Hold)] == ["n1/0", "n2/0", "n3/0"]


# --- down the ladder -----------------------------------------------------------------------------


def lost_node(**config: Any) -> Stopping:
    play = Stopping(2, standby=0, in_job=True, can_requeue=True, **config).begin(standbys=False)
    for worker in play.holders():
        play.say(worker, m.Committed(1, 1))
    play.tell("n2", ms.NodeLost("4 missed heartbeats"))
    return play


def test_where_no_standby_is_left_slurm_is_asked_for_a_node_without_the_lost_one() -> None:
    play = lost_node()
    (recruit,) = [a for a in play.out if isinstance(a, ms.Recruit)]
    assert recruit.exclude == ("n2",)
    assert said(play.out)[-1].startswith(
        "node n2 was lost, noticed by 4 missed heartbeats; it held rank 1; rung 3 (replace): "
    )
    assert [
        (e.fields["rung"], e.fields["number"])
        for e in play.out
        if isinstance(e, ms.Emit) and e.event == "rung"
    ] == [("replace", 3)]


def test_the_node_that_comes_takes_the_rank_and_the_run_goes_on() -> None:
    play = lost_node()
    play.ready("n1/0", 5)
    actions = play.tell("r1", m.AgentHello("r1", 77, "h", True, [1], VERSIONS_OF_NODES, joiner=True))
    assert "node r1 has joined the run, in place of what was lost" in said(actions)
    play.say("r1/0", m.Hello({"torch": "2"}))
    play.say("r1/0", m.Ready(2, 0, True, True, "h", 1, "layout"))
    (go,) = {id(g): g for _, g in told(play.out, m.Go) if g.generation == 2}.values()
    assert {x.worker: x.rank for x in go.members} == {"n1/0": 0, "r1/0": 1}


VERSIONS_OF_NODES = {"torch": "2"}


def test_a_node_with_another_torch_is_sent_away_and_the_next_one_is_asked_for() -> None:
    play = lost_node()
    actions = play.tell("r1", m.AgentHello("r1", 77, "h", True, [1], {"torch": "3"}, joiner=True))
    assert [a.message.code for a in actions if isinstance(a, ms.To) and isinstance(a.message, m.Stop)] == [64]
    assert len([a for a in play.out if isinstance(a, ms.Recruit)]) == 2


def test_no_node_comes_so_a_survivor_writes_a_checkpoint_and_the_job_is_requeued_without_the_bad_node() -> (
    None
):
    play = lost_node()
    play.ready("n1/0", 5)
    actions = play.notice(ms.RecruitFailed("no node was free in 600 s", final=True))
    assert [w for w, _ in told(actions, m.Save)] == ["n1/0"]
    end = end_of(play.say("n1/0", m.Saved(5)))
    assert end is not None
    assert (end.code, end.requeue, end.exclude) == (75, True, ("n2",))
    assert "rung 4 (requeue)" in end.reason
    assert end.reason.endswith("a checkpoint of step 5 was written")


# --- in any order --------------------------------------------------------------------------------


@orders(300)
@given(
    seeds,
    strikes(["kill"], 2),
    st.integers(0, 300),
    st.integers(1, 3),
    st.sampled_from(["stop", "requeue"]),
    noises,
)
def test_told_to_stop_at_any_moment_no_committed_step_is_lost_as_long_as_somebody_holds_it(
    seed: int, faults: list[Fault], when: int, nnodes: int, kind: str, noise: float
) -> None:
    run = Run(Shape(nnodes, steps=6, checkpoint_every=4), seed, [*faults, Fault(when, kind, 0)], noise)
    end = run.play()
    if not run.membership.recovers:
        return  # struck before any rank came to recovery.init(): a plain script, for all that is known
    assert end.code in (0, 75, 143), end.reason
    if "a checkpoint of step" in end.reason:
        alive = [w.committed for w in run.workers.values() if w.alive and w.joined and w.whole]
        assert run.checkpoint >= max(alive, default=0)
    if end.requeue:
        assert run.checkpoint >= 0 or run.newest == 0 or not run.membership.progress
