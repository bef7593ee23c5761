"""PURE checks: facts in, one line out, with what to do about it. Nothing is asked or changed in here."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from everstep.launcher.doctor.facts import Facts, HostFacts, Interface, SlurmFacts
from everstep.launcher.slurm.client import fold

Level = Literal["ok", "warn", "fail", "skip"]


@dataclass(frozen=True)
class Line:
    """One check's outcome."""

    check: str
    level: Level
    """skip: it could not be looked at from here; the fix then says how it can."""
    text: str
    fix: str = ""


Check = Callable[[Facts], Line]

_EXIT_CODES: dict[Level, int] = {"ok": 0, "skip": 0, "warn": 1, "fail": 2}


def examine(facts: Facts) -> list[Line]:
    """Every check's line, in the order in which one would mend things."""
    return [check(facts) for check in (_slurm, *(() if facts.slurm is None else _ALL))]


def exit_code(lines: Sequence[Line]) -> int:
    """0: all well; 1: something to look at; 2: something will go wrong."""
    return max((_EXIT_CODES[line.level] for line in lines), default=0)


# --- Slurm ----------------------------------------------------------------------------------------

_OLDEST = (22, 5)


def _slurm(facts: Facts) -> Line:
    slurm = facts.slurm
    if slurm is None:
        return Line(
            "Slurm",
            "fail",
            facts.slurm_problem,
            "load the Slurm module, or run this on a host of the cluster; `everstep run` needs no Slurm",
        )
    if release_of(slurm.release) < _OLDEST:
        return Line(
            "Slurm", "fail", f"release {slurm.release}", "Everstep is made for Slurm 22.05 and later: upgrade"
        )
    others = {node.version for node in slurm.nodes if node.version} - {slurm.release}
    if others:
        odd = [node.name for node in slurm.nodes if node.version in others]
        return Line(
            "Slurm",
            "warn",
            f"release {slurm.release} here, {', '.join(sorted(others))} on {fold(odd)}",
            "a SPANK plugin loads only in the release it was built for: upgrade all, or build it for each",
        )
    return Line("Slurm", "ok", f"release {slurm.release}, {_nodes_in_words(slurm)}")


def _nodes_in_words(slurm: SlurmFacts) -> str:
    unusable = [node.name for node in slurm.nodes if not node.usable]
    down = f", {fold(unusable)} not usable" if unusable else ""
    return f"{_nodes(len(slurm.nodes))}{down}"


def _nodes(count: int) -> str:
    return f"{count} node{'s' * (count != 1)}"


def _plugin(facts: Facts) -> Line:
    slurm = _slurm_of(facts)
    plugin = slurm.plugin
    where = plugin.config_file or "plugstack.conf"
    wanted = ".".join(slurm.release.split(".")[:2])
    if plugin.built_for and plugin.built_for != wanted:
        return Line(
            "SPANK plugin",
            "fail",
            f"{plugin.path} was built for Slurm {plugin.built_for}, and this is {wanted}: Slurm refuses it",
            "build it here: make -C slurm_spank install",
        )
    if plugin.offered:
        built = f", built for {plugin.built_for}" if plugin.built_for else ""
        return Line("SPANK plugin", "ok", f"loaded: srun has --auto-resume{built}")
    if plugin.configured:
        return Line(
            "SPANK plugin",
            "fail",
            f"{where} loads it, but srun has no --auto-resume",
            "srun -vv hostname 2>&1 | grep -i spank says why",
        )
    return Line(
        "SPANK plugin",
        "warn",
        "not installed: srun has no --auto-resume",
        "use `everstep srun` in place of srun, or have an admin install it (slurm_spank/)",
    )


def _dead_nodes(facts: Facts) -> Line:
    said = _slurm_of(facts).config.get("SlurmdTimeout", "")
    seconds = int(found[1]) if (found := re.match(r"(\d+)", said)) else None
    name, fix = "dead nodes", "SlurmdTimeout=60 to 300 in slurm.conf (an admin)"
    if seconds is None:
        return Line(name, "warn", f"SlurmdTimeout is {said or 'not shown'}", fix)
    if seconds == 0:
        return Line(name, "warn", "SlurmdTimeout=0: Slurm never calls a silent node dead", fix)
    text = f"Slurm calls a silent node dead after {seconds} s (everstep itself after about 1 s)"
    if seconds > 600:
        return Line(name, "warn", text, fix)
    return Line(name, "ok", text)


