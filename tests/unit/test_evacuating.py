"""A node that its health checks find unfit: work is moved off it before it takes the run down."""

from __future__ import annotations

from everstep.launcher import membership as ms
from everstep.launcher import messages as m
from hypothesis import given
from hypothesis import strategies as st
from run_model import Fault, Run, Shape
from test_membership import VERSIONS, Play, orders, said, seeds, strikes, told

SICK = m.Health("xid gpu3 reset: Xid 95")


def stepped(play: Play) -> Play:
    """A run that has committed a step, its standbys warm."""
    for worker in play.holders():
        play.say(worker, m.Committed(1, 1))
    play.warm_standbys()
    return play


def held(play: Play) -> list[ms.Action]:
    """Every rank stands between two steps."""
    actions: list[ms.Action] = []
    for worker in play.holders():
        actions += play.say(worker, m.Held(play.machine.generation, 5))
    return actions


def killed(actions: list[ms.Action]) -> list[str]:
    return [a.message.worker for a in actions if isinstance(a, ms.To) and isinstance(a.message, m.Kill)]


def test_the_ranks_of_an_unfit_node_move_to_the_spare_node_between_two_steps() -> None:
    play = stepped(Play(2, 2, spare=1, devices=8).begin())
    actions = play.tell("n2", SICK)
    assert said(actions) == [
        "node n2 is not fit for work (xid gpu3 reset: Xid 95): ranks 2, 3 will be moved after the step "
        "under way"
    ]
    assert len(told(actions, m.Hold)) == 4
    actions = held(play)
    assert said(actions) == [
        "node n2 is not fit for work (xid gpu3 reset: Xid 95); it held ranks 2, 3; standbys on n3 take them; "
        "generation 2, world 4"
    ]
    assert killed(actions) == ["n2/0", "n2/1"]
    assert [w for w, _ in told(actions, m.Abort)] == ["n1/0", "n1/1"]


def test_where_nobody_is_ready_elsewhere_the_run_stays_and_says_so_once() -> None:
    play = stepped(Play(2, 1, devices=8).begin())
    actions = play.tell("n2", SICK)
    assert said(actions) == [
        "WARNING: node n2 is not fit for work (xid gpu3 reset: Xid 95), and no standby elsewhere is ready: "
        "the run stays there until one is"
    ]
    assert killed(actions) == []
    assert play.tell("n2", SICK) == []


def test_in_a_job_slurm_is_asked_for_another_node_and_the_ranks_move_when_it_is_ready() -> None:
    play = stepped(Play(2, 1, devices=8, in_job=True).begin())
    (recruit,) = [a for a in play.tell("n2", SICK) if isinstance(a, ms.Recruit)]
    assert recruit.exclude == ("n2",)
    play.tell("r1", m.AgentHello("r1", 77, "h", True, [1], VERSIONS, 8, joiner=True))
    play.say("r1/0", m.Hello(VERSIONS))
    actions = held(play)
    assert killed(actions) == ["n2/0"]
    assert "standby on r1 takes it" in said(actions)[0]


def test_a_step_that_does_not_end_is_not_waited_for() -> None:
    play = stepped(Play(2, 1, spare=1, devices=8).begin())
    play.tell("n2", SICK)
    actions = play.machine.notice(ms.TimeUp("move", 1))
    assert killed(actions) == ["n2/0"]


def test_a_node_that_recovers_meanwhile_keeps_its_ranks_and_all_go_on() -> None:
    play = stepped(Play(2, 1, spare=1, devices=8).begin())
    play.tell("n2", SICK)
    play.tell("n2", m.Health(""))
    actions = held(play)
    assert killed(actions) == []
    assert [w for w, _ in told(actions, m.Abort)] == ["n1/0", "n2/0"], "they hold, and have to be let go"


def test_the_only_node_that_holds_the_state_is_not_given_up() -> None:
    play = stepped(Play(1, 2, spare=1, devices=8).begin())
    actions = play.tell("n1", SICK)
    assert killed(actions) == []
    assert "no other node holds the state" in said(actions)[0]


def test_a_standby_of_an_unfit_node_takes_no_rank() -> None:
    play = stepped(Play(3, 1, spare=1, devices=8).begin())
    play.tell("n4", SICK)
    actions = play.exit("n2/0", -9)
    assert [w for w, _ in told(actions, m.Assign)] == ["n2/1"]
    play.tell("n2", SICK)
    assert [w for w, _ in told(play.out, m.Assign) if w.startswith("n4")] == []


def test_a_node_that_is_unfit_at_the_start_is_left_to_stand_by() -> None:
    machine = ms.Membership(ms.Config(1, 1, lambda p: {}, spare_nodes=1))
    machine.handle("n1", m.AgentHello("n1", 0, "h", False, [1], VERSIONS, unfit="a GPU is missing"))
    actions = machine.handle("n2", m.AgentHello("n2", 1, "h", True, [1], VERSIONS))
    assert said(actions) == ["WARNING: node n1 is not fit for work (a GPU is missing): another one is used"]
    assert [a.node for a in actions if isinstance(a, ms.To) and isinstance(a.message, m.Spawn)] == ["n2"]


def test_without_another_node_it_is_used_all_the_same() -> None:
    machine = ms.Membership(ms.Config(1, 1, lambda p: {}))
    actions = machine.handle("n1", m.AgentHello("n1", 0, "h", False, [1], VERSIONS, unfit="a GPU is missing"))
    assert said(actions) == [
        "WARNING: node n1 is not fit for work (a GPU is missing): it is used all the same"
    ]


@orders(200)
@given(
    seeds, strikes(["kill", "sick", "sick", "well"], 6), st.integers(2, 3), st.integers(0, 4), st.booleans()
)
def test_a_wrong_verdict_costs_no_step_and_ends_no_run(
    seed: int, faults: list[Fault], nnodes: int, steps: int, spare: bool
) -> None:
    kills = [f for f in faults if f.kind == "kill"][:1]
    verdicts = [f for f in faults if f.kind != "kill"]
    run = Run(Shape(nnodes, standby=1, spare_nodes=int(spare), steps=steps), seed, [*kills, *verdicts])
    end = run.play()
    if not run.membership.recovers:
        return  # struck before any rank came to recovery.init()
    if end.code == 75 and ("nobody holds the state" in end.reason or "no standby is left" in end.reason):
        assert kills or "no standby is left" in end.reason
        return
    assert end.code == 0, end.reason
    for rank in range(run.config.world):
        assert run.holder(rank).state == list(range(steps)), "a step left out, or done twice"
