"""The node agent: one asyncio loop over its workers and the coordinator's messages.

It starts, watches and stops workers as it is told, and passes their messages on. On the
node with index 0 it also plays the coordinator. It never decides who holds a rank.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import zmq
import zmq.asyncio
from everstep.launcher import fitness, torchrun, workers
from everstep.launcher import messages as m
from everstep.launcher.chair import GATHER, take_the_chair
from everstep.launcher.coordinator import ANSWERED, MISSED, Coordinator
from everstep.launcher.guardian import adopt_orphans, end_descendants
from everstep.launcher.keys import keys_from
from everstep.launcher.options import ORDERS_VARIABLE, SECRET_VARIABLE
from everstep.launcher.output import Relay
from everstep.launcher.post import Post, introduction
from everstep.launcher.voice import say
from everstep.recovery import tripwire
from everstep.recovery.control import DEAF_VARIABLE

_GRACE = 2.0  # between SIGTERM and SIGKILL of workers, where torchrun's --shutdown-timeout says nothing
_SILENCE = 4.0  # seconds without the coordinator's heartbeat until its workers are stopped
_ADMISSION = 20.0  # seconds from the connection to the coordinator's first word
_CLOSING = 90.0  # seconds for the coordinator's last words with Slurm
_TWICE = 2.0  # seconds within which a signal that comes again is the same: Slurm and the guardian send it
_ALONE = 1.0  # seconds for the coordinator to say that the whole run is being stopped
_RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


async def serve(post: Post, secret: str) -> int:
    """Be the agent of this node until the run is over; the run's exit code."""
    return await Agent(post, secret).run()


