"""One agent that is its own coordinator: its health checks are no reason to end otherwise than the run."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import AsyncGenerator

import pytest
from everstep.healthcheck import api
from everstep.launcher import fitness
from everstep.launcher import messages as m
from everstep.launcher.keys import new_secret

LIFE = """
import asyncio, socket, sys
from everstep.healthcheck import api
from everstep.launcher import torchrun
from everstep.launcher.agent import serve
from everstep.launcher.keys import new_secret
from everstep.launcher.options import RunOptions
from everstep.launcher.post import Post

class Broken(Exception):
    pass

async def cannot_start(level):
    raise OSError("no process could be started")

async def breaks_down(every):
    raise Broken
    yield

async def is_fit(level):
    return api.Verdict(True)

api.examine, api.watch = {examine}, breaks_down
listener = socket.create_server(("127.0.0.1", 0))
post = Post(
    node="n1", index=0, nnodes=1, options=RunOptions(standby=0, health="light"), run_id="r",
    spec=torchrun.WorkerSpec(nproc_per_node=1, command=("sh", "-c", "sleep 0.2; exit {code}"), plain=True),
    coordinator=("127.0.0.1", listener.getsockname()[1]), address="127.0.0.1", listener=listener.fileno(),
)
code = asyncio.run(serve(post, new_secret()))
sys.exit(code)
"""


@pytest.mark.parametrize("examine", ["is_fit", "cannot_start"])
@pytest.mark.parametrize("code", [0, 9])
def test_health_checks_that_break_down_change_neither_the_end_nor_the_code(examine: str, code: int) -> None:
    life = LIFE.format(examine=examine, code=code)
    argv = [sys.executable, "-c", life]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr


def test_the_checks_process_has_ended_when_their_watch_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever that happens, in telling too: it is reaped there, and by nobody else."""
    ended = False

    async def verdicts(every: float) -> AsyncGenerator[api.Verdict, None]:
        nonlocal ended
        try:
            yield api.Verdict(False, "the GPU is gone")
        finally:
            await asyncio.sleep(0)
            ended = True

    async def scene() -> None:
        telling = asyncio.Event()

        async def tell(message: m.Health) -> None:
            telling.set()
            await asyncio.Event().wait()

        task = asyncio.create_task(fitness.watch("", 1.0, tell))
        await telling.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert ended

    monkeypatch.setattr(api, "watch", verdicts)
    asyncio.run(scene())


TWO = """
import asyncio, os, socket, sys
from everstep.launcher import torchrun
from everstep.launcher.agent import serve
from everstep.launcher.options import RunOptions
from everstep.launcher.post import Post

index, port = int(sys.argv[1]), int(sys.argv[2])
post = Post(
    node=f"n{index}", index=index, nnodes=2, options=RunOptions(standby=0, health="off"), run_id="r",
    spec=torchrun.WorkerSpec(nproc_per_node=1, command=("sh", "-c", "echo begun; exec sleep 60"), plain=True),
    coordinator=("127.0.0.1", port), address="127.0.0.1", forsaken=lambda: print("forsaken", flush=True),
)
sys.exit(asyncio.run(serve(post, os.environ["SECRET"])))
"""


def test_an_agent_that_loses_its_coordinator_does_what_is_left_to_do_for_the_run() -> None:
    """In a Slurm job: cancel the replacement that waits in the queue, since nobody else would."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    env = {**os.environ, "SECRET": new_secret()}
    agents = [
        subprocess.Popen(
            [sys.executable, "-c", TWO, str(index), str(port)], env=env, stdout=subprocess.PIPE, text=True
        )
        for index in range(2)
    ]
    try:
        assert agents[1].stdout is not None
        for line in agents[1].stdout:
            if "begun" in line:
                break
        agents[0].kill()
        said, _ = agents[1].communicate(timeout=60)
    finally:
        for agent in agents:
            agent.kill()
            agent.wait()
    assert agents[1].returncode == 75
    assert "forsaken" in said