def _no_kill(facts: Facts) -> Line:
    name, job = "this job: --no-kill", _slurm_of(facts).job
    fix = "submit with `everstep sbatch` (it adds --no-kill), or say `#SBATCH --no-kill` in the script"
    if job is None:
        return Line(name, "skip", "not in a job", "run `everstep doctor` inside one")
    if job.no_kill is True:
        return Line(name, "ok", f"set ({job.no_kill_reason})")
    if job.no_kill is False:
        return Line(
            name,
            "fail",
            f"not set ({job.no_kill_reason}): Slurm ends job {job.job_id} when a node dies",
            fix,
        )
    return Line(name, "warn", f"cannot be told: {job.no_kill_reason}", fix)


def _requeue(facts: Facts) -> Line:
    slurm = _slurm_of(facts)
    job, name = slurm.job, "requeue"
    fix = "submit with `everstep sbatch` (it adds --requeue), or say `#SBATCH --requeue` in the script"
    if job is not None and job.requeue is not None:
        if not job.requeue:
            return Line(
                name, "warn", f"job {job.job_id} may not be requeued: with all spares lost it ends", fix
            )
        again = f" (it has been {job.restarts} times)" if job.restarts else ""
        return Line(name, "ok", f"job {job.job_id} may be requeued{again}")
    if slurm.config.get("JobRequeue", "1") == "0":
        return Line(name, "warn", "JobRequeue=0: no job is requeued unless it says so", fix)
    return Line(name, "ok", "JobRequeue=1: jobs may be requeued")


def _preemption(facts: Facts) -> Line:
    slurm, name = _slurm_of(facts), "preemption"
    kind = slurm.config.get("PreemptType", "").rpartition("/")[2]
    if kind in ("", "none", "(null)"):
        return Line(name, "ok", "none: no job is stopped for another one")
    default = slurm.config.get("PreemptMode", "").upper()
    modes = {p.name: (p.preempt_mode or default).upper() for p in slurm.partitions}
    struck = [p for p in slurm.partitions if "OFF" not in modes[p.name].split(",")]
    without = [p.name for p in struck if p.grace_time == 0]
    suspended = [p.name for p in struck if "SUSPEND" in modes[p.name]]
    text = f"{kind}, {default}"
    if suspended:
        return Line(
            name,
            "warn",
            f"{text}: {', '.join(suspended)} suspends jobs, and a suspended rank stops all others",
            "PreemptMode=REQUEUE and GraceTime=60 there (an admin), or a partition that is not preempted",
        )
    if without:
        return Line(
            name,
            "warn",
            f"{text}, GraceTime=0 in {', '.join(without)}: no time for a last checkpoint",
            "GraceTime=60 or more for the partition (an admin); meanwhile make checkpoints often",
        )
    return Line(name, "ok", f"{text}, with time for a last checkpoint")


def _topology(facts: Facts) -> Line:
    said = _slurm_of(facts).config.get("TopologyPlugin", "")
    kind = said.rpartition("/")[2]
    if kind in ("", "none", "default", "flat", "(null)"):
        return Line(
            "topology",
            "warn",
            f"{said or 'not shown'}: nobody knows which nodes share a switch",
            "TopologyPlugin=topology/tree or block, and topology.conf (an admin)",
        )
    return Line("topology", "ok", said)


def _health(facts: Facts) -> Line:
    config = _slurm_of(facts).config
    program = config.get("HealthCheckProgram", "")
    if program in ("", "(null)"):
        return Line(
            "health program",
            "warn",
            "none: a node with a sick GPU is used again",
            "HealthCheckProgram=…/everstep-health in slurm.conf (an admin; see healthcheck/)",
        )
    interval = config.get("HealthCheckInterval", "")
    if re.match(r"0\b", interval):
        return Line(
            "health program",
            "warn",
            f"{program}, but HealthCheckInterval is 0: it never runs",
            "HealthCheckInterval=300 in slurm.conf (an admin)",
        )
    return Line("health program", "ok", f"{program}, every {interval or '? sec'}")


# --- the nodes ------------------------------------------------------------------------------------

_ASK = "run it inside a job, or let it start a job of a second: everstep doctor -- -N4 (any srun options)"


