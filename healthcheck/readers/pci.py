"""/sys/bus/pci: the NVIDIA GPUs that are plugged in, whatever their driver says."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from everstep.healthcheck.runner import Runner

_BUS = "/sys/bus/pci/devices"


def gpus(runner: Runner) -> list[str]:
    """The PCI device numbers of the GPUs to compute with.

    Those that have NVIDIA's driver count, and of those without any driver 3D controllers (0x0302) and
    siblings of the former. A small card for a console has no driver by design; another driver's is a
    VM's, say; NVSwitches are bridges.
    """
    found = []
    for name in runner.names(_BUS):
        folder = f"{_BUS}/{name}"
        kind = _text(runner, f"{folder}/class")
        if _text(runner, f"{folder}/vendor") == "0x10de" and kind.startswith("0x03"):
            found.append((_text(runner, f"{folder}/device"), kind, runner.link(f"{folder}/driver")))
    driven = {device for device, _, driver in found if driver == "nvidia"}
    return [
        device
        for device, kind, driver in found
        if driver == "nvidia" or (driver is None and (kind.startswith("0x0302") or device in driven))
    ]


def _text(runner: Runner, path: str) -> str:
    return (runner.read(path) or b"").decode("utf-8", "replace").strip()
