"""The coordinator: membership behind a socket.

A role of one agent, in that agent's own loop. It authenticates agents by CURVE, counts
their heartbeats, feeds `Membership`, and carries out what that decides: messages to
agents, the events file, the log. It decides nothing itself.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import zmq
import zmq.asyncio
from everstep.launcher import membership as ms
from everstep.launcher import messages as m
from everstep.launcher.jobside import JobSide
from everstep.launcher.keys import Admission, Keys
from everstep.launcher.voice import say
from everstep.recovery.errors import UsageError
from zmq.auth.asyncio import AsyncioAuthenticator

MISSED = 4  # heartbeats
ANSWERED = (
    4  # of so many heartbeats one is answered: agents are to hear of the coordinator's death, but not as soon
)
_FAREWELL = 6.0
_SLOW_START = 10.0  # seconds of silence until a node is held for lost, before the first step


@dataclass(frozen=True)
class Outcome:
    """How the run ended."""

    code: int
    reason: str
    requeue: bool = False  # the job is to go back to the queue
    exclude: tuple[str, ...] = ()  # without these nodes


class Coordinator:
    """Serve until the run is over, then `outcome` is set."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        keys: Keys,
        config: ms.Config,
        heartbeat: float,
        events: Path | None,
        job: JobSide | None = None,
    ) -> None:
        self._job = job
        self._asking: asyncio.Future[None] | None = None
        self._membership = ms.Membership(config)
        self._heartbeat = heartbeat
        self._expected = config.nnodes + config.spare_nodes
        self._events = _open_events(events)
        self._heard: dict[str, float] = {}
        self._gone: set[str] = set()
        self._dropped = 0
        self.outcome: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self._authenticator = AsyncioAuthenticator(context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback("*", credentials_provider=Admission(keys))
        self._socket = context.socket(zmq.ROUTER)
        self._socket.curve_server = True
        self._socket.curve_secretkey = keys.server_secret
        self._socket.curve_publickey = keys.server_public
        self._socket.setsockopt(zmq.LINGER, 500)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)

    def bind(self, host: str, port: int) -> None:
        """Listen. Raises zmq.ZMQError."""
        self._socket.bind(f"tcp://{host}:{port}")

    def adopt(self, fd: int) -> None:
        """Listen on a socket that is bound already."""
        self._socket.setsockopt(zmq.USE_FD, fd)
        self._socket.bind("tcp://127.0.0.1:*")

    def stop(self, code: int, reason: str) -> None:
        """End the run from outside."""
        if not self.outcome.done():
            self._emit("failed", {"generation": self._membership.generation, "reason": reason, "code": code})
            self._act([ms.End(code, reason)])

    def asked_to_stop(self, number: int) -> None:
        """The whole run is to end in order, because of this signal."""
        name = signal.Signals(number).name
        asked = ms.StopAsked(f"told to stop ({name})", 128 + number, self._job is not None)
        if self._job is None:
            self.notice(asked)
        elif number == signal.SIGTERM and self._asking is None:
            self._asking = asyncio.ensure_future(self._told_by_slurm(self._job, asked))
        elif number != signal.SIGTERM:  # a warning ahead (--signal), which going back to the queue answers
            self.notice(asked)

    async def _told_by_slurm(self, job: JobSide, asked: ms.StopAsked) -> None:
        """SIGTERM comes before a preemption, and then from everybody who ends the job for good."""
        found = await job.preempted()
        if found is None:
            self.notice(replace(asked, requeue=False))
        else:
            self.notice(replace(asked, why=found.why, requeue=not found.comes_back))

    def notice(self, event: ms.RunEvent) -> None:
        """Something that concerns the run as a whole."""
        self._act(self._membership.notice(event))

    async def serve(self, gather_within: float) -> Outcome:
        """Run until the end; everybody has been told to stop by then."""
        tasks = [asyncio.create_task(self._receive()), asyncio.create_task(self._watch(gather_within))]
        outcome = await self.outcome
        await self._farewell()
        if self._job is not None:
            await self._job.close(self._membership.frontier, outcome.reason)
            if outcome.requeue:
                await self._job.requeue(outcome.exclude)
        for task in tasks:
            task.cancel()
        self._authenticator.stop()
        self._socket.close()
        return outcome

    async def _receive(self) -> None:
        while True:
            parts = await self._socket.recv_multipart()
            try:
                if len(parts) != 2:
                    raise m.BadMessage(f"{len(parts)} parts")
                message = m.decode_from_agent(parts[1])
                node = parts[0].decode()
            except (m.BadMessage, UnicodeDecodeError) as error:
                self._dropped += 1
                if self._dropped in (1, 100, 10_000):
                    say(f"{self._dropped} malformed messages dropped so far, the last: {error}")
                continue
            self._heard[node] = time.monotonic()
            if isinstance(message, m.Output):
                _print(message)
            elif isinstance(message, m.Bye):
                self._gone.add(node)
                if not self.outcome.done():
                    self._act(self._membership.handle(node, ms.NodeLost("its agent, which was told to stop")))
            else:
                self._act(self._membership.handle(node, message))
                if isinstance(message, m.AgentHello) and message.joiner and self._job is not None:
                    known = self._membership.nodes.get(node)
                    if known is not None and known.alive:
                        self._job.joined()

    async def _watch(self, gather_within: float) -> None:
        """Heartbeats, both ways."""
        last, began = time.monotonic(), time.monotonic()
        for turn in itertools.count():
            await asyncio.sleep(self._heartbeat)
            now = time.monotonic()
            if now - last > 2 * self._heartbeat:  # it was we who stood still: nobody is late by that much
                for node in self._heard:
                    self._heard[node] += now - last - self._heartbeat
            last = now
            if self._membership.phase == "gathering" and now - began > gather_within:
                here = len(self._membership.nodes)
                late = f"{here} of {self._expected} nodes are here after {gather_within:.0f} s"
                self._act([ms.End(75, f"{late}: see whether the others could start")])
            # While scripts and torch are being read, a node may be very busy, and nobody waits for it yet.
            patience = MISSED * self._heartbeat if self._membership.joined else _SLOW_START
            for node, heard in list(self._heard.items()):
                if node not in self._gone and now - heard > patience:
                    self._gone.add(node)
                    self._act(self._membership.handle(node, ms.NodeLost(f"{MISSED} missed heartbeats")))
                elif node not in self._gone and turn % ANSWERED == 0:
                    self._post(node, m.Beat())

    def _act(self, actions: list[ms.Action]) -> None:
        for action in actions:
            if isinstance(action, ms.To):
                self._post(action.node, action.message)
            elif isinstance(action, ms.Emit):
                self._emit(action.event, action.fields)
            elif isinstance(action, ms.Say):
                say(action.text)
            elif isinstance(action, ms.Timer):
                up = ms.TimeUp(action.name, action.generation)
                asyncio.get_running_loop().call_later(action.seconds, self.notice, up)
            elif isinstance(action, ms.AskWhy):
                self.asked_to_stop(action.signal)
            elif isinstance(action, ms.Recruit):
                if self._job is not None:
                    self._job.recruit(action)
            elif isinstance(action, ms.Blame):
                if self._job is not None:
                    self._job.lost(action.node, action.reason)
            elif not self.outcome.done():
                _say_end(action)
                self.outcome.set_result(Outcome(action.code, action.reason, action.requeue, action.exclude))

    def _post(self, node: str, message: m.ToAgent) -> None:
        # The socket's queue takes it at once, in order; an agent that is gone is noticed by its silence.
        sent = asyncio.ensure_future(self._socket.send_multipart([node.encode(), m.encode(message)]))
        sent.add_done_callback(_ignore_failure)

    def _emit(self, event: str, fields: dict[str, Any]) -> None:
        if self._events is None:
            return
        line = json.dumps({"t": time.time(), "event": event, **fields}) + "\n"
        try:
            os.write(self._events, line.encode())
        except OSError as error:
            say(f"the events file cannot be written any more: {error}")
            self._events = None

    async def _farewell(self) -> None:
        """Tell every agent to stop, and wait for each to say that its workers are gone."""
        outcome = self.outcome.result()
        waiting = {node for node in self._membership.nodes if node not in self._gone}
        for node in waiting:
            self._post(node, m.Stop(outcome.code, outcome.reason))
        deadline = time.monotonic() + _FAREWELL
        while waiting - self._gone and time.monotonic() < deadline:
            await asyncio.sleep(0.02)


def _open_events(path: Path | None) -> int | None:
    try:
        return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644) if path else None
    except OSError as error:
        raise UsageError(f"--events {path} cannot be written here: {error.strerror}") from error


def _print(output: m.Output) -> None:
    stream = sys.stderr if output.stream == 2 else sys.stdout
    stream.buffer.write(output.data)
    stream.flush()


def _ignore_failure(sent: asyncio.Future[Any]) -> None:
    if not sent.cancelled():
        sent.exception()


def _say_end(end: ms.End) -> None:
    if end.code == 0:
        say("finished")
        return
    if end.detail:
        sys.stderr.write(end.detail.rstrip() + "\n")
    say(f"error: {end.reason} (exit code {end.code})")
