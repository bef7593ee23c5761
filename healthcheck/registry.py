"""The register of checks: a decorator, levels, and the entry-point group by which sites add their own."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from importlib import metadata
from typing import TYPE_CHECKING

from everstep.healthcheck.errors import HealthError
from everstep.healthcheck.result import Result

if TYPE_CHECKING:
    from everstep.healthcheck.facts import Facts
    from everstep.healthcheck.profile import Profile

GROUP = "everstep.health_checks"
"""Entry points of this group name modules whose import registers checks."""


class Level(IntEnum):
    """How much is looked at; each level holds those before it."""

    LIGHT = 0
    """Reads only, under 5 s: before a step, in a Prolog, in the background."""
    FULL = 1
    """More tools, under 60 s: for HealthCheckProgram."""
    DEEP = 2
    """Puts load on the devices: nothing else may run on the node."""
    NAMED = 3
    """Only where it is named: it takes an hour."""

    @property
    def word(self) -> str:
        """As on the command line."""
        return self.name.lower()


Function = Callable[["Facts", "Profile"], "Result | Iterable[Result]"]


@dataclass(frozen=True)
class Check:
    """A check, and what is known of it before it runs."""

    name: str
    level: Level
    run: Function
    source: str
    """What it reads, for people."""
    action: str
    """What a finding asks of people."""
    about: str
    """gpu, neuron, network, host, active or site."""
    events: bool = False
    """It reads events, which grow old: that it passes again mends nothing until the node has booted."""
    moment: bool = False
    """It is about this very moment: no pass of a minute ago stands for it."""

    @property
    def title(self) -> str:
        """The first line of its docstring."""
        return (self.run.__doc__ or self.name).strip().splitlines()[0]


REGISTER: dict[str, Check] = {}

OURS = (
    "gpu",
    "gpu_processes",
    "gpu_memory",
    "gpu_load",
    "gpu_links",
    "xid",
    "dcgm",
    "neuron",
    "network",
    "storage",
    "host",
    "host_log",
    "disk_log",
    "active",
)
"""The modules of checks of this package."""


def check(
    name: str,
    level: Level,
    *,
    source: str,
    action: str,
    about: str = "site",
    events: bool = False,
    moment: bool = False,
    register: dict[str, Check] = REGISTER,
) -> Callable[[Function], Function]:
    """Register a function `(facts, profile) -> Result | Iterable[Result]` as a check."""

    def add(function: Function) -> Function:
        known = register.get(name)
        if known is not None and known.run.__module__ != function.__module__:
            raise ValueError(
                f"two checks are called {name}: in {known.run.__module__} and {function.__module__}"
            )
        register[name] = Check(name, level, function, source, action, about, events, moment)
        return function

    return add


def load(*, sites: bool = True) -> tuple[Mapping[str, Check], tuple[str, ...]]:
    """All checks, ours and the sites', and what went wrong with the latter: a broken one stops no other."""
    for module in OURS:
        importlib.import_module(f"everstep.healthcheck.checks.{module}")
    return REGISTER, _load_sites() if sites else ()


@functools.cache
def _load_sites() -> tuple[str, ...]:
    faults = []
    for entry in metadata.entry_points(group=GROUP):
        try:
            entry.load()
        except Exception as error:  # whatever a site's module does when it is imported
            faults.append(f"the site's checks {entry.name} ({entry.value}) cannot be loaded: {error}")
    return tuple(faults)


def chosen(
    checks: Mapping[str, Check], level: Level, names: Iterable[str] = (), off: Iterable[str] = ()
) -> list[Check]:
    """The checks to run: the named ones, else those of the level that are not switched off.

    Raises HealthError for a name that is no check's.
    """
    names = list(dict.fromkeys(names))
    unknown = [name for name in names if name not in checks]
    if unknown:
        close = ", ".join(_close(unknown[0], checks))
        raise HealthError(
            f"there is no check {unknown[0]!r}{f'; did you mean {close}?' if close else ''} "
            "(`everstep health check --list` shows all)"
        )
    if names:
        return [checks[name] for name in names]
    switched_off = set(off)
    return [each for each in checks.values() if each.level <= level and each.name not in switched_off]


def _close(word: str, known: Iterable[str]) -> list[str]:
    import difflib

    return difflib.get_close_matches(word, list(known), 3)
