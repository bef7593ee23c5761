"""What slows GPUs down: heat, throttling, power limits, clocks, a narrow PCIe link."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from everstep.healthcheck.checks.each import each
from everstep.healthcheck.facts import Facts
from everstep.healthcheck.history import Sample
from everstep.healthcheck.profile import GpuProfile, Profile
from everstep.healthcheck.readers.smi import Gpu
from everstep.healthcheck.registry import Level, check
from everstep.healthcheck.result import Result, Severity, critical, warn

REASONS = {
    "hw_slowdown": ("HW slowdown", True),
    "hw_thermal_slowdown": ("HW thermal slowdown", True),
    "hw_power_brake_slowdown": ("HW power brake", True),
    "sw_thermal_slowdown": ("SW thermal slowdown", False),
}
"""The clocks' event reasons that mean trouble, and whether the hardware gives them."""

_COUNTERS = {"hw_thermal_slowdown": "hw_therm_slowdown", "hw_power_brake_slowdown": "hw_power_brake"} | {
    "sw_thermal_slowdown": "sw_therm_slowdown"
}


@check(
    "gpu_temperature",
    Level.LIGHT,
    source="nvidia-smi -q -x: temperature",
    action="look at the cooling",
    about="gpu",
)
def gpu_temperature(facts: Facts, profile: Profile) -> Iterable[Result]:
    """No GPU is as hot as where it slows down."""

    def judge(gpu: Gpu) -> list[Result] | None:
        def at(*names: str) -> float | None:
            return gpu.number(*(f"temperature/{name}" for name in names))

        left, slow_left = at("gpu_temp_tlimit"), at("gpu_temp_slow_tlimit_threshold")
        now, slow = at("gpu_temp"), at("gpu_temp_slow_threshold")
        if left is not None:
            # Hopper and later tell how far it is to the limit, and less than nothing beyond it.
            limit = -2.0 if slow_left is None else slow_left
            if left <= limit:
                words = f"{-left:.0f} C over its limit: it slows down; look at the cooling"
                return [critical(words, Severity.MONITOR, gpu.name, value=left, limit=limit)]
            return []
        if now is None or slow is None:
            return None
        if now >= slow:
            words = f"{now:.0f} C, and it slows down from {slow:.0f} C: look at the cooling"
            return [critical(words, Severity.MONITOR, gpu.name, value=now, limit=slow)]
        memory, most = at("memory_temp"), at("gpu_temp_max_mem_threshold")
        if memory is not None and most is not None and memory > most:
            return [warn(f"memory at {memory:.0f} C, over {most:.0f} C", gpu.name, value=memory, limit=most)]
        return []

    return each(facts.gpus, judge, sound="cool enough", unsupported="the GPUs tell no temperature limits")


@check(
    "gpu_throttle",
    Level.LIGHT,
    source="nvidia-smi -q -x: clocks_event_reasons and their counters, over 10 min",
    action="look at cooling and power",
    about="gpu",
)
def gpu_throttle(facts: Facts, profile: Profile) -> Iterable[Result]:
    """No GPU is held back by heat or power for most of the time; one sample decides nothing."""

    def judge(gpu: Gpu) -> list[Result] | None:
        sample = throttling(gpu)
        if not sample:
            return None
        name = f"throttle/{gpu.name}"
        earlier = facts.history.earlier(name, facts.now, profile.gpu.throttle_window_min * 60)
        facts.history.add(name, facts.now, sample)
        return throttled(gpu.name, [*earlier, (facts.now, sample)], profile.gpu)

    return each(facts.gpus, judge, sound="not for long", unsupported="the GPUs tell no clocks' event reasons")


def throttling(gpu: Gpu) -> dict[str, float]:
    """Which reasons are active (1 or 0), and their counters in microseconds where the driver counts."""
    sample: dict[str, float] = {}
    for reason in REASONS:
        active = gpu.yes(
            f"clocks_event_reasons/clocks_event_reason_{reason}",
            f"clocks_throttle_reasons/clocks_throttle_reason_{reason}",
        )
        if active is not None:
            sample[reason] = float(active)
        counter = gpu.number(
            f"clocks_event_reasons_counters/clocks_event_reasons_counters_{_COUNTERS.get(reason)}"
        )
        if counter is not None:
            sample[f"{reason}_us"] = counter
    return sample


