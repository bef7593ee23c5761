"""What cannot work is said in one line, with what to do about it, and with the right exit code."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable

import msgspec
import pytest
from everstep.launcher.keys import new_secret
from everstep.launcher.local import LocalOrders
from everstep.launcher.options import ORDERS_VARIABLE, SECRET_VARIABLE, RunOptions
from everstep.launcher.torchrun import WorkerSpec
from harness import EVERSTEP, Ended, Job

Launch = Callable[..., Job]


def one_line(ended: Ended, code: int, *words: str) -> None:
    assert ended.code == code, ended.output
    assert "Traceback" not in ended.output, ended.output
    for word in words:
        assert word in ended.error, ended.output


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("no steps", ["without a call of run.steps()"]),
        ("no state_dict", ["track(meter=…)", "state_dict"]),
        ("objects in set-up", ["broadcast_object_list() between init() and steps()", "inside the loop"]),
        ("untracked model", ["DistributedDataParallel model is not tracked", "run.track(model=…)"]),
        ("untracked optimizer", ["SGD", "run.track(optimizer=…)"]),
        ("not protected", ["@run.protect"]),
        ("gradients live on", ["gradients live across steps", "zero_grad()"]),
        ("collective after the optimizer", ["after optimizer.step()", "step.commit()"]),
        ("left in mid-step", ["left in the middle of step 0", "step.commit()"]),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_a_script_that_uses_the_library_wrongly(launch: Launch, case: str, words: list[str]) -> None:
    one_line(launch("bad.py", case, nnodes=1, standby=0).end(), 64, *words)


@pytest.mark.parametrize("case", ["other shapes", "other shapes, no DDP"])
def test_another_model_on_one_rank(launch: Launch, case: str) -> None:
    one_line(launch("bad.py", case, nnodes=2, standby=0).end(), 64, "the same model on every rank")


def test_no_standby_is_left_and_none_is_coming(launch: Launch) -> None:
    faults = ["kill:rank=1,at=begin,step=3"]
    ended = launch("mlp.py", "--steps", "9", nnodes=2, standby=0, faults=faults).end()
    one_line(ended, 75, "no standby is left for rank 1", "requeue", "--standby")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["run", "mpl.py"], ["mpl.py: no such script", "did you mean mlp.py?"]),
        (["run", "--standbys", "2", "mlp.py"], ["--standbys"]),
        (["run", "--standby", "many", "mlp.py"], ["--standby", "many"]),
        (["run", "-m", "no_such_module"], ["no module 'no_such_module'"]),
    ],
)
def test_a_command_line_that_means_nothing(
    command: Callable[..., Job], words: list[str], said: list[str]
) -> None:
    one_line(command([EVERSTEP, *words]).end(), 64, *said)


def agent(command: Callable[..., Job], secret: str, port: int) -> Ended:
    orders = LocalOrders(
        index=0,
        nnodes=1,
        port=port,
        listener=-1,
        run_id="test",
        options=RunOptions(),
        spec=WorkerSpec(nproc_per_node=1, command=(sys.executable,), arguments=("mlp.py",)),
    )
    env = {ORDERS_VARIABLE: msgspec.json.encode(orders, enc_hook=str).decode(), SECRET_VARIABLE: secret}
    return command([EVERSTEP, "agent", "--local"], env=env).end()


@pytest.mark.parametrize("secret", ["", "abc"], ids=["missing", "damaged"])
def test_an_agent_without_the_runs_secret(command: Callable[..., Job], secret: str) -> None:
    one_line(agent(command, secret, 1), 64, "the run's secret (EVERSTEP_SECRET) is missing or damaged")


def test_the_coordinators_port_is_in_use(command: Callable[..., Job]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        one_line(agent(command, new_secret(), port), 64, f"port {port} of n1 cannot be used")


def test_an_agent_started_by_hand(command: Callable[..., Job]) -> None:
    assert ORDERS_VARIABLE not in os.environ
    one_line(command([EVERSTEP, "agent", "--local"]).end(), 64, "not by hand")
