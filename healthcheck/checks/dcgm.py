"""NVIDIA's own diagnostic: dcgmi diag, at its four levels. Every result of every test counts."""

from __future__ import annotations

from collections.abc import Iterable

from everstep.healthcheck.errors import Absent
from everstep.healthcheck.facts import Facts
from everstep.healthcheck.profile import Profile
from everstep.healthcheck.readers.dcgm import Outcome
from everstep.healthcheck.registry import Level, check
from everstep.healthcheck.result import Result, Severity, critical, ok, skip, warn

_ADVICE = {2: Severity.REPLACE, 6: Severity.RESET}
"""DCGM's error severities: 2 isolate the GPU, 6 reset it; the others do not say."""


def diagnose(facts: Facts, level: int) -> list[Result]:
    """What dcgmi diag at one of its levels says."""
    try:
        split = any(gpu.mig for gpu in facts.gpus)
    except Absent:
        split = False
    if split:
        return [skip("GPUs are split by MIG, which the diagnostic cannot take")]
    outcomes = facts.dcgm(level)
    results = [judged for outcome in outcomes if (judged := judge(outcome, level)) is not None]
    if results:
        return results
    passed = sum(outcome.status == "pass" for outcome in outcomes)
    return [ok(f"{passed} results passed", value=passed)] if passed else [skip("no test ran")]


def judge(outcome: Outcome, level: int) -> Result | None:
    """A finding, where the outcome is one."""
    words = f"r{level} {outcome.test}: {' '.join(outcome.words.split())[:160] or outcome.status}"
    if outcome.status == "fail":
        severity = _ADVICE.get(outcome.advice or 0, Severity.RESET)
        return critical(words, severity, outcome.gpu, value=outcome.status, limit="pass")
    if outcome.status == "warn":
        return warn(words, outcome.gpu, value=outcome.status, limit="pass")
    return None


@check(
    "dcgm_r1",
    Level.FULL,
    source="dcgmi diag -r 1 -j",
    action="what DCGM advises: reset or replace",
    about="gpu",
)
def dcgm_r1(facts: Facts, profile: Profile) -> Iterable[Result]:
    """DCGM's quick diagnostic passes; seconds."""
    return diagnose(facts, 1)


@check(
    "dcgm_r2",
    Level.DEEP,
    source="dcgmi diag -r 2 -j",
    action="what DCGM advises: reset or replace",
    about="gpu",
)
def dcgm_r2(facts: Facts, profile: Profile) -> Iterable[Result]:
    """DCGM's medium diagnostic passes; 2.5 to 10.5 minutes."""
    return diagnose(facts, 2)


@check(
    "dcgm_r3",
    Level.NAMED,
    source="dcgmi diag -r 3 -j",
    action="what DCGM advises: reset or replace",
    about="gpu",
)
def dcgm_r3(facts: Facts, profile: Profile) -> Iterable[Result]:
    """DCGM's long diagnostic passes; the node must be free."""
    return diagnose(facts, 3)


@check(
    "dcgm_r4",
    Level.NAMED,
    source="dcgmi diag -r 4 -j",
    action="what DCGM advises: reset or replace",
    about="gpu",
)
def dcgm_r4(facts: Facts, profile: Profile) -> Iterable[Result]:
    """DCGM's longest diagnostic passes; 45 to 135 minutes, and the node must be free."""
    return diagnose(facts, 4)
