"""PURE: a batch script's text: its variables filled, and the directives that keep its job alive added."""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from everstep.launcher.slurm.getopt import Given, Option, read
from everstep.launcher.slurm.nokill import directives
from everstep.launcher.slurm.srun_table import SBATCH, OptionTable
from everstep.recovery.errors import UsageError


@dataclass(frozen=True)
class Variable:
    """A `NAME=value` line at the top of a script."""

    name: str
    value: str
    """As the shell would read it; empty: to be set by whoever submits it."""
    comment: str
    line: int
    """Its place in the text, from 0."""


_ASSIGNMENT = re.compile(
    r"""(?P<name>[A-Za-z_]\w*)=(?P<value>"[^"$`\\]*"|'[^']*'|[^\s"'$`;&|()<>\\#]*)"""
    r"""\s*(?P<comment>\#.*)?$"""
)


def variables(text: str) -> list[Variable]:
    """The plain assignments before a script's first command, in their order."""
    found: list[Variable] = []
    for at, line in enumerate(text.splitlines()):
        if not line.strip() or line.startswith("#"):
            continue
        match = _ASSIGNMENT.match(line)
        if match is None:
            if re.match(r"[A-Za-z_]\w*=", line):
                continue  # one that the shell has to work out: not to be filled, but no command either
            break
        comment = (match["comment"] or "").lstrip("# ")
        found.append(Variable(match["name"], match["value"].strip("\"'"), comment, at))
    return found


def fill(text: str, settings: Mapping[str, str]) -> str:
    """The script with these variables set.

    Raises UsageError where it has no such variable, or where one that it needs stays empty.
    """
    known = {variable.name: variable for variable in variables(text)}
    for name in settings:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            meant = f"did you mean {close[0]}?" if close else f"it has {', '.join(known) or 'none'}"
            raise UsageError(f"--set {name}: the script has no such variable at its top: {meant}")
    lines = text.splitlines(keepends=True)
    for name, value in settings.items():
        old = lines[known[name].line]
        comment = f"  # {known[name].comment}" if known[name].comment else ""
        lines[known[name].line] = f"{name}={shlex.quote(value)}{comment}{old[len(old.rstrip()) :]}"
    return "".join(lines)


def unset(text: str) -> list[Variable]:
    """The variables that somebody has to set: empty, and the script refuses that (`${NAME:?`)."""
    return [v for v in variables(text) if not v.value and f"${{{v.name}:?" in text]


@dataclass(frozen=True)
class Kept:
    """A script with what keeps its job alive."""

    text: str
    added: tuple[tuple[str, str], ...]
    """What was added, and why."""
    warnings: tuple[str, ...]


_WANTED = {
    "no-kill": "without it Slurm ends the whole job when one node dies",
    "requeue": "so that the job may go on from its newest checkpoint when nobody holds the state any more",
}


def keep_alive(text: str, given: Sequence[str], table: OptionTable = SBATCH) -> Kept:
    """Add `#SBATCH --no-kill` and `#SBATCH --requeue` where they are missing.

    They go into the script and not onto the command line, because Slurm shows the script to whoever asks
    later whether the job survives a lost node, and the command line mostly not.

    Parameters
    ----------
    text
        The script.
    given
        sbatch's options on the command line: what they say counts more than the script, as for sbatch.
    """
    line = Given.of(given, table)
    inside = Given(_options(directives(text), table))
    added: list[tuple[str, str]] = []
    warnings: list[str] = []
    for name, why in _WANTED.items():
        against = _against(name, line) or ("" if name in line else _against(name, inside))
        if against:
            warnings.append(f"{against} is kept as you gave it: {_COSTS[name]}")
        elif name not in inside:
            added.append(
                (f"--{name}", why if name not in line else "also in the script, where the job can see it")
            )
    return Kept(_insert(text, [option for option, _ in added]), tuple(added), tuple(warnings))


_COSTS = {
    "no-kill": "Slurm will end the whole job when one node dies",
    "requeue": "when nobody holds the state any more the job ends for good",
}


def _against(name: str, given: Given) -> str:
    """The option that says the contrary, as it was written; empty where none does."""
    if name == "no-kill" and name in given and (given.value(name) or "").lower() == "off":
        return given.shown(name)
    if name == "requeue" and "no-requeue" in given:
        return given.shown("no-requeue")
    return ""


def _options(words: Sequence[str], table: OptionTable) -> Iterable[Option]:
    try:
        return read(words, table, program="sbatch").options
    except UsageError:  # a directive of a plugin that we do not know: sbatch will say if it is wrong
        return [Option(word[2:].partition("=")[0], None, word) for word in words if word.startswith("--")]


def _insert(text: str, options: Sequence[str]) -> str:
    """The text with one more #SBATCH line for each option, after the last of them or the first line."""
    if not options:
        return text
    lines = text.splitlines(keepends=True)
    place = 1 if lines and lines[0].startswith("#!") else 0
    for at, line in enumerate(lines):
        if line.startswith("#SBATCH"):
            place = at + 1
        elif line.strip() and not line.startswith("#"):
            break
    if place and not lines[place - 1].endswith("\n"):
        lines[place - 1] += "\n"
    return "".join([*lines[:place], *(f"#SBATCH {option}\n" for option in options), *lines[place:]])


def difference(before: str, after: str, name: str) -> str:
    """What was changed, as a unified diff with little around it; empty where nothing was."""
    lines = difflib.unified_diff(
        before.splitlines(),
        after.splitlines(),
        f"{name} (as it is)",
        f"{name} (as submitted)",
        n=1,
        lineterm="",
    )
    return "\n".join(lines)


def interpreter(text: str) -> str:
    """The name of the program in its first line: `bash`; empty where it has none."""
    found = re.match(r"#!\s*(\S+)(?:\s+(\S+))?", text)
    if not found:
        return ""
    program = found[1].rpartition("/")[2]
    return (found[2] or "").rpartition("/")[2] if program == "env" else program
