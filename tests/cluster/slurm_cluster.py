"""The containerized Slurm cluster as tests use it: run things on it, break it, mend it."""

from __future__ import annotations

import io
import itertools
import posixpath
import re
import signal as signals
import subprocess
import tarfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[2]
NODES = ("n1", "n2", "n3", "n4")
SHARED = "/shared"
HPC_UID = 1000

Process = tuple[str, str]  # (what tells it from every other one, its command line)


def wait_until(happened: Callable[[], bool], what: str, timeout: float, every: float = 0.1) -> None:
    """Return as soon as `happened()`; after `timeout` seconds raise TimeoutError that says `what` did not."""
    deadline = time.monotonic() + timeout
    while not happened():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {timeout:g} s: {what}")
        time.sleep(every)


class CommandFailed(RuntimeError):
    """A command on the cluster ended with another code than 0; the message has all it said."""

    def __init__(self, node: str, done: subprocess.CompletedProcess[str]) -> None:
        command = done.args if isinstance(done.args, str) else " ".join(done.args)
        super().__init__(f"on {node}: {command}\nexit code {done.returncode}\n{done.stdout}{done.stderr}")
        self.done = done


class Running:
    """A command that runs on a node now: its output as it comes, signals, its end."""

    def __init__(self, node: Any, name: str, process: subprocess.Popen[str]) -> None:
        self.name = name
        self._node = node
        self._process = process
        self._lines: list[str] = []
        self._news = threading.Condition()
        if process.stdout is None:
            raise ValueError("the process must be started with stdout=PIPE")
        self._stdout = process.stdout
        first = self._stdout.readline()
        if not first.strip().isdigit():
            raise RuntimeError(f"on {name}: {first}{self._stdout.read()}")
        self.pid = int(first)  # in the container
        self._open = True
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self._stdout:
            with self._news:
                self._lines.append(line.rstrip("\n"))
                self._news.notify_all()
        with self._news:
            self._open = False
            self._news.notify_all()

    @property
    def output(self) -> str:
        """All it has written so far, standard output and error together."""
        with self._news:
            return "\n".join(self._lines)

    def lines(self, timeout: float) -> Iterator[str]:
        """Its lines from the first on, each once it is there, until it ends; `timeout` is for all of them."""
        deadline = time.monotonic() + timeout
        for index in itertools.count():
            with self._news:
                while index >= len(self._lines) and self._open:
                    if not self._news.wait(max(0.0, deadline - time.monotonic())):
                        raise TimeoutError(
                            f"no further line within {timeout:g} s; so far:\n" + "\n".join(self._lines)
                        )
                if index >= len(self._lines):
                    return
                line = self._lines[index]
            yield line

    def wait_for(self, pattern: str, timeout: float) -> re.Match[str]:
        """The first line, past ones included, that has `pattern`."""
        for line in self.lines(timeout):
            found = re.search(pattern, line)
            if found:
                return found
        raise RuntimeError(f"it ended without a line like {pattern!r}:\n{self.output}")

    def wait(self, timeout: float) -> int:
        """Its exit code, once it has ended and its output is read."""
        for _ in self.lines(timeout):
            pass
        return self._process.wait(timeout)

    def send_signal(self, number: int) -> None:
        """Send a signal to the command itself (not to its client on this side, nor to its children)."""
        self._node.exec_run(["kill", f"-{number}", str(self.pid)])

    def stop(self) -> None:
        """Make sure that nothing of it is left on this side; on the node, kill the command."""
        if self._process.poll() is None:
            self.send_signal(signals.SIGKILL)
            try:
                self._process.wait(5)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()


@dataclass(frozen=True)
class Layout:
    """What tells one of this checkout's clusters from the other."""

    folder: Path = REPO  # of its compose file
    nodes: tuple[str, ...] = NODES
    services: Mapping[str, str] = field(default_factory=dict)  # where a machine's service has another name
    release: tuple[str, ...] = ()  # what docker/up.sh and docker/down.sh are told


OLD = Layout(
    folder=REPO / "docker" / "release-22.05",
    nodes=("old-n1", "old-n2"),
    services={"controller": "old-controller", "login": "old-controller"},
    release=("--release", "22.05"),
)


