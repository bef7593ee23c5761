"""Active tests: each device's matmul and memory bandwidth, and all_reduce over them, against the profile."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import median
from typing import Any

from everstep.healthcheck.facts import Facts
from everstep.healthcheck.profile import Profile
from everstep.healthcheck.registry import Level, check
from everstep.healthcheck.result import Result, Severity, critical, ok, skip, warn

_AMONG_SIBLINGS = 0.85
"""A device that is slower than this share of its node's median is worth a look, whatever the threshold."""


def judge(measured: dict[str, Any], least: float | None, unit: str) -> list[Result]:
    """What a measurement says. Pure."""
    if "skip" in measured:
        return [skip(str(measured["skip"]))]
    values = {each["device"]: float(each["value"]) for each in measured["results"]}
    usual = median(values.values()) if values else 0.0
    results = []
    for each in measured["results"]:
        device, value = each["device"], float(each["value"])
        if each.get("wrong"):
            results.append(critical("wrong results: replace", Severity.REPLACE, device, value=value))
        elif least is not None and value < least:
            words = f"{value:g} {unit}, and {least:g} are wanted: reset it, and replace it if it stays slow"
            results.append(critical(words, Severity.RESET, device, value=value, limit=least))
        elif len(values) > 2 and value < _AMONG_SIBLINGS * usual:
            words = f"{value:g} {unit}, and its siblings have {usual:g}: look at its cooling and power"
            results.append(warn(words, device, value=value, limit=round(_AMONG_SIBLINGS * usual, 1)))
    if results:
        return results
    if not values:
        return [skip("nothing was measured")]
    worst = min(values.values())
    return [ok(f"{worst:g} {unit} or more", value=worst, limit=least)]


@check(
    "load_matmul",
    Level.DEEP,
    source="torch: bf16 matmul on each device",
    action="reset; replace if it stays slow",
    about="active",
)
def load_matmul(facts: Facts, profile: Profile) -> Iterable[Result]:
    """Each device multiplies as fast as it should, and correctly."""
    least = profile.active.matmul_tflops
    return judge(facts.load("matmul", cpu=_cpu(facts, least)), least, "TFLOP/s")


@check(
    "load_memory",
    Level.DEEP,
    source="torch: copies in each device's memory",
    action="reset; replace if it stays slow",
    about="active",
)
def load_memory(facts: Facts, profile: Profile) -> Iterable[Result]:
    """Each device's memory is as fast as it should be."""
    least = profile.active.memory_gb_s
    return judge(facts.load("memory", cpu=_cpu(facts, least)), least, "GB/s")


@check(
    "load_all_reduce",
    Level.DEEP,
    source="torch: all_reduce over the node's devices, bus bandwidth",
    action="look at NVLinks and fabric; reset",
    about="active",
)
def load_all_reduce(facts: Facts, profile: Profile) -> Iterable[Result]:
    """The node's devices reduce as fast as they should, and correctly."""
    least = profile.active.all_reduce_gb_s
    return judge(facts.load("all_reduce", cpu=_cpu(facts, least)), least, "GB/s")


def _cpu(facts: Facts, least: float | None) -> bool:
    """The host's processors are measured only where a profile gives a threshold and there is no GPU."""
    return least is not None and facts.runner.which("nvidia-smi") is None
