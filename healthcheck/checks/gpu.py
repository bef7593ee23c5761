"""GPUs: whether the driver answers, and whether all of them are there."""

from __future__ import annotations

from collections.abc import Iterable

from everstep.healthcheck.checks.each import each
from everstep.healthcheck.facts import Facts
from everstep.healthcheck.profile import Profile
from everstep.healthcheck.readers.smi import Gpu
from everstep.healthcheck.registry import Level, check
from everstep.healthcheck.result import Result, Severity, critical, ok, skip, warn

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

_LOST = (b"GPU is lost", b"Unable to determine the device handle")
_NOTHING_THERE = (6, 9, 12)
_NOT_RUN = (126, 127)


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
    if ran.code in _NOTHING_THERE and profile.gpu.count is None and facts.no_gpu_on_the_bus:
        return skip("nvidia-smi is here, and no GPU on the PCI bus")
    said = f" ({ran.said})" if ran.code and ran.said else ""
    if ran.code in _NOT_RUN:  # by the shell or the kernel: nothing has asked the driver, which may be sound
        return warn(f"nvidia-smi cannot be run (exit code {ran.code}): mend the tool{said}", value=ran.code)
    if ran.code in EXIT_CODES:
        words, severity = EXIT_CODES[ran.code]
        reason = f"nvidia-smi {words}{said}"
        if severity is None:
            return warn(reason, severity=Severity.MONITOR, value=ran.code, limit=0)
        return critical(reason, severity, value=ran.code, limit=0)
    if any(words in ran.out + ran.err for words in _LOST):
        return critical(f"nvidia-smi has lost a GPU: reboot{said}", Severity.REBOOT, value=ran.code, limit=0)
    if ran.code:
        reason = f"nvidia-smi ended with exit code {ran.code}{said}"
        if facts.smi_read.complete:
            return warn(reason, value=ran.code, limit=0)
        return critical(f"{reason}: reboot", Severity.REBOOT, value=ran.code, limit=0)
    if not ran.out.strip():
        return warn("nvidia-smi printed nothing")
    read = facts.smi_read
    if not read.gpus and read.complete and profile.gpu.count is None:
        return skip("nvidia-smi shows no GPU, and none is asked for")
    if not read.gpus and not read.complete:
        return warn(f"nvidia-smi printed what cannot be read: {ran.said[:100]}")
    if not read.complete:
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
    found = len(facts.smi_read.gpus)
    wanted = profile.gpu.count
    if not found and not facts.smi_read.complete:
        yield skip("nvidia-smi's output cannot be read (see gpu_smi)")
        return
    earlier = [values["count"] for _, values in facts.history.earlier("gpus", facts.now)]
    facts.history.add("gpus", facts.now, {"count": found})
    # A box that has no number in its profile has these; the first that is more than were found is told.
    others = {
        "on the PCI bus": len(facts.gpus_on_the_bus),
        "that nvidia-smi counts": facts.smi_read.attached or 0,
        "that were there before": int(max(earlier, default=0)),
    }
    lost = next((where for where, count in others.items() if count > found), None)
    if wanted is None and lost:
        yield critical(
            f"{found} of the {others[lost]} GPUs {lost}: reboot, and replace what does not come back",
            Severity.REBOOT,
            value=found,
            limit=others[lost],
        )
    elif wanted is not None and found < wanted:
        yield critical(
            f"{found} of {wanted} GPUs: reboot, and replace what does not come back",
            Severity.REBOOT,
            value=found,
            limit=wanted,
        )
    elif wanted is not None and found > wanted:
        yield warn(f"{found} GPUs, and the profile {profile.name} says {wanted}", value=found, limit=wanted)
    elif not found:
        yield skip("no GPU, and none is asked for")
    else:
        yield ok(f"{found} GPUs", value=found, limit=wanted)


@check(
    "gpu_persistence",
    Level.LIGHT,
    source="nvidia-smi -q -x: persistence_mode",
    action="start nvidia-persistenced, or nvidia-smi -pm 1",
    about="gpu",
)
def gpu_persistence(facts: Facts, profile: Profile) -> Iterable[Result]:
    """The driver stays loaded where the profile wants that."""
    if not profile.gpu.persistence:
        return [skip(f"the profile {profile.name} does not ask for it")]

    def judge(gpu: Gpu) -> list[Result] | None:
        on = gpu.yes("persistence_mode")
        if on is None:
            return None
        return [] if on else [warn("persistence mode is off: start nvidia-persistenced", gpu.name)]

    return each(facts.gpus, judge, sound="on", unsupported="the GPUs tell no persistence mode")