def _software(facts: Facts) -> Line:
    name, here = "everstep and torch", facts.here
    if not facts.asked and facts.ask_problem:
        return Line(
            name, "fail", f"no node could be asked: {facts.ask_problem}", "see what srun says by itself"
        )
    if not facts.asked:
        return Line(
            name, "skip", f"here everstep {here.everstep}, torch {here.torch or '-'}; nodes not asked", _ASK
        )
    silent = _silent(facts)
    if silent:
        return Line(
            name,
            "fail",
            f"no answer from {fold(silent)}: {facts.ask_problem or 'no reason given'}",
            f"install everstep under {here.prefix} on every node, best on a shared file system",
        )
    kinds: dict[tuple[str, str, str], list[str]] = {}
    for host in (here, *facts.hosts):
        kinds.setdefault((host.everstep, host.torch, host.python), []).append(host.host)
    words = [
        f"everstep {kind[0] or '-'}, torch {kind[1] or '-'}, Python {kind[2]} on {fold(hosts)}"
        for kind, hosts in kinds.items()
    ]
    if len(kinds) > 1:
        return Line(name, "fail", "; ".join(words), "install the same on every node")
    if not here.torch:
        return Line(name, "fail", words[0], f"install torch for {here.prefix}")
    return Line(name, "ok", f"the same on {_nodes(len(facts.asked))}: {words[0].partition(' on ')[0]}")


def _silent(facts: Facts) -> list[str]:
    heard = {host.host for host in facts.hosts}
    return [name for name in facts.asked if name not in heard]


def _interface(facts: Facts) -> Line:
    name = "network for state"
    if not facts.hosts:
        return Line(name, "skip", "nodes not asked", _ASK)
    loop = [host.host for host in facts.hosts if host.chosen.startswith("127.") and len(facts.asked) > 1]
    if loop:
        return Line(
            name,
            "fail",
            f"on {fold(loop)} the way to the other nodes is the loopback interface",
            "mend /etc/hosts there, or use --interface NAME",
        )
    unknown = [host.host for host in facts.hosts if not host.chosen]
    if unknown and len(facts.asked) > 1:
        return Line(
            name,
            "fail",
            f"{fold(unknown)} cannot resolve the other nodes' names",
            "mend name resolution there, or use --interface NAME",
        )
    for host in facts.hosts:
        if (better := _faster(host)) is not None:
            return Line(
                name,
                "warn",
                f"{host.host} would use {_interface_in_words(host)}, and {better.name} is faster",
                f"everstep srun --interface {better.name} …",
            )
    return Line(name, "ok", "; ".join(sorted({_interface_in_words(host) for host in facts.hosts})))


def _faster(host: HostFacts) -> Interface | None:
    """An interface that is plainly faster than the one that would be used."""
    used = _used(host)
    if used is None or not used.speed:
        return None
    best = max(host.interfaces, key=lambda found: found.speed)
    return best if best.speed >= 2 * used.speed else None


def _used(host: HostFacts) -> Interface | None:
    return next((found for found in host.interfaces if found.address == host.chosen), None)


def _interface_in_words(host: HostFacts) -> str:
    used = _used(host)
    if used is None:
        return host.chosen or "this node alone"
    return f"{used.name} ({used.speed / 1000:g} Gbit/s)" if used.speed else used.name


def _permissions(facts: Facts) -> Line:
    name = "permissions"
    loose = {item.path: (item, host.host) for host in (*facts.hosts, facts.here) for item in host.loose}
    if not loose:
        return Line(name, "ok", "others can change neither everstep nor what runs write; secrets stay yours")
    (item, host), more = next(iter(loose.values())), len(loose) - 1
    return Line(
        name,
        "fail",
        f"others may write {item.path} ({item.why}, seen on {host}){f', and {more} more' if more else ''}: "
        "they could run their code as you, with the run's secret",
        f"chmod go-w {' '.join(loose)}",
    )


def release_of(version: str) -> tuple[int, int]:
    """`24.11.5` as (24, 11); (0, 0) where it cannot be read."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def _slurm_of(facts: Facts) -> SlurmFacts:
    if facts.slurm is None:
        raise ValueError("checks of Slurm are made only where there is one")
    return facts.slurm


_ALL: tuple[Check, ...] = (
    _plugin,
    _software,
    _no_kill,
    _requeue,
    _preemption,
    _dead_nodes,
    _topology,
    _health,
    _interface,
    _permissions,
)
