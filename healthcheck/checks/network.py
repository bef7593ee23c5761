"""EFA and InfiniBand: ports, their counters, and what libfabric and the kernel need."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from everstep.healthcheck.facts import Facts
from everstep.healthcheck.profile import Profile
from everstep.healthcheck.readers.ports import EFA_FAULTS, INFINIBAND_FAULTS, Port
from everstep.healthcheck.registry import Level, check
from everstep.healthcheck.result import Result, Severity, critical, ok, skip, warn

_FLAPS = 3
MODULES = ("efa", "ib_uverbs", "ib_core")
TCP = "without it NCCL falls back to TCP in silence"


@check(
    "efa_count",
    Level.LIGHT,
    source="sysfs: /sys/class/infiniband",
    action="load the efa module or reboot; replace if it stays",
    about="network",
)
def efa_count(facts: Facts, profile: Profile) -> Result:
    """All EFA devices are there; they can come up late."""
    wanted = profile.network.efa
    if wanted is None:
        return skip(f"the profile {profile.name} asks for no EFA")
    found = len({port.device for port in facts.ports if port.efa})
    tries = 1 if facts.level is Level.LIGHT else profile.network.tries
    for _ in range(tries - 1):
        if found >= wanted:
            break
        facts.sleep(profile.network.try_every_s)
        found = len({port.device for port in facts.ports_afresh() if port.efa})
    if found >= wanted:
        return ok(f"{found} EFA devices", value=found, limit=wanted)
    if facts.level is Level.LIGHT and (facts.uptime or 1e9) < 300:
        return warn(f"{found} of {wanted} EFA devices, soon after boot", value=found, limit=wanted)
    words = f"{found} of {wanted} EFA devices{f' in {tries} tries' if tries > 1 else ''}: reboot; {TCP}"
    return critical(words, Severity.REBOOT, value=found, limit=wanted)


@check(
    "net_ports",
    Level.LIGHT,
    source="sysfs: /sys/class/infiniband/*/ports/*/state",
    action="look at cable and switch; reboot for EFA",
    about="network",
)
def net_ports(facts: Facts, profile: Profile) -> Iterable[Result]:
    """Every EFA port is up, and every InfiniBand port that should be."""
    ports = [port for port in facts.ports if port.state]
    if not ports:
        return [skip("there is no EFA or InfiniBand port")]
    results = []
    for port in ports:
        was_up = any(values.get("up") for _, values in facts.history.earlier(f"port/{port.name}", facts.now))
        facts.history.add(f"port/{port.name}", facts.now, {"up": float(port.active)})
        judged = _port(port, was_up)
        if judged is not None:
            results.append(judged)
    wanted = profile.network.infiniband
    up = sum(port.active and not port.efa and port.layer != "Ethernet" for port in ports)
    if wanted is not None:
        # A site has said how many are to be up; which ones are not cabled is its own affair.
        results = [each for each in results if any(port.name == each.device and port.efa for port in ports)]
        if up < wanted:
            down = ", ".join(port.name for port in ports if not port.active)
            words = f"{up} of {wanted} InfiniBand ports up (down: {down or 'none'}): look at cable and switch"
            results.append(critical(words, Severity.MONITOR, value=up, limit=wanted))
    if results:
        return results
    return [ok(f"{sum(port.active for port in ports)} up", value=sum(port.active for port in ports))]


def _port(port: Port, was_up: bool) -> Result | None:
    """What a port that is not up means. One that was never up may not be cabled at all."""
    if port.active:
        return None
    if port.efa:
        return critical(
            f"EFA port is {port.words}: reboot; {TCP}",
            Severity.REBOOT,
            port.name,
            value=port.state,
            limit="4: ACTIVE",
        )
    if was_up:
        words = f"went down: {port.words}: look at cable and switch"
        return critical(words, Severity.MONITOR, port.name, value=port.state, limit="4: ACTIVE")
    if port.disabled or port.layer == "Ethernet":
        return None
    return warn(f"InfiniBand port is {port.words}", port.name, value=port.state, limit="4: ACTIVE")


@check(
    "net_errors",
    Level.LIGHT,
    source="sysfs: hw_counters and counters, between two readings",
    action="look at cable, switch and peers",
    about="network",
)
def net_errors(facts: Facts, profile: Profile) -> Iterable[Result]:
    """Ports' error counters do not grow. Their values say nothing: they count since boot."""
    ports = [port for port in facts.ports if port.counters]
    if not ports:
        return [skip("no port has counters")]
    results = []
    compared = False
    for port in ports:
        names = EFA_FAULTS if port.efa else tuple(INFINIBAND_FAULTS)
        values = {name: float(port.counters[name]) for name in names if name in port.counters}
        seconds, grown = facts.history.growth(f"net/{port.name}", facts.now, values)
        if seconds > 0:
            compared = True
            judged = _efa(port, seconds, grown) if port.efa else _infiniband(port, seconds, grown)
            results += [judged] if judged else []
    if results or compared:
        return results or [ok("no growth that matters")]
    return [skip("a first reading: growth is judged from the next one on")]


