"""GPUs' memory and what the driver asks for: ECC, retired pages, row remapping, the recovery action."""

from __future__ import annotations

from collections.abc import Iterable

from everstep.healthcheck.checks.each import each, quote
from everstep.healthcheck.facts import Facts
from everstep.healthcheck.profile import Profile
from everstep.healthcheck.readers.smi import Gpu
from everstep.healthcheck.registry import Level, check
from everstep.healthcheck.result import Result, Severity, critical, warn

_SEVERAL = 5
_UNCORRECTABLE = (
    "sram_uncorrectable",
    "sram_uncorrectable_parity",
    "sram_uncorrectable_secded",
    "dram_uncorrectable",
)


@check(
    "gpu_ecc",
    Level.LIGHT,
    source="nvidia-smi -q -x: ecc_errors/volatile, pending repairs",
    action="reset the GPU",
    about="gpu",
)
def gpu_ecc(facts: Facts, profile: Profile) -> Iterable[Result]:
    """No uncorrectable memory error since the driver was loaded."""

    def judge(gpu: Gpu) -> list[Result] | None:
        count = uncorrectable(gpu, "volatile")
        results = []
        if count:
            results.append(
                critical(
                    f"{count} uncorrectable ECC errors: reset the GPU",
                    Severity.RESET,
                    gpu.name,
                    value=count,
                    limit=0,
                )
            )
        for part in ("channel", "tpc"):
            if gpu.yes(f"ecc_errors/{part}_repair_pending"):
                results.append(
                    critical(f"a {part} repair is pending: reset the GPU", Severity.RESET, gpu.name)
                )
        if gpu.yes("ecc_errors/unrepairable_memory"):
            results.append(
                critical(
                    f"memory that cannot be repaired: replace the GPU{quote(gpu)}", Severity.REPLACE, gpu.name
                )
            )
        return results if count is not None or results else None

    return each(facts.gpus, judge, sound="no uncorrectable error", unsupported="the GPUs tell no ECC counts")


@check(
    "gpu_ecc_total",
    Level.LIGHT,
    source="nvidia-smi -q -x: ecc_errors/aggregate",
    action="replace where the driver's threshold is exceeded, else watch",
    about="gpu",
)
def gpu_ecc_total(facts: Facts, profile: Profile) -> Iterable[Result]:
    """Few uncorrectable memory errors in the GPU's life."""

    def judge(gpu: Gpu) -> list[Result] | None:
        count = uncorrectable(gpu, "aggregate")
        exceeded = gpu.yes("ecc_errors/aggregate/sram_threshold_exceeded")
        if exceeded:
            return [
                critical(
                    f"SRAM errors over the driver's threshold: replace the GPU{quote(gpu)}",
                    Severity.REPLACE,
                    gpu.name,
                    value=count,
                )
            ]
        if count:
            return [
                warn(
                    f"{count} uncorrectable ECC errors in its life: watch it", gpu.name, value=count, limit=0
                )
            ]
        return None if count is None and exceeded is None else []

    return each(facts.gpus, judge, sound="no uncorrectable error", unsupported="the GPUs tell no ECC counts")


@check(
    "gpu_retired_pages",
    Level.LIGHT,
    source="nvidia-smi -q -x: retired_pages",
    action="reboot where pending, replace for a double-bit retirement",
    about="gpu",
)
def gpu_retired_pages(facts: Facts, profile: Profile) -> Iterable[Result]:
    """No page waits for its retirement, and none was retired for a double-bit error."""

    def judge(gpu: Gpu) -> list[Result] | None:
        double = gpu.number("retired_pages/double_bit_retirement/retired_count")
        pending = gpu.yes("retired_pages/pending_retirement", "retired_pages/pending_blacklist")
        results = []
        if double:
            results.append(
                critical(
                    f"{double:.0f} pages retired for double-bit errors: replace the GPU{quote(gpu)}",
                    Severity.REPLACE,
                    gpu.name,
                    value=int(double),
                    limit=0,
                )
            )
        if pending:
            results.append(critical("a page retirement is pending: reboot", Severity.REBOOT, gpu.name))
        return None if double is None and pending is None else results

    return each(facts.gpus, judge, sound="no page to retire", unsupported="the GPUs do not retire pages")


