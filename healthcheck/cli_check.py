"""`everstep health check` and `everstep health checks`: examine this node, or a recorded one."""

from __future__ import annotations

import json
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import click
from everstep.healthcheck import idle as idle_gpus_of
from everstep.healthcheck import registry
from everstep.healthcheck.errors import HealthError
from everstep.healthcheck.examine import Request, examine
from everstep.healthcheck.registry import Level
from everstep.healthcheck.result import Report

if TYPE_CHECKING:
    from rich.console import Console


@click.command()
@click.option(
    "--level",
    type=click.Choice(["light", "full", "deep"]),
    default="full",
    show_default=True,
    help="light: reads only, under 5 s. full: under 60 s. deep: puts load on the devices.",
)
@click.option("--check", "names", multiple=True, metavar="NAME", help="This check only; may be given again.")
@click.option("--off", multiple=True, metavar="NAME", help="Not this check; may be given again.")
@click.option(
    "--profile", metavar="NAME", help="What the node should be, such as p5, or auto.  [default: auto]"
)
@click.option("--root", type=click.Path(path_type=Path), default=Path("/"), help="Examine a recorded node.")
@click.option("--config", metavar="FILE", help="The site's file; only if it is named, with --root too.")
@click.option("--idle-gpus", metavar="LIST", help="GPUs on which nothing may run now: 0,2-3, UUIDs or all.")
@click.option("--json", "as_json", is_flag=True, help="One line of JSON.")
@click.option("-v", "--verbose", is_flag=True, help="Show passes and skips too.")
@click.option("--list", "list_", is_flag=True, help="List the checks there are.")
def check(
    level: str,
    names: tuple[str, ...],
    off: tuple[str, ...],
    profile: str | None,
    root: Path,
    config: str | None,
    idle_gpus: str | None,
    as_json: bool,
    verbose: bool,
    list_: bool,
) -> int:
    """Examine this node. Exit code: 0 ok, 1 warn, 2 critical, 3 wrong usage."""
    if list_:
        return _list()
    gpus, faults = idle(idle_gpus)
    request = Request(
        level=Level[level.upper()],
        names=names,
        off=frozenset(off),
        profile=profile or "auto",
        root=root,
        idle_gpus=gpus,
    )
    if root == Path("/") or config is not None:
        request, more = _as_the_site_says(request, profile, config)
        faults += more
    # So that what was started is ended when we are.
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        report = examine(request)
    finally:
        signal.signal(signal.SIGTERM, before)
    report = replace(report, faults=faults + report.faults)
    if as_json:
        for fault in report.faults:
            click.echo(f"everstep: {fault}", err=True)
        click.echo(report.to_json())
    else:
        from everstep.healthcheck.show import show

        show(report, _console(), everything=verbose)
    return report.exit_code


def _as_the_site_says(
    request: Request, profile: str | None, config: str | None
) -> tuple[Request, tuple[str, ...]]:
    """With the site's checks, profiles and switches."""
    from everstep.healthcheck import plugins, site

    settings = site.load(config).site
    faults = plugins.load(settings)
    return (
        replace(
            request,
            off=request.off | settings.off(),
            profile=profile or settings.profile or "auto",
            site_profiles=plugins.profiles(settings),
            site_checks=False,  # they are loaded
        ),
        faults,
    )


@click.command()
def checks() -> int:
    """List the checks there are, with what each reads and asks for."""
    return _list()


@click.command()
@click.argument("files", nargs=-1, required=True, type=click.File("rb"), metavar="FILE...")
@click.option("--json", "as_json", is_flag=True, help="One line of JSON a node.")
def segment(files: tuple[BinaryIO, ...], as_json: bool) -> int:
    """Compare the cliques of an NVL72 segment's nodes.

    FILEs hold what `everstep health check --json` printed on each node, a line a node; - is standard input.
    """
    from everstep.healthcheck.checks.gpu_links import across

    cliques: dict[str, str] = {}
    for file in files:
        for number, line in enumerate(file, 1):
            try:
                report = Report.from_dict(json.loads(line))
            except (ValueError, KeyError, TypeError):
                raise HealthError(
                    f"{file.name}, line {number} is no result of `everstep health check --json`"
                ) from None
            told = [each.value for each in report.results if each.check == "gpu_clique" and each.value]
            cliques[report.node] = str(told[0]) if told else ""
    reports = [
        Report(node, "", "", (replace(result, check="gpu_clique"),))
        for node, result in across(cliques).items()
    ]
    for report in sorted(reports, key=lambda each: (-each.status, each.node)):
        result = report.results[0]
        click.echo(report.to_json() if as_json else f"{report.node}: {result.status.word}: {result.reason}")
    return max((each.exit_code for each in reports), default=0)


def idle(words: str | None) -> tuple[frozenset[int | str] | None, tuple[str, ...]]:
    """The GPUs of `--idle-gpus`; without it those of the job in whose Prolog or Epilog we are. And faults."""
    if words is None:
        return idle_gpus_of.of_job(os.environ)
    try:
        return (idle_gpus_of.parse(words) if words else None), ()
    except ValueError:
        raise HealthError(
            f"--idle-gpus wants numbers such as 0,2-3, UUIDs such as GPU-1f2e3d4c, or all, and got {words!r}"
        ) from None


def _console() -> Console:
    from rich.console import Console

    # Scripts want a line for each finding, however long.
    return Console(highlight=False, width=None if sys.stdout.isatty() else 300)


def _list() -> int:
    from everstep.healthcheck import plugins, site
    from everstep.healthcheck.show import listed

    faults = plugins.load(site.load().site)
    known, _ = registry.load()
    listed(known.values(), _console())
    for fault in faults:
        click.echo(f"everstep: {fault}", err=True)
    return 0
