"""The errors that the recovery library raises, and what each means for the run."""

from __future__ import annotations


class EverstepError(Exception):
    """Something that everstep itself has to say to the user, in one line.

    A worker that ends with one prints the line alone, without a traceback, and
    exits with `exit_code`.
    """

    exit_code = 64


class UsageError(EverstepError):
    """The script uses the library in a way that cannot work; the message names the cure."""


class NoStateError(EverstepError):
    """Nobody holds the run's state any more: neither a peer's memory nor a checkpoint."""

    exit_code = 75


class Fault(Exception):
    """A peer was lost, or a new generation has begun: unwind to `protect`."""
