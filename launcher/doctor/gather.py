"""Gathering the facts: from Slurm, from files, and from the job's nodes. Nothing is changed."""

from __future__ import annotations

import contextlib
import ctypes
import glob
import importlib.metadata
import os
import platform
import re
import shutil
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
from everstep.launcher.doctor.facts import Facts, HostFacts, Interface, Loose, Plugin, SlurmFacts
from everstep.launcher.slurm.client import Job, SlurmClient, expand
from everstep.launcher.slurm.connect import connect
from everstep.launcher.slurm.srun_table import help_of
from everstep.recovery.errors import UsageError

_ASK_WITHIN = 60.0
_PEERS_VARIABLE = "EVERSTEP_DOCTOR_PEERS"


def gather(srun_options: Sequence[str], environ: Mapping[str, str]) -> Facts:
    """All facts. `srun_options` start a job of a second where we are in none, to ask its nodes."""
    here = host_facts(())
    try:
        client = connect(environ)
        slurm = _slurm(client, environ)
    except UsageError as error:
        return Facts(here, slurm_problem=str(error))
    if slurm.job is None and not srun_options:
        return Facts(here, slurm)
    names = slurm.job.nodes if slurm.job else ()
    hosts, asked, problem = _ask(names, srun_options, environ)
    return Facts(here, slurm, hosts=hosts, asked=asked, ask_problem=problem)


def _slurm(client: SlurmClient, environ: Mapping[str, str]) -> SlurmFacts:
    config = client.config()
    return SlurmFacts(
        release=client.version(),
        config=config,
        partitions=client.partitions(),
        nodes=client.nodes(),
        job=_job(client, environ),
        plugin=plugin_facts(config),
    )


def _job(client: SlurmClient, environ: Mapping[str, str]) -> Job | None:
    number = environ.get("SLURM_JOB_ID", "")
    return client.job(int(number)) if number.isdigit() else None


# --- the plugin -----------------------------------------------------------------------------------


def plugin_facts(config: Mapping[str, str]) -> Plugin:
    """What srun offers, and what plugstack.conf loads."""
    config_file = Path(config.get("PlugStackConfig") or "/etc/slurm/plugstack.conf")
    lines = tuple(line for line in plugstack(config_file) if re.search(r"everstep|auto_?-?resume", line))
    path = next((word for line in lines for word in line.split() if word.endswith(".so")), "")
    if path and not path.startswith("/"):
        places = [Path(folder, path) for folder in config.get("PluginDir", "").split(":")]
        path = next((str(place) for place in places if place.exists()), path)
    return Plugin(
        offered="--auto-resume" in help_of("srun"),
        configured=lines,
        path=path,
        built_for=built_for(path),
        config_file=str(config_file),
    )


def plugstack(file: Path, depth: int = 5) -> Iterator[str]:
    """The lines of plugstack.conf and what it includes, comments left out."""
    try:
        text = file.read_text(errors="replace")
    except OSError:
        return
    for line in text.splitlines():
        line = line.partition("#")[0].strip()
        if line.startswith("include") and depth:
            for pattern in line.split()[1:]:
                for found in sorted(glob.glob(str(file.parent / pattern))):
                    yield from plugstack(Path(found), depth - 1)
        elif line:
            yield line


def built_for(path: str) -> str:
    """The release that a plugin was compiled against, by its own `plugin_version`; empty if it has none."""
    if not path:
        return ""
    try:
        # Slurm's own symbols are missing here, and are not looked for before they are called.
        plugin = ctypes.CDLL(path, mode=os.RTLD_LAZY | os.RTLD_LOCAL)
        number = ctypes.c_uint.in_dll(plugin, "plugin_version").value
    except (OSError, ValueError):
        return ""
    return f"{number >> 16}.{number >> 8 & 0xFF:02d}"


# --- a host's own -----------------------------------------------------------------------------------


def host_facts(peers: Sequence[str]) -> HostFacts:
    """What this host says of itself; `peers` are the nodes that state would travel to."""
    host = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    return HostFacts(
        host=host,
        everstep=_version("everstep"),
        torch=_version("torch"),
        python=platform.python_version(),
        prefix=sys.prefix,
        interfaces=tuple(_interfaces()),
        chosen=_chosen([name for name in peers if name != host]),
        loose=tuple(_loose()),
    )


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _interfaces() -> Iterator[Interface]:
    import psutil

    states = psutil.net_if_stats()
    for name, addresses in psutil.net_if_addrs().items():
        state = states.get(name)
        if state is None or not state.isup or "loopback" in getattr(state, "flags", ""):
            continue
        for found in addresses:
            if found.family == socket.AF_INET:
                yield Interface(name, str(found.address), state.speed)


