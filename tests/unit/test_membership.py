"""Who holds which rank: promises that hold in any order of events, and decisions one by one.

The runs are played in `run_model`. `EVERSTEP_THOROUGH=1` tries many more orders.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
from everstep.launcher import membership as ms
from everstep.launcher import messages as m
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from run_model import VERSIONS, Bug, Fault, Run, Shape, Worker

THOROUGH = bool(os.environ.get("EVERSTEP_THOROUGH"))


def orders(number: int) -> settings:
    """So many event orders; twenty times as many in the thorough profile."""
    return settings(
        max_examples=number * (20 if THOROUGH else 1),
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
    )


shapes = st.builds(
    Shape,
    nnodes=st.integers(1, 3),
    nproc=st.integers(1, 2),
    standby=st.integers(0, 2),
    spare_nodes=st.integers(0, 1),
    max_restarts=st.integers(0, 1),
    steps=st.integers(0, 4),
    recovers=st.integers(0, 9).map(bool),
    devices=st.sampled_from([0, 8]),
    checkpoint_every=st.sampled_from([0, 0, 2]),
    in_job=st.booleans(),
    replacements=st.lists(st.sampled_from(["node", "node", "refused", "never"]), max_size=4).map(tuple),
    bugs=st.lists(
        st.builds(
            Bug,
            kind=st.sampled_from(["raise", "raise", "exit", "os_exit", "break"]),
            step=st.integers(-2, 4),
            rank=st.sampled_from([None, 0, 1]),
            code=st.sampled_from([0, 0, 3]),
            times=st.sampled_from([1, 2, 1000]),
            late=st.booleans(),
        ),
        max_size=2,
    ).map(tuple),
)
seeds = st.integers(0, 2**32)
noises = st.sampled_from([0.0, 0.05])


def strikes(kinds: list[str], most: int, within: int = 500) -> st.SearchStrategy[list[Fault]]:
    one = st.builds(Fault, st.integers(0, within), st.sampled_from(kinds), st.integers(0, 30))
    return st.lists(one, max_size=most)


# --- in any order --------------------------------------------------------------------------------


@orders(600)
@given(
    shapes,
    seeds,
    strikes(["kill", "kill", "kill", "node", "node", "sick", "sick", "well", "stop", "requeue"], 12),
    noises,
)
def test_whatever_happens_the_run_ends_with_a_reason(
    shape: Shape, seed: int, faults: list[Fault], noise: float
) -> None:
    """Never stuck, and every `Go` keeps its promises: `Run.see_go` and `Run.act` look at each."""
    end = Run(shape, seed, faults, noise).play()
    event(f"exit code {end.code}")
    assert end.reason


@orders(350)
@given(
    seeds,
    strikes(["kill"], 3),
    st.integers(1, 3),
    st.integers(1, 2),
    st.integers(1, 2),
    st.integers(0, 4),
    st.booleans(),
)
def test_as_long_as_a_standby_is_left_the_run_goes_on_to_its_last_step(
    seed: int, faults: list[Fault], nnodes: int, nproc: int, standby: int, steps: int, disk: bool
) -> None:
    shape = Shape(nnodes, nproc, standby, steps=steps, checkpoint_every=int(disk))
    run = Run(shape, seed, faults)
    end = run.play()
    if not run.membership.recovers:
        return  # struck before any rank came to recovery.init(): a plain script, for all that is known
    if end.code == 75 and "nobody holds the state" in end.reason:
        assert len(run.killed) >= run.config.world, "somebody still held it"
        return
    assert end.code == 0, end.reason
    for rank in range(run.config.world):
        assert run.holder(rank).state == list(range(steps)), "a step left out, or done twice"


@orders(400)
@given(seeds, strikes(["kill", "node"], 5), shapes)
def test_every_fault_is_reported_once(seed: int, faults: list[Fault], shape: Shape) -> None:
    run = Run(shape, seed, faults)
    run.play()
    heard_exits = {x.worker for _, x in run.heard if isinstance(x, m.WorkerExited)}
    for worker in run.workers.values():
        reports = run.faults_of(worker.name)
        assert len({e["kind"] for e in reports}) == len(reports), "twice"
        if worker.name in run.killed and worker.name in heard_exits and not told_to_end(run, worker):
            assert [e["kind"] for e in reports if e["kind"] != "exception"] == ["SIGKILL"]
    for node in run.noticed:
        assert len([e for e in run.named("fault") if e["kind"] == "node" and e["node"] == node]) == 1


def told_to_end(run: Run, worker: Worker) -> bool:
    """Was it killed when its end was no news: it had been released, its node or the run was lost?"""
    known = run.membership.roster.workers[worker.name]
    exits = [
        i for i, (_, x) in enumerate(run.heard) if isinstance(x, m.WorkerExited) and x.worker == worker.name
    ]
    lost = [i for i, (n, x) in enumerate(run.heard) if isinstance(x, ms.NodeLost) and n == worker.node]
    after_all = not lost or exits[0] < lost[0]
    return known.released or not after_all


@orders(200)
@given(seeds, st.integers(1, 3), st.integers(1, 2), st.integers(0, 4))
def test_an_undisturbed_run_has_one_generation(seed: int, nnodes: int, nproc: int, steps: int) -> None:
    run = Run(Shape(nnodes, nproc, steps=steps), seed)
    assert run.play().code == 0
    assert list(run.gos) == [1]
    assert not run.named("fault")
    assert run.says[0] == f"generation 1, world {nnodes * nproc}: the run begins"


@orders(200)
@given(seeds, st.integers(1, 3), st.integers(0, 3), strikes(["kill"], 1))
def test_an_exception_that_always_comes_ends_the_run_with_its_traceback(
    seed: int, nnodes: int, step: int, faults: list[Fault]
) -> None:
    run = Run(Shape(nnodes, 1, steps=4, bugs=(Bug("raise", step),)), seed, faults)
    end = run.play()
    if run.killed and (not run.membership.recovers or "nobody holds" in end.reason):
        return  # it struck before init(), or took the only one that held the state
    assert end.code == 1
    assert end.detail == "Traceback"
    raised = {e["generation"] for e in run.named("fault") if e["kind"] == "exception"}
    assert len(raised) >= 3, "tried three times in all"


@orders(150)
@given(seeds, st.integers(1, 3), st.integers(0, 3), st.booleans())
def test_an_exception_that_comes_twice_is_got_over(seed: int, nnodes: int, step: int, late: bool) -> None:
    run = Run(Shape(nnodes, 1, steps=4, bugs=(Bug("raise", step, rank=0, times=2, late=late),)), seed)
    end = run.play()
    if end.code == 75 or nnodes == 1:
        assert nnodes == 1
        return
    assert end.code == 0, end.reason
    assert all(run.holder(r).state == [0, 1, 2, 3] for r in range(nnodes))


@orders(150)
@given(seeds, st.integers(2, 3), st.integers(0, 3))
def test_an_exit_code_in_the_loop_is_tried_again_and_then_the_runs(seed: int, nnodes: int, step: int) -> None:
    run = Run(Shape(nnodes, 1, steps=4, bugs=(Bug("exit", step, rank=1, code=3),)), seed)
    end = run.play()
    assert end.code == 3
    assert end.reason == f"step {step} failed 3 times, last on rank 1: exit code 3"


@orders(150)
@given(seeds, st.integers(1, 3), st.integers(1, 3))
def test_all_ranks_may_leave_the_loop_early_together(seed: int, nnodes: int, step: int) -> None:
    run = Run(Shape(nnodes, 1, steps=4, bugs=(Bug("break", step),)), seed)
    assert run.play() == ms.End(0, "finished")


@orders(200)
@given(seeds, st.integers(2, 3), st.integers(0, 3), st.booleans(), st.sampled_from(["break", "os_exit"]))
def test_one_rank_that_leaves_the_loop_early_ends_the_run_in_one_clear_line(
    seed: int, nnodes: int, step: int, late: bool, how: str
) -> None:
    run = Run(Shape(nnodes, 1, steps=4, bugs=(Bug(how, step, rank=1, late=late),)), seed)
    end = run.play()
    said_so = "while the others go on: every rank must run the same steps"
    assert end.code == 1
    assert end.reason.startswith("rank 1 ended its script at step ")
    assert end.reason.endswith(said_so)
    if how == "break":  # with os._exit nobody tells us the step
        assert f"at step {step} " in end.reason


@orders(150)
@given(seeds, st.integers(1, 3), st.integers(1, 2), st.integers(0, 1))
def test_a_plain_script_is_restarted_as_a_group_up_to_max_restarts(
    seed: int, nnodes: int, nproc: int, restarts: int
) -> None:
    shape = Shape(nnodes, nproc, max_restarts=restarts, recovers=False, bugs=(Bug("exit", 1, 0, 7),))
    run = Run(shape, seed)
    assert run.play().code == 7
    assert len(run.spawns) == shape.nnodes * nproc * (restarts + 1), "no standby, and all each time"


# --- one by one ----------------------------------------------------------------------------------


class Play:
    """A run whose events a test gives in its own order, with every worker already in the loop."""

    def __init__(
        self, nnodes: int = 2, nproc: int = 1, spare: int = 0, devices: int = 0, **config: Any
    ) -> None:
        shape = ms.Config(
            nnodes, nproc, lambda p: {"LOCAL_RANK": str(p.local_rank)}, spare_nodes=spare, **config
        )
        self.machine = ms.Membership(shape)
        self.out: list[ms.Action] = []
        for index in range(nnodes + spare):
            node = f"n{index + 1}"
            self.tell(node, m.AgentHello(node, index, "h", index >= nnodes, [1], VERSIONS, devices))

    def tell(self, node: str, message: m.FromAgent | ms.NodeLost) -> list[ms.Action]:
        got = self.machine.handle(node, message)
        self.out += got
        return got

    def say(self, worker: str, message: m.FromWorker) -> list[ms.Action]:
        return self.tell(worker.split("/")[0], m.FromWorkers(worker, message))

    def exit(self, worker: str, code: int) -> list[ms.Action]:
        return self.tell(worker.split("/")[0], m.WorkerExited(worker, code))

    def begin(self, standbys: bool = True) -> Play:
        for worker in self.holders():
            self.say(worker, m.Hello(VERSIONS))
        for worker in self.holders():
            self.go_on(worker, fresh=True)
        for worker in self.holders():
            self.say(worker, m.GroupReady(1, 0.1))
        if standbys:
            self.warm_standbys()
        return self

    def warm_standbys(self) -> None:
        for worker in [w for w in self.machine.roster.workers.values() if w.status == "starting"]:
            self.say(worker.id, m.Hello(VERSIONS))

    def go_on(self, worker: str, committed: int = 0, fresh: bool = False) -> list[ms.Action]:
        g = self.machine.generation
        return self.say(worker, m.Ready(g, committed, True, fresh, "h", 1, "layout", fingerprint="x" * fresh))

    def stand(self, committed: int = 0) -> None:
        """All that are asked for are ready, and the group is built."""
        fresh = [w for w in self.holders() if self.machine.roster.workers[w].grouped == 0]
        for worker in [*self.holders(), *(w.id for w in self.machine.roster.donors())]:
            self.go_on(worker, 0 if worker in fresh else committed, worker in fresh)
        for worker in self.holders():
            self.say(worker, m.GroupReady(self.machine.generation, 0.1))

    def finish_steps(self, total: int) -> None:
        for worker in self.holders():
            self.say(worker, m.Done(total))

    def leave(self, worker: str, committed: int, **fields: Any) -> list[ms.Action]:
        return self.say(worker, m.Leaving(self.machine.generation, True, committed, **fields))

    def holders(self) -> list[str]:
        return [w.id for w in self.machine.roster.holders()]


def said(actions: list[ms.Action]) -> list[str]:
    return [a.text for a in actions if isinstance(a, ms.Say)]


def end_of(actions: list[ms.Action]) -> ms.End | None:
    return next((a for a in actions if isinstance(a, ms.End)), None)


def told(actions: list[ms.Action], kind: type) -> list[tuple[str, Any]]:
    """(worker, message) of each message of this kind that is sent to workers."""
    to = [a.message for a in actions if isinstance(a, ms.To) and isinstance(a.message, m.ToWorkers)]
    return [(w, x.message) for x in to for w in x.workers if isinstance(x.message, kind)]


def spawned(actions: list[ms.Action]) -> list[tuple[str, m.Spawn]]:
    return [(a.node, a.message) for a in actions if isinstance(a, ms.To) and isinstance(a.message, m.Spawn)]


def test_a_killed_worker_is_replaced_by_the_standby_of_its_node_in_one_line() -> None:
    play = Play().begin()
    actions = play.exit("n2/0", -9)
    assert said(actions) == [
        "rank 1 on n2 died (SIGKILL), noticed by its agent; standby on n2 takes it; generation 2, world 2"
    ]
    assert told(actions, m.Abort) == [("n1/0", m.Abort(2))]
    assert [(w, a.rank, a.start) for w, a in told(actions, m.Assign)] == [("n2/1", 1, False)]


def test_a_rank_waits_for_its_standby_and_is_then_spoken_of_by_its_number() -> None:
    play = Play().begin(standbys=False)
    assert said(play.exit("n2/0", -9)) == [
        "rank 1 on n2 died (SIGKILL), noticed by its agent; it waits for a standby on n2 to be ready; "
        "generation 2, world 2"
    ]
    assert said(play.say("n2/1", m.Hello(VERSIONS))) == ["standby on n2 takes rank 1; generation 2, world 2"]


def test_two_ranks_that_wait_on_one_node_have_a_standby_each_and_at_once() -> None:
    play = Play(1, 2, standby=1).begin(standbys=False)
    play.exit("n1/0", -9)
    actions = play.exit("n1/1", -9)
    assert [(n, s.nice) for n, s in spawned(actions)] == [("n1", False)]
    play.warm_standbys()
    assert sorted(play.holders()) == ["n1/2", "n1/3"]


def test_a_lost_nodes_ranks_move_to_the_spare_node_with_local_ranks_of_their_own() -> None:
    play = Play(2, 2, spare=1, devices=8).begin()
    actions = play.tell("n2", ms.NodeLost("4 missed heartbeats"))
    assert said(actions) == [
        "node n2 was lost, noticed by 4 missed heartbeats; it held ranks 2, 3; standbys on n3 take them; "
        "generation 2, world 4"
    ]
    assert [a.env["LOCAL_RANK"] for _, a in told(actions, m.Assign)] == ["0", "1"]
    assert not any(a.node == "n2" for a in actions if isinstance(a, ms.To))


def test_without_a_spare_node_a_node_without_devices_helps_out() -> None:
    play = Play().begin()
    assert [w for w, _ in told(play.tell("n2", ms.NodeLost("x")), m.Assign)] == ["n1/1"]


def test_where_nodes_have_devices_none_is_shared() -> None:
    play = Play(devices=8).begin()
    end = end_of(play.tell("n2", ms.NodeLost("4 missed heartbeats")))
    assert end is not None
    assert (end.code, "no standby is left for rank 1" in end.reason) == (75, True)


def test_without_standbys_a_lost_worker_asks_for_a_requeue() -> None:
    end = end_of(Play(standby=0).begin().exit("n2/0", -9))
    assert end is not None
    assert end.code == 75
    assert end.reason == (
        "rank 1 on n2 died (SIGKILL), noticed by its agent; no standby is left for rank 1 and none is "
        "coming: requeue the job, or start it with --standby or --spare-nodes"
    )


def test_without_standbys_a_spare_nodes_take_over() -> None:
    play = Play(standby=0, spare=1).begin()
    assert [w for w, _ in told(play.exit("n2/0", -9), m.Assign)] == ["n3/0"]


def test_without_standbys_the_users_own_exception_is_still_the_users_to_see() -> None:
    play = Play(standby=0).begin()
    end = end_of(play.leave("n2/0", 3, error="ValueError: x", traceback="Traceback", code=1))
    assert end is not None
    assert (end.code, end.detail) == (1, "Traceback")


def test_a_spare_node_holds_as_many_standbys_as_a_node_has_ranks() -> None:
    play = Play(1, 2, spare=1)
    for worker in play.holders():
        play.say(worker, m.Hello(VERSIONS))
    standbys = [node for node, spawn in spawned(play.out) if spawn.rank < 0]
    assert sorted(standbys) == ["n1", "n2", "n2"]


def test_a_used_standby_is_replaced_after_the_first_committed_step_and_niced() -> None:
    play = Play().begin()
    assert not spawned(play.exit("n2/0", -9))
    play.stand()
    actions = play.say("n1/0", m.Committed(2, 1))
    assert [(n, s.nice) for n, s in spawned(actions)] == [("n2", True)]
    assert said(actions) == ["generation 2 goes on: step 0 committed"]
    assert not spawned(play.say("n2/1", m.Committed(2, 1)))


def test_a_standby_that_never_gets_ready_is_not_started_for_ever() -> None:
    play = Play().begin(standbys=False)
    play.say("n1/0", m.Committed(1, 1))
    for number in (1, 2, 3):
        actions = play.exit(f"n2/{number}", 1)
    assert not spawned(actions)
    assert said(actions) == [
        "a standby on n2 ended 3 times before it was ready (exit code 1): no more are started there"
    ]


def test_all_ranks_that_raise_side_by_side_are_one_try() -> None:
    play = Play().begin()
    raised = m.Leaving(1, True, 7, "ValueError: x", "Traceback", False, 1)
    assert end_of(play.say("n1/0", raised)) is None
    actions = play.say("n2/0", raised)
    assert end_of(actions) is None
    assert said(actions) == [
        "rank 1 on n2 raised ValueError: x; standby on n2 takes it; generation 3, world 2"
    ]
    assert list(play.machine.tries.failed.values()) == [{1}]


def test_who_raised_stays_as_a_donor_until_every_rank_stands_in_the_next_group() -> None:
    play = Play().begin()
    play.leave("n2/0", 7, error="ValueError: x", code=1)
    for worker in ("n1/0", "n2/1"):
        play.go_on(worker, 7 if worker == "n1/0" else 0, fresh=worker != "n1/0")
    assert play.machine.phase != "running", "it is waited for"
    go = told(play.go_on("n2/0", 7), m.Go)
    assert {x.worker: x.rank for x in go[0][1].members} == {"n1/0": 0, "n2/1": 1, "n2/0": -1}
    assert not told(play.say("n1/0", m.GroupReady(2, 0.1)), m.Release)
    assert [w for w, _ in told(play.say("n2/1", m.GroupReady(2, 0.1)), m.Release)] == ["n2/0"]
    assert not play.exit("n2/0", 1), "its end is no news"


def test_the_third_failure_of_a_step_ends_the_run_with_the_workers_own_code() -> None:
    play = Play().begin()
    for _ in range(3):
        holder = play.holders()[1]
        actions = play.leave(holder, 7, error="ValueError: x", traceback="Traceback", code=1)
        play.warm_standbys()
        play.stand(7)
    assert end_of(actions) == ms.End(1, "step 7 failed 3 times, last on rank 1: ValueError: x", "Traceback")


def test_trouble_that_nobody_can_explain_is_not_repeated_for_ever() -> None:
    play = Play().begin()
    for _ in range(3):
        actions = play.say("n1/0", m.Trouble(play.machine.generation, "gloo: sizes differ"))
        play.stand()
    assert end_of(actions) == ms.End(1, "step 0 failed 3 times, last on rank 0: gloo: sizes differ")


def test_trouble_of_an_older_generation_is_old_news() -> None:
    play = Play().begin()
    play.exit("n2/0", -9)
    play.stand()
    assert not play.say("n1/0", m.Trouble(1, "gloo: Connection closed by peer"))


def test_who_leaves_early_is_let_go_at_once() -> None:
    play = Play().begin()
    assert [w for w, _ in told(play.leave("n2/0", 7), m.Release)] == ["n2/0"]


def test_who_leaves_early_while_a_group_is_formed_is_part_of_it_first() -> None:
    play = Play(3).begin()
    play.exit("n3/0", -9)
    assert not told(play.say("n2/0", m.Leaving(1, True, 7)), m.Release)
    play.stand(7)
    assert "n2/0" in [w for w, _ in told(play.out, m.Release)]


def test_who_left_early_cannot_be_part_of_a_new_group_even_while_a_rank_waits_for_its_standby() -> None:
    play = Play(3).begin(standbys=False)
    play.leave("n2/0", 7)
    assert end_of(play.exit("n3/0", -9)) is None
    end = end_of(play.exit("n2/0", 0))
    assert end is not None
    assert end.code == 75
    assert "rank 1 had ended its script at step 7" in end.reason


def test_a_worker_killed_before_the_end_of_its_script_is_replaced_even_after_the_last_step() -> None:
    play = Play().begin()
    play.finish_steps(9)
    play.leave("n1/0", 9)
    assert [w for w, _ in told(play.exit("n2/0", -9), m.Assign)] == ["n2/1"]
    play.stand(9)
    assert told(play.say("n2/1", m.Done(9)), m.AllDone) == [("n2/1", m.AllDone(9))]
    assert {w for w, _ in told(play.leave("n2/1", 9), m.Release)} == {"n1/0", "n2/1"}
    play.exit("n1/0", 0)
    assert end_of(play.exit("n2/1", 0)) == ms.End(0, "finished")


def test_a_worker_killed_after_the_end_of_its_script_has_lost_nothing() -> None:
    play = Play().begin()
    play.finish_steps(9)
    play.leave("n2/0", 9)
    actions = play.exit("n2/0", -9)
    assert said(actions) == [
        "rank 1 on n2 died (SIGKILL), noticed by its agent; its script had ended, nothing is lost"
    ]
    play.leave("n1/0", 9)
    assert end_of(play.exit("n1/0", 0)) == ms.End(0, "finished")


def test_an_exit_code_after_training_is_the_runs() -> None:
    play = Play().begin()
    play.finish_steps(9)
    play.leave("n1/0", 9)
    play.leave("n2/0", 9)
    play.exit("n1/0", 0)
    end = end_of(play.exit("n2/0", 3))
    assert end == ms.End(3, "rank 1 on n2 ended (exit code 3) after its last step")


def test_a_crash_before_anything_began_ends_the_run_unless_restarts_were_asked_for() -> None:
    assert end_of(Play().exit("n2/0", 3)) == ms.End(
        3, "rank 1 on n2 ended (exit code 3), noticed by its agent (--max-restarts N would try again)"
    )


def test_a_kill_before_anything_began_starts_a_script_that_recovers_anew() -> None:
    play = Play()
    play.say("n1/0", m.Hello(VERSIONS))
    actions = play.exit("n2/0", -9)
    assert said(actions) == [
        "rank 1 on n2 died (SIGKILL), noticed by its agent; all ranks start again, restart 1 of 3"
    ]
    assert len(spawned(play.exit("n1/0", -9))) == 2, "once all are gone"


def test_a_script_without_steps_is_told_so_and_one_with_a_code_keeps_it() -> None:
    for code, expected in ((0, 64), (3, 3)):
        play = Play()
        for worker in play.holders():
            play.say(worker, m.Hello(VERSIONS))
        actions = play.say("n1/0", m.Leaving(1, False, 0))
        assert [w for w, _ in told(actions, m.Release)] == ["n1/0"]
        end = end_of(play.exit("n1/0", code))
        assert end is not None
        assert end.code == expected
        assert ("run.steps()" in end.reason) == (code == 0)


def test_a_rank_that_ends_without_init_is_named() -> None:
    for exit_first in (True, False):
        play = Play()
        if exit_first:
            play.exit("n2/0", 0)
            end = end_of(play.say("n1/0", m.Hello(VERSIONS)))
        else:
            play.say("n1/0", m.Hello(VERSIONS))
            end = end_of(play.exit("n2/0", 0))
        assert end is not None
        assert end.code == 64
        assert "rank 1 on n2 ended (exit code 0) without recovery.init()" in end.reason


def test_other_versions_on_a_node_end_the_run_at_once() -> None:
    play = Play()
    end = end_of(play.say("n2/0", m.Hello({"torch": "3"})))
    assert end == ms.End(64, "n2 has torch 3, other nodes have 2: install the same torch on every node")


def test_a_model_of_other_shapes_on_one_rank_is_named() -> None:
    play = Play()
    for worker in play.holders():
        play.say(worker, m.Hello(VERSIONS))
    play.say("n1/0", m.Ready(1, 0, True, True, "h", 1, "10 tensors,ab", fingerprint="x"))
    end = end_of(play.say("n2/0", m.Ready(1, 0, True, True, "h", 1, "12 tensors,cd", fingerprint="y")))
    assert end is not None
    assert (end.code, end.reason) == (
        64,
        "rank 1's model has other shapes than rank 0's (12 tensors against 10 tensors): "
        "build the same model on every rank",
    )


@pytest.mark.parametrize(
    "message",
    [
        m.AgentHello("n2", 1, "h", False, [1], {"torch": "9"}),
        m.WorkerExited("n2/77", -9),
        m.WorkerExited("n1/0", -9),  # not this node's
        m.FromWorkers("n2/77", m.Done(3)),
        m.FromWorkers("n2/0", m.Published(7, "k", b"v")),
        m.FromWorkers("n2/0", m.Ready(1, 99, True, False, "h", 1, "odd")),
        m.Bye(),
    ],
)
def test_what_nobody_should_have_said_changes_nothing(message: m.FromAgent) -> None:
    play = Play().begin()
    assert play.tell("n2", message) == []
    assert play.tell("stranger", message) == []


def test_after_the_end_nothing_is_heard() -> None:
    play = Play(standby=0).begin()
    assert end_of(play.exit("n2/0", -9)) is not None
    assert play.exit("n1/0", -9) == []
    assert play.tell("n1", ms.NodeLost("x")) == []


def test_a_node_lost_before_the_run_begins_asks_for_a_requeue() -> None:
    machine = ms.Membership(ms.Config(2, 1, lambda place: {}))
    machine.handle("n1", m.AgentHello("n1", 0, "h", False, [1], VERSIONS))
    end = end_of(machine.handle("n1", ms.NodeLost("4 missed heartbeats")))
    assert end == ms.End(75, "node n1 was lost, noticed by 4 missed heartbeats")
