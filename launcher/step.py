"""`everstep srun`: one agent on each node of a Slurm step, and the way back to who typed it.

Slurm's own exit code of a step that lost a node says nothing of the run, so the
coordinator's agent tells `everstep srun` how it ended, over the same kind of proved
connection that agents use; srun's code is what is left if it cannot.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import importlib.metadata
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from everstep.launcher import options as own
from everstep.launcher import srun, torchrun
from everstep.launcher.guardian import die_with_parent, guarded
from everstep.launcher.keys import keys_from, new_secret
from everstep.launcher.program import check_program
from everstep.launcher.recruit import job_name
from everstep.launcher.report import Ear, tell
from everstep.launcher.slurm.cli_json import CliJson, require
from everstep.launcher.slurm.client import expand
from everstep.launcher.slurm.srun_table import installed_table
from everstep.launcher.voice import say
from everstep.recovery.errors import EverstepError, UsageError

if TYPE_CHECKING:
    from everstep.launcher.post import Post

_OVERDUE = 10.0  # seconds that a step may outlive its run
_OVERDUE_AT_THE_END = 2.0  # the same, where the job is being ended anyway
_WINDING = 60.0  # seconds for the end of a run in order, besides the grace of its last step


def run_step(words: Sequence[str]) -> int:
    """Everything behind `everstep srun`: the run's exit code. Raises EverstepError."""
    require("srun")
    table = installed_table()
    parts = srun.split(words, table)
    if not parts.command:
        return subprocess.call(["srun", *parts.srun])  # --help, --version
    options = own.parse(parts.everstep)
    allocation = srun.find_allocation(parts.srun, os.environ, CliJson(), table)
    secret = new_secret()
    plan = srun.plan(
        parts.srun,
        parts.command,
        options,
        os.environ,
        everstep_path(),
        version=importlib.metadata.version("everstep"),
        secret=secret,
        allocation=allocation,
        table=table,
    )
    cwd = Path(plan.chdir) if plan.chdir else None
    spec = torchrun.parse(srun.torchrun_arguments(parts.command), cwd=cwd, on_node=False)
    srun.world_nodes(plan.nodes, options, spec.nnodes)
    for reason in plan.reasons:
        say(reason)
    for warning in (*plan.warnings, *spec.notes):
        say(f"WARNING: {warning}")
    ear = Ear(keys_from(secret))
    env = {k: v for k, v in os.environ.items() if k not in plan.unset}
    env.update(plan.env)
    env[own.SPEC_VARIABLE] = torchrun.encode_spec(spec)
    env[own.REPORT_VARIABLE] = f"{socket.gethostname()}:{ear.port}"
    try:
        return _run(plan.argv, env, ear)
    finally:
        ear.close()


def _run(argv: Sequence[str], env: Mapping[str, str], ear: Ear) -> int:
    # If we are killed outright, srun is told to stop, and passes that on to the agents.
    process = subprocess.Popen(list(argv), env=dict(env), preexec_fn=lambda: die_with_parent(signal.SIGTERM))

    told_to_stop: list[int] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        told_to_stop.append(number)
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(number)

    # A terminal's Ctrl-C reaches srun by itself; what is sent to us alone is passed on.
    previous = {n: signal.signal(n, pass_on) for n in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)}
    previous[signal.SIGINT] = signal.signal(signal.SIGINT, lambda number, frame: None)
    try:
        return _outcome(process, ear, told_to_stop)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _outcome(process: subprocess.Popen[bytes], ear: Ear, told_to_stop: Sequence[int]) -> int:
    """The run's exit code: what its coordinator says, else srun's own."""
    told: int | None = None
    over = 0.0
    ending = False
    while process.poll() is None:
        if told is None:
            told = ear.heard(timeout=0.3)
            over = time.monotonic()
            continue
        time.sleep(0.05)
        # srun waits long for a node that is dead, and a job that is being ended has no time for that.
        late = time.monotonic() - over > (_OVERDUE_AT_THE_END if told_to_stop else _OVERDUE)
        if late and (ending or told_to_stop):
            process.kill()
        elif late:
            say("the run is over and some agents are still there: ending the step")
            process.terminate()
            ending, over = True, time.monotonic()
    if told is None:
        told = ear.heard(timeout=0.5)
    if told is not None:
        return told
    srun_code = process.returncode
    if srun_code < 0:
        name = signal.Signals(-srun_code).name
        say(
            f"error: srun was killed ({name}), and its step may be running without it: "
            "`squeue --me --steps` shows it, `scancel JOBID.STEPID` ends it"
        )
    elif srun_code:
        say(f"srun ended with exit code {srun_code}, and no word of how the run ended")
    return srun_code if srun_code >= 0 else 128 - srun_code


