"""What a kind of node should have: profiles, written in TOML, found by looking at the node or by name."""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from everstep.healthcheck.errors import Absent, HealthError
from everstep.healthcheck.facts import Facts

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

SITE_FOLDER = "/etc/everstep/health/profiles"
"""A site's own profiles, on the node: NAME.toml each; one that has a name of ours extends ours."""

T = TypeVar("T")


@dataclass(frozen=True)
class Detect:
    """How a node of this kind is known: by its instance type, else by all its GPUs' products."""

    instance_types: tuple[str, ...] = ()
    products: tuple[str, ...] = ()
    """GPUs' product names: words that are in them, or the whole name after `=`."""
    neuron_types: tuple[str, ...] = ()
    """What the Neuron driver calls the instance type, for where the firmware does not tell it."""
    order: int = 100
    """Where several fit, the lowest wins."""


@dataclass(frozen=True)
class GpuProfile:
    """NVIDIA GPUs."""

    count: int | None = None
    nvlinks: int | None = None
    """Links up on each GPU."""
    fabric: bool = False
    """Wants fabric state Completed and status Success, where the driver tells."""
    fabric_manager: bool = False
    clique: bool = False
    """Wants a clique and a cluster UUID, as in an NVL72."""
    persistence: bool = False
    pcie_width: int | None = None
    """Lanes of each GPU; None: as many as its siblings have, since some hosts give fewer by design."""
    xid_window_h: float = 72.0
    throttle_per_minute: float = 0.6
    throttle_window_min: float = 10.0
    power_limit_share: float = 0.9
    """The power limit may be this share of the default, and not less."""
    busy_percent: float = 50.0
    """From this load on, PCIe generation and clocks are judged."""
    clock_share: float = 0.4
    nvlink_replays_per_hour: float = 100.0
    nvlink_crc_per_second: float = 100.0


@dataclass(frozen=True)
class NeuronProfile:
    """AWS Trainium."""

    count: int | None = None
    cores: int | None = None
    """Physical cores of each device."""


@dataclass(frozen=True)
class NetworkProfile:
    """EFA and InfiniBand."""

    efa: int | None = None
    infiniband: int | None = None
    """How many InfiniBand ports must be up; None: those that are cabled."""
    tries: int = 3
    try_every_s: float = 5.0
    memlock_gib: float | None = None


@dataclass(frozen=True)
class HostProfile:
    """The host."""

    disk_warn: float = 95.0
    disk_critical: float = 99.0
    """Percent full, and less than `disk_free_gib` free."""
    disk_free_gib: float = 20.0
    memory_gib: float | None = None
    """Less than this in all is a lost module."""
    memory_free_percent: float = 1.0
    shm_gib: float | None = None
    clock_warn_s: float = 0.1
    clock_critical_s: float = 5.0
    nofile: int | None = None
    window_h: float = 24.0
    """How far back the kernel log counts."""
    corrected_memory_errors_per_hour: float = 1000.0


@dataclass(frozen=True)
class ActiveProfile:
    """Thresholds of the active tests; without one a test measures and passes."""

    matmul_tflops: float | None = None
    memory_gb_s: float | None = None
    all_reduce_gb_s: float | None = None


@dataclass(frozen=True)
class Profile:
    """A kind of node."""

    name: str
    title: str = ""
    detect: Detect = field(default_factory=Detect)
    gpu: GpuProfile = field(default_factory=GpuProfile)
    neuron: NeuronProfile = field(default_factory=NeuronProfile)
    network: NetworkProfile = field(default_factory=NetworkProfile)
    host: HostProfile = field(default_factory=HostProfile)
    active: ActiveProfile = field(default_factory=ActiveProfile)
    off: frozenset[str] = frozenset()
    """Checks that are switched off."""
    site: Mapping[str, Any] = field(default_factory=dict)
    """A site's own checks read what they want here."""


def read_all(texts: Mapping[str, str], site: Mapping[str, str] | None = None) -> dict[str, Profile]:
    """Profiles from TOML texts by name; a text may extend another by `extends`.

    A site's profile that has a name of ours changes ours: what it does not say stays. Raises HealthError.
    """
    tables = {name: _parsed(name, text) for name, text in texts.items()}
    for name, text in (site or {}).items():
        table = _parsed(name, text)
        if name in tables and table.get("extends", name) == name:
            table.pop("extends", None)
            table = _over(tables[name], table)
        tables[name] = table
    return {name: _built(name, _merged(name, tables, ())) for name in tables}


def _parsed(name: str, text: str) -> dict[str, Any]:
    try:
        table: dict[str, Any] = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise HealthError(f"profile {name} is no TOML: {error}; correct it or take it away") from None
    return table


@functools.cache
def ours() -> dict[str, str]:
    """The TOML texts of the profiles of this package, by name."""
    folder = resources.files("everstep.healthcheck") / "profiles"
    return {
        each.name.removesuffix(".toml"): each.read_text(encoding="utf-8")
        for each in folder.iterdir()
        if each.name.endswith(".toml")
    }


def find(wanted: str, profiles: Mapping[str, Profile], facts: Facts) -> Profile:
    """The profile of that name; `auto`: the one that fits the node. Raises HealthError."""
    if wanted != "auto":
        if wanted not in profiles:
            raise HealthError(f"there is no profile {wanted!r}; there are: {', '.join(sorted(profiles))}")
        return profiles[wanted]
    kind = instance_type(facts)
    # The products may have to be asked of nvidia-smi, which takes its time.
    return (
        of_instance_type(profiles, kind)
        or of_neurons(profiles, [each.instance_type for each in facts.neurons])
        or of_products(profiles, products(facts))
    )


