"""A site's own checks: trusted files that register them, each with a time limit of its own."""

from __future__ import annotations

import importlib.util
import sys
import threading
import zlib
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from everstep.healthcheck import registry, trust
from everstep.healthcheck.errors import HealthError
from everstep.healthcheck.facts import Facts
from everstep.healthcheck.profile import SITE_FOLDER, Profile
from everstep.healthcheck.registry import REGISTER, Check, Function
from everstep.healthcheck.result import Result, warn
from everstep.healthcheck.site import Site, files

LIMIT_S = 10.0
"""How long a site's check may take."""
_OURS = "everstep.healthcheck."


def load(site: Site, *, uid: int | None = None) -> tuple[str, ...]:
    """Register the site's checks, from its files and from installed packages; returns what went wrong.

    A broken file of checks stops no other check. Raises HealthError for one that is not there or not trusted.
    """
    _, faults = registry.load()
    found = list(faults)
    for path in files(site.plugins, ".py", uid=uid):
        try:
            _import(path)
        except Exception as error:  # whatever a site's file does when it is run
            found.append(f"the site's checks {path} cannot be loaded: {type(error).__name__}: {error}")
    for name in site.checks:
        if name not in REGISTER:
            found.append(f"[checks.{name}] is about no check; `everstep health checks` lists them")
    for name, each in REGISTER.items():
        if not each.run.__module__.startswith(_OURS):
            REGISTER[name] = limited(each)
    return tuple(found)


def profiles(site: Site, *, uid: int | None = None) -> dict[str, str]:
    """The site's profiles, TOML by name, from its usual folder and from where its file says.

    Raises HealthError for one that is not there, not trusted or not text.
    """
    paths: tuple[str, ...] = site.profiles
    if Path(SITE_FOLDER).is_dir():
        paths = (SITE_FOLDER, *paths)
    texts = {}
    for path in files(paths, ".toml", uid=uid):
        try:
            texts[path.stem] = trust.read(path, uid=uid).decode()
        except (OSError, UnicodeDecodeError) as error:
            raise HealthError(f"the profile {path} cannot be read: {error}") from error
    return texts


def limited(check: Check, seconds: float = LIMIT_S) -> Check:
    """The same check, given up after a while: it is then a warning, that names it."""
    run = check.run

    def within(facts: Facts, profile: Profile) -> Iterable[Result] | Result:
        said: list[Iterable[Result] | Result] = []
        broke: list[Exception] = []

        def work() -> None:
            try:
                found = run(facts, profile)
                said.append(found if isinstance(found, Result) else tuple(found))
            except Exception as error:  # raised again below, in the caller's thread
                broke.append(error)

        # A daemon: Python cannot stop a thread, and the process ends without it.
        thread = threading.Thread(target=work, daemon=True, name=f"everstep-site-{check.name}")
        thread.start()
        thread.join(seconds)
        if broke:
            raise broke[0]
        if not said:
            return warn(f"the site's check did not end in {seconds:g} s")
        return said[0]

    within.__module__ = _OURS + "plugins"  # so that it is not wrapped twice
    within.__doc__ = run.__doc__
    limited_run: Function = within
    return replace(check, run=limited_run)


def _import(path: Path) -> None:
    name = f"everstep_site_{path.stem}_{zlib.crc32(bytes(path)):08x}"
    if name in sys.modules:
        return
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError("it is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
