"""PURE reading of whether a job was made with --no-kill, from what Slurm lets one see.

Slurm (22.05 to 24.11) shows it nowhere: neither `scontrol show job` nor its JSON has a field, and
sbatch sets no variable. So the evidence is what the job was made with: its batch script's #SBATCH
lines, the submit line that the accounting keeps, and the variables that sbatch and salloc read.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from everstep.launcher.slurm.getopt import Option, read
from everstep.launcher.slurm.srun_table import SBATCH
from everstep.recovery.errors import UsageError


class NoKill(NamedTuple):
    """Whether a job was made with --no-kill (None: it cannot be told), and why we think so."""

    value: bool | None
    reason: str


def judge(
    *,
    record: Mapping[str, Any] | None = None,
    script: str | None = None,
    submit_line: str | None = None,
    environ: Mapping[str, str] | None = None,
) -> NoKill:
    """Weigh what is known of how a job was made.

    Parameters
    ----------
    record
        The job in Slurm's JSON.
    script
        The batch script; None where it could not be read, empty where the job has none.
    submit_line
        The command that made the job (sacct's SubmitLine); None where it is not known.
    environ
        The environment inside the job, which holds what sbatch or salloc was started with.
    """
    record = record or {}
    environ = environ or {}
    kill = record.get("kill_on_node_fail")
    if isinstance(kill, bool):
        return NoKill(not kill, "Slurm says so")
    if submit_line is None and isinstance(record.get("submit_line"), str):
        submit_line = record["submit_line"] or None
    if submit_line is not None and (said := _in_words(_words(submit_line)[1:])) is not None:
        return NoKill(said, f"submitted as {submit_line!r}")
    for variable in ("SBATCH_NO_KILL", "SALLOC_NO_KILL"):
        if variable in environ:
            return NoKill(environ[variable].lower() != "off", f"{variable} is set")
    if script is not None and (said := _in_words(directives(script))) is not None:
        return NoKill(said, "an #SBATCH line of the job's script says so")
    if submit_line is not None and script is not None:
        return NoKill(False, "neither its submit line nor its script has --no-kill")
    if script:
        return NoKill(None, "its script has no `#SBATCH --no-kill`, and Slurm does not show the command line")
    return NoKill(None, "Slurm does not show how the job was made")


def _in_words(words: Sequence[str]) -> bool | None:
    """The last word on --no-kill among a command's options; what comes after its script is not looked at."""
    try:
        options = read(words, SBATCH).options
    except UsageError:  # an option that we do not know, a plugin's perhaps
        options = [
            option for word in words if word.startswith("-k") for option in read([word], SBATCH).options
        ]
        options += [Option("no-kill", word[10:] or None, word) for word in words if _NO_KILL.match(word)]
    said = [option.value for option in options if option.name == "no-kill"]
    return (said[-1] or "").lower() != "off" if said else None


_NO_KILL = re.compile(r"--no-kill(=|$)")


def directives(script: str) -> list[str]:
    """The words of a script's #SBATCH lines, which end where its first command begins."""
    words: list[str] = []
    for line in script.splitlines():
        if line.startswith("#SBATCH"):
            words += _words(line[len("#SBATCH") :])
        elif line.strip() and not line.startswith("#"):
            break
    return words


def _words(line: str) -> list[str]:
    try:
        return shlex.split(line, comments=True)
    except ValueError:  # an open quote: somebody's comment
        return line.split()
