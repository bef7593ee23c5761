"""What Slurm runs on a node: HealthCheckProgram, Prolog and Epilog, each within its limits.

All three fail open: whatever goes wrong with ourselves, a node stays in service, and the log says so. Only a
Prolog or an Epilog that found something critical, in mode `drain`, ends with another code than 0.
HealthCheckProgram always ends with 0: some releases of slurmd wait for that before they register the node.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import sys
import syslog
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

import msgspec
from everstep.healthcheck import child, records, site, trust
from everstep.healthcheck.child import Answer
from everstep.healthcheck.errors import HealthError
from everstep.healthcheck.policy import Action, Decision, History, InSlurm, Mode, decide, fresh_pass, refuse
from everstep.healthcheck.records import Record
from everstep.healthcheck.result import Report, Status
from everstep.healthcheck.runner import FOLDERS
from everstep.healthcheck.site import Loaded, Site

HISTORY = "policy.json"
KEEP_WORSE_S = 900.0
"""For so long a lighter run does not take the place of a deeper one that found more."""
FIELD_EVERY_S = 600.0
"""How often Slurm's field is written where nothing has changed."""
CONTEXTS = {"prolog_slurmd": "prolog", "epilog_slurmd": "epilog"}
_DEPTH = {"light": 0, "full": 1, "deep": 2}


class Slurm(Protocol):
    """What is asked of Slurm about this node."""

    def look(self, node: str) -> tuple[InSlurm, str]:
        """What it says of the node, and what its comment or extra field holds."""

    def act(self, node: str, action: Action) -> None:
        """Do it. Raises UsageError."""

    def write_field(self, node: str, text: str) -> None:
        """Put our short result into the node's comment or extra field."""


@dataclass
class Machine:
    """Everything outside: the checks, Slurm, the clock, the log."""

    loaded: Loaded
    slurm: Slurm
    checks: Callable[[str, float, bool], Answer]
    """(level, limit in seconds, only what is about this moment) -> what the checks said."""
    clock: Callable[[], float] = time.time
    log: Callable[[str], None] = print
    boot: str = ""
    environ: Mapping[str, str] = field(default_factory=dict)

    @property
    def site(self) -> Site:
        """The site's settings."""
        return self.loaded.site


def program(machine: Machine) -> int:
    """HealthCheckProgram: check, decide, act, and leave the result where the report finds it. Always 0."""
    with _only_one(machine) as alone:
        if not alone:
            machine.log("another run is under way: this one does nothing")
            return 0
        hook = machine.site.program
        answer = machine.checks(hook.level, hook.limit_s, False)
        node = _name(machine)
        settings = machine.site.settings(_after_boot())
        history, lost = _read_history(machine)
        seen: InSlurm | None = None
        held, slurm_fault = "", ""
        if settings.mode is not Mode.REPORT or machine.site.slurm_field:
            seen, held, slurm_fault = _look(machine, node)
        results = answer.report.results if answer.report else ()
        decision = decide(
            results,
            seen,
            history,
            settings,
            now=machine.clock(),
            boot=machine.boot,
            faults=(*answer.faults, *lost),
        )
        said = _carry_out(machine, node, decision)
        notes = (*decision.notes, *((slurm_fault,) if slurm_fault else ()), *said)
        for note in notes:
            machine.log(note)
        if answer.report is not None:
            record = _record(machine, answer.report, "program", _asked(decision.action), notes)
            _leave(machine, record)
            _tell_slurm(machine, node, record, held)
    return 0


def prolog(machine: Machine) -> int:
    """Prolog: 1 where the node must not have this job, else 0. Asks nothing of Slurm."""
    return _before_or_after(machine, "prolog", machine.site.prolog)


def epilog(machine: Machine) -> int:
    """Epilog: 1 where the node must not have another job, else 0. Asks nothing of Slurm."""
    return _before_or_after(machine, "epilog", machine.site.epilog)


HOOKS: Mapping[str, Callable[[Machine], int]] = {"program": program, "prolog": prolog, "epilog": epilog}


def run(name: str, config: str | None = None) -> int:
    """Run one of them on this node, with everything real. Never raises."""
    log = _Log(name)
    try:
        # Slurm starts a Prolog without a PATH, and one that we are given may be anybody's.
        os.environ["PATH"] = ":".join([*_slurm_bin(os.getppid()), *FOLDERS])
        return HOOKS[name](_machine(config, log))
    except HealthError as error:
        log(f"nothing was checked: {error}")
    except Exception as error:  # fail open: a fault of ours must not take a node out of service
        log(f"a fault of everstep's own, nothing was done: {type(error).__name__}: {error}")
    return 0


