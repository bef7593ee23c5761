"""The last result of a node: in the node's state folder, in a shared folder, or in Slurm's own books."""

from __future__ import annotations

import json
import math
import os
import re
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from everstep.healthcheck.errors import HealthError
from everstep.healthcheck.result import Report, Result, Severity, Status

LAST = "last.json"
"""Its name in the node's own state folder; in a shared one it is NODE.json."""
SUFFIX = ".json"
MARK = "everstep"
LONGEST = 4 * 2**20  # bytes
IN_SLURM_LONGEST = 250  # characters


@dataclass(frozen=True)
class Record:
    """One run of the checks on a node, and what was made of it."""

    report: Report
    at: float
    """Unix seconds, by the node's clock."""
    by: str = ""
    """program, prolog, epilog, ssh or check."""
    mode: str = ""
    boot: str = ""
    action: str = ""
    """What was asked of Slurm, in words."""
    notes: tuple[str, ...] = ()
    source: str = field(default="", compare=False)
    """Where it was read, for people."""

    @property
    def node(self) -> str:
        """The node it is of."""
        return self.report.node

    def as_dict(self) -> dict[str, Any]:
        """The report's own JSON, and after it what is said around it."""
        around = {"at": self.at, "by": self.by, "mode": self.mode, "boot": self.boot, "action": self.action}
        return {**self.report.as_dict(), **around, "notes": list(self.notes)}

    def to_json(self) -> bytes:
        """One line of JSON."""
        return json.dumps(self.as_dict()).encode() + b"\n"


def from_dict(data: Mapping[str, Any], source: str = "", *, findings_only: bool = False) -> Record:
    """A record from its JSON. Raises ValueError where it is none.

    `findings_only` leaves out the passes, for whoever reads those of a thousand nodes.
    """
    try:
        at = float(data["at"])
        if not math.isfinite(at):
            raise ValueError(f"no result of everstep's: at {at}")
        return Record(
            report=Report.from_dict(_without_passes(data) if findings_only else data),
            at=at,
            by=str(data.get("by", "")),
            mode=str(data.get("mode", "")),
            boot=str(data.get("boot", "")),
            action=str(data.get("action", "")),
            notes=tuple(str(note) for note in data.get("notes") or ()),
            source=source,
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"no result of everstep's: {error!r}") from error


def _without_passes(data: Mapping[str, Any]) -> Mapping[str, Any]:
    results = data["results"]
    found = [each for each in results if each["status"] not in ("ok", "skip")]
    # One of the others stays, so that the status is the same.
    same = [each for each in results if each["status"] == data["status"]][:1]
    return {**data, "results": found or same}


def from_json(text: bytes | str, source: str = "", *, findings_only: bool = False) -> Record:
    """A record from its text. Raises ValueError where it is none."""
    try:
        data = json.loads(text)
    except RecursionError as error:
        raise ValueError("no result of everstep's: nested too deeply") from error
    if not isinstance(data, dict):
        raise ValueError("no result of everstep's: not an object")
    return from_dict(data, source, findings_only=findings_only)


def read_folder(folder: str | Path, names: Iterable[str]) -> tuple[dict[str, Record], list[str]]:
    """The last results of these nodes in a shared folder, and what was wrong with some, in words.

    Only files of root's or of the folder's owner are believed, so that no other user can speak for a node.

    Raises HealthError where the folder cannot be read.
    """
    found: dict[str, Record] = {}
    faults: list[str] = []
    try:
        place = os.stat(folder)
        there = set(os.listdir(folder))
    except OSError as error:
        raise HealthError(
            f"{folder} cannot be read: {error.strerror}; see shared_dir in health.toml"
        ) from error
    if place.st_mode & stat.S_IWOTH and not place.st_mode & stat.S_ISVTX:
        return {}, [f"results in {folder} are not believed: anybody can write there; `chmod o-w {folder}`"]
    for name in names:
        if name + SUFFIX not in there or "/" in name:
            continue
        path = f"{folder}/{name}{SUFFIX}"
        try:
            found[name] = _read(path, name, {0, place.st_uid}, str(folder))
        except OSError as error:
            faults.append(f"{path} cannot be read: {error.strerror}")
        except ValueError as error:
            faults.append(f"{path} is not believed: {error}")
    return found, faults


def _read(path: str, name: str, owners: set[int], source: str) -> Record:
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(handle, "rb") as file:
        about = os.fstat(handle)
        if not stat.S_ISREG(about.st_mode) or about.st_uid not in owners:
            raise ValueError(f"it belongs to user {about.st_uid}")
        record = from_json(file.read(LONGEST), source, findings_only=True)
    if record.node != name:
        raise ValueError(f"it is of {record.node}")
    return record


def to_slurm(record: Record) -> str:
    """For a node's comment or extra field: `everstep critical reset 1796057276 full p5 xid gpu3: …`."""
    report = record.report
    worst = report.findings[0] if report.findings else None
    what = f"{worst.check} {worst.device or 'node'}: {worst.reason}" if worst else "-"
    words = [
        MARK,
        report.status.word,
        report.severity.word,
        str(int(record.at)),
        report.level,
        report.profile,
    ]
    return " ".join(" ".join([*words, what]).split())[:IN_SLURM_LONGEST]


def from_slurm(node: str, text: str, source: str) -> Record | None:
    """A record from a node's comment or extra field; None where it holds something else."""
    form = r"everstep (\w+) (\w+) (\d+) (\S+) (\S+) (?:-|(\S+) (\S+): (.*))"
    read = re.fullmatch(form, text.strip())
    if read is None:
        return None
    status_word, severity_word, at, level, profile, check, device, reason = read.groups()
    try:
        status, severity = Status[status_word.upper()], Severity[severity_word.upper()]
    except KeyError:
        return None
    where = "" if device == "node" else device or ""
    results = (Result(status, reason or "", severity, where, check=check or "all"),)
    return Record(Report(node, profile, level, results), float(at), source=source)
