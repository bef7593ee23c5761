"""`nvidia-smi -q -x`: the GPUs, element by element. What is absent or N/A is unsupported, not bad."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

_UNSUPPORTED = re.compile(
    r"^\[?(N/?A|Not Supported|Unsupported|Requested functionality has been deprecated"
    r"|Insufficient Permissions|Not Available|Not Applicable|Unknown|-)?\]?$",
    re.IGNORECASE,
)
_ANSWERED = (
    "temperature",
    "gpu_power_readings",
    "power_readings",
    "clocks",
    "utilization",
    "fb_memory_usage",
    "ecc_errors",
    "remapped_rows",
    "performance_state",
    "pci",
)
_BROKEN = re.compile(r"ERR!|Unknown Error|GPU is lost|GPU requires reset", re.IGNORECASE)
_NUMBER = re.compile(r"^\s*(-?\d+(?:\.\d+)?)\s*(?:[A-Za-z%/()]+)?x?\s*$")
_NO_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_PCI = re.compile(r"^(?:PCI:)?(?:([0-9A-Fa-f]{4,8}):)?([0-9A-Fa-f]{2}):([0-9A-Fa-f]{2})(?:\.[0-9A-Fa-f])?$")


@dataclass(frozen=True)
class Gpu:
    """One GPU."""

    index: int
    element: ET.Element = field(compare=False, repr=False)

    @property
    def name(self) -> str:
        """As in results: gpu3."""
        return f"gpu{self.index}"

    @property
    def product(self) -> str:
        """Such as `NVIDIA H100 80GB HBM3`."""
        return (self.element.findtext("product_name") or "").strip()

    @property
    def pci(self) -> str:
        """Such as `0000:9b:00`, as the kernel writes it."""
        text = self.element.get("id") or self.element.findtext("pci/pci_bus_id") or ""
        return pci(text) or text.strip()

    @property
    def uuid(self) -> str:
        """Such as `gpu-1f2e3d4c-…`, in small letters; empty where it is not told."""
        return (self.text("uuid") or "").lower()

    @property
    def serial(self) -> str:
        """What to quote when it is to be replaced; empty where it is not told."""
        return self.text("serial") or ""

    @property
    def mig(self) -> bool:
        """Whether it is split into MIG devices."""
        return self.text("mig_mode/current_mig") == "Enabled"

    def text(self, path: str) -> str | None:
        """An element's text; None where it is absent, N/A, unsupported, or not answered by the GPU."""
        found = self.element.findtext(path)
        if found is None:
            return None
        found = found.strip()
        return None if _UNSUPPORTED.match(found) or _BROKEN.search(found) else found

    def first(self, *paths: str) -> str | None:
        """The first of these that says something: names change from driver to driver."""
        return next((text for path in paths if (text := self.text(path)) is not None), None)

    def number(self, *paths: str) -> float | None:
        """The number in the first of these that says something, without its unit; else None."""
        text = self.first(*paths)
        found = _NUMBER.match(text) if text is not None else None
        return float(found.group(1)) if found else None

    def yes(self, *paths: str) -> bool | None:
        """Yes, Active, Enabled or True; None where it is unsupported."""
        text = self.first(*paths)
        return None if text is None else text.lower() in {"yes", "active", "enabled", "true", "1"}

    def broken(self) -> Iterator[tuple[str, str]]:
        """The elements, with their texts, in which the driver says that the GPU does not answer.

        Only those that any GPU answers: of others it is said as well where a guest may not ask.
        """
        for path in _ANSWERED:
            for parent in self.element.iterfind(path):
                for element in parent.iter():
                    if element.text and _BROKEN.search(element.text):
                        yield element.tag, element.text.strip()

    def processes(self) -> Iterator[tuple[int, str, str]]:
        """The compute processes on it: pid, name, type."""
        for element in self.element.iterfind("processes/process_info"):
            pid = (element.findtext("pid") or "").strip()
            kind = (element.findtext("type") or "C").strip()
            if pid.isdigit() and "C" in kind:
                yield int(pid), (element.findtext("process_name") or "").strip(), kind


@dataclass(frozen=True)
class Smi:
    """All of it."""

    gpus: tuple[Gpu, ...]
    attached: int | None
    driver: str
    complete: bool = True
    """False where the output ends early or cannot be read to its end."""


def parse(output: bytes) -> Smi:
    """Read the output as far as it goes; GPUs that are there whole count."""
    text = _NO_XML.sub("?", output.decode("utf-8", "replace"))
    # Our own parser would be no safer: this is the driver's tool's output, and expat refuses entity bombs.
    parser: Any = ET.XMLPullParser(["end"])
    elements: list[ET.Element] = []
    attached, driver = None, ""
    complete = False
    try:
        parser.feed(text)
        for _, element in parser.read_events():
            if not isinstance(element, ET.Element):
                continue
            if element.tag == "gpu":
                elements.append(element)
            elif element.tag == "attached_gpus" and (element.text or "").strip().isdigit():
                attached = int((element.text or "0").strip())
            elif element.tag == "driver_version":
                driver = (element.text or "").strip()
            elif element.tag == "nvidia_smi_log":
                complete = True
    except ET.ParseError:
        complete = False
    return Smi(tuple(Gpu(i, each) for i, each in enumerate(elements)), attached, driver, complete)


def pci(text: str) -> str | None:
    """`00000000:9B:00.0` and `PCI:0000:9b:00` alike as `0000:9b:00`; None where it is no PCI address."""
    found = _PCI.match(text.strip())
    if found is None:
        return None
    domain, bus, device = found.groups()
    return f"{int(domain or '0', 16):04x}:{bus}:{device}".lower()
