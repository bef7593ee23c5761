"""NVLink: `nvidia-smi nvlink -s`, `nvidia-smi nvlink -e` and `dcgmi nvlink -s`, by GPU."""

from __future__ import annotations

import re

_GPU = re.compile(r"^\s*GPU (\d+):")
_STATUS = re.compile(r"^\s*Link (\d+): (.+?)\s*$")
_ERRORS = re.compile(
    r"^\s*Link (\d+): (Replay|Recovery|CRC)\w* (?:Errors?|FLIT\w*)?[^:]*: (\d+)", re.IGNORECASE
)
_DCGM_GPU = re.compile(r"^\s*(?:gpuId|GPU) (\d+):?", re.IGNORECASE)
_DCGM_OTHER = re.compile(r"^\s*(?:NvSwitch|physicalId|CPU)", re.IGNORECASE)
_DCGM_LINKS = re.compile(r"^\s*((?:[UDX_] ?)+)\s*$")


def status(output: str) -> dict[int, dict[int, bool]]:
    """For each GPU and link: whether the link is up. `nvidia-smi nvlink -s`."""
    gpus: dict[int, dict[int, bool]] = {}
    current: dict[int, bool] = {}
    for line in output.splitlines():
        if found := _GPU.match(line):
            current = gpus.setdefault(int(found[1]), {})
        elif found := _STATUS.match(line):
            text = found[2].lower()
            if "inactive" in text or "down" in text:
                current[int(found[1])] = False
            elif re.match(r"[\d.]+ *gb/s", text) or "active" in text:
                current[int(found[1])] = True
    return gpus


def errors(output: str) -> dict[int, dict[str, int]]:
    """For each GPU: its links' errors, `replay`, `recovery` and `crc`, summed. `nvidia-smi nvlink -e`."""
    gpus: dict[int, dict[str, int]] = {}
    current: dict[str, int] = {}
    for line in output.splitlines():
        if found := _GPU.match(line):
            current = gpus.setdefault(int(found[1]), {})
        elif found := _ERRORS.match(line):
            kind = found[2].lower()
            current[kind] = current.get(kind, 0) + int(found[3])
    return gpus


def dcgm_status(output: str) -> dict[int, dict[int, bool]]:
    """The same from `dcgmi nvlink -s`: U up, D down; X (disabled) and _ (not supported) are no links."""
    gpus: dict[int, dict[int, bool]] = {}
    current: dict[int, bool] | None = None
    for line in output.splitlines():
        if found := _DCGM_GPU.match(line):
            current = gpus.setdefault(int(found[1]), {})
        elif _DCGM_OTHER.match(line):
            current = None
        elif current is not None and (found := _DCGM_LINKS.match(line)):
            base = len(current)
            for i, letter in enumerate(found[1].split()):
                if letter in "UD":
                    current[base + i] = letter == "U"
    return gpus
