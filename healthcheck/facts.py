"""A node's facts: lazy, read once, all through one runner. A fact that cannot be had raises `Absent`."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from everstep.healthcheck.errors import Absent, TimedOut
from everstep.healthcheck.history import History
from everstep.healthcheck.readers import dcgm, links, neuron, pci, proc
from everstep.healthcheck.readers import ports as ports_reader
from everstep.healthcheck.readers import smi as smi_reader
from everstep.healthcheck.readers.kernel_log import KernelLog
from everstep.healthcheck.registry import Level
from everstep.healthcheck.runner import Ran, Runner

T = TypeVar("T")

_NOT_ASKED = ("/boot", "/efi", "/snap", "/var/lib/docker", "/var/lib/containerd", "/var/lib/kubelet")
"""Under these, file systems are small or many by design."""
_MOST_MOUNTS = 64
_LOOK = "import os, sys; os.statvfs(sys.argv[1]); os.close(os.open(sys.argv[1], os.O_RDONLY))"
"""For a recorded node without `stat`: a look that hangs where the mount does."""


@dataclass
class Limits:
    """How long each tool may take, in seconds."""

    smi: float = 30.0
    tool: float = 15.0
    mount: float = 10.0
    dcgm: float = 45.0
    load: float = 300.0

    @classmethod
    def of(cls, level: Level) -> Limits:
        """Light must be over within 5 s, whatever hangs."""
        if level is Level.LIGHT:
            return cls(smi=3.0, tool=2.3, mount=2.3, dcgm=2.3)
        if level is Level.FULL:
            return cls()
        return cls(smi=60.0, tool=30.0, mount=10.0, dcgm=3 * 3600.0)


@dataclass
class Facts:
    """What is known of one node at one time. Checks read this and nothing else."""

    runner: Runner
    level: Level = Level.FULL
    now: float = field(default_factory=time.time)
    """Unix seconds."""
    history: History = field(default_factory=History)
    limits: Limits = field(default_factory=Limits)
    idle_gpus: frozenset[int | str] | None = None
    """The GPUs on which nothing may run now, as in a Prolog, by number or UUID; None: that is not known."""
    sleep: Callable[[float], None] = time.sleep
    wait: float | None = None
    """How long one thread waits for another that reads the same fact."""
    end: float | None = None
    """When the whole run is to be over, by the monotonic clock."""
    _kept: dict[str, Any] = field(default_factory=dict, repr=False)
    _locks: dict[str, threading.Lock] = field(default_factory=dict, repr=False)
    _guard: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def once(self, name: str, make: Callable[[], T]) -> T:
        """`make()`, called once whoever asks; a failure is kept as well."""
        with self._guard:
            lock = self._locks.setdefault(name, threading.Lock())
        if not lock.acquire(timeout=-1 if self.wait is None else max(0.0, self.wait)):
            raise TimedOut(f"{name} is still being read")
        try:
            if name not in self._kept:
                try:
                    self._kept[name] = make()
                except Absent as absent:
                    self._kept[name] = absent
            kept = self._kept[name]
        finally:
            lock.release()
        if isinstance(kept, Absent):
            raise kept
        return kept  # type: ignore[no-any-return]

    def left(self) -> float:
        """How many seconds the whole run has left."""
        return float("inf") if self.end is None else self.end - time.monotonic()

    def begin(self) -> None:
        """Start the slow readings in the background, so that they go on side by side with all else."""

        def start(name: str) -> None:
            with contextlib.suppress(Absent):
                getattr(self, name)

        for name in ("smi_read", "kernel_log", "network_mounts"):
            threading.Thread(target=start, args=(name,), daemon=True, name=f"everstep-{name}").start()

    def text(self, path: str) -> str | None:
        """A small file's text, stripped; None where it cannot be read."""
        data = self.runner.read(path)
        return None if data is None else data.decode("utf-8", "replace").strip()

    # NVIDIA

    @property
    def smi_ran(self) -> Ran:
        """`nvidia-smi -q -x`, as it ran. Absent only where there is no nvidia-smi."""

        def make() -> Ran:
            ran = self.runner.run(["nvidia-smi", "-q", "-x"], self.limits.smi)
            if ran.missing:
                raise Absent("there is no nvidia-smi")
            return ran

        return self.once("nvidia-smi", make)

    @property
    def smi_read(self) -> smi_reader.Smi:
        """What nvidia-smi says, as far as it can be read; maybe of no GPU at all."""

        def make() -> smi_reader.Smi:
            ran = self.smi_ran
            if ran.timed_out:
                raise TimedOut(f"nvidia-smi did not answer in {ran.seconds:.0f} s", owner="gpu_smi")
            return smi_reader.parse(ran.out)

        return self.once("smi", make)

    @property
    def gpus(self) -> tuple[smi_reader.Gpu, ...]:
        """The GPUs that nvidia-smi shows; at least one."""
        gpus = self.smi_read.gpus
        if not gpus:
            raise Absent("nvidia-smi shows no GPU (see gpu_smi)")
        return gpus

    @property
    def gpus_on_the_bus(self) -> list[str]:
        """The PCI device numbers of the NVIDIA GPUs on the bus, whatever the driver says."""
        return self.once("PCI bus", lambda: pci.gpus(self.runner))

    @property
    def no_gpu_on_the_bus(self) -> bool:
        """Whether the PCI bus can be seen, and shows no NVIDIA GPU."""
        return bool(self.runner.names("/sys/bus/pci/devices")) and not self.gpus_on_the_bus

    def smi_tool(self, *words: str) -> str:
        """Another command of nvidia-smi's, as text."""
        if self.smi_ran.timed_out:  # the next one would hang as well
            raise TimedOut(f"nvidia-smi did not answer in {self.smi_ran.seconds:.0f} s", owner="gpu_smi")
        return self.tool("nvidia-smi", *words)

    @property
    def nvlinks(self) -> dict[int, dict[int, bool]]:
        """For each GPU and NVLink: whether it is up. From nvidia-smi, else from dcgmi."""

        def make() -> dict[int, dict[int, bool]]:
            try:
                found = links.status(self.smi_tool("nvlink", "-s"))
            except TimedOut:
                raise
            except Absent:
                found = {}
            if not any(found.values()):
                found = links.dcgm_status(self.tool("dcgmi", "nvlink", "-s"))
            if not any(found.values()):
                raise Absent("no NVLinks are told of")
            return found

        return self.once("nvlinks", make)

    @property
    def nvlink_errors(self) -> dict[int, dict[str, int]]:
        """For each GPU its links' errors by kind."""

        def make() -> dict[int, dict[str, int]]:
            found = links.errors(self.smi_tool("nvlink", "-e"))
            if not any(found.values()):
                raise Absent("no NVLink errors are told of")
            return found

        return self.once("nvlink errors", make)

    def dcgm(self, level: int) -> list[dcgm.Outcome]:
        """`dcgmi diag -r LEVEL -j`: the outcome of every test."""

        def make() -> list[dcgm.Outcome]:
            ran = self.runner.run(["dcgmi", "diag", "-r", str(level), "-j"], self.limits.dcgm)
            if ran.missing:
                raise Absent("there is no dcgmi")
            if ran.timed_out:
                raise TimedOut(f"dcgmi diag -r {level} did not end in {ran.seconds:.0f} s")
            try:
                return dcgm.parse(ran.out)  # whatever its exit code: 205 and others are not fatal
            except ValueError as error:
                raise Absent(f"dcgmi diag -r {level}: {ran.said or error} (exit code {ran.code})") from None

        return self.once(f"dcgm r{level}", make)

    # Trainium

    @property
    def neurons(self) -> list[neuron.Neuron]:
        """The Neuron devices in sysfs; none where there is no such tree."""
        return self.once("neurons", lambda: neuron.devices(self.runner))

    @property
    def neuron_ls(self) -> list[dict[str, Any]]:
        """`neuron-ls -j`."""

        def make() -> list[dict[str, Any]]:
            text = self.tool("neuron-ls", "-j")
            try:
                return neuron.listed(text.encode())
            except ValueError as error:
                raise Absent(f"neuron-ls printed what cannot be read: {error}") from None

        return self.once("neuron-ls", make)

    @property
    def neuron_monitor(self) -> neuron.Monitor:
        """The first report of neuron-monitor, which would go on for ever."""

        def make() -> neuron.Monitor:
            ran = self.runner.run(["neuron-monitor"], self.limits.tool, first_line=True)
            if ran.missing:
                raise Absent("there is no neuron-monitor")
            if ran.timed_out:
                raise TimedOut(f"neuron-monitor printed no report in {ran.seconds:.0f} s")
            try:
                return neuron.monitored(ran.out)
            except ValueError as error:
                raise Absent(f"neuron-monitor printed what cannot be read: {ran.said or error}") from None

        return self.once("neuron-monitor", make)

    # Network

    @property
    def ports(self) -> list[ports_reader.Port]:
        """The EFA and InfiniBand ports. Absent where there is no sysfs at all."""
        if not self.runner.names("/sys/class"):
            raise Absent("there is no /sys/class")
        return self.once("ports", lambda: ports_reader.ports(self.runner))

    def ports_afresh(self) -> list[ports_reader.Port]:
        """The ports as they are now: they can come up late."""
        with self._guard:
            self._kept["ports"] = found = ports_reader.ports(self.runner)
        return found

    # The kernel's word

    @property
    def uptime(self) -> float | None:
        """Seconds since boot."""
        text = self.text("/proc/uptime")
        try:
            return float(text.split()[0]) if text else None
        except (ValueError, IndexError):
            return None

    @property
    def kernel_log(self) -> KernelLog:
        """The kernel log since boot: dmesg; the journal where that is refused or has lost its beginning."""
        return self.once("kernel log", self._read_kernel_log)

    def _read_kernel_log(self) -> KernelLog:
        now = None if self.runner.recorded else self.now
        ran = self.runner.run(["dmesg"], self.limits.tool)
        log = None
        if ran.code == 0 and ran.out.strip():
            log = KernelLog(ran.out, now=now, uptime=self.uptime)
            if not log.wrapped or self.level is Level.LIGHT:
                return log
        journal = self.runner.run(
            ["journalctl", "-k", "-b", "-o", "short-monotonic", "--no-pager"], self.limits.tool
        )
        if journal.code == 0 and journal.out.count(b"\n") > 1:
            # The ring loses its oldest lines, the journal those that it was too slow for: both are read.
            both = journal.out + (log.data if log else b"")
            return KernelLog(
                both, now=now, uptime=self.uptime, source="journalctl and dmesg" if log else "journalctl"
            )
        if log:
            return log
        for path in ("/dev/kmsg", "/var/log/kern.log", "/var/log/dmesg"):
            data = self.runner.read(path)
            if data and data.strip():
                return KernelLog(data, now=now, uptime=self.uptime, source=path)
        if ran.timed_out:
            raise TimedOut(f"dmesg did not answer in {ran.seconds:.0f} s", owner="host_kernel_log")
        raise Absent(f"the kernel log cannot be read: {ran.said or 'dmesg is missing or prints nothing'}")

    @property
    def modules(self) -> set[str]:
        """The kernel modules that are there, loaded or built in."""

        def make() -> set[str]:
            text = self.text("/proc/modules")
            names = self.runner.names("/sys/module")
            if text is None and not names:
                raise Absent("there is neither /proc/modules nor /sys/module")
            return {line.split()[0] for line in (text or "").splitlines() if line.split()} | set(names)

        return self.once("modules", make)

    @property
    def memory(self) -> dict[str, int]:
        """/proc/meminfo in bytes."""
        text = self.text("/proc/meminfo")
        if not text:
            raise Absent("there is no /proc/meminfo")
        return proc.memory(text)

    @property
    def processes(self) -> dict[str, list[int]]:
        """The processes by their names: the kernel's (15 letters) and the one they were started by.

        Both, since a daemon that executes itself anew (slurmd does, told to reconfigure) changes the first.
        Absent where none is shown.
        """

        def make() -> dict[str, list[int]]:
            found: dict[str, list[int]] = {}
            for name in self.runner.names("/proc"):
                if name.isdigit() and (comm := self.text(f"/proc/{name}/comm")):
                    started = (self.text(f"/proc/{name}/cmdline") or "").partition("\0")[0].rpartition("/")[2]
                    for known in {comm, started} - {""}:
                        found.setdefault(known, []).append(int(name))
            if not found:
                raise Absent("/proc shows no process")
            return found

        return self.once("processes", make)

    @property
    def mounts(self) -> list[proc.Mount]:
        """What is mounted where."""
        text = self.text("/proc/self/mounts") or self.text("/proc/mounts")
        if not text:
            raise Absent("there is no /proc/mounts")
        return proc.mounts(text)

    @property
    def network_mounts(self) -> dict[str, Ran]:
        """Each network mount's answer to `stat -f`, asked at once, in children that can be left behind."""

        def make() -> dict[str, Ran]:
            paths = [each.path for each in self.mounts if each.kind in proc.NETWORK]
            answers: dict[str, Ran] = {}

            def ask(path: str) -> None:
                answers[path] = self._ask(path)

            threads = [
                threading.Thread(target=ask, args=(path,), daemon=True) for path in paths[:_MOST_MOUNTS]
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(self.limits.mount + 2)
            return dict(answers)

        return self.once("network mounts", make)

    def _ask(self, path: str) -> Ran:
        where = str(self.runner.path(path))
        ran = self.runner.run(["stat", "-f", "-c", "%T", where], self.limits.mount)
        if ran.missing and self.runner.exists(path):
            ran = self.runner.run_python(_LOOK, [where], self.limits.mount)
        return ran

    @property
    def usages(self) -> list[proc.Usage]:
        """How full the local file systems are, and /dev/shm. A recorded node tells by its df."""

        def make() -> list[proc.Usage]:
            if self.runner.recorded and self.runner.which("df"):
                return self._df()
            found = []
            seen = set()
            for mount in self.mounts:
                local = (
                    mount.kind in proc.LOCAL
                    or mount.path == proc.SHM
                    or (mount.path == "/" and mount.kind == "overlay")
                )
                if not local or mount.path.startswith(_NOT_ASKED) or mount.device.startswith("/dev/loop"):
                    continue
                if mount.device in seen and mount.kind in proc.LOCAL:
                    continue  # a bind mount
                usage = self.runner.usage(mount.path)
                if usage is not None:
                    seen.add(mount.device)
                    found.append(usage)
            return found

        return self.once("usages", make)

    def _df(self) -> list[proc.Usage]:
        found: dict[str, proc.Usage] = {}
        inodes: dict[str, tuple[int, int]] = {}
        skipped = {
            each.path for each in self._mounts_or_none() if each.kind not in proc.LOCAL and each.path != "/"
        }
        skipped.discard(proc.SHM)
        for option in ("-k", "-i"):
            for which, path, size, used, free in proc.df(self.tool("df", "-P", option, owner="disk_space")):
                if path in skipped or path.startswith(_NOT_ASKED):
                    continue
                if which == "inodes":
                    inodes[path] = (size, used)
                else:
                    found[path] = proc.Usage(path, size, used, free)
        for path, (size, used) in inodes.items():
            known = found.get(path, proc.Usage(path, 0, 0, 0))
            found[path] = proc.Usage(path, known.size, known.used, known.free, size, used)
        return list(found.values())

    def _mounts_or_none(self) -> list[proc.Mount]:
        try:
            return self.mounts
        except Absent:
            return []

    def usage_of(self, path: str) -> proc.Usage | None:
        """How full one file system is; None where that is not told."""
        return next((each for each in self.usages if each.path == path and each.size), None)

    @property
    def shm_size(self) -> int | None:
        """The size that /dev/shm was mounted with, in bytes; None where it is the default."""
        for mount in self._mounts_or_none():
            if mount.path == proc.SHM:
                for option in mount.options:
                    if option.startswith("size="):
                        return proc.size(option.removeprefix("size="))
        return None

    @property
    def limits_of_jobs(self) -> tuple[str, dict[str, tuple[float, float]]]:
        """Whose limits jobs inherit, slurmd's if it runs, and the limits: soft and hard."""
        try:
            pids = self.processes.get("slurmd", [])
        except Absent:
            pids = []
        for whose, pid in [("slurmd", str(pid)) for pid in pids[:1]] + [("this process", "self")]:
            text = self.text(f"/proc/{pid}/limits")
            if text:
                return whose, proc.limits(text)
        raise Absent("no process tells its limits")

    def load(self, kind: str, *, cpu: bool) -> dict[str, Any]:
        """What an active test measured. A recorded node's `everstep-load` prints what was measured there."""

        def make() -> dict[str, Any]:
            words = [kind, *(["--cpu"] if cpu else [])]
            if self.runner.recorded:
                ran = self.runner.run(["everstep-load", *words], self.limits.load)
                if ran.missing:
                    raise Absent("a recorded node can be put under no load")
            else:
                program = "from everstep.healthcheck.load import main; main()"
                ran = self.runner.run_python(program, words, self.limits.load, isolated=False)
            if ran.timed_out:
                raise TimedOut(f"{kind} did not end in {ran.seconds:.0f} s")
            try:
                data = json.loads(ran.out.decode("utf-8", "replace").strip().splitlines()[-1])
                if not isinstance(data, dict):
                    raise ValueError("no object")
                return data
            except (ValueError, IndexError):
                raise Absent(f"{kind} measured nothing: {ran.said or f'exit code {ran.code}'}") from None

        return self.once(f"load {kind}", make)

    # Tools

    def tool(self, *argv: str, owner: str = "") -> str:
        """What a tool prints. Absent where it is missing or fails, TimedOut where it hangs."""
        ran = self.runner.run(argv, self.limits.tool)
        if ran.missing:
            raise Absent(f"there is no {argv[0]}")
        if ran.timed_out:
            raise TimedOut(f"{' '.join(argv[:3])} did not answer in {ran.seconds:.0f} s", owner)
        if ran.code:
            raise Absent(f"{' '.join(argv[:3])} failed with exit code {ran.code}: {ran.said}")
        return ran.out.decode("utf-8", "replace")
