"""Who does not know the run's secret is no part of it."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

from everstep.launcher.agent import Post
from everstep.launcher.keys import new_secret
from everstep.launcher.options import RunOptions
from everstep.launcher.torchrun import WorkerSpec

AGENT = """
import asyncio, sys
sys.path.insert(0, sys.argv[1])
from test_secrets import post
from everstep.launcher.agent import serve
print("up", flush=True)
sys.exit(asyncio.run(serve(post(int(sys.argv[2]), int(sys.argv[3])), sys.argv[4])))
"""


def agent(index: int, port: int) -> subprocess.Popen[str]:
    """An agent process with a secret of its own."""
    words = [sys.executable, "-c", AGENT, str(Path(__file__).parent), str(index), str(port), new_secret()]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def post(index: int, port: int) -> Post:
    return Post(
        node=f"n{index + 1}",
        index=index,
        nnodes=2,
        options=RunOptions(),
        spec=WorkerSpec(nproc_per_node=1, command=("true",)),
        run_id="test",
        coordinator=("127.0.0.1", port),
        address="127.0.0.1",
    )


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


def test_an_agent_with_another_secret_is_not_admitted_and_says_so() -> None:
    port = free_port()
    first = agent(0, port)
    try:
        assert first.stdout is not None
        assert first.stdout.readline() == "up\n"
        stranger = agent(1, port)
        _, said = stranger.communicate(timeout=90)
        assert stranger.returncode == 64, said
        assert "does not accept this agent's secret" in said
        assert first.poll() is None, "the coordinator was not disturbed"
    finally:
        first.terminate()
        first.communicate(timeout=30)
