"""Why a fact cannot be had, and the errors of the command line."""

from __future__ import annotations

from everstep.recovery.errors import UsageError


class HealthError(UsageError):
    """Wrong usage of `everstep health`, in one line; Nagios' UNKNOWN is its exit code."""

    exit_code = 3


class Absent(Exception):
    """A source is not there, says nothing, or is not for this machine: the check is skipped."""


class TimedOut(Absent):
    """A source did not answer in its time.

    `owner` is the check that reports this source's silence; other checks are skipped.
    """

    def __init__(self, reason: str, owner: str = "") -> None:
        super().__init__(reason)
        self.owner = owner
