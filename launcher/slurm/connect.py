"""The best way there is here to ask Slurm."""

from __future__ import annotations

import os
from collections.abc import Mapping

from everstep.launcher.slurm import pyslurm
from everstep.launcher.slurm.cli_json import CliJson
from everstep.launcher.slurm.client import SlurmClient
from everstep.launcher.slurm.commands import require
from everstep.recovery.errors import UsageError


def connect(environ: Mapping[str, str] | None = None) -> SlurmClient:
    """pyslurm where it is installed and made for this release; else Slurm's commands.

    Raises UsageError where this host has no Slurm.
    """
    require("scontrol")
    commands = CliJson(environ=os.environ if environ is None else environ)
    try:
        return pyslurm.client_for(commands) or commands
    except UsageError:  # not even its version: whoever asks next hears why
        return commands
