"""torchrun's own arguments, read by torch's own parser, and what a worker gets from them.

torch is imported inside the functions that need it: that takes seconds (nearly all of it `import
torch` itself), and `everstep --help` must not wait for it.
"""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeVar

import msgspec
from everstep.launcher.program import check_program
from everstep.recovery.errors import UsageError

if TYPE_CHECKING:
    import argparse

Value = TypeVar("Value")

_RUN_PATH = "import runpy, sys; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
"""What --run-path runs: torchrun does this in a spawned interpreter of its own."""


class WorkerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """How to start the workers of one node, as torchrun's options say; plain data that can travel."""

    nproc_per_node: int
    """Workers on each node; 0 where the user said gpu, cpu or auto and no node was asked yet."""
    nnodes: int | None = None
    """Nodes, or None where the user gave no number."""
    max_restarts: int = 0
    monitor_interval: float = 0.1
    shutdown_timeout: int | None = None
    """Seconds between SIGTERM and SIGKILL when workers are stopped; None: the default."""
    role: str = "default"
    run_id: str | None = None
    """--rdzv-id, where the user gave one: names the run, and its log directory."""
    log_dir: str | None = None
    tee: str = "0"
    redirects: str = "0"
    tee_bits: int | dict[int, int] = 0
    """`tee` as torch reads it, for all local ranks or for each: 1 is stdout, 2 stderr. See `streams`."""
    redirect_bits: int | dict[int, int] = 0
    local_ranks_filter: tuple[int, ...] = ()
    """Local ranks whose output the console shows; empty: all."""
    virtual_local_rank: bool = False
    """Each worker sees its own GPU alone, as device 0, and LOCAL_RANK 0."""
    command: tuple[str, ...]
    """The interpreter with its options and the script, or the program itself."""
    arguments: tuple[str, ...] = ()
    """The script's arguments, `${local_rank}` in them not yet replaced."""
    env: dict[str, str] = {}
    """Set in every worker, on top of what the agent itself has."""
    script: str | None = None
    """The script's path; None for a module or a program."""
    plain: bool = False
    """Not torchrun's: `command` is run as it is, in the environment that Slurm gives a task."""
    notes: tuple[str, ...] = ()
    """What the user should know: options that Everstep has no use for."""

    @property
    def entry(self) -> tuple[str, ...]:
        """The command line of a worker, macros not yet replaced."""
        return (*self.command, *self.arguments)


def encode_spec(spec: WorkerSpec) -> str:
    """The specification as JSON, for an environment variable."""
    return msgspec.json.encode(spec).decode()


def decode_spec(text: str) -> WorkerSpec:
    """What `encode_spec` wrote. Raises UsageError."""
    try:
        return msgspec.json.decode(text, type=WorkerSpec)
    except msgspec.MsgspecError as error:
        raise UsageError(
            f"the workers' specification is damaged ({error}): `everstep agent` is started by `everstep srun`"
        ) from error


def worker_argv(spec: WorkerSpec, local_rank: int) -> list[str]:
    """The command line of one worker, `${local_rank}` in the script's arguments replaced as torchrun does."""
    arguments = [Template(word).safe_substitute(local_rank=str(local_rank)) for word in spec.arguments]
    return [*spec.command, *arguments]


def parse(
    argv: Sequence[str],
    *,
    environ: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    on_node: bool = True,
    device_count: Callable[[], int] | None = None,
) -> WorkerSpec:
    """Read what follows `torchrun` on a command line.

    Parameters
    ----------
    argv
        torchrun's options, the script, its arguments.
    environ
        The environment; torchrun's options can also come from its PET_ variables.
    cwd
        Where the workers will run; None: here.
    on_node
        Whether this is a node that will run workers. On a login node, say no: devices are not counted
        there, and `gpu`, `cpu` and `auto` are left open.
    device_count
        Counts this node's CUDA devices; None: torch does.

    Raises
    ------
    UsageError
        Anything that torchrun would refuse, and a script that does not exist, in one line.
    """
    return _spec(_arguments(argv, ()), argv, environ, cwd, on_node, device_count)


def parse_run(
    argv: Sequence[str],
    own: Mapping[str, bool],
    *,
    environ: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    device_count: Callable[[], int] | None = None,
) -> tuple[tuple[str, ...], WorkerSpec]:
    """Read `everstep run`'s command line, in which everstep's options may stand among torchrun's.

    Parameters
    ----------
    argv
        The words after `everstep run`.
    own
        Everstep's options and whether a value follows each (`options.names()`).

    Returns
    -------
    Everstep's words, for `options.parse`, and the workers' specification.
    """
    arguments = _arguments(argv, [name for name, valued in own.items() if valued])
    words: list[str] = []
    for name in own:
        words += [f"{name}={value}" for value in getattr(arguments, _own_dest(name), None) or []]
    return tuple(words), _spec(arguments, argv, environ, cwd, True, device_count)