def everstep_path() -> str:
    """The full path of the command that is running. Raises UsageError."""
    path = Path(sys.argv[0])
    if path.name == "everstep" and path.exists():
        return str(path.absolute())
    beside = Path(sys.executable).with_name("everstep")
    if beside.exists():
        return str(beside)
    raise UsageError("the `everstep` command is not beside this Python: start it by its full path")


# --- on the nodes ---------------------------------------------------------------------------------


def agent_main() -> int:
    """What srun starts on each node: the agent under its guardian."""
    secret = os.environ.pop(own.SECRET_VARIABLE, "")
    text = os.environ.pop(own.ORDERS_VARIABLE, "")
    report = os.environ.pop(own.REPORT_VARIABLE, "")
    known = torchrun.decode_spec(os.environ.pop(own.SPEC_VARIABLE, ""))
    keys = keys_from(secret)
    orders = own.decode_orders(text)

    def main() -> int:
        from everstep.launcher.agent import serve
        from everstep.launcher.post import Post

        index = int(os.environ.get("SLURM_NODEID", "0"))
        hosts = expand(os.environ.get("SLURM_STEP_NODELIST") or os.environ["SLURM_JOB_NODELIST"])
        post = Post(
            node=os.environ.get("SLURMD_NODENAME", socket.gethostname()),
            index=index,
            nnodes=orders.nnodes - orders.options.spare_nodes,
            options=orders.options,
            spec=torchrun.WorkerSpec(nproc_per_node=1, command=("true",)),
            run_id=f"{os.environ.get('SLURM_JOB_ID', 'job')}.{os.environ.get('SLURM_STEP_ID', '0')}",
            coordinator=(hosts[0], _port(secret)),
            address="127.0.0.1",
            spare=index >= orders.nnodes - orders.options.spare_nodes,
            bind="*",
            forsaken=cancel_what_waits if index else None,
            deaf=True,
        )
        try:
            post = _settle(post, orders, known, hosts)
            if index == 0:
                post = with_job(post, orders, text, secret, hosts)
        except EverstepError as error:
            post = replace(post, problem=f"{post.node}: {error}", code=error.exit_code)
        code = 70
        try:
            code = asyncio.run(serve(post, secret))
        except EverstepError as error:
            code = error.exit_code
            raise
        finally:
            if index == 0 and report:
                tell(report, keys, code)
        return code

    def cancel_what_waits() -> None:
        """The coordinator is gone without a word: nobody else knows of a replacement job in the queue."""
        name = job_name(int(os.environ.get("SLURM_JOB_ID", "0")))
        argv = ["scancel", f"--name={name}", f"--user={os.getuid()}", "--state=PENDING", "--quiet"]
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            subprocess.run(argv, timeout=10, check=False, capture_output=True)

    os.environ.update(orders.worker_env)
    first = os.environ.get("SLURM_NODEID", "0") == "0"
    return guarded(main, orders.options.grace + _WINDING, cancel_what_waits if first else None)


def with_job(post: Post, orders: own.AgentOrders, text: str, secret: str, hosts: Sequence[str]) -> Post:
    """The coordinator's post, with what it needs to ask Slurm for more. Nothing is asked for yet."""
    from everstep.launcher import history
    from everstep.launcher.jobside import look
    from everstep.launcher.recruit import Terms

    client = CliJson()
    here = look(os.environ, client)
    folder = post.options.run_dir or history.default_folder(os.environ)
    usable = folder if folder is not None and history.make(folder) else None
    options = post.options
    if options.events is None and usable is not None:
        options = replace(options, events=usable / history.EVENTS)
    host, port = post.coordinator
    terms = Terms(
        job_id=here.job_id,
        script=f"#!/bin/sh\nexec {shlex.quote(everstep_path())} agent --join\n",
        env={
            **{name: value for name, value in os.environ.items() if name not in orders.worker_env},
            own.ORDERS_VARIABLE: text,
            own.SECRET_VARIABLE: secret,
            own.SPEC_VARIABLE: torchrun.encode_spec(post.spec),
            own.COORDINATOR_VARIABLE: f"{host}:{port}",
        },
        cwd=os.getcwd(),
        output=usable,
        within=options.replace_within,
        own_nodes=tuple(hosts),
    )
    return replace(post, options=options, client=client, here=here, terms=terms, folder=folder)


