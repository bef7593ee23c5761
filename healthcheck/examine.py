"""Run checks on a node and report: facts are read side by side, and nothing that hangs holds the rest up."""

from __future__ import annotations

import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from everstep.healthcheck import registry
from everstep.healthcheck.errors import Absent, HealthError, TimedOut
from everstep.healthcheck.facts import Facts, Limits
from everstep.healthcheck.history import Store, default_store
from everstep.healthcheck.profile import SITE_FOLDER, Profile, find, ours, read_all, read_folder
from everstep.healthcheck.registry import Check, Level
from everstep.healthcheck.result import Report, Result, ok, skip, warn
from everstep.healthcheck.runner import Runner, System

OWN_FAULT = "a fault of everstep's own, not of the node's: "
"""How the reason of a result begins where the check itself broke; its status is skip."""

TOTAL_S: Mapping[Level, float] = {Level.LIGHT: 3.6, Level.FULL: 50.0}
"""How long all checks of a level take at the most. Slurm kills HealthCheckProgram after 60 s."""

_SIDE_BY_SIDE = 64


@dataclass(frozen=True)
class Request:
    """What is to be examined."""

    level: Level = Level.FULL
    names: tuple[str, ...] = ()
    """These checks only, whatever their level."""
    off: frozenset[str] = frozenset()
    """Not these."""
    moment: bool = False
    """Only those that are about this very moment: the rest has passed a moment ago."""
    profile: str = "auto"
    root: Path = Path("/")
    idle_gpus: frozenset[int | str] | None = None
    site_profiles: Mapping[str, str] | None = None
    """The site's profiles, TOML by name; None: those of the site's folder."""
    site_checks: bool = True
    total_s: float | None = None
    """None: the level's own."""


def examine(
    request: Request,
    *,
    runner: Runner | None = None,
    store: Store | None = None,
    now: float | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> Report:
    """Run the checks that are asked for. Raises HealthError where what is asked for makes no sense.

    `store` keeps what checks of growth remember; by default a file for each node, `Nowhere()` for none.
    """
    start = time.monotonic()
    if runner is None and not (request.root.is_dir() and os.access(request.root, os.R_OK | os.X_OK)):
        raise HealthError(f"--root {request.root} is no folder that can be read")
    checks, faults = registry.load(sites=request.site_checks)
    # A check that is named takes the time that it needs, whatever the level.
    level = max([request.level, *(checks[name].level for name in request.names if name in checks)])
    total = request.total_s if request.total_s is not None else TOTAL_S.get(level)
    end = None if total is None else start + total
    runner = System(request.root, deadline=end) if runner is None else runner
    store = default_store(runner.root) if store is None else store
    facts = Facts(
        runner,
        level,
        time.time() if now is None else now,
        limits=Limits.of(level),
        idle_gpus=request.idle_gpus,
        sleep=sleep,
        end=end,
    )
    facts.history = store.load(boot_id(runner))
    try:
        profile, results = _examined(request, checks, facts, end)
    finally:
        runner.stop()
    faults += tuple(f"{each.check}: {each.reason}" for each in results if each.reason.startswith(OWN_FAULT))
    if facts.history.added:
        try:
            store.save(facts.history, facts.now)
        except OSError as error:
            faults += (f"counters are not remembered for the next run: {error}",)
    return Report(node_name(runner), profile.name, request.level.word, tuple(results), faults)


def _examined(
    request: Request, checks: Mapping[str, Check], facts: Facts, end: float | None
) -> tuple[Profile, list[Result]]:
    if not request.names and not request.moment:
        facts.begin()
    runner = facts.runner
    site = read_folder(runner.path(SITE_FOLDER)) if request.site_profiles is None else request.site_profiles
    profile = find(request.profile, read_all(ours(), site), facts)
    chosen = registry.chosen(checks, request.level, request.names, profile.off | request.off)
    chosen = [each for each in chosen if each.moment or not request.moment]
    return profile, _run_all(chosen, facts, profile, end)


def run_check(check: Check, facts: Facts, profile: Profile) -> list[Result]:
    """One check's results, whatever it does: what is absent is a skip, what breaks is ours."""
    start = time.monotonic()
    try:
        found = check.run(facts, profile)
        results = [found] if isinstance(found, Result) else list(found)
        if not results:
            results = [ok("in order")]
    except TimedOut as silent:
        text = str(silent)
        told = silent.owner not in ("", check.name)
        results = [skip(f"{text} (see {silent.owner})") if told else warn(text)]
    except Absent as absent:
        results = [skip(str(absent))]
    except Exception as error:  # a broken check must empty no cluster
        results = [skip(f"{OWN_FAULT}{type(error).__name__}: {error}")]
    seconds = time.monotonic() - start
    return [replace(each, check=check.name, seconds=seconds) for each in results]


def boot_id(runner: Runner) -> str:
    """What tells this boot from others; empty where it is not told."""
    return (runner.read("/proc/sys/kernel/random/boot_id") or b"").decode("utf-8", "replace").strip()


def node_name(runner: Runner) -> str:
    """The node's name, as Slurm has it where it says so."""
    if runner.recorded:
        for path in ("/etc/hostname", "/proc/sys/kernel/hostname"):
            name = (runner.read(path) or b"").decode("utf-8", "replace").strip()
            if name:
                return name.split(".")[0]
        return runner.root.resolve().name
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname().split(".")[0]


def _run_all(checks: Sequence[Check], facts: Facts, profile: Profile, end: float | None) -> list[Result]:
    """Checks that only read run side by side; those that put load on devices after them, one by one."""
    reading = [each for each in checks if each.level <= Level.FULL]
    loading = [each for each in checks if each.level > Level.FULL]
    results = _side_by_side(reading, facts, profile, end)
    for each in loading:
        results[each.name] = run_check(each, facts, profile)
    return [result for each in checks for result in results[each.name]]


def _side_by_side(
    checks: Iterable[Check], facts: Facts, profile: Profile, end: float | None
) -> dict[str, list[Result]]:
    to_do: queue.SimpleQueue[Check] = queue.SimpleQueue()
    done: queue.SimpleQueue[tuple[str, list[Result]]] = queue.SimpleQueue()
    waiting = {each.name: each for each in checks}
    for each in waiting.values():
        to_do.put(each)

    def work() -> None:
        while True:
            try:
                check = to_do.get_nowait()
            except queue.Empty:
                return
            done.put((check.name, run_check(check, facts, profile)))

    # Daemons: a read that the kernel never answers must not keep the program from ending.
    start = time.monotonic()
    for _ in range(min(_SIDE_BY_SIDE, len(waiting))):
        threading.Thread(target=work, daemon=True, name="everstep-check").start()
    results: dict[str, list[Result]] = {}
    while waiting:
        try:
            left = None if end is None else max(0.0, end - time.monotonic())
            name, found = done.get(timeout=left)
        except queue.Empty:
            break
        results[name] = found
        del waiting[name]
    for name in waiting:
        took = time.monotonic() - start
        results[name] = [replace(warn(f"did not end in {took:.0f} s"), check=name, seconds=took)]
    return results