class Cluster:
    """The machines of one of this checkout's clusters (`controller`, `login`, `n1` to `n4`), by name."""

    def __init__(self, client: Any, layout: Layout | None = None) -> None:
        self._client = client
        self._layout = layout or Layout()
        self.nodes = self._layout.nodes
        self._started: list[Running] = []

    # -- running things ------------------------------------------------------------------------------------

    def exec(
        self,
        node: str,
        command: str | Sequence[str],
        *,
        user: str = "hpc",
        cwd: str | None = None,
        timeout: float = 60,
        env: dict[str, str] | None = None,
        check: bool = True,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command to its end: a list as it is, a string in a login shell, as if one had logged in.

        Raises CommandFailed where it ends with another code than 0 (unless `check=False`), TimeoutError
        where it does not end in time; it is killed then.
        """
        argv = ["timeout", "--kill-after=2", str(timeout), *_argv(command)]
        code, (stdout, stderr) = self._container(node).exec_run(
            argv, user=user, workdir=cwd or _home(user), environment=env or {}, demux=True
        )
        done = subprocess.CompletedProcess(command, code, _text(stdout), _text(stderr))
        if code in (124, 137):
            raise TimeoutError(
                f"on {node}: {command} did not end within {timeout:g} s\n{done.stdout}{done.stderr}"
            )
        if check and code != 0:
            raise CommandFailed(node, done)
        return done

    def popen(
        self,
        node: str,
        command: str | Sequence[str],
        *,
        user: str = "hpc",
        cwd: str | None = None,
        env: dict[str, str] | None = None,
    ) -> Running:
        """Start a command and come back at once. What still runs when the test ends is killed."""
        settings = [f"--env={name}={value}" for name, value in (env or {}).items()]
        client = ["docker", "exec", f"--user={user}", f"--workdir={cwd or _home(user)}"]
        told_pid = ["sh", "-c", 'echo $$; exec "$@" 2>&1', "sh"]
        process = subprocess.Popen(
            [*client, *settings, self._container(node).id, *told_pid, *_argv(command)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        running = Running(self._container(node), node, process)
        self._started.append(running)
        return running

    def stop_started(self) -> None:
        """Stop everything that `popen` started and that still runs."""
        while self._started:
            self._started.pop().stop()

    def read_shared(self, path: str) -> str:
        """The text of a file in /shared; raises FileNotFoundError."""
        where = posixpath.join(SHARED, path)
        done = self.exec("login", ["cat", where], check=False)
        if done.returncode != 0:
            raise FileNotFoundError(done.stderr.strip())
        return done.stdout

    def write_shared(self, path: str, text: str) -> str:
        """Write a file in /shared, folders included, as user hpc; returns its absolute path."""
        where = posixpath.join(SHARED, path)
        folder, name = posixpath.split(where)
        self.exec("login", ["mkdir", "-p", folder])
        data = text.encode()
        entry = tarfile.TarInfo(name)
        entry.size, entry.uid, entry.gid, entry.mode = len(data), HPC_UID, HPC_UID, 0o644
        archive = io.BytesIO()
        with tarfile.open(fileobj=archive, mode="w") as tar:
            tar.addfile(entry, io.BytesIO(data))
        self._container("login").put_archive(folder, archive.getvalue())
        return where

    # -- breaking and mending nodes ------------------------------------------------------------------------

    def kill_node(self, name: str) -> None:
        """SIGKILL to everything on the node at once. Its connections are closed by no one."""
        self._container(name).kill()

    def start_node(self, name: str) -> None:
        """Start a killed node and wait until Slurm calls it idle."""
        self._container(name).start()
        self.wait_state(name, {"IDLE"})

    def pause_node(self, name: str) -> None:
        """Freeze every process of the node: the kernel still answers for it, nobody else does."""
        self._container(name).pause()

    def unpause_node(self, name: str) -> None:
        """Let a paused node go on."""
        self._container(name).unpause()

    def cut_off(self, name: str) -> None:
        """Take the node off the network: its processes run on and reach nobody."""
        self._network(name).disconnect(self._container(name), force=True)

    def reconnect(self, name: str) -> None:
        """Put a node that was cut off back on the network."""
        container = self._container(name)
        hosts = dict(line.split(":", 1) for line in container.attrs["HostConfig"]["ExtraHosts"] or ())
        self._network(name).connect(container, aliases=[name], ipv4_address=hosts.get(name))

    def mend(self) -> None:
        """Undo every pause, kill and cut."""
        for name in ("controller", "login", *self.nodes):
            container = self._container(name)
            if container.status == "paused":
                container.unpause()
            elif container.status != "running":
                container.start()
            container.reload()
            network = self._network(name)
            if network.name not in container.attrs["NetworkSettings"]["Networks"]:
                self.reconnect(name)

    # -- what Slurm says -----------------------------------------------------------------------------------

    def ask(self, *words: str) -> str:
        """What a command of Slurm's prints. A controller is busy for seconds when a node has just died."""
        deadline = time.monotonic() + 40
        while True:
            done = self.exec("controller", words, user="root", timeout=20, check=False)
            if done.returncode == 0:
                return done.stdout
            if "timed out" not in done.stderr or time.monotonic() > deadline:
                raise CommandFailed("controller", done)

    def node_state(self, name: str) -> set[str]:
        """Slurm's state of a node and its flags, such as {"DOWN", "NOT_RESPONDING"}."""
        said = self.ask("scontrol", "--oneliner", "show", "node", name)  # 22.05 has no --json here
        state = next(word for word in said.split() if word.startswith("State="))
        return set(state.removeprefix("State=").replace("*", "").split("+"))

    def wait_state(self, name: str, state: set[str], timeout: float = 60) -> None:
        """Wait until Slurm's state of a node, flags included, is just this."""
        wait_until(
            lambda: self.node_state(name) == state, f"Slurm calls {name} {'+'.join(sorted(state))}", timeout
        )

    def jobs(self) -> list[str]:
        """One line, "id state name", for each job that is not over (one being cleaned up after is)."""
        said = self.ask("squeue", "--noheader", "--format=%i %T %j")
        return [line for line in said.splitlines() if " COMPLETING " not in line]

    def wait_idle(self, timeout: float = 90) -> None:
        """Wait until every node is idle and the queue is empty."""
        try:
            wait_until(self._is_idle, "all nodes idle, no job left", timeout)
        except TimeoutError as error:
            raise TimeoutError(f"{error}; it is: {self.describe()}") from None

    def _is_idle(self) -> bool:
        said = self.ask("sinfo", "--noheader", "--Node", "--format=%N %T")
        # A node is listed once for each of its partitions.
        return set(said.splitlines()) == {f"{name} idle" for name in self.nodes} and not self.jobs()

    def describe(self) -> str:
        """Nodes and jobs in a line, for messages."""
        command = "sinfo -hN -o '%N %T'; squeue -h -o 'job %i %T %N'"
        said = self.exec("controller", command, user="root", check=False)
        return ", ".join(said.stdout.splitlines())

    def clear(self) -> None:
        """Mend what is broken, cancel every job, and wait until the cluster is idle."""
        self.mend()
        wait_until(self._controller_answers, "the controller answers", 30)
        if self._is_idle():
            return
        wait_until(self._idle_or_resumed, "all nodes idle, no job left", 90, every=0.5)

    def _controller_answers(self) -> bool:
        return self.exec("controller", ["scontrol", "ping"], user="root", check=False).returncode == 0

    def _idle_or_resumed(self) -> bool:
        # Again where a controller that looks for lost nodes did not answer in time.
        if self.jobs():
            self.exec("controller", ["scancel", "--user=hpc"], user="root", check=False)
        for name in self.nodes:
            state = self.node_state(name)
            # A node that Slurm has written off is asked for by hand; one that is only late comes by itself.
            if "DRAIN" in state or state == {"DOWN"}:
                resume = ["scontrol", "update", f"nodename={name}", "state=resume"]
                self.exec("controller", resume, user="root", check=False)
        return self._is_idle()

    def processes(self) -> dict[str, set[Process]]:
        """The processes of user hpc on each machine that runs, zombies aside."""
        found: dict[str, set[Process]] = {}
        for name in ("login", *self.nodes):
            container = self._container(name)
            if container.status != "running":
                continue
            started = container.attrs["State"]["StartedAt"]
            said = self.exec(name, ["ps", "-u", "hpc", "-o", "pid=,stat=,args="], user="root", check=False)
            found[name] = set()
            for line in said.stdout.splitlines():
                pid, state, arguments = line.split(maxsplit=2)
                if not state.startswith("Z"):
                    found[name].add((f"{started} {pid}", arguments))
        return found

    def kill_processes(self, processes: dict[str, set[Process]]) -> None:
        """SIGKILL to processes that `processes()` has found."""
        for name, those in processes.items():
            for identity, _ in those:
                self.exec(name, ["kill", "-9", identity.split()[1]], user="root", check=False)

    # -- the containers ------------------------------------------------------------------------------------

    def _container(self, service: str) -> Any:
        service = self._layout.services.get(service, service)
        labels = [*_labels(self._layout), f"com.docker.compose.service={service}"]
        found = self._client.containers.list(all=True, filters={"label": labels})
        if not found:
            raise LookupError(
                f"the cluster has no machine {service!r}; it has {', '.join(self.nodes)} and two more"
            )
        return found[0]

    def _network(self, service: str) -> Any:
        project = self._container(service).labels["com.docker.compose.project"]
        return self._client.networks.get(f"{project}_default")


def containers_exist(client: Any, layout: Layout) -> bool:
    """Whether this cluster of this checkout is there, running or not."""
    return bool(client.containers.list(all=True, filters={"label": _labels(layout)}))


def _labels(layout: Layout) -> list[str]:
    return [f"com.docker.compose.project.working_dir={layout.folder}"]


def _argv(command: str | Sequence[str]) -> list[str]:
    return ["bash", "-lc", command] if isinstance(command, str) else list(command)


def _home(user: str) -> str:
    return "/root" if user == "root" else f"/home/{user}"


def _text(output: bytes | None) -> str:
    return (output or b"").decode(errors="replace")