def _own_dest(name: str) -> str:
    return "everstep_" + name.lstrip("-").replace("-", "_")


def _arguments(argv: Sequence[str], own: Sequence[str]) -> argparse.Namespace:
    """torch's own parser over `argv`, with everstep's options added, its exit turned into one line."""
    run = _torchrun()
    parser = _ask(run.get_args_parser)
    known = [option for action in parser._actions for option in action.option_strings]
    for name in own:
        parser.add_argument(name, dest=_own_dest(name), action="append")

    def fail(message: str) -> NoReturn:
        raise UsageError(f"torchrun: {message}{_nearest_option(message, [*known, *own])}")

    # argparse would print its whole usage and exit with 2; there is no other way to be told instead.
    setattr(parser, "error", fail)  # noqa: B010
    arguments: argparse.Namespace = parser.parse_args(list(argv))
    return arguments


def _nearest_option(message: str, known: Sequence[str]) -> str:
    if "the following arguments are required" in message:
        return ": name your script after the options, as in `torchrun --nproc-per-node=2 train.py`"
    wrong = [word.partition("=")[0] for word in message.split() if word.startswith("-")]
    if not message.startswith("unrecognized") or not wrong:
        return ""
    near = difflib.get_close_matches(wrong[0], known, n=1)
    return f": did you mean {near[0]}?" if near else " (options for your script go after its name)"


