"""Embedded mode: N nodes on this machine, each an agent process with its workers. No Slurm.

`everstep run` starts the agents and waits for them. What it is to them, srun is on a cluster.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from types import FrameType

import msgspec
from everstep.launcher.guardian import guarded
from everstep.launcher.keys import new_secret
from everstep.launcher.options import ORDERS_VARIABLE, SECRET_VARIABLE, RunOptions
from everstep.launcher.torchrun import WorkerSpec
from everstep.launcher.voice import say
from everstep.recovery.errors import UsageError

_HOST = "127.0.0.1"
_WINDING = 60.0  # seconds for the end of a run in order, besides the grace of its last step


class LocalOrders(msgspec.Struct, frozen=True, kw_only=True):
    """What `everstep run` tells each agent, by way of the environment."""

    index: int
    nnodes: int
    port: int
    listener: int
    run_id: str
    options: RunOptions
    spec: WorkerSpec


def run_local(options: RunOptions, spec: WorkerSpec) -> int:
    """Run the command on nodes played by this machine; the run's exit code."""
    nnodes = spec.nnodes or options.nnodes or 1
    listener = socket.create_server((_HOST, 0))
    secret, run_id = new_secret(), spec.run_id or secrets.token_hex(4)
    agents: list[subprocess.Popen[bytes]] = []
    stopped: list[int] = []

    def stop(number: int, frame: FrameType | None) -> None:
        stopped.append(number)
        for agent in agents:
            with contextlib.suppress(ProcessLookupError):
                agent.send_signal(signal.SIGTERM if number != signal.SIGINT or len(stopped) > 1 else number)

    previous = {n: signal.signal(n, stop) for n in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    try:
        for index in range(nnodes + options.spare_nodes):
            orders = LocalOrders(
                index=index,
                nnodes=nnodes,
                port=int(listener.getsockname()[1]),
                listener=listener.fileno() if index == 0 else -1,
                run_id=run_id,
                options=options,
                spec=spec,
            )
            agents.append(_start(orders, secret, listener))
        listener.close()
        code = agents[0].wait()
        _see_off(agents)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    if stopped and stopped[0] == signal.SIGINT:
        return 128 + stopped[0]
    if code < 0:
        say(f"error: the coordinator's agent was killed (signal {-code}): start the run again")
        return 75
    return code


def _start(orders: LocalOrders, secret: str, listener: socket.socket) -> subprocess.Popen[bytes]:
    env = dict(os.environ)
    env[ORDERS_VARIABLE] = msgspec.json.encode(orders, enc_hook=str).decode()
    env[SECRET_VARIABLE] = secret
    return subprocess.Popen(
        [sys.executable, "-m", "everstep.launcher.cli", "agent", "--local"],
        env=env,
        pass_fds=(listener.fileno(),) if orders.listener >= 0 else (),
        start_new_session=True,  # Ctrl-C is for us to pass on
    )


def _see_off(agents: list[subprocess.Popen[bytes]]) -> None:
    """Agents end by themselves; one that does not within a few seconds is made to."""
    deadline = time.monotonic() + 4.0
    for agent in agents:
        try:
            agent.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            agent.terminate()
    for agent in agents:
        try:
            agent.wait(5.0)
        except subprocess.TimeoutExpired:
            agent.kill()


def agent_main() -> int:
    """What each agent process runs: the agent under its guardian."""
    from pathlib import Path

    secret = os.environ.pop(SECRET_VARIABLE, "")
    text = os.environ.pop(ORDERS_VARIABLE, "")
    try:
        orders = msgspec.json.decode(
            text, type=LocalOrders, dec_hook=lambda kind, value: kind(value) if kind is Path else value
        )
    except msgspec.MsgspecError as error:
        raise UsageError(
            f"`everstep agent` is started by `everstep run` or `everstep srun`, not by hand ({error})"
        ) from error

    def main() -> int:
        from everstep.launcher.agent import serve
        from everstep.launcher.post import Post

        post = Post(
            node=f"n{orders.index + 1}",
            index=orders.index,
            nnodes=orders.nnodes,
            options=orders.options,
            spec=orders.spec,
            run_id=orders.run_id,
            coordinator=(_HOST, orders.port),
            address=_HOST,
            spare=orders.index >= orders.nnodes,
            listener=orders.listener,
        )
        return asyncio.run(serve(post, secret))

    return guarded(main, orders.options.grace + _WINDING)
