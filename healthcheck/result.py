"""What a check says: a status, a severity, and the reason in words; and how that is written as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Union

Value = Union[str, int, float, None]  # noqa: UP007  (an alias, read at run time on 3.10 too)


class Status(IntEnum):
    """What a result means for the node. `CRITICAL` alone says that it is not fit for work."""

    SKIP = 0
    """Not judged: not for this machine, or its source is missing or silent. Never a failure."""
    OK = 1
    WARN = 2
    CRITICAL = 3

    @property
    def word(self) -> str:
        """As in JSON: ok, warn, critical or skip."""
        return self.name.lower()


class Severity(IntEnum):
    """What has to be done about it, in one ladder."""

    OK = 0
    MONITOR = 1
    RESET = 2
    REBOOT = 3
    REPLACE = 4

    @property
    def word(self) -> str:
        """As in JSON: ok, monitor, reset, reboot or replace."""
        return self.name.lower()


EXIT_CODES: Mapping[Status, int] = {Status.SKIP: 0, Status.OK: 0, Status.WARN: 1, Status.CRITICAL: 2}
"""Nagios' exit codes. A skip is no failure; 3 (UNKNOWN) is for wrong usage alone."""

UNKNOWN = 3


@dataclass(frozen=True)
class Result:
    """One finding, or one pass, of one check."""

    status: Status
    reason: str
    severity: Severity = Severity.OK
    device: str = ""
    """Such as `gpu3`, `0000:9b:00` (a GPU in the kernel log), `mlx5_0/1`, `/scratch`; empty: the node."""
    value: Value = None
    limit: Value = None
    check: str = ""
    """Filled in by whoever runs the check."""
    seconds: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        """The JSON form, its keys in the documented order."""
        return {
            "check": self.check,
            "device": self.device,
            "status": self.status.word,
            "severity": self.severity.word,
            "reason": self.reason,
            "value": self.value,
            "limit": self.limit,
            "seconds": round(self.seconds, 3),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Result:
        """The other way. Raises KeyError or ValueError where the data is no result."""
        return cls(
            check=str(data["check"]),
            device=str(data["device"]),
            status=_named(Status, data["status"]),
            severity=_named(Severity, data["severity"]),
            reason=str(data["reason"]),
            value=data.get("value"),
            limit=data.get("limit"),
            seconds=float(data.get("seconds") or 0.0),
        )


@dataclass(frozen=True)
class Report:
    """All results of one run on one node."""

    node: str
    profile: str
    level: str
    results: tuple[Result, ...]
    faults: tuple[str, ...] = field(default=(), compare=False)
    """Failures of everstep's own: a check that raised, a state that cannot be read. Not in the JSON."""

    @property
    def status(self) -> Status:
        """The worst one."""
        return worst_status(self.results)

    @property
    def severity(self) -> Severity:
        """The gravest one."""
        return worst_severity(self.results)

    @property
    def exit_code(self) -> int:
        """Nagios' exit code of the worst result."""
        return EXIT_CODES[self.status]

    @property
    def findings(self) -> tuple[Result, ...]:
        """What is not in order, the gravest first."""
        found = [each for each in self.results if each.status >= Status.WARN]
        return tuple(sorted(found, key=lambda each: (-each.status, -each.severity)))

    def as_dict(self) -> dict[str, Any]:
        """The JSON form: what `everstep health check --json` prints."""
        return {
            "node": self.node,
            "profile": self.profile,
            "level": self.level,
            "status": self.status.word,
            "severity": self.severity.word,
            "results": [each.as_dict() for each in self.results],
        }

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps(self.as_dict())

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Report:
        """The other way. Raises KeyError, TypeError or ValueError where the data is no report."""
        results = tuple(Result.from_dict(each) for each in data["results"])
        return cls(str(data["node"]), str(data["profile"]), str(data["level"]), results)


def worst_status(results: Iterable[Result]) -> Status:
    """The worst status; SKIP where nothing was judged."""
    return max((each.status for each in results), default=Status.SKIP)


def worst_severity(results: Iterable[Result]) -> Severity:
    """The gravest severity; OK where there is none."""
    return max((each.severity for each in results), default=Severity.OK)


def ok(reason: str, device: str = "", *, value: Value = None, limit: Value = None) -> Result:
    """A pass."""
    return Result(Status.OK, reason, Severity.OK, device, value, limit)


def skip(reason: str, device: str = "") -> Result:
    """Not judged, and why."""
    return Result(Status.SKIP, reason, Severity.OK, device)


def warn(
    reason: str,
    device: str = "",
    severity: Severity = Severity.MONITOR,
    *,
    value: Value = None,
    limit: Value = None,
) -> Result:
    """Something to look at; the node can work."""
    return Result(Status.WARN, reason, severity, device, value, limit)


def critical(
    reason: str,
    severity: Severity,
    device: str = "",
    *,
    value: Value = None,
    limit: Value = None,
) -> Result:
    """Not fit for work, and what has to be done."""
    return Result(Status.CRITICAL, reason, severity, device, value, limit)


def _named(kind: Any, word: Any) -> Any:
    try:
        return kind[str(word).upper()]
    except KeyError:
        raise ValueError(f"{word!r} is no {kind.__name__.lower()}") from None
