"""One agent that is its own coordinator: its health checks are no reason to end otherwise than the run."""

from __future__ import annotations

import subprocess
import sys

import pytest

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
