"""Telling the site of a node that was lost, in the way the site has chosen. PURE but for `report`.

    /etc/everstep/launcher.toml
        [lost_nodes]
        action = "none"      # or: comment, drain, fail, command
        reason = "Action:Replace"       # for fail; Action:Reboot is the other one
        command = ["/usr/local/sbin/lost-node"]   # is given NODE, JOB and REASON

An ordinary user may not change nodes in Slurm, so but for `none` and `command` this does something only
where the site lets its users (or the run's owner is an operator). What Slurm refuses is said, once.
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from everstep.launcher.slurm.client import SlurmClient
from everstep.recovery.errors import EverstepError, UsageError

SITE_FILE = Path("/etc/everstep/launcher.toml")
ACTIONS = ("none", "comment", "drain", "fail", "command")
REASONS = ("Action:Replace", "Action:Reboot")
_LIMIT = 30.0  # seconds for the site's command


@dataclass(frozen=True)
class Blaming:
    """What the site wants done about a node that a run has lost."""

    action: str = "none"
    reason: str = REASONS[0]
    command: tuple[str, ...] = ()


def read(path: Path = SITE_FILE) -> Blaming:
    """The site's choice; nothing is done where there is no file. Raises UsageError where it is not clear."""
    try:
        table = msgspec.toml.decode(path.read_bytes())
    except FileNotFoundError:
        return Blaming()
    except (OSError, UnicodeDecodeError, msgspec.DecodeError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from error
    return understand(table.get("lost_nodes", {}), str(path))


def understand(table: Any, where: str) -> Blaming:
    """The table [lost_nodes] of the site's file. Raises UsageError."""
    if not isinstance(table, dict):
        raise UsageError(f"{where}: [lost_nodes] is a table")
    action, reason, command = (
        table.get("action", "none"),
        table.get("reason", REASONS[0]),
        table.get("command", []),
    )
    if action not in ACTIONS:
        raise UsageError(f"{where}: action = {action!r}: use one of {', '.join(ACTIONS)}")
    if reason not in REASONS:
        raise UsageError(f"{where}: reason = {reason!r}: use one of {', '.join(REASONS)}")
    if not isinstance(command, list) or not all(isinstance(word, str) for word in command):
        raise UsageError(f'{where}: command is a list of words, such as ["/usr/local/sbin/lost-node"]')
    if action == "command" and not command:
        raise UsageError(f"{where}: action is command, and there is no command = [...]")
    return Blaming(action, reason, tuple(command))


def fields(blaming: Blaming, job: str, how: str) -> Mapping[str, str]:
    """What to change of the node in Slurm; nothing for `none` and `command`."""
    text = f"everstep: lost by job {job} ({how})"
    if blaming.action == "comment":
        return {"Comment": text}
    if blaming.action == "drain":
        return {"State": "DRAIN", "Reason": text}
    if blaming.action == "fail":
        return {"State": "FAIL", "Reason": f"{blaming.reason} {text}"}
    return {}


def report(blaming: Blaming, client: SlurmClient, node: str, job: str, how: str) -> str:
    """Do what the site wants; one line on what was done, or why it was not. Empty where nothing is wanted."""
    if blaming.action == "none":
        return ""
    try:
        if blaming.action == "command":
            done = subprocess.run(
                [*blaming.command, node, job, how],
                timeout=_LIMIT,
                capture_output=True,
                check=False,
                text=True,
            )
            said = (done.stderr.strip() or done.stdout.strip()).splitlines()
            return (
                f"{blaming.command[0]} {node}: exit code {done.returncode}{': ' + said[-1] if said else ''}"
            )
        client.update_nodes([node], **fields(blaming, job, how))
    except (EverstepError, OSError, subprocess.SubprocessError) as error:
        return f"node {node} could not be reported ({blaming.action}): {error}"
    return f"node {node} was reported to Slurm ({blaming.action})"