def _efa(port: Port, seconds: float, grown: Mapping[str, float]) -> Result | None:
    rising = {name: count for name, count in grown.items() if count > 0}
    if not rising:
        return None
    # Never critical: these grow on sound nodes too, when a peer dies.
    words = ", ".join(f"{name} +{count:.0f}" for name, count in rising.items())
    return warn(
        f"{words} in {seconds / 60:.0f} min: look at this node and its peers",
        port.name,
        value=sum(rising.values()),
        limit=0,
    )


def _infiniband(port: Port, seconds: float, grown: Mapping[str, float]) -> Result | None:
    rising = {name: count for name, count in grown.items() if count > INFINIBAND_FAULTS[name]}
    if not rising:
        return None
    name = next(iter(rising))
    words = ", ".join(f"{each} +{count:.0f}" for each, count in rising.items())
    reason = f"{words} in {seconds / 60:.0f} min: look at cable and switch"
    if rising.get("link_downed", 0) >= _FLAPS:
        return critical(reason, Severity.MONITOR, port.name, value=rising["link_downed"], limit=_FLAPS)
    return warn(reason, port.name, value=rising[name], limit=INFINIBAND_FAULTS[name])


@check(
    "efa_provider",
    Level.FULL,
    source="fi_info -p efa",
    action="install the EFA software again, or reboot",
    about="network",
)
def efa_provider(facts: Facts, profile: Profile) -> Result:
    """libfabric lists the provider efa."""
    if profile.network.efa is None:
        return skip(f"the profile {profile.name} asks for no EFA")
    ran = facts.runner.run(["fi_info", "-p", "efa"], facts.limits.tool)
    if ran.missing:
        return skip("there is no fi_info")
    if ran.timed_out:
        return critical(f"fi_info did not answer in {ran.seconds:.0f} s: reboot; {TCP}", Severity.REBOOT)
    if b"provider: efa" in ran.out:
        return ok("provider: efa")
    return critical(
        f"fi_info lists no provider efa ({ran.said or 'it prints nothing'}): {TCP}", Severity.REBOOT
    )


@check(
    "efa_modules",
    Level.LIGHT,
    source="/proc/modules, /sys/module",
    action="modprobe efa, or install the EFA driver again",
    about="network",
)
def efa_modules(facts: Facts, profile: Profile) -> Result:
    """The kernel modules that EFA needs are loaded."""
    if profile.network.efa is None:
        return skip(f"the profile {profile.name} asks for no EFA")
    missing = [name for name in MODULES if name not in facts.modules]
    if missing:
        words = f"kernel modules missing: {', '.join(missing)}: modprobe {missing[0]}, or reboot; {TCP}"
        return critical(words, Severity.REBOOT, value=", ".join(missing), limit=", ".join(MODULES))
    return ok(", ".join(MODULES))


@check(
    "memlock",
    Level.LIGHT,
    source="/proc/PID/limits of slurmd, else of this process",
    action="LimitMEMLOCK=infinity in slurmd's unit",
    about="network",
)
def memlock(facts: Facts, profile: Profile) -> Result:
    """Jobs may lock as much memory as EFA needs."""
    wanted = profile.network.memlock_gib
    if wanted is None:
        return skip(f"the profile {profile.name} asks for none")
    whose, limits = facts.limits_of_jobs
    found = limits.get("Max locked memory")
    if found is None:
        return skip(f"{whose} has no such limit")
    gib = found[1] / 2**30
    if gib < wanted:
        words = (
            f"{whose} may lock {gib:.3g} GiB of {wanted:.0f}: set LimitMEMLOCK=infinity in its unit; {TCP}"
        )
        return critical(words, Severity.MONITOR, value=round(gib, 3), limit=wanted)
    return ok(f"{'unlimited' if gib == float('inf') else f'{gib:.0f} GiB'} for {whose}", limit=wanted)
