"""What ties GPUs together: NVLinks, their errors, the fabric and its manager, an NVL72's clique."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from everstep.healthcheck.checks.each import each
from everstep.healthcheck.checks.host import service
from everstep.healthcheck.facts import Facts
from everstep.healthcheck.profile import Profile
from everstep.healthcheck.readers.smi import Gpu
from everstep.healthcheck.registry import Level, check
from everstep.healthcheck.result import Result, Severity, Status, critical, ok, skip, warn

_NO_CLUSTER = "00000000-0000-0000-0000-000000000000"
_SETTLED_S = 600.0
"""After a boot: until then a fabric that is not there yet is no fault."""
_FAULTS = ("route_unhealthy", "access_timeout_recovery")


@check(
    "nvlink_count",
    Level.FULL,
    source="nvidia-smi nvlink -s, else dcgmi nvlink -s",
    action="reset the GPU; replace if the link stays down",
    about="gpu",
)
def nvlink_count(facts: Facts, profile: Profile) -> Iterable[Result]:
    """Each GPU has all its NVLinks."""
    wanted = profile.gpu.nvlinks
    if wanted is None:
        return [skip(f"the profile {profile.name} says no number of NVLinks: some cards have inactive ones")]
    links = facts.nvlinks
    if profile.gpu.count is None and not any(any(ups.values()) for ups in links.values()):
        return [skip("no NVLink is up: there is nothing to link, as in a VM with one GPU")]
    results = []
    for gpu, ups in sorted(links.items()):
        up = sum(ups.values())
        if up < wanted:
            down = ", ".join(str(link) for link, is_up in sorted(ups.items()) if not is_up)
            words = f"{up} of {wanted} NVLinks up{f'; down: {down}' if down else ''}: reset the GPU"
            results.append(critical(words, Severity.RESET, f"gpu{gpu}", value=up, limit=wanted))
    return results or [ok(f"{wanted} on each GPU", limit=wanted)]


@check(
    "nvlink_errors",
    Level.FULL,
    source="nvidia-smi nvlink -e, between two readings",
    action="reset the GPU; replace if it comes again",
    about="gpu",
)
def nvlink_errors(facts: Facts, profile: Profile) -> Iterable[Result]:
    """NVLinks' error counters do not grow."""
    results = []
    compared = False
    for gpu, errors in sorted(facts.nvlink_errors.items()):
        values = {kind: float(count) for kind, count in errors.items()}
        seconds, grown = facts.history.growth(f"nvlink/gpu{gpu}", facts.now, values)
        if not grown:
            continue
        compared = True
        results += _judged(f"gpu{gpu}", seconds, grown, profile)
    if results or compared:
        return results or [ok("no growth")]
    return [skip("a first reading: growth is judged from the next one on")]


def _judged(device: str, seconds: float, grown: Mapping[str, float], profile: Profile) -> list[Result]:
    over = f"in {seconds / 60:.0f} min"
    recovery, replay, crc = (grown.get(kind, 0.0) for kind in ("recovery", "replay", "crc"))
    if recovery > 0:
        words = f"{recovery:.0f} NVLink recovery errors {over}: reset the GPU"
        return [critical(words, Severity.RESET, device, value=recovery, limit=0)]
    if replay > profile.gpu.nvlink_replays_per_hour:
        words = f"{replay:.0f} NVLink replays {over}"
        return [warn(words, device, value=replay, limit=profile.gpu.nvlink_replays_per_hour)]
    if seconds > 0 and crc / seconds > profile.gpu.nvlink_crc_per_second:
        words = f"{crc / seconds:.0f} NVLink CRC errors a second {over}"
        return [warn(words, device, value=round(crc / seconds, 1), limit=profile.gpu.nvlink_crc_per_second)]
    return []


@check(
    "gpu_fabric",
    Level.LIGHT,
    source="nvidia-smi -q -x: fabric",
    action="restart the fabric manager, then reset the GPU or reboot",
    about="gpu",
)
def gpu_fabric(facts: Facts, profile: Profile) -> Iterable[Result]:
    """Each GPU has joined the NVLink fabric."""
    young = _young(facts)

    def judge(gpu: Gpu) -> list[Result] | None:
        state, status = gpu.text("fabric/state"), gpu.text("fabric/status")
        if state is None:
            return None
        if state != "Completed":
            if not profile.gpu.fabric:
                return None
            words = f"fabric state is {state}, not Completed"
            if young and state in ("In Progress", "Not Started"):
                return [warn(f"{words}, soon after boot", gpu.name, value=state, limit="Completed")]
            return [critical(f"{words}: reboot", Severity.REBOOT, gpu.name, value=state, limit="Completed")]
        if status is not None and status != "Success":
            words = f"fabric status is {status}: reset the GPU, and reboot if it stays"
            return [critical(words, Severity.RESET, gpu.name, value=status, limit="Success")]
        return _fabric_health(gpu)

    return each(facts.gpus, judge, sound="Completed, Success", unsupported="the GPUs are in no fabric")


