"""GPUs: whether the driver answers, and whether all of them are there."""

from __future__ import annotations

from collections.abc import Iterable

from everstep.healthcheck.facts import Facts
from everstep.healthcheck.profile import Profile
from everstep.healthcheck.registry import Level, check
from everstep.healthcheck.result import Result, Severity, critical, ok, warn

EXIT_CODES: dict[int, tuple[str, Severity | None]] = {
    6: ("finds no GPU", Severity.REBOOT),
    8: ("finds a GPU without its power cables", Severity.REPLACE),
    9: ("finds no driver loaded: load it, or reboot", Severity.REBOOT),
    10: ("finds an interrupt issue with a GPU: reboot", Severity.REBOOT),
    12: ("does not find NVML: install the driver again", Severity.REBOOT),
    14: ("finds a corrupt InfoROM: plan to replace the GPU", None),
    15: ("finds a GPU fallen off the bus: reboot, and replace it if it comes again", Severity.REBOOT),
}
"""What nvidia-smi's exit codes say [NHC, NVML]; None: work goes on."""


@check(
    "gpu_smi",
    Level.LIGHT,
    source="nvidia-smi -q -x: exit code and time",
    action="reboot",
    about="gpu",
)
def gpu_smi(facts: Facts, profile: Profile) -> Result:
    """nvidia-smi answers in its time, with exit code 0 and whole output."""
    ran = facts.smi_ran
    if ran.timed_out:
        return critical(
            f"nvidia-smi did not answer in {ran.seconds:.0f} s: the driver hangs; reboot",
            Severity.REBOOT,
            value=round(ran.seconds, 1),
            limit=facts.limits.smi,
        )
    said = f" ({ran.said})" if ran.code and ran.said else ""
    if ran.code in EXIT_CODES:
        words, severity = EXIT_CODES[ran.code]
        reason = f"nvidia-smi {words}{said}"
        if severity is None:
            return warn(reason, severity=Severity.MONITOR, value=ran.code, limit=0)
        return critical(reason, severity, value=ran.code, limit=0)
    if ran.code:
        return warn(f"nvidia-smi ended with exit code {ran.code}{said}", value=ran.code, limit=0)
    if not ran.out.strip():
        return warn("nvidia-smi printed nothing")
    if not facts.smi.complete:
        return warn("nvidia-smi's output ends early")
    return ok(f"answered in {ran.seconds:.1f} s", value=round(ran.seconds, 1), limit=facts.limits.smi)


@check(
    "gpu_count",
    Level.LIGHT,
    source="nvidia-smi -q -x, PCI sysfs",
    action="reboot; replace if the GPU does not come back",
    about="gpu",
)
def gpu_count(facts: Facts, profile: Profile) -> Iterable[Result]:
    """All GPUs are there."""
    found = len(facts.gpus)
    wanted = profile.gpu.count
    if wanted is not None and found < wanted:
        yield critical(
            f"{found} of {wanted} GPUs: reboot, and replace what does not come back",
            Severity.REBOOT,
            value=found,
            limit=wanted,
        )
    elif wanted is not None and found > wanted:
        yield warn(f"{found} GPUs, and the profile {profile.name} says {wanted}", value=found, limit=wanted)
    else:
        yield ok(f"{found} GPUs", value=found, limit=wanted)