def main() -> int:
    """The command `everstep-health`, which slurm.conf names for all three: Slurm says in which it is."""
    return run(CONTEXTS.get(os.environ.get("SLURM_SCRIPT_CONTEXT", ""), "program"))


def keep_last(old: Record | None, new: Record) -> Record:
    """Which of the two is the node's last result: the new one, but for a lighter one that found less."""
    if old is None or old.boot != new.boot or not 0 <= new.at - old.at < KEEP_WORSE_S:
        return new
    lighter = _DEPTH.get(new.report.level, 0) < _DEPTH.get(old.report.level, 0)
    return old if lighter and new.report.status < old.report.status else new


def _before_or_after(machine: Machine, by: str, hook: site.Hook) -> int:
    settings = machine.site.settings()
    last = _read_last(machine)
    keep_s = machine.site.policy.keep_pass_s
    kept = last is not None and fresh_pass(
        last.at,
        last.boot,
        last.report.status < Status.CRITICAL,
        now=machine.clock(),
        now_boot=machine.boot,
        keep_s=keep_s,
    )
    # A pass of a minute ago says nothing of what a job has left on its GPUs since.
    if kept and not machine.environ.get("SLURM_JOB_GPUS"):
        return 0
    answer = machine.checks(hook.level, hook.limit_s, kept)
    for fault in answer.faults:
        machine.log(f"a fault of our own, which refuses nothing: {fault}")
    if answer.report is None:
        return 0
    why = refuse(answer.report.results, settings)
    job = machine.environ.get("SLURM_JOB_ID", "")
    action = f"{by} refused job {job}".strip() if why else ""
    report = _with(last.report, answer.report) if kept and last is not None else answer.report
    record = _record(machine, report, by, action, answer.faults)
    # A look at this moment alone makes no new pass.
    if keep_last(last, record) is record and (not kept or report.status is Status.CRITICAL):
        _leave(machine, record)
    if why:
        machine.log(f"{action}: {why}")
        return 1
    for found in answer.report.findings if settings.mode is not Mode.DRAIN else ():
        machine.log(f"mode {settings.mode.value}, not refused: {found.check} {found.device} {found.reason}")
    return 0


def _with(whole: Report, part: Report) -> Report:
    """The whole, with what a part of it says now."""
    names = {each.check for each in part.results}
    rest = tuple(each for each in whole.results if each.check not in names)
    return replace(whole, results=rest + part.results)


def _carry_out(machine: Machine, node: str, decision: Decision) -> tuple[str, ...]:
    """Remember and do what was decided, in the order that `Action` asks for; returns what went wrong."""
    action = decision.action
    said: tuple[str, ...] = ()
    real = action is not None and not action.shadow
    if not (real and action is not None and action.kind == "undrain"):
        said += _write_history(machine, decision.history)
    if real and action is not None:
        try:
            machine.slurm.act(node, action)
        except HealthError as error:
            return (*said, f"Slurm did not do it: {error}")
        if action.kind == "undrain":
            said += _write_history(machine, decision.history)
    return said


def _look(machine: Machine, node: str) -> tuple[InSlurm | None, str, str]:
    try:
        seen, held = machine.slurm.look(node)
    except HealthError as error:
        return None, "", str(error)
    return seen, held, ""


def _tell_slurm(machine: Machine, node: str, record: Record, held: str) -> None:
    """Write the short result where the site wants it, if it is news. Somebody else's words stay."""
    if machine.site.slurm_field is None:
        return
    old = records.from_slurm(node, held, "") if held else None
    if held and old is None:
        machine.log(f"the node's {machine.site.slurm_field} holds other words: left alone")
        return
    text = records.to_slurm(record)
    same = old is not None and old.report.results == _short(record, node)
    if same and old is not None and 0 <= record.at - old.at < FIELD_EVERY_S:
        return
    try:
        machine.slurm.write_field(node, text)
    except HealthError as error:
        machine.log(f"the result is not in Slurm's {machine.site.slurm_field}: {error}")


def _short(record: Record, node: str) -> tuple[object, ...]:
    read = records.from_slurm(node, records.to_slurm(record), "")
    return read.report.results if read else ()