def _fabric_health(gpu: Gpu) -> list[Result]:
    health = "fabric/health"
    summary, bandwidth = gpu.text(f"{health}/summary"), gpu.text(f"{health}/bandwidth")
    wrong = gpu.text(f"{health}/incorrect_configuration")
    results = []
    faults = [name.replace("_", " ") for name in _FAULTS if gpu.yes(f"{health}/{name}")]
    if summary is not None and summary not in ("Healthy", "Not Supported"):
        faults.insert(0, f"summary {summary}")
    if wrong is not None and wrong not in ("None", "False", "No"):
        faults.append(f"incorrect configuration: {wrong}")
    if bandwidth is not None and bandwidth not in ("Full", "Not Supported"):
        faults.append(f"bandwidth {bandwidth}")
    if faults:
        words = f"fabric health: {', '.join(faults)}: reset the GPU"
        results.append(critical(words, Severity.RESET, gpu.name, value=faults[0]))
    elif gpu.yes(f"{health}/route_recovery_in_progress"):
        results.append(warn("fabric health: a route is being recovered", gpu.name))
    return results


@check(
    "fabric_manager",
    Level.LIGHT,
    source="/proc, systemctl is-active nvidia-fabricmanager",
    action="start nvidia-fabricmanager",
    about="gpu",
)
def fabric_manager(facts: Facts, profile: Profile) -> Result:
    """The fabric manager runs where NVSwitches need it: not seen, it can be down for weeks."""
    if not profile.gpu.fabric_manager:
        return skip(f"the profile {profile.name} needs none")
    found = service(
        facts,
        unit="nvidia-fabricmanager",
        names=("nv-fabricmanage", "nv-fabricmanager"),
        evidence=("/usr/bin/nv-fabricmanager", "/usr/share/nvidia/nvswitch", "/var/log/fabricmanager.log"),
        action="start nvidia-fabricmanager",
    )
    if found.status is Status.CRITICAL and found.value != "failed" and _young(facts):
        return warn(f"{found.reason}, if it does not soon after boot", value=found.value, limit=found.limit)
    return found


def _young(facts: Facts) -> bool:
    """Whether the node has just booted: the fabric takes minutes, and its manager starts late."""
    uptime = facts.uptime
    return uptime is not None and uptime < _SETTLED_S


@check(
    "gpu_clique",
    Level.LIGHT,
    source="nvidia-smi -q -x: fabric/cliqueId, clusterUuid",
    action="look at the rack's NVLink switches and partitions",
    about="gpu",
)
def gpu_clique(facts: Facts, profile: Profile) -> Iterable[Result]:
    """An NVL72's GPUs are all in one clique of one cluster."""
    if not profile.gpu.clique:
        return [skip(f"the profile {profile.name} has no cliques")]
    told = {gpu: clique(gpu) for gpu in facts.gpus}
    cliques = {gpu: name for gpu, name in told.items() if name is not None}
    if not cliques:
        return [skip("the GPUs tell of no clique")]
    without = [gpu for gpu, name in cliques.items() if not name]
    if without:
        words = "no clique or no cluster UUID: reset the GPU, then look at the rack's switches"
        return [critical(words, Severity.RESET, gpu.name, value="", limit="a clique") for gpu in without]
    usual = Counter(cliques.values()).most_common(1)[0][0]
    astray = [gpu for gpu, name in cliques.items() if name != usual]
    if astray:
        return [
            critical(
                f"in another clique ({cliques[gpu]}) than the node's other GPUs ({usual}): reset the GPU",
                Severity.RESET,
                gpu.name,
                value=cliques[gpu],
                limit=usual,
            )
            for gpu in astray
        ]
    return [ok("one clique", value=usual)]


def clique(gpu: Gpu) -> str | None:
    """`CLUSTER/CLIQUE`; empty where the GPU is in none, None where it does not tell."""
    cluster, number = gpu.text("fabric/clusterUuid"), gpu.number("fabric/cliqueId")
    if cluster is None or number is None:
        return None
    return f"{cluster}/{number:.0f}" if cluster != _NO_CLUSTER and number else ""


def across(cliques: Mapping[str, str]) -> dict[str, Result]:
    """The same over the nodes of a segment: by node, its clique as `gpu_clique` gives it in `value`. Pure."""
    named = {node: name for node, name in cliques.items() if name}
    if not named:
        return {node: skip("no node of the segment tells its clique") for node in cliques}
    usual, _ = Counter(named.values()).most_common(1)[0]
    results = {}
    for node, name in cliques.items():
        if name == usual:
            results[node] = ok(f"in the segment's clique, with {len(named) - 1} others", value=name)
        elif name:
            words = f"in another clique than the segment's other nodes ({usual}): look at the rack's switches"
            results[node] = critical(words, Severity.RESET, value=name, limit=usual)
        else:
            results[node] = skip("it does not tell its clique")
    return results
