"""`everstep health`: the group of commands. Each is a few lines over a function elsewhere, imported when it is used."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import click
from everstep.healthcheck.errors import HealthError

COMMANDS = {
    "check": "everstep.healthcheck.cli_check:check",
    "checks": "everstep.healthcheck.cli_check:checks",
}
"""Where each command is."""


class _Lazy(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        module, _, attribute = COMMANDS[name].partition(":")
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command


@click.command(cls=_Lazy, context_settings={"help_option_names": ["-h", "--help"]})
def health() -> None:
    """Which nodes and accelerators are fit for work, which are not, and why."""


def main(words: Sequence[str]) -> int:
    """Run `everstep health WORDS` and return its exit code: Nagios' codes. Raises HealthError for wrong usage."""
    try:
        code: Any = health.main(args=list(words), prog_name="everstep health", standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message())
        return 0
    except click.exceptions.Abort:
        return 130
    except click.ClickException as error:
        raise HealthError(f"{error.format_message()} (see `everstep health --help`)") from None
    return code if isinstance(code, int) else 0