def throttled(device: str, samples: Sequence[tuple[float, Sample]], profile: GpuProfile) -> list[Result]:
    """What the samples of the window say: events a minute, or the share of time where the driver counts."""
    limit, window = profile.throttle_per_minute, profile.throttle_window_min
    results = []
    for reason, (words, hardware) in REASONS.items():
        minutes = {int(at // 60) for at, sample in samples if sample.get(reason)}
        rate = len(minutes) / window
        counted = [(at, sample[f"{reason}_us"]) for at, sample in samples if f"{reason}_us" in sample]
        if len(counted) > 1:
            seconds = counted[-1][0] - counted[0][0]
            grown = counted[-1][1] - counted[0][1]
            if seconds >= window * 30 and grown >= 0:  # half of the window at the least
                rate = max(rate, grown / 1e6 / seconds)
        if rate > limit:
            text = f"{words} in {rate:.1f} of each minute over {window:.0f} min: look at cooling and power"
            if hardware:
                results.append(critical(text, Severity.MONITOR, device, value=round(rate, 2), limit=limit))
            else:
                results.append(warn(text, device, value=round(rate, 2), limit=limit))
    return results


@check(
    "gpu_power",
    Level.LIGHT,
    source="nvidia-smi -q -x: gpu_power_readings",
    action="set the limit back, or look at power supplies",
    about="gpu",
)
def gpu_power(facts: Facts, profile: Profile) -> Iterable[Result]:
    """No GPU's power limit is well below its default."""

    def judge(gpu: Gpu) -> list[Result] | None:
        folders = ("gpu_power_readings", "power_readings")
        limit = gpu.number(*(f"{f}/{n}" for f in folders for n in ("current_power_limit", "power_limit")))
        default = gpu.number(*(f"{f}/default_power_limit" for f in folders))
        if limit is None or not default:
            return None
        least = profile.gpu.power_limit_share * default
        if limit < least:
            words = (
                f"limited to {limit:.0f} W of {default:.0f} W: set it back with nvidia-smi -pl {default:.0f}"
            )
            return [warn(words, gpu.name, value=limit, limit=least)]
        return []

    return each(facts.gpus, judge, sound="limits as they come", unsupported="the GPUs tell no power limits")


@check(
    "gpu_clocks",
    Level.LIGHT,
    source="nvidia-smi -q -x: clocks, applications_clocks, utilization",
    action="set application clocks back, or look at what holds the clock down",
    about="gpu",
)
def gpu_clocks(facts: Facts, profile: Profile) -> Iterable[Result]:
    """Application clocks are not below their default, and a busy GPU does not crawl."""

    def judge(gpu: Gpu) -> list[Result] | None:
        results = []
        set_to = gpu.number("applications_clocks/graphics_clock")
        default = gpu.number("default_applications_clocks/graphics_clock")
        if set_to is not None and default is not None and set_to < default:
            words = (
                f"application clocks at {set_to:.0f} of {default:.0f} MHz: set them back with nvidia-smi -rac"
            )
            results.append(warn(words, gpu.name, value=set_to, limit=default))
        now, most = gpu.number("clocks/sm_clock"), gpu.number("max_clocks/sm_clock")
        load = gpu.number("utilization/gpu_util")
        if now is None or not most:
            return results if default is not None else None
        least = profile.gpu.clock_share * most
        if load is not None and load >= 90 and now < least:
            words = f"{now:.0f} of {most:.0f} MHz under a load of {load:.0f} %"
            results.append(warn(words, gpu.name, value=now, limit=least))
        return results

    return each(facts.gpus, judge, sound="clocks as they should be", unsupported="the GPUs tell no clocks")


@check(
    "gpu_pcie",
    Level.LIGHT,
    source="nvidia-smi -q -x: pci_gpu_link_info, utilization",
    action="reboot; reseat or replace if it stays",
    about="gpu",
)
def gpu_pcie(facts: Facts, profile: Profile) -> Iterable[Result]:
    """The PCIe link is as wide as it can be, and under load as fast."""

    where = "pci/pci_gpu_link_info"
    widths: dict[str, float] = {}  # the widest of each product
    for each_gpu in facts.gpus:
        lanes = each_gpu.number(f"{where}/link_widths/current_link_width") or 0.0
        widths[each_gpu.product] = max(lanes, widths.get(each_gpu.product, 0.0))

    def judge(gpu: Gpu) -> list[Result] | None:
        width, most = (
            gpu.number(f"{where}/link_widths/current_link_width"),
            gpu.number(f"{where}/link_widths/max_link_width"),
        )
        if width is None or most is None:
            return None
        results = []
        most = min(most, profile.gpu.pcie_width or widths[gpu.product])
        if width < most:
            words = f"PCIe x{width:.0f} of x{most:.0f}: reboot, and reseat or replace the GPU if it stays"
            results.append(critical(words, Severity.REBOOT, gpu.name, value=int(width), limit=int(most)))
        # Links slow down when idle, so that their generation means something under load alone.
        gen, best = (
            gpu.number(f"{where}/pcie_gen/current_link_gen"),
            gpu.number(f"{where}/pcie_gen/max_link_gen"),
        )
        load = gpu.number("utilization/gpu_util")
        if (
            gen is not None
            and best is not None
            and gen < best
            and load is not None
            and load >= profile.gpu.busy_percent
        ):
            words = f"PCIe generation {gen:.0f} of {best:.0f} under a load of {load:.0f} %"
            results.append(warn(words, gpu.name, value=int(gen), limit=int(best)))
        return results

    return each(facts.gpus, judge, sound="full width", unsupported="the GPUs tell no PCIe link")
