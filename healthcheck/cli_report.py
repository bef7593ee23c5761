"""`everstep health`: ask, show, and with `--watch` again and again."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator

import click
from everstep.healthcheck import ask, report_text, site, ssh
from everstep.healthcheck import report as reports
from everstep.healthcheck.errors import HealthError
from everstep.healthcheck.report import Overview
from everstep.launcher.slurm.cli_json import CliJson

SHORTEST_S = 1.0
"""Between two looks of `--watch`: slurmctld has other things to do."""
LONGEST_S = 86400.0


def report(
    *,
    by_node: bool,
    by_reason: bool,
    partition: str | None,
    nodes: str | None,
    job: str | None,
    as_json: bool,
    watch: float | None,
    use_ssh: bool,
    ssh_accept_new: bool,
    results: str | None,
    config: str | None,
) -> int:
    """Answer the question on the command line. Returns the worst node's exit code, or raises HealthError."""
    if watch is not None and not SHORTEST_S <= watch <= LONGEST_S:  # which nan is not
        raise HealthError(f"--watch {watch:g}: give seconds, from {SHORTEST_S:g} to {LONGEST_S:g}")
    ask.slurm_is_here()
    settings = site.load(config).site
    question = ask.Question(
        partition=partition,
        nodes=nodes,
        job=job,
        shared_dir=results or settings.shared_dir,
        state_dir=settings.state_dir,
        ssh=_ssh(use_ssh, ssh_accept_new),
    )
    client = CliJson()
    show = _json if as_json else _view(by_node, by_reason, job)
    code = 0
    for number, overview in enumerate(_looks(lambda: ask.overview(question, client), watch)):
        if watch is not None and not as_json and sys.stdout.isatty():
            click.clear()
        elif number and not as_json:
            click.echo()
        click.echo(show(overview), color=False if os.environ.get("NO_COLOR") else None)
        code = overview.exit_code
    return code


def _looks(look: Callable[[], Overview], every: float | None) -> Iterator[Overview]:
    """One overview, or one after the other until the user has seen enough."""
    try:
        yield look()
        while every is not None:
            time.sleep(every)
            yield look()
    except KeyboardInterrupt:
        if every is None:
            raise


def _view(by_node: bool, by_reason: bool, job: str | None) -> Callable[[Overview], str]:
    if by_node:
        lines = report_text.by_node
    elif by_reason:
        lines = report_text.by_reason
    else:
        lines = report_text.by_job if job is not None else report_text.summary
    return lambda overview: report_text.joined(lines(overview))


def _json(overview: Overview) -> str:
    return json.dumps(reports.as_dict(overview))


def _ssh(wanted: bool, accept_new: bool) -> ssh.Settings | None:
    return ssh.Settings(accept_new=accept_new) if wanted or accept_new else None
