"""`everstep health`: the group of commands. Each is a few lines over a function, imported when it is used."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import click
from everstep.healthcheck.errors import HealthError

COMMANDS = {
    "check": "everstep.healthcheck.cli_check:check",
    "checks": "everstep.healthcheck.cli_check:checks",
    "segment": "everstep.healthcheck.cli_check:segment",
    "program": "everstep.healthcheck.cli_hooks:program",
    "prolog": "everstep.healthcheck.cli_hooks:prolog",
    "epilog": "everstep.healthcheck.cli_hooks:epilog",
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


@click.command(
    cls=_Lazy, invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]}
)
@click.option("-N", "--by-node", is_flag=True, help="A line a node.")
@click.option("-R", "--by-reason", is_flag=True, help="Only what is bad, with the reasons in full.")
@click.option("-p", "--partition", metavar="NAME", help="Only this partition.")
@click.option("-w", "--nodes", metavar="LIST", help="Only these nodes, such as n[1-4,7].")
@click.option("-j", "--job", metavar="JOBID", help="Whether this job is touched: 12, 12_3 or 12+1.")
@click.option("--json", "as_json", is_flag=True, help="JSON, with the age and source of all that is known.")
@click.option(
    "--watch",
    type=float,
    is_flag=False,
    flag_value=10.0,
    metavar="[SECONDS]",
    help="Again and again (every 10 s).",
)
@click.option(
    "--ssh",
    "use_ssh",
    is_flag=True,
    help="Ask nodes that Slurm cannot reach over SSH, with your own agent and keys.",
)
@click.option(
    "--ssh-accept-new", is_flag=True, help="Take their host keys where none is known (refused by default)."
)
@click.option(
    "--results", metavar="DIR", help="Where nodes leave their last results (else as the site's file says)."
)
@click.option("--config", metavar="FILE", help="The site's file, if not /etc/everstep/health.toml.")
@click.pass_context
def health(context: click.Context, /, **options: Any) -> int | None:
    """Which nodes and accelerators are fit for work, which are not, and why.

    Exit code, of the worst node that is asked about: 0 in order, 1 warnings, 2 out of service or sick, 3 the
    question cannot be answered.
    """
    if context.invoked_subcommand is not None:
        return None
    from everstep.healthcheck.cli_report import report

    return report(**options)


def main(words: Sequence[str]) -> int:
    """Run `everstep health WORDS`; returns one of Nagios' exit codes, or raises HealthError."""
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