class Agent:
    """One node's part in the run."""

    def __init__(self, post: Post, secret: str) -> None:
        self._post = post
        self._keys = keys_from(secret)
        self._context = zmq.asyncio.Context()
        self._loop = asyncio.get_running_loop()
        self._workers: dict[str, workers.WorkerProcess] = {}
        self._relay = Relay()
        self._over: asyncio.Future[int] = self._loop.create_future()
        self._beat = time.monotonic()
        self._logs: Path | None = None
        self._may_nice = workers.may_unnice()
        self._socket: zmq.asyncio.Socket | None = None
        self._connections: zmq.asyncio.Socket | None = None  # events of the connection to the coordinator
        self._reached = self._admitted = False
        self._playing: Coordinator | None = None  # where this agent is the coordinator too
        # Where workers' lines go: on a replacement node, into a pipe to the coordinator.
        self._output = {1: 1, 2: 2}
        self._pipes: dict[int, int] = {}
        self._asked: dict[int, float] = {}  # signals that were heeded, and when
        self._winding = False
        self._last_act: asyncio.Future[None] = self._loop.create_future()
        self._last_act.set_result(None)

    async def run(self) -> int:
        adopt_orphans()
        for number in (signal.SIGINT, signal.SIGHUP):
            self._loop.add_signal_handler(number, self._told_to_stop, number)
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
            self._loop.add_signal_handler(number, self._asked_to_stop, number)
        coordinator = self._take_the_chair()
        self._socket = self._connect()
        if self._post.joiner:
            self._send_output_on()
        level = self._post.health
        unfit = await fitness.examine(level, self._say_here) if level != "off" else ""
        await self._send(introduction(self._post, unfit))
        tasks = [asyncio.create_task(self._receive()), asyncio.create_task(self._watch())]
        if level != "off":
            tasks.append(
                asyncio.create_task(fitness.watch(unfit, self._post.options.health_every, self._send))
            )
        code = await self._over
        tasks[0].cancel()
        for task in tasks[2:]:  # the health checks: their process is to end before all that is left is ended
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)  # one that broke down is no reason to stay
        await self._last_act
        await self._stop_workers()
        if self._pipes:
            self._relay.drain(1.0)
            for stream in self._pipes:
                self._pass_output(stream)
        await self._send(m.Bye())
        for task in tasks[1:]:
            task.cancel()
        if coordinator is not None:
            with contextlib.suppress(asyncio.TimeoutError):
                # Slurm may take its time over a requeue, and nobody else would ask for it.
                code = await asyncio.wait_for(coordinator, _CLOSING if self._post.client else 10.0)
        self._relay.drain(1.0)
        self._socket.disable_monitor()
        self._socket.close()
        self._context.destroy(linger=200)
        return code

    # --- the coordinator, here or elsewhere -----------------------------------------------------

    def _take_the_chair(self) -> asyncio.Task[int] | None:
        if self._post.index != 0:
            return None
        coordinator = self._playing = take_the_chair(self._post, self._context, self._keys)

        async def serve_it() -> int:
            return (await coordinator.serve(GATHER)).code

        return asyncio.ensure_future(serve_it())

    def _say_here(self, text: str) -> None:
        say(f"{self._post.node}: {text}")

    def _connect(self) -> zmq.asyncio.Socket:
        sock = self._context.socket(zmq.DEALER)
        sock.setsockopt(zmq.IDENTITY, self._post.node.encode())
        sock.curve_serverkey = self._keys.server_public
        sock.curve_publickey = self._keys.client_public
        sock.curve_secretkey = self._keys.client_secret
        sock.setsockopt(zmq.LINGER, 500)
        sock.setsockopt(zmq.RECONNECT_IVL, 50)
        sock.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
        host, port = self._post.coordinator
        self._connections = sock.get_monitor_socket(zmq.EVENT_CONNECTED)
        sock.connect(f"tcp://{host}:{port}")
        return sock

    async def _send(self, message: m.FromAgent) -> None:
        if self._socket is not None:
            with contextlib.suppress(zmq.ZMQError):
                await self._socket.send(m.encode(message))

    def _send_soon(self, message: m.FromAgent) -> None:
        # A DEALER's queue takes it at once; order is kept.
        if self._socket is not None:
            with contextlib.suppress(zmq.ZMQError):
                self._socket.send(m.encode(message))

    async def _receive(self) -> None:
        if self._socket is None:
            return
        while True:
            data = await self._socket.recv()
            self._beat, self._admitted = time.monotonic(), True
            try:
                message = m.decode_to_agent(data)
            except m.BadMessage:
                continue
            if isinstance(message, m.Spawn):
                self._spawn(message)
            elif isinstance(message, m.Kill):
                if message.worker in self._workers:
                    self._workers[message.worker].signal(signal.SIGKILL)
            elif isinstance(message, m.ToWorkers):
                self._to_workers(message)
            elif isinstance(message, m.Winding):
                self._winding = True
                self._loop.call_later(message.seconds, self._end, 75)
            elif isinstance(message, m.Stop):
                if message.code and self._post.joiner:
                    say(f"{self._post.node}: the run has ended: {message.reason}")
                self._end(message.code)

    def _to_workers(self, message: m.ToWorkers) -> None:
        for name in message.workers:
            worker = self._workers.get(name)
            if worker is None:
                continue
            if isinstance(message.message, m.Assign):
                worker.rank = message.message.rank
                worker.unnice()
            worker.send(message.message)
            if worker.outgoing:
                self._loop.add_writer(worker.control.fileno(), self._flush, worker)

    def _flush(self, worker: workers.WorkerProcess) -> None:
        if worker.flush():
            self._loop.remove_writer(worker.control.fileno())

    async def _watch(self) -> None:
        period = self._post.options.heartbeat
        last = time.monotonic()
        while True:
            await asyncio.sleep(period)
            now = time.monotonic()
            if now - last > 2 * period:
                self._beat += now - last - period  # we stood still ourselves
            last = now
            steps = {name: w.committed() for name, w in self._workers.items() if w.rank >= 0}
            await self._send(m.Heartbeat(steps))
            limit = self._patience()
            if now - self._beat > limit and not self._over.done():
                self._end(self._give_up(limit))

    def _give_up(self, limit: float) -> int:
        """Say why this node stops; the exit code."""
        node, (host, port) = self._post.node, self._post.coordinator
        if self._reached and not self._admitted:
            say(
                f"error: {node}: the coordinator at {host}:{port} does not accept this agent's secret "
                "(EVERSTEP_SECRET): start agents through `everstep run` or `everstep srun` (exit code 64)"
            )
            return 64
        say(
            f"error: {node}: nothing was heard of the coordinator at {host}:{port} for {limit:.0f} s; "
            "this node's workers are stopped: requeue the run (exit code 75)"
        )
        if self._admitted and self._post.forsaken is not None:
            self._last_act = asyncio.ensure_future(asyncio.to_thread(self._post.forsaken))
        return 75

    def _patience(self) -> float:
        """How long the coordinator may be silent: long while it may not be up, short once it answered."""
        if self._admitted or self._post.index == 0:
            return max(_SILENCE, MISSED * ANSWERED * self._post.options.heartbeat)
        # A coordinator that takes the connection and says nothing does not know our secret.
        return _ADMISSION if self._connected() or self._post.joiner else GATHER

    def _connected(self) -> bool:
        if not self._reached and self._connections is not None:
            self._reached = bool(int(self._connections.get(zmq.EVENTS)) & zmq.POLLIN)
        return self._reached

    # --- workers --------------------------------------------------------------------------------

    def _spawn(self, order: m.Spawn) -> None:
        post = self._post
        local_rank = max(order.local_rank, 0)
        how = workers.Start(
            worker=order.worker,
            argv=torchrun.worker_argv(post.spec, local_rank),
            env=self._worker_environment(order),
            nice=order.nice and self._may_nice,
            stdout=self._output[1],
            stderr=self._output[2],
        )
        self._route(how, order)
        holder: list[workers.WorkerProcess] = []

        def label() -> str:
            if post.spec.plain:
                return ""  # srun's --label does that
            rank = holder[0].rank if holder else order.rank
            return f"[rank {rank}] " if rank >= 0 else f"[{post.node} standby] "

        try:
            worker = workers.start(how, self._relay, label)
        except OSError as error:
            say(f"{post.node}: a worker cannot be started: {error}")
            self._send_soon(m.WorkerExited(order.worker, 126))
            return
        worker.rank = order.rank
        holder.append(worker)
        self._workers[order.worker] = worker
        self._loop.add_reader(worker.pidfd, self._exited, worker)
        self._loop.add_reader(worker.control.fileno(), self._heard, worker)
        self._send_soon(m.WorkerStarted(order.worker, worker.pid))

    def _worker_environment(self, order: m.Spawn) -> Mapping[str, str]:
        own = {SECRET_VARIABLE, ORDERS_VARIABLE, *(() if self._post.spec.plain else _RANK_VARIABLES)}
        env = {name: value for name, value in os.environ.items() if name not in own}
        env.update(self._post.spec.env)
        env.update(order.env)
        env["EVERSTEP_HOST"] = self._post.address
        env["EVERSTEP_RESUME"] = self._post.options.resume
        if self._post.deaf:
            env[DEAF_VARIABLE] = "1"
        env["TORCHELASTIC_RUN_ID"] = self._post.run_id
        return env

    def _route(self, how: workers.Start, order: m.Spawn) -> None:
        """Where the worker's output goes, by torchrun's --log-dir, --tee and --redirects."""
        spec = self._post.spec
        local_rank = max(order.local_rank, 0)
        if spec.tee == "0" and spec.redirects == "0" and not spec.local_ranks_filter:
            return
        ways = torchrun.streams(spec, local_rank)
        if "file" in (ways.stdout, ways.stderr) or "tee" in (ways.stdout, ways.stderr):
            if self._logs is None:
                if spec.log_dir:
                    Path(spec.log_dir).mkdir(parents=True, exist_ok=True)
                self._logs = Path(tempfile.mkdtemp(prefix=f"{self._post.run_id}_", dir=spec.log_dir))
            # A standby's rank is not known yet: its files are named by the worker instead.
            slot = str(order.local_rank) if order.rank >= 0 else order.worker.replace("/", "-standby-")
            directory = self._logs / f"attempt_{order.attempt}" / slot
            directory.mkdir(parents=True, exist_ok=True)
            how.stdout_file = directory / "stdout.log" if ways.stdout in ("file", "tee") else None
            how.stderr_file = directory / "stderr.log" if ways.stderr in ("file", "tee") else None
        how.stdout = how.stdout if ways.stdout in ("console", "tee") else None
        how.stderr = how.stderr if ways.stderr in ("console", "tee") else None

    def _send_output_on(self) -> None:
        for stream in (1, 2):
            read, self._output[stream] = os.pipe()
            os.set_blocking(read, False)
            self._pipes[stream] = read
            self._loop.add_reader(read, self._pass_output, stream)

    def _pass_output(self, stream: int) -> None:
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self._pipes[stream], 1 << 16):
                self._send_soon(m.Output(stream, data))

    def _heard(self, worker: workers.WorkerProcess) -> None:
        try:
            data = worker.control.recv(1 << 18)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._loop.remove_reader(worker.control.fileno())
            return
        try:
            frames = worker.frames.feed(data)
        except m.BadMessage:
            self._loop.remove_reader(worker.control.fileno())
            return
        for frame in frames:
            with contextlib.suppress(m.BadMessage):
                message = m.decode_from_worker(frame)
                self._send_soon(m.FromWorkers(worker.name, message))
                if isinstance(message, m.Hello):
                    threading.Thread(target=self._feel, args=(worker,), daemon=True).start()

    def _feel(self, worker: workers.WorkerProcess) -> None:
        """In a thread of its own: tens of milliseconds before the pidfd, where a signal ends the worker."""
        if tripwire.wait(worker.page):
            with contextlib.suppress(RuntimeError):  # the loop is closed: the run is over
                self._loop.call_soon_threadsafe(self._dying, worker)

    def _dying(self, worker: workers.WorkerProcess) -> None:
        number = tripwire.killed_by(worker.pid) if worker.name in self._workers else None
        if number is not None:
            self._announce(worker, -number)
            self._sweep(worker.pid)

    def _announce(self, worker: workers.WorkerProcess, code: int) -> None:
        if not worker.announced:
            worker.announced = True
            if self._over.done():
                return  # we ended it ourselves, and that is no news
            self._heard_last(worker)
            self._send_soon(m.WorkerExited(worker.name, code, "its agent"))

    def _exited(self, worker: workers.WorkerProcess) -> None:
        code = worker.process.poll()
        if code is None:
            return
        self._loop.remove_reader(worker.pidfd)
        self._announce(worker, code)
        self._loop.remove_reader(worker.control.fileno())
        self._loop.remove_writer(worker.control.fileno())
        del self._workers[worker.name]
        self._sweep(worker.pid)
        worker.close()

    def _heard_last(self, worker: workers.WorkerProcess) -> None:
        """What it said just before its end comes before the news of its end."""
        for _ in range(1000):
            try:
                data = worker.control.recv(1 << 18)
            except OSError:
                return
            if not data:
                return
            with contextlib.suppress(m.BadMessage):
                for frame in worker.frames.feed(data):
                    self._send_soon(m.FromWorkers(worker.name, m.decode_from_worker(frame)))

    def _sweep(self, session: int, again: int = 3) -> None:
        """End what a dead worker has left behind: its DataLoader children hold its sockets open."""
        end_descendants({w.pid for w in self._workers.values()}, session)
        if again and not self._over.done():
            self._loop.call_later(0.05, self._sweep, session, again - 1)

    # --- the end --------------------------------------------------------------------------------

    def _asked_to_stop(self, number: int) -> None:
        """By Slurm or by whoever cares for the node: the run as a whole ends in order, if it is meant."""
        now = time.monotonic()
        if number in self._asked:
            if now - self._asked[number] > _TWICE:
                self._told_to_stop(number)  # asked again: at once
            return
        self._asked[number] = now
        if self._playing is not None:
            self._playing.asked_to_stop(number)
        else:
            self._send_soon(m.Told(number))
            if number == signal.SIGTERM:
                self._loop.call_later(_ALONE, self._stop_alone, number)

    def _stop_alone(self, number: int) -> None:
        if not self._winding:  # the others go on
            self._told_to_stop(number)

    def _told_to_stop(self, number: int) -> None:
        if not self._over.done():
            name = signal.Signals(number).name
            say(f"{self._post.node}: told to stop ({name})")
            if self._playing is not None:
                self._playing.stop(128 + number, f"stopped by {name}")
        self._end(128 + number)

    def _end(self, code: int) -> None:
        if not self._over.done():
            self._over.set_result(code)

    async def _stop_workers(self) -> None:
        grace = self._post.spec.shutdown_timeout
        for worker in list(self._workers.values()):
            worker.terminate()
        deadline = time.monotonic() + (min(grace, 3) if grace is not None else _GRACE)
        while self._workers and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        for worker in list(self._workers.values()):
            worker.signal(signal.SIGKILL)
        deadline = time.monotonic() + 2.0
        while self._workers and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        end_descendants(set())
