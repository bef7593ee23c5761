"""The site's own choices: `/etc/everstep/health.toml`, its checks and its profiles."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from everstep.healthcheck import trust
from everstep.healthcheck.errors import HealthError
from everstep.healthcheck.policy import Mode, Settings

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

DEFAULT = "/etc/everstep/health.toml"
VARIABLE = "EVERSTEP_HEALTH_CONFIG"
STATE_DIR = "/var/lib/everstep/health"

Seconds = Annotated[float, msgspec.Meta(gt=0)]
Limit = Annotated[float, msgspec.Meta(gt=0, le=45)]
Count = Annotated[int, msgspec.Meta(ge=1)]
Level = Literal["light", "full", "deep"]


class Policy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`[policy]`: how far the drains go."""

    undrain: bool = True
    confirm: Count = 1
    passes: Count = 1
    flap_limit: Annotated[int, msgspec.Meta(ge=2)] = 3
    flap_hours: Seconds = 24.0
    contract: bool = False
    keep_pass_s: Annotated[float, msgspec.Meta(ge=0, le=3600)] = 60.0
    after_boot: tuple[str, ...] | None = None


class Program(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`[program]`: what HealthCheckProgram looks at, and for how long at most. Slurm kills it after 60 s."""

    level: Literal["light", "full"] = "full"
    limit_s: Limit = 45.0


class Hook(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`[prolog]`, `[epilog]`. Slurm expects them to end within its MessageTimeout, 10 s by default."""

    level: Literal["light", "full"] = "light"
    limit_s: Limit = 8.0


class Switch(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`[checks.NAME]`: whether a check may drain, is only shown, or is not run."""

    act: Literal["drain", "report", "off"] = "drain"


class Site(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The whole file."""

    mode: Literal["report", "shadow", "drain"] = "report"
    profile: str | None = None
    plugins: tuple[str, ...] = ()
    """Python files of checks, or folders of them."""
    profiles: tuple[str, ...] = ()
    """TOML files of profiles, or folders of them."""
    root: str | None = None
    """Check the node recorded there, not the one that this is: for trials."""
    state_dir: str = STATE_DIR
    shared_dir: str | None = None
    slurm_field: Literal["comment", "extra"] | None = None
    node_name: str | None = None
    policy: Policy = Policy()
    program: Program = Program()
    prolog: Hook = Hook()
    epilog: Hook = Hook()
    checks: Mapping[str, Switch] = msgspec.field(default_factory=dict)

    def off(self) -> frozenset[str]:
        """The checks that are not to be run."""
        return frozenset(name for name, switch in self.checks.items() if switch.act == "off")

    def settings(self, after_boot: frozenset[str] = frozenset()) -> Settings:
        """The policy's settings; `after_boot` are the checks that read events, where the file names none."""
        named = self.policy.after_boot
        return Settings(
            mode=Mode(self.mode),
            undrain=self.policy.undrain,
            confirm=self.policy.confirm,
            passes=self.policy.passes,
            flap_limit=self.policy.flap_limit,
            flap_window_s=self.policy.flap_hours * 3600,
            contract=self.policy.contract,
            report_only=frozenset(name for name, switch in self.checks.items() if switch.act != "drain"),
            after_boot=after_boot if named is None else frozenset(named),
        )


@dataclass(frozen=True)
class Loaded:
    """A site's file, and where it was."""

    site: Site = field(default_factory=Site)
    source: str = "no file: the built-in settings"


def load(path: str | Path | None = None, *, uid: int | None = None) -> Loaded:
    """The site's settings: from `path`, else $EVERSTEP_HEALTH_CONFIG, else the usual place if it is there.

    Raises HealthError, in one line, where the file is not there, not trusted (see `trust`) or not right.
    """
    named = path or os.environ.get(VARIABLE) or None
    where = named or DEFAULT
    if not os.path.lexists(where):
        if named is None:
            return Loaded()
        raise HealthError(f"no file {where}: name one that is there, or leave it out")
    try:
        text = trust.read(where, uid=uid)
    except OSError as error:
        raise HealthError(f"{where} cannot be read: {error.strerror}") from error
    return Loaded(parse(text, str(where)), str(where))


def parse(text: bytes, name: str) -> Site:
    """The settings in a file's text. Raises HealthError that names the file and the place in it."""
    try:
        raw: dict[str, Any] = tomllib.loads(text.decode())
        return msgspec.convert(raw, Site)
    except UnicodeDecodeError as error:
        raise HealthError(f"{name} is not UTF-8 text: byte {error.start}") from error
    except tomllib.TOMLDecodeError as error:
        raise HealthError(f"{name} is not TOML: {error}") from error
    except msgspec.ValidationError as error:
        # `Object contains unknown field `x` - at `$.policy``
        said = str(error).replace("`$.", "`").replace("Object contains unknown field", "no such setting:")
        raise HealthError(f"{name}: {said}; docs/health.md lists the settings") from error


def files(paths: tuple[str, ...], suffix: str, *, uid: int | None = None) -> list[Path]:
    """The files that these paths mean: a folder means what is in it with this suffix, by name.

    Raises HealthError where one is not there or is not trusted.
    """
    found: list[Path] = []
    for path in paths:
        if not os.path.exists(path):
            raise HealthError(f"no file or folder {path}: mend the site's health.toml")
        try:
            where = trust.resolve(path, uid=uid)
            inside = sorted(os.listdir(where)) if where.is_dir() else None
        except OSError as error:
            raise HealthError(f"{path} cannot be read: {error.strerror}") from error
        if inside is None:
            found.append(where)
            continue
        names = [name for name in inside if name.endswith(suffix) and not name.startswith((".", "_"))]
        found += [trust.resolve(where / name, uid=uid) for name in names]
    return found
