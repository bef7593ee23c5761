"""EFA and InfiniBand ports: the sysfs tree /sys/class/infiniband."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from everstep.healthcheck.runner import Runner

TREE = "/sys/class/infiniband"
_AMAZON = "0x1d0f"

EFA_FAULTS = (
    "rx_drops",
    "rdma_read_wr_err",
    "rdma_write_wr_err",
    "retrans_timeout_events",
    "impaired_remote_conn_events",
    "unresponsive_remote_events",
)
"""EFA's counters that mean faults; a driver may lack some."""

INFINIBAND_FAULTS: Mapping[str, float] = {
    "link_downed": 0,
    "link_error_recovery": 10,
    "local_link_integrity_errors": 100,
    "port_rcv_errors": 100,
    "symbol_error": 1000,
}
"""How much each of InfiniBand's counters may grow in an hour."""


@dataclass(frozen=True)
class Port:
    """One port of one device."""

    device: str
    port: int
    state: str
    """Such as `4: ACTIVE`."""
    physical: str
    """Such as `5: LinkUp`; empty where it is not told."""
    layer: str
    """InfiniBand or Ethernet; EFA says `Unspecified`, or nothing."""
    rate: str
    efa: bool
    counters: dict[str, int] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """As in results: mlx5_0/1."""
        return f"{self.device}/{self.port}"

    @property
    def active(self) -> bool:
        """Whether it carries data."""
        return self.state.upper().endswith("ACTIVE")

    @property
    def disabled(self) -> bool:
        """Whether somebody switched it off."""
        return "disabled" in self.physical.lower()

    @property
    def words(self) -> str:
        """Its state, for people."""
        return ", ".join(each for each in (self.state, self.physical, self.rate) if each)


def ports(runner: Runner) -> list[Port]:
    """All ports of all devices."""
    found = []
    for device in runner.names(TREE):
        folder = f"{TREE}/{device}"
        for port in runner.names(f"{folder}/ports"):
            if port.isdigit():
                found.append(_port(runner, folder, device, int(port)))
    return found


def _port(runner: Runner, folder: str, device: str, port: int) -> Port:
    base = f"{folder}/ports/{port}"
    layer = _text(runner, f"{base}/link_layer")
    efa = _is_efa(runner, folder, device, layer)
    # Those that are judged alone: some cards ask their firmware for each.
    names = (
        [f"hw_counters/{name}" for name in EFA_FAULTS]
        if efa
        else [f"counters/{n}" for n in INFINIBAND_FAULTS]
    )
    counters = {}
    for name in names:
        text = _text(runner, f"{base}/{name}")
        if text.isdigit():
            counters[name.partition("/")[2]] = int(text)
    return Port(
        device,
        port,
        _text(runner, f"{base}/state"),
        _text(runner, f"{base}/phys_state"),
        layer,
        _text(runner, f"{base}/rate"),
        efa,
        counters,
    )


def _is_efa(runner: Runner, folder: str, device: str, layer: str) -> bool:
    vendor = _text(runner, f"{folder}/device/vendor")
    if vendor:
        return vendor.lower() == _AMAZON
    driver = runner.link(f"{folder}/device/driver")
    if driver:
        return driver == "efa"
    if re.match(r"(mlx|bnxt|irdma|hfi|qib|siw|rxe)", device):
        return False
    return device.startswith(("efa", "rdmap")) or layer not in ("InfiniBand", "Ethernet")


def _text(runner: Runner, path: str) -> str:
    return (runner.read(path) or b"").decode("utf-8", "replace").strip()