def _record(machine: Machine, report: Report, by: str, action: str, notes: tuple[str, ...]) -> Record:
    # Not the name that a recorded node has: it is this one that is drained and reported.
    named = replace(report, node=_name(machine))
    return Record(named, machine.clock(), by, machine.site.mode, machine.boot, action, notes)


def _asked(action: Action | None) -> str:
    if action is None:
        return ""
    return f"{'would ' if action.shadow else ''}{action.kind} {action.reason}".strip()


def _leave(machine: Machine, record: Record) -> None:
    """Write the last result where the report finds it. That it cannot be written stops nothing."""
    data = record.to_json()
    _try_write(machine, Path(machine.site.state_dir) / records.LAST, data)
    if machine.site.shared_dir is not None:
        _try_write(machine, Path(machine.site.shared_dir) / (record.node + records.SUFFIX), data)


def _try_write(machine: Machine, path: Path, data: bytes) -> None:
    try:
        trust.write(path, data)
    except HealthError as error:
        machine.log(str(error))
    except OSError as error:
        machine.log(f"{path} cannot be written: {error.strerror}")


def _read_last(machine: Machine) -> Record | None:
    try:
        return records.from_json(trust.read(Path(machine.site.state_dir) / records.LAST))
    except FileNotFoundError:
        return None
    except (HealthError, OSError, ValueError) as error:
        machine.log(f"the last result is not used: {error}")
        return None


def _read_history(machine: Machine) -> tuple[History, tuple[str, ...]]:
    """What is remembered, and what is wrong with it. Without it no drain is ours, so none is lifted."""
    path = Path(machine.site.state_dir) / HISTORY
    try:
        return msgspec.json.decode(trust.read(path), type=History), ()
    except FileNotFoundError:
        return History(), ()
    except (HealthError, OSError, msgspec.MsgspecError) as error:
        return History(), (f"the record of our drains in {path} is not used: {error}",)


def _write_history(machine: Machine, history: History) -> tuple[str, ...]:
    path = Path(machine.site.state_dir) / HISTORY
    try:
        trust.write(path, msgspec.json.encode(history), mode=0o600)
    except HealthError as error:
        return (str(error),)
    except OSError as error:
        return (f"{path} cannot be written, so a drain of ours will not be known for one: {error.strerror}",)
    return ()


@contextlib.contextmanager
def _only_one(machine: Machine) -> Iterator[bool]:
    """Whether no other HealthCheckProgram of ours runs here; yes, too, where that cannot be told."""
    path = Path(machine.site.state_dir) / "lock"
    try:
        if not path.exists():
            trust.write(path, b"", mode=0o600)
        handle = os.open(trust.resolve(path), os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except (HealthError, OSError):
        yield True
        return
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield True
    except BlockingIOError:
        yield False
    finally:
        os.close(handle)


def _after_boot() -> frozenset[str]:
    from everstep.healthcheck import registry

    checks, _ = registry.load()
    return frozenset(name for name, each in checks.items() if each.events)


def _name(machine: Machine) -> str:
    return (
        machine.site.node_name or machine.environ.get("SLURMD_NODENAME") or socket.gethostname().split(".")[0]
    )


def _machine(config: str | None, log: Callable[[str], None]) -> Machine:
    from everstep.healthcheck.examine import boot_id
    from everstep.healthcheck.runner import System
    from everstep.healthcheck.slurm_node import SlurmNode

    loaded = site.load(config)
    return Machine(
        loaded=loaded,
        slurm=SlurmNode(loaded.site.slurm_field),
        checks=lambda level, limit_s, moment: child.run(level, limit_s=limit_s, config=config, moment=moment),
        log=log,
        boot=boot_id(System(Path(loaded.site.root or "/"))),
        environ=os.environ,
    )


def _slurm_bin(parent: int) -> list[str]:
    """The folder of Slurm's commands beside the slurmd that has started us; none where somebody else has."""
    try:
        daemon = Path(os.readlink(f"/proc/{parent}/exe"))
    except OSError:
        return []
    return [str(daemon.parents[1] / "bin")] if daemon.name.startswith("slurmd") else []


class _Log:
    """To the system's log, and to standard error, which slurmd keeps."""

    def __init__(self, name: str) -> None:
        self._name = name
        syslog.openlog("everstep-health", syslog.LOG_PID, syslog.LOG_DAEMON)

    def __call__(self, text: str) -> None:
        syslog.syslog(syslog.LOG_WARNING, f"{self._name}: {text}")
        print(f"everstep health {self._name}: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