def _chosen(peers: Sequence[str]) -> str:
    """The address that the kernel would send from to the first peer that can be resolved."""
    for peer in peers:
        with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((peer, 9))  # nothing is sent
            return str(probe.getsockname()[0])
    return ""


def _loose() -> Iterator[Loose]:
    """What others could change of that which we run, or that our runs write."""
    import everstep.launcher
    import everstep.recovery

    ours = [
        (Path(everstep.launcher.__path__[0]), "everstep's own code"),
        (Path(everstep.recovery.__path__[0]), "everstep's own code"),
        (Path(sys.executable), "the Python that runs it"),
        (Path.cwd() / ".everstep", "where runs keep their state"),
    ]
    if (command := shutil.which("everstep")) is not None:
        ours.append((Path(command), "the everstep command"))
    for path, why in ours:
        if (bad := others_may_write(path)) is not None:
            yield Loose(str(bad), why)


def others_may_write(path: Path) -> Path | None:
    """The path itself, or a folder on the way to it, that everybody may write; None if there is none.

    A folder like /tmp, where only the owner may remove a file (the sticky bit), is none.
    """
    try:
        path = path.resolve(strict=True)
        for place in (path, *path.parents):
            mode = place.stat().st_mode
            if mode & stat.S_IWOTH and not (stat.S_ISDIR(mode) and mode & stat.S_ISVTX):
                return place
    except OSError:
        return None
    return None


# --- the nodes --------------------------------------------------------------------------------------


def _ask(
    names: Sequence[str], srun_options: Sequence[str], environ: Mapping[str, str]
) -> tuple[tuple[HostFacts, ...], tuple[str, ...], str]:
    """Ask each node of the job, or of a new one made with these options: (answers, asked, problem)."""
    everywhere = ["--ntasks-per-node=1", "--no-kill", "--kill-on-bad-exit=0"]
    if names:
        count = str(len(names))
        where = [f"-N{count}", f"-n{count}", f"--nodelist={','.join(names)}", "--overlap", "--cpu-bind=none"]
    else:
        where = ["--immediate=30", "--time=2", "--job-name=everstep-doctor"]
    argv = ["srun", *everywhere, *where, *srun_options, *_own_command(), "doctor", "--facts"]
    unwanted = ("SLURM_CPUS_PER_TASK", "SLURM_TRES_PER_TASK", "SLURM_NTASKS_PER_NODE", "SLURM_NTASKS")
    env = {k: v for k, v in environ.items() if k not in unwanted}
    if names:
        env[_PEERS_VARIABLE] = ",".join(names)
    try:
        done = subprocess.run(
            argv,
            env=env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_ASK_WITHIN,
            check=False,
        )
        said, problem = done.stdout, _last_line(done.stderr)
    except subprocess.TimeoutExpired as error:
        said, problem = _decoded(error.stdout), f"no answer in {_ASK_WITHIN:g} s"
    answers = tuple(_answers(said))
    return answers, tuple(names) or tuple(sorted({host.host for host in answers})), problem


def answer(environ: Mapping[str, str]) -> str:
    """What `everstep doctor --facts` prints on a node."""
    peers = environ.get(_PEERS_VARIABLE) or environ.get("SLURM_STEP_NODELIST") or ""
    return msgspec.json.encode(host_facts(expand(peers))).decode()


def _answers(said: str) -> Iterator[HostFacts]:
    for line in said.splitlines():
        with contextlib.suppress(msgspec.DecodeError):
            yield msgspec.json.decode(line, type=HostFacts)


def _own_command() -> list[str]:
    """What starts this everstep on another node: its full path, as the launcher does it."""
    path = Path(sys.argv[0])
    if path.name == "everstep" and path.exists():
        return [str(path.absolute())]
    return [sys.executable, "-m", "everstep.launcher.cli"]


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[-1]


def _decoded(text: bytes | str | None) -> str:
    return text.decode(errors="replace") if isinstance(text, bytes) else text or ""
