"""`everstep health program`, `prolog` and `epilog`: what Slurm runs, for those who write it into a script."""

from __future__ import annotations

import click
from everstep.healthcheck import hooks

_CONFIG = click.option("--config", metavar="FILE", help="The site's file, if not /etc/everstep/health.toml.")


@click.command()
@_CONFIG
def program(config: str | None) -> int:
    """For HealthCheckProgram: check, drain or give back as the site's mode says. Ends with 0."""
    return hooks.run("program", config)


@click.command()
@_CONFIG
def prolog(config: str | None) -> int:
    """For Prolog: 1 where a job must not start here, which drains the node and requeues the job."""
    return hooks.run("prolog", config)


@click.command()
@_CONFIG
def epilog(config: str | None) -> int:
    """For Epilog: 1 where no other job must start here, which drains the node."""
    return hooks.run("epilog", config)