def of_instance_type(profiles: Mapping[str, Profile], kind: str) -> Profile | None:
    """The profile for an instance type; None where there is none. Pure."""
    fitting = (each for each in _in_order(profiles) if kind and kind in each.detect.instance_types)
    return next(fitting, None)


def of_neurons(profiles: Mapping[str, Profile], types: Sequence[str]) -> Profile | None:
    """The profile for what the Neuron driver says on each device; None for instances of one. Pure."""
    fitting = (each for each in _in_order(profiles) if set(types) & set(each.detect.neuron_types))
    return next(fitting, None) if len(types) > 1 else None


def of_products(profiles: Mapping[str, Profile], names: Sequence[str]) -> Profile:
    """The profile for the GPUs' product names, all of which must fit. Pure."""
    for each in _in_order(profiles):
        if names and each.detect.products and all(_fits(name, each.detect.products) for name in names):
            return each
    return profiles["gpu" if names else "cpu"]


def _in_order(profiles: Mapping[str, Profile]) -> list[Profile]:
    return sorted(profiles.values(), key=lambda each: (each.detect.order, each.name))


def instance_type(facts: Facts) -> str:
    """EC2's name of the instance type, which the firmware tells; empty elsewhere."""
    vendor = facts.text("/sys/devices/virtual/dmi/id/sys_vendor") or ""
    kind = facts.text("/sys/devices/virtual/dmi/id/product_name") or ""
    return kind if not vendor or "amazon" in vendor.lower() else ""


def products(facts: Facts) -> list[str]:
    """The GPUs' product names: from the driver where it tells without nvidia-smi, which may hang."""
    names = []
    for each in facts.runner.names("/proc/driver/nvidia/gpus"):
        for line in (facts.text(f"/proc/driver/nvidia/gpus/{each}/information") or "").splitlines():
            if line.startswith("Model:"):
                names.append(line.partition(":")[2].strip())
    if names:
        return names
    try:
        return [gpu.product for gpu in facts.gpus]
    except Absent:
        return [_BY_PCI_DEVICE.get(device, "NVIDIA GPU") for device in facts.gpus_on_the_bus]


_BY_PCI_DEVICE = {
    "0x20b0": "NVIDIA A100-SXM4-40GB",
    "0x20b2": "NVIDIA A100-SXM4-80GB",
    "0x2330": "NVIDIA H100 80GB HBM3",
    "0x2335": "NVIDIA H200",
    "0x2901": "NVIDIA B200",
    "0x2941": "NVIDIA GB200",
}
"""For a driver that says nothing."""


def _fits(name: str, parts: Sequence[str]) -> bool:
    return any(
        name == part[1:] if part.startswith("=") else all(word in name for word in part.split())
        for part in parts
    )


def _merged(name: str, tables: Mapping[str, dict[str, Any]], path: tuple[str, ...]) -> dict[str, Any]:
    table = dict(tables[name])
    base = table.pop("extends", None)
    if base is None:
        return table
    if not isinstance(base, str) or base not in tables:
        raise HealthError(
            f"profile {name} extends {base!r}, which there is not; there are: {', '.join(sorted(tables))}"
        )
    if base in path or base == name:
        raise HealthError(f"profile {name} extends itself, by way of {base}")
    inherited = _merged(base, tables, (*path, name))
    # How a node is known is not inherited: two profiles would claim it.
    inherited.pop("detect", None)
    return _over(inherited, table)


def _over(base: Mapping[str, Any], top: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in top.items():
        old = merged.get(key)
        merged[key] = _over(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged


def _built(name: str, table: Mapping[str, Any]) -> Profile:
    return _dataclass(Profile, {**table, "name": name}, f"profile {name}")


def _dataclass(kind: type[T], table: Mapping[str, Any], where: str) -> T:
    hints = _hints(cast(Any, kind))
    unknown = [key for key in table if key not in hints]
    if unknown:
        raise HealthError(f"{where}: there is no {unknown[0]!r}; there are: {', '.join(sorted(hints))}")
    return kind(**{key: _value(hints[key], value, f"{where}: {key}") for key, value in table.items()})


@functools.cache
def _hints(kind: type[Any]) -> dict[str, Any]:
    return get_type_hints(kind)


def _value(kind: Any, value: Any, where: str) -> Any:
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        if not isinstance(value, dict):
            raise HealthError(f"{where} should be a table, and is {value!r}")
        return _dataclass(kind, value, where)
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (tuple, frozenset):
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            raise HealthError(f"{where} should be a list of words, and is {value!r}")
        return origin(value)
    allowed = inner if type(None) in inner or origin is Union else (kind,)
    if float in allowed and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if (origin is not None and not inner) or any(_is(value, each) for each in allowed):
        return value
    if isinstance(value, dict) and "Mapping" in str(kind):
        return value
    words = " or ".join(getattr(each, "__name__", str(each)) for each in allowed if each is not type(None))
    raise HealthError(f"{where} should be {words}, and is {value!r}")


def _is(value: Any, kind: Any) -> bool:
    return (
        isinstance(kind, type) and isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
    )


def read_folder(folder: Path) -> dict[str, str]:
    """The TOML texts in a folder, by name; none where there is no such folder. Raises HealthError."""
    texts = {}
    try:
        for each in sorted(folder.glob("*.toml")):
            texts[each.stem] = each.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise HealthError(f"the profiles in {folder} cannot be read: {error}") from None
    return texts