def joiner_main() -> int:
    """What a replacement job runs: the agent of a node that joins a run which is under way."""
    secret = os.environ.pop(own.SECRET_VARIABLE, "")
    orders = own.decode_orders(os.environ.pop(own.ORDERS_VARIABLE, ""))
    known = torchrun.decode_spec(os.environ.pop(own.SPEC_VARIABLE, ""))
    host, _, port = os.environ.pop(own.COORDINATOR_VARIABLE, "").rpartition(":")

    def main() -> int:
        from everstep.launcher.agent import serve
        from everstep.launcher.post import Post

        job = os.environ.get("SLURM_JOB_ID", "0")
        post = Post(
            node=os.environ.get("SLURMD_NODENAME", socket.gethostname()),
            index=orders.nnodes + int(job),
            nnodes=orders.nnodes - orders.options.spare_nodes,
            options=orders.options,
            spec=known,
            run_id=f"{job}.replacement",
            coordinator=(host, int(port)),
            address="127.0.0.1",
            spare=True,
            joiner=True,
            deaf=True,
        )
        try:
            post = _settle(post, orders, known, [host])
        except EverstepError as error:
            post = replace(post, problem=f"{post.node}: {error}", code=error.exit_code)
        return asyncio.run(serve(post, secret))

    return guarded(main, orders.options.grace + _WINDING)


def _settle(post: Post, orders: own.AgentOrders, known: torchrun.WorkerSpec, hosts: Sequence[str]) -> Post:
    """What is known only on the node itself. Raises UsageError."""
    version = importlib.metadata.version("everstep")
    if orders.everstep != version:
        raise UsageError(
            f"everstep {version} is installed here, and the run was started by {orders.everstep}: "
            "install the same everstep on every node"
        )
    spec, devices = known, 0
    if not known.plain and (known.nproc_per_node == 0 or Path("/dev/nvidiactl").exists()):
        # Only a node with devices, or a number left open, needs torch in its agent.
        spec = torchrun.parse(srun.torchrun_arguments(orders.command))
        devices = torchrun.cuda_devices()
    elif known.script is not None and not known.plain:
        check_program(known.script, kind="script", cwd=Path.cwd(), environ=os.environ)
    address = _address(orders.options.interface, [h for i, h in enumerate(hosts) if i != post.index])
    return replace(post, spec=spec, address=address, devices=devices)


def _port(secret: str) -> int:
    """The coordinator's port: known to all agents beforehand, another one for each run."""
    digest = hmac.new(bytes.fromhex(secret), b"everstep port", hashlib.sha256).digest()
    return 20000 + int.from_bytes(digest[:4], "big") % 12000  # below the kernel's own range


def _address(interface: str | None, others: Sequence[str]) -> str:
    """The address for state and groups: the interface's, or the one that peers are reached from."""
    if interface is not None:
        import psutil

        for found in psutil.net_if_addrs().get(interface, ()):
            if found.family in (socket.AF_INET, socket.AF_INET6):
                return str(found.address).partition("%")[0]
        with contextlib.suppress(OSError):
            socket.inet_aton(interface)
            return interface
        known = ", ".join(sorted(psutil.net_if_addrs()))
        raise UsageError(f"--interface {interface}: this node has {known}")
    for other in others:
        with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((other, 9))  # nothing is sent: the kernel only picks the way
            return str(probe.getsockname()[0])
    if not others:
        return "127.0.0.1"
    raise UsageError(f"none of the other nodes' names can be resolved here ({', '.join(others[:3])}, …)")