def _spec(
    arguments: argparse.Namespace,
    argv: Sequence[str],
    environ: Mapping[str, str] | None,
    cwd: Path | None,
    on_node: bool,
    device_count: Callable[[], int] | None,
) -> WorkerSpec:
    environ = os.environ if environ is None else environ
    command, script = _command(arguments, environ)
    nproc = _local_world_size(arguments.nproc_per_node, on_node, environ, device_count)
    if arguments.max_restarts < 0:
        raise UsageError(f"--max-restarts {arguments.max_restarts}: 0 or more is wanted")
    if arguments.log_dir and os.path.isfile(arguments.log_dir):
        raise UsageError(f"--log-dir {arguments.log_dir} is a file: name a directory")
    check_program(
        arguments.training_script,
        kind="script" if script is not None else "module" if arguments.module else "program",
        cwd=cwd or Path.cwd(),
        environ=environ,
    )

    env: dict[str, str] = {}
    if "OMP_NUM_THREADS" not in environ and nproc > 1:
        env["OMP_NUM_THREADS"] = "1"
    if "TORCH_NCCL_ASYNC_ERROR_HANDLING" not in environ:
        env["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "1"
    env["TORCHELASTIC_SIGNALS_TO_HANDLE"] = arguments.signals_to_handle
    return WorkerSpec(
        nproc_per_node=nproc,
        nnodes=_nnodes(arguments.nnodes),
        max_restarts=arguments.max_restarts,
        monitor_interval=arguments.monitor_interval,
        shutdown_timeout=arguments.shutdown_timeout,
        role=arguments.role,
        run_id=None if arguments.rdzv_id == "none" else arguments.rdzv_id,
        log_dir=arguments.log_dir,
        tee=arguments.tee,
        redirects=arguments.redirects,
        tee_bits=_std(arguments.tee, "--tee"),
        redirect_bits=_std(arguments.redirects, "--redirects"),
        local_ranks_filter=_ranks(arguments.local_ranks_filter),
        virtual_local_rank=arguments.virtual_local_rank,
        command=command,
        arguments=tuple(arguments.training_script_args),
        env=env,
        script=script,
        notes=_notes(arguments),
    )


def _command(arguments: argparse.Namespace, environ: Mapping[str, str]) -> tuple[tuple[str, ...], str | None]:
    program: str = arguments.training_script
    if arguments.run_path:
        return (sys.executable, "-u", "-c", _RUN_PATH, program), program
    if arguments.no_python:
        if arguments.module:
            raise UsageError("--no-python and --module do not go together: leave one out")
        return (program,), None
    python = environ.get("PYTHON_EXEC", sys.executable)
    if arguments.module:
        return (python, "-u", "-m", program), None
    return (python, "-u", program), program


def _nnodes(text: str) -> int | None:
    if text == "1:1":  # torchrun's default: the user said nothing
        return None
    try:
        low, high = _torchrun().parse_min_max_nnodes(text)
    except (RuntimeError, ValueError) as error:
        raise UsageError(f"--nnodes {text}: a number of nodes is wanted, such as --nnodes 4") from error
    if low != high:
        raise UsageError(f"--nnodes {text}: a world that grows and shrinks comes later: say --nnodes {high}")
    if low < 1:
        raise UsageError(f"--nnodes {text}: 1 or more is wanted")
    return int(high)


def _local_world_size(
    text: str, on_node: bool, environ: Mapping[str, str], device_count: Callable[[], int] | None
) -> int:
    try:
        nproc: int | None = int(text)
    except ValueError:
        nproc = None
    if nproc is not None and nproc < 1:
        raise UsageError(f"--nproc-per-node {text}: 1 or more is wanted")
    if not on_node:
        if nproc is None and text not in ("gpu", "cpu", "auto", "xpu"):
            raise UsageError(f"--nproc-per-node {text}: a number is wanted, or gpu, cpu or auto")
        return nproc or 0
    if nproc is None:
        try:
            return int(_torchrun().determine_local_world_size(text))
        except ValueError as error:
            if text == "gpu":
                raise UsageError(
                    "--nproc-per-node gpu: no CUDA device can be used on this node "
                    f"(CUDA_VISIBLE_DEVICES={environ.get('CUDA_VISIBLE_DEVICES', 'not set')}): ask Slurm for "
                    "some (--gres=gpu:N), or give a number of workers"
                ) from error
            raise UsageError(f"--nproc-per-node {text}: {error}") from error
    devices = (device_count or cuda_devices)()
    if 0 < devices < nproc:
        raise UsageError(
            f"--nproc-per-node {nproc}: this node has {devices} CUDA device{'s' * (devices != 1)}, and each "
            f"worker needs its own: say --nproc-per-node {devices}, or hide them with CUDA_VISIBLE_DEVICES= "
            "to run on CPUs"
        )
    return nproc


def cuda_devices() -> int:
    """CUDA devices of this node. Imports torch."""
    import torch

    # Counted without making a context on any of them, so workers can still be started.
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _ranks(text: str) -> tuple[int, ...]:
    try:
        return tuple(sorted({int(rank) for rank in text.split(",")})) if text else ()
    except ValueError:
        raise UsageError(
            f"--local-ranks-filter {text}: local ranks separated by commas are wanted, such as 0,1"
        ) from None


_SUPERSEDED: Mapping[str, object] = {
    "rdzv_backend": "static",
    "rdzv_endpoint": "",
    "rdzv_conf": "",
    "standalone": False,
    "node_rank": 0,
    "master_addr": "127.0.0.1",
    "master_port": None,
    "local_addr": None,
}
_UNUSED: Mapping[str, object] = {
    "start_method": "spawn",
    "event_log_handler": "null",
    "logs_specs": None,
    "numa_binding": None,
    "duplicate_stdout_filters": [],
    "duplicate_stderr_filters": [],
    "signals_to_handle": "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
}


def _notes(arguments: argparse.Namespace) -> tuple[str, ...]:
    """What to say of options that the user gave and that do nothing here."""

    def given(defaults: Mapping[str, object]) -> list[str]:
        names = [name for name, default in defaults.items() if getattr(arguments, name) != default]
        return [f"--{name.replace('_', '-')}" for name in names]

    notes = []
    if names := given(_SUPERSEDED):
        notes.append(f"{', '.join(names)}: not used, Everstep's own coordinator brings the nodes together")
    if names := given(_UNUSED):
        notes.append(f"{', '.join(names)}: not used, Everstep starts and watches the workers itself")
    return tuple(notes)


# --- what a worker gets ---


def rank_environment(
    spec: WorkerSpec,
    *,
    rank: int,
    local_rank: int,
    world_size: int,
    nnodes: int,
    node_rank: int,
    master_addr: str,
    master_port: int,
    restart_count: int,
    run_id: str,
    environ: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """The variables that torchrun sets in a worker's environment, no more and no fewer.

    `environ` is the agent's environment, which a worker inherits; it matters to --virtual-local-rank
    alone. TORCHELASTIC_ERROR_FILE comes with the log files, from `log_files`.
    """
    variables = {
        "LOCAL_RANK": str(local_rank),
        "RANK": str(rank),
        "GROUP_RANK": str(node_rank),
        "ROLE_RANK": str(rank),
        "ROLE_NAME": spec.role,
        "LOCAL_WORLD_SIZE": str(spec.nproc_per_node),
        "WORLD_SIZE": str(world_size),
        "GROUP_WORLD_SIZE": str(nnodes),
        "ROLE_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": master_addr,
        "MASTER_PORT": str(master_port),
        "TORCHELASTIC_RESTART_COUNT": str(restart_count),
        "TORCHELASTIC_MAX_RESTARTS": str(spec.max_restarts),
        "TORCHELASTIC_RUN_ID": run_id,
        # There is no agent's store to join: rank 0 serves its own, as under a static rendezvous.
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        **spec.env,
    }
    return {**variables, **device_environment(spec, local_rank, environ)}


def task_environment(*, rank: int, node_rank: int, nnodes: int) -> dict[str, str]:
    """The variables that Slurm sets in a step's task, for a command that is one on each node.

    They are Slurm's own until a spare node takes a lost one's place.
    """
    return {
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": "0",
        "SLURM_NODEID": str(node_rank),
        **dict.fromkeys(("SLURM_NTASKS", "SLURM_NPROCS", "SLURM_NNODES"), str(nnodes)),
        **dict.fromkeys(("SLURM_STEP_NUM_TASKS", "SLURM_STEP_NUM_NODES"), str(nnodes)),
    }


def device_environment(
    spec: WorkerSpec, local_rank: int, environ: Mapping[str, str] | None = None
) -> dict[str, str]:
    """What --virtual-local-rank sets: the worker's own device alone, as device 0; nothing without it."""
    if not spec.virtual_local_rank:
        return {}
    visible = (os.environ if environ is None else environ).get("CUDA_VISIBLE_DEVICES")
    devices = visible.split(",") if visible is not None else [str(rank) for rank in range(local_rank + 1)]
    if local_rank >= len(devices):
        raise UsageError(
            f"--virtual-local-rank: local rank {local_rank} has no device in CUDA_VISIBLE_DEVICES={visible}"
        )
    return {"LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": devices[local_rank].strip()}


Way = Literal["console", "file", "tee", "drop"]


class Streams(msgspec.Struct, frozen=True):
    """Where a worker's stdout and stderr go: console, file, tee (both) or drop (nowhere)."""

    stdout: Way
    stderr: Way


def streams(spec: WorkerSpec, local_rank: int) -> Streams:
    """Where a worker's output goes by --redirects, --tee and --local-ranks-filter, as under torchrun."""
    shown = not spec.local_ranks_filter or local_rank in spec.local_ranks_filter

    def way(bit: int) -> Way:
        if _for_rank(spec.tee_bits, local_rank) & bit:
            return "tee" if shown else "file"
        if _for_rank(spec.redirect_bits, local_rank) & bit:
            return "file"
        return "console" if shown else "drop"

    return Streams(way(1), way(2))


class LogFiles(msgspec.Struct, frozen=True):
    """A worker's files under --log-dir: `<log_dir>/<run id>_<random>/attempt_<n>/<local rank>/`."""

    directory: Path
    stdout: Path
    stderr: Path
    error: Path
    """For TORCHELASTIC_ERROR_FILE, into which torch's @record writes an exception."""


def log_files(run_log_dir: Path, attempt: int, local_rank: int) -> LogFiles:
    """The files of one worker; the run's directory is made once a node, by `mkdtemp(prefix=f"{run_id}_")`."""
    directory = run_log_dir / f"attempt_{attempt}" / str(local_rank)
    return LogFiles(directory, directory / "stdout.log", directory / "stderr.log", directory / "error.json")


def _std(text: str, option: str) -> int | dict[int, int]:
    """--tee or --redirects as torch reads it: 1 is stdout, 2 stderr, 3 both, for all ranks or for each."""
    from torch.distributed.elastic.multiprocessing import Std

    try:
        said: Any = Std.from_str(text)
    except ValueError:
        raise UsageError(
            f"{option} {text}: 0, 1 (stdout), 2 (stderr) or 3 (both) is wanted, or one for each local rank, "
            "such as 0:3,1:1"
        ) from None
    return {rank: int(std) for rank, std in said.items()} if isinstance(said, dict) else int(said)


def _for_rank(std: int | dict[int, int], local_rank: int) -> int:
    return std.get(local_rank, 0) if isinstance(std, dict) else std


def _torchrun() -> Any:
    import torch.distributed.run

    return torch.distributed.run


def _ask(question: Callable[[], Value]) -> Value:
    """Something that torch's code says, its complaints (a bad PET_ variable, say) in one line."""
    try:
        return question()
    except (RuntimeError, ValueError) as error:
        raise UsageError(f"torchrun: {error}") from error