@check(
    "gpu_row_remap",
    Level.LIGHT,
    source="nvidia-smi -q -x: remapped_rows",
    action="reset where pending, replace for a failure",
    about="gpu",
)
def gpu_row_remap(facts: Facts, profile: Profile) -> Iterable[Result]:
    """No row remapping is pending, and none has failed."""

    def judge(gpu: Gpu) -> list[Result] | None:
        pending = gpu.yes("remapped_rows/remapped_row_pending")
        failed = gpu.yes("remapped_rows/remapped_row_failure")
        if failed:
            return [critical(f"a row remap failed: replace the GPU{quote(gpu)}", Severity.REPLACE, gpu.name)]
        if pending:
            return [critical("a row remap is pending: reset the GPU", Severity.RESET, gpu.name)]
        return None if pending is None and failed is None else []

    return each(facts.gpus, judge, sound="no row to remap", unsupported="the GPUs do not remap rows")


@check(
    "gpu_recovery_action",
    Level.LIGHT,
    source="nvidia-smi -q -x: gpu_recovery_action, gpu_reset_status",
    action="what the driver says: reset or reboot",
    about="gpu",
)
def gpu_recovery_action(facts: Facts, profile: Profile) -> Iterable[Result]:
    """The driver asks for no recovery."""

    def judge(gpu: Gpu) -> list[Result] | None:
        action = gpu.text("gpu_recovery_action")
        if action is None:
            reset = gpu.yes("gpu_reset_status/reset_required")
            drain = gpu.yes("gpu_reset_status/drain_and_reset_recommended")
            if reset is None and drain is None:
                return None
            action = "Reset" if reset else "Drain and Reset" if drain else "None"
        return [recovery(action, gpu.name)] if action.lower() != "none" else []

    return each(facts.gpus, judge, sound="none asked for", unsupported="the driver tells no recovery action")


@check(
    "gpu_answers",
    Level.LIGHT,
    source="nvidia-smi -q -x: ERR!, Unknown Error, GPU requires reset",
    action="reset the GPU, or reboot where it is lost",
    about="gpu",
)
def gpu_answers(facts: Facts, profile: Profile) -> Iterable[Result]:
    """Each GPU answers all that the driver asks it."""

    def judge(gpu: Gpu) -> list[Result]:
        broken = list(gpu.broken())
        if not broken:
            return []
        texts = " ".join(text for _, text in broken).lower()
        what = f"{len(broken)} readings fail, such as {broken[0][0]}: {broken[0][1]}"
        if "is lost" in texts:
            return [critical(f"{what}: reboot", Severity.REBOOT, gpu.name, value=len(broken), limit=0)]
        if "requires reset" in texts:
            return [critical(f"{what}: reset the GPU", Severity.RESET, gpu.name, value=len(broken), limit=0)]
        # A reading or two may be unknown on a sound GPU; one that answers nothing is not.
        if "err!" in texts or len(broken) >= _SEVERAL:
            return [warn(what, gpu.name, value=len(broken), limit=0)]
        return []

    return each(facts.gpus, judge, sound="all readings answered", unsupported="")


def uncorrectable(gpu: Gpu, which: str) -> int | None:
    """Uncorrectable errors in the `volatile` or the `aggregate` counters; None where none is told."""
    counts = [gpu.number(f"ecc_errors/{which}/{name}") for name in _UNCORRECTABLE]
    counts.append(gpu.number(f"ecc_errors/{which}/double_bit/total"))  # drivers before Ampere's counters
    known = [count for count in counts if count is not None]
    return int(sum(known)) if known else None


def recovery(action: str, device: str) -> Result:
    """What a recovery action asks for: `Node Reboot Required`, `Reset`, `Drain and Reset`, `Drain P2P`."""
    text = action.lower()
    if "reboot" in text:
        return critical(
            f"the driver asks for: {action}: reboot", Severity.REBOOT, device, value=action, limit="None"
        )
    if "reset" in text:
        return critical(
            f"the driver asks for: {action}: reset the GPU",
            Severity.RESET,
            device,
            value=action,
            limit="None",
        )
    if "p2p" in text:
        return critical(
            f"the driver asks for: {action}: end what uses NVLink there, then reset the GPU",
            Severity.RESET,
            device,
            value=action,
            limit="None",
        )
    return warn(f"the driver asks for: {action}", device, value=action, limit="None")
