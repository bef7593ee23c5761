"""The node agent: one asyncio loop over its workers and the coordinator's messages.

It starts, watches and stops workers as it is told, and passes their messages on. On the
node with index 0 it also plays the coordinator. It never decides who holds a rank.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import zmq
import zmq.asyncio
from everstep.launcher import messages as m
from everstep.launcher import torchrun, workers
from everstep.launcher.coordinator import MISSED, Coordinator
from everstep.launcher.guardian import adopt_orphans, end_descendants
from everstep.launcher.jobside import Here, JobSide, restart_count
from everstep.launcher.keys import keys_from
from everstep.launcher.ladder import parse_policy
from everstep.launcher.membership import Config, Placement, RecruitFailed
from everstep.launcher.options import ORDERS_VARIABLE, SECRET_VARIABLE, RunOptions
from everstep.launcher.output import Relay
from everstep.launcher.recruit import Terms
from everstep.launcher.slurm.client import SlurmClient
from everstep.recovery import tripwire
from everstep.recovery.control import DEAF_VARIABLE
from everstep.recovery.errors import UsageError

_GRACE = 2.0  # between SIGTERM and SIGKILL of workers, where torchrun's --shutdown-timeout says nothing
_SILENCE = 4.0  # seconds without the coordinator's heartbeat until its workers are stopped
_GATHER = 300.0
_ADMISSION = 20.0  # seconds from the connection to the coordinator's first word
_PORTS = 8
_TWICE = (
    2.0  # seconds within which a signal that comes again is the same one: Slurm and the guardian both send it
)
_ALONE = 1.0  # seconds for the coordinator to say that the whole run is being stopped
_RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Post:
    """Everything that one agent needs to know to begin."""

    node: str
    index: int
    nnodes: int  # that hold ranks
    options: RunOptions
    spec: torchrun.WorkerSpec
    run_id: str
    coordinator: tuple[str, int]
    address: str  # that state and groups travel on
    spare: bool = False
    listener: int = -1  # an already bound socket, for the coordinator
    bind: str = "127.0.0.1"
    devices: int = 0
    problem: str = ""
    code: int = 64
    joiner: bool = False  # of a replacement node, which comes to a run that is under way
    deaf: bool = False  # Slurm signals every process of a step, and workers leave that to their agent
    # The coordinator's, in a Slurm job: what it can be asked for, by whom, and where its history is kept.
    here: Here = Here()  # noqa: RUF009
    client: SlurmClient | None = None
    terms: Terms | None = None
    folder: Path | None = None


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
        self._output = {
            1: 1,
            2: 2,
        }  # where workers' lines go; on a replacement node, a pipe to the coordinator
        self._pipes: dict[int, int] = {}
        self._asked: dict[int, float] = {}  # signals that were heeded, and when
        self._winding = False

    async def run(self) -> int:
        adopt_orphans()
        for number in (signal.SIGINT, signal.SIGHUP):
            self._loop.add_signal_handler(number, self._told_to_stop, number)
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
            self._loop.add_signal_handler(number, self._asked_to_stop, number)
        coordinator = self._coordinator()
        self._socket = self._connect()
        if self._post.joiner:
            self._send_output_on()
        examined = self._post.options.health == "on" or (
            self._post.options.health == "auto" and self._post.deaf
        )
        unfit = await self._examine() if examined else ""
        await self._send(self._introduction(unfit))
        tasks = [asyncio.create_task(self._receive()), asyncio.create_task(self._watch())]
        if examined:
            tasks.append(asyncio.create_task(self._stay_fit(unfit)))
        code = await self._over
        tasks[0].cancel()
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
                code = await asyncio.wait_for(coordinator, 10.0)
        self._relay.drain(1.0)
        self._socket.disable_monitor()
        self._socket.close()
        self._context.destroy(linger=200)
        return code

    # --- the coordinator, here or elsewhere -----------------------------------------------------

    def _coordinator(self) -> asyncio.Task[int] | None:
        post = self._post
        if post.index != 0:
            return None
        job: JobSide | None = None
        fruitless = 0
        if post.client is not None and post.terms is not None:
            job = JobSide(post.client, post.here.job_id, post.terms, self._recruit_failed, _say)
            fruitless = job.begin(post.folder, restart_count())
        config = Config(
            nnodes=post.nnodes,
            nproc=post.spec.nproc_per_node,
            environment=self._environment,
            standby=post.options.standby,
            spare_nodes=post.options.spare_nodes,
            max_restarts=post.spec.max_restarts,
            expects_recovery=_mentions_everstep(post.spec.script),
            token=lambda: os.urandom(32),
            allowed=parse_policy(post.options.resume_policy),
            in_job=job is not None and post.here.job_id > 0,
            can_requeue=post.here.can_requeue,
            why_not=post.here.why_not,
            attempts=fruitless,
            grace=post.options.grace,
        )
        heartbeat, events = post.options.heartbeat, post.options.events
        coordinator = Coordinator(self._context, self._keys, config, heartbeat, events, job)
        try:
            if post.listener >= 0:
                coordinator.adopt(post.listener)
            else:
                coordinator.bind(post.bind, post.coordinator[1])
        except zmq.ZMQError as error:
            raise UsageError(
                f"port {post.coordinator[1]} of {post.node} cannot be used for the coordinator ({error}): "
                "start the run again, which takes another one"
            ) from error

        self._playing = coordinator

        async def serve_it() -> int:
            return (await coordinator.serve(_GATHER)).code

        return asyncio.ensure_future(serve_it())

    def _recruit_failed(self, failed: RecruitFailed) -> None:
        if self._playing is not None:
            self._playing.notice(failed)

    def _environment(self, place: Placement) -> dict[str, str]:
        task: dict[str, str] = {}
        if self._post.spec.plain:
            task = torchrun.task_environment(
                rank=place.rank, node_rank=place.group_rank, nnodes=self._post.nnodes
            )
            if not _mentions_everstep(self._post.spec.script):
                return task
        return task | torchrun.rank_environment(
            self._post.spec,
            rank=place.rank,
            local_rank=place.local_rank,
            world_size=self._post.nnodes * self._post.spec.nproc_per_node,
            nnodes=self._post.nnodes,
            node_rank=place.group_rank,
            master_addr=place.master_host,
            master_port=place.master_port,
            restart_count=place.attempt,
            run_id=self._post.run_id,
        )

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

    async def _examine(self) -> str:
        """Why this node is not fit for work, if it is not."""
        from everstep.healthcheck import api

        verdict = await api.examine()
        for fault in verdict.faults:
            _say(f"{self._post.node}: health checks: {fault}")
        return "" if verdict.fit else verdict.reason

    async def _stay_fit(self, unfit: str) -> None:
        """Tell the coordinator when that changes."""
        from everstep.healthcheck import api

        async for verdict in api.watch():
            now = "" if verdict.fit else verdict.reason
            if now != unfit and not verdict.faults:
                unfit = now
                await self._send(m.Health(unfit))

    def _introduction(self, unfit: str = "") -> m.AgentHello:
        post = self._post
        versions = {name: importlib.metadata.version(name) for name in ("everstep", "torch")}
        return m.AgentHello(
            post.node,
            post.index,
            post.address,
            post.spare,
            _free_ports(post.address, _PORTS),
            versions,
            post.devices,
            post.problem,
            post.code,
            post.joiner,
            unfit,
        )

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
                    _say(f"{self._post.node}: the run has ended: {message.reason}")
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
            _say(
                f"error: {node}: the coordinator at {host}:{port} does not accept this agent's secret "
                "(EVERSTEP_SECRET): start agents through `everstep run` or `everstep srun` (exit code 64)"
            )
            return 64
        _say(
            f"error: {node}: nothing was heard of the coordinator at {host}:{port} for {limit:.0f} s; "
            "this node's workers are stopped: requeue the run (exit code 75)"
        )
        return 75

    def _patience(self) -> float:
        """How long the coordinator may be silent: long while it may not be up, short once it answered."""
        if self._admitted or self._post.index == 0:
            return max(_SILENCE, 2 * MISSED * self._post.options.heartbeat)
        # A coordinator that takes the connection and says nothing does not know our secret.
        return _ADMISSION if self._connected() or self._post.joiner else _GATHER

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
            _say(f"{post.node}: a worker cannot be started: {error}")
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
            _say(f"{self._post.node}: told to stop ({name})")
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


def _mentions_everstep(script: str | None) -> bool:
    """Whether a script is likely to call recovery.init(): until it does, only its text can tell."""
    try:
        return script is not None and b"everstep" in Path(script).read_bytes()
    except OSError:
        return False


def _free_ports(host: str, count: int) -> list[int]:
    """Ports that are free now, for MASTER_PORT."""
    held, ports = [], []
    for _ in range(count):
        sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        try:
            sock.bind((host, 0))
        except OSError:
            sock.close()
            continue
        held.append(sock)
        ports.append(int(sock.getsockname()[1]))
    for sock in held:
        sock.close()
    return ports


def _say(text: str) -> None:
    print(f"everstep: {text}", file=sys.stderr, flush=True)
