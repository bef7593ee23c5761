"""`everstep sbatch`: fill a template or take a script, check it, show what is submitted, and submit it."""

from __future__ import annotations

import difflib
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from everstep.launcher import batch_script
from everstep.launcher.slurm.client import SlurmClient
from everstep.launcher.slurm.commands import require
from everstep.launcher.slurm.connect import connect
from everstep.launcher.slurm.getopt import Given, read
from everstep.launcher.slurm.srun_table import SBATCH, OptionTable, installed_table
from everstep.launcher.voice import say
from everstep.recovery.errors import UsageError

HELP = """\
Usage: everstep sbatch [--set NAME=VALUE]... [--dry-run] [any sbatch options] TEMPLATE|script [args]
       everstep sbatch --list

Submit a batch script, or one of Everstep's templates, as a job that survives its nodes.

  everstep sbatch --set SCRIPT=train.py --nodes=9 ddp
  everstep sbatch --dry-run train.sbatch --epochs 3

The script is checked (bash -n, sbatch --test-only) and shown as far as it is changed, then submitted.
--no-kill and --requeue are added where they are missing.

  --set NAME=VALUE  Set a variable at the top of the script.
  --dry-run         Check and show, and do not submit.
  --list            List the templates and their variables.

sbatch's options are passed on as they are: see `sbatch --help`.
"""

_OWN = {"--set": True, "--dry-run": False}
_LIST_FIRST = "everstep sbatch --list lists the templates"


@dataclass(frozen=True)
class Asked:
    """A command line of `everstep sbatch`, taken apart."""

    settings: Mapping[str, str]
    dry_run: bool
    sbatch: tuple[str, ...]
    script: str | None
    args: tuple[str, ...]


def parse(argv: Sequence[str], table: OptionTable) -> Asked:
    """Tell everstep's options, sbatch's, the script and its arguments apart. Raises UsageError."""
    reading = read(argv, table, _OWN, program="sbatch")
    settings: dict[str, str] = {}
    dry_run = False
    sbatch: list[str] = []
    for piece in reading.pieces:
        own = piece.words[0].partition("=")[0]
        if own == "--set":
            name, equals, value = (piece.options[0].value or "").partition("=")
            if not equals or not name:
                raise UsageError(f"--set {name}: write --set NAME=VALUE")
            settings[name] = value
        elif own == "--dry-run":
            dry_run = True
        else:
            sbatch += piece.words
    if not reading.rest and "wrap" not in Given(reading.options):
        raise UsageError(f"no script after sbatch's options: name a script or a template ({_LIST_FIRST})")
    script, args = (reading.rest[0], tuple(reading.rest[1:])) if reading.rest else (None, ())
    if "--dry-run" in args:
        raise UsageError(
            "--dry-run behind the script would go to the script, and the job be submitted: write "
            "`everstep sbatch --dry-run` first (an option of that name of the script's own: use sbatch)"
        )
    return Asked(settings, dry_run, tuple(sbatch), script, args)


def run_sbatch(words: Sequence[str]) -> int:
    """Everything behind `everstep sbatch`: the exit code. Raises UsageError."""
    if not words or words[0] in ("-h", "--help"):
        print(HELP, end="")
        return 0 if words else 64
    if words[0] == "--list":
        print(listing(), end="")
        return 0
    require("sbatch")
    asked = parse(words, installed_table("sbatch"))
    client = connect()
    if asked.script is None:
        return _wrapped(asked, client)
    name, before, place = find_script(asked.script, Path.cwd())
    return _submit(asked, name, before, place, client)


def _submit(asked: Asked, name: str, before: str, place: Path | None, client: SlurmClient) -> int:
    if "\r\n" in before:
        say(f"{name} has DOS line ends (CR LF), which sbatch refuses: what is submitted has UNIX ones")
        before, place = before.replace("\r\n", "\n"), None
    after = batch_script.fill(before, asked.settings)
    missing = batch_script.unset(after)
    if missing:
        told = "; ".join(f"--set {v.name}=… ({v.comment or 'it has no default'})" for v in missing)
        raise UsageError(f"{name} needs {told}")
    kept = batch_script.keep_alive(after, asked.sbatch, installed_table("sbatch"))
    check_syntax(name, after)
    for option, why in kept.added:
        say(f"#SBATCH {option} added: {why}")
    for warning in kept.warnings:
        say(f"WARNING: {warning}")
    if changes := batch_script.difference(before, kept.text, name):
        print(changes, file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="everstep-") as folder:
        if place is None or kept.text != before:
            # sbatch takes its own copy; the name is kept, since it is the job's by default.
            place = Path(folder, name)
            place.write_text(kept.text)
        argv = [*asked.sbatch, str(place), *asked.args]
        return _test_and_submit(client, argv, asked.dry_run)


def _wrapped(asked: Asked, client: SlurmClient) -> int:
    """`--wrap`: there is no script to add to."""
    if asked.settings:
        raise UsageError("--set is for the variables of a script, and --wrap makes one without any")
    kept = batch_script.keep_alive("#!/bin/sh\n", asked.sbatch)
    given = Given.of(asked.sbatch, installed_table("sbatch"))
    added = [(option, why) for option, why in kept.added if option[2:] not in given]
    for option, why in added:
        say(f"{option} added: {why}")
    return _test_and_submit(client, [*(option for option, _ in added), *asked.sbatch], asked.dry_run)


def _test_and_submit(client: SlurmClient, argv: Sequence[str], dry_run: bool) -> int:
    for line in client.test_submit(argv).splitlines():
        say(line.removeprefix("sbatch: "))
    if dry_run:
        say("not submitted (--dry-run)")
        return 0
    if "wait" in Given(read(argv, SBATCH, program="sbatch").options):
        return subprocess.call(["sbatch", *argv])  # as long as the job lasts; its exit code is the job's
    job = client.submit(argv)
    say(f"how it goes: everstep status {job}")
    print(f"Submitted batch job {job}", flush=True)
    return 0


def find_script(name: str, here: Path) -> tuple[str, str, Path | None]:
    """The script's name, its text, and where it is (None: a template of ours).

    A file of that name comes first. Raises UsageError where there is neither.
    """
    path = here / name
    try:
        if path.is_file():
            return path.name, path.read_bytes().decode(), path  # line ends as they are
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{name} cannot be read as a script: {error}") from error
    ours = templates()
    for candidate in (name, f"{name}.sbatch"):
        if candidate in ours:
            return candidate, ours[candidate], None
    close = difflib.get_close_matches(name, [*ours, *(n.removesuffix(".sbatch") for n in ours)], n=1)
    meant = f": did you mean the template {close[0]}?" if close else ""
    raise UsageError(f"{name}: no such script here, and no such template{meant} ({_LIST_FIRST})")


def templates() -> dict[str, str]:
    """The templates that come with Everstep: name and text."""
    folder = resources.files("everstep.sbatch_templates")
    names = sorted(file.name for file in folder.iterdir() if file.name.endswith(".sbatch"))
    return {name: folder.joinpath(name).read_text() for name in names}


def listing() -> str:
    """The templates, what each is for (its second line), and its variables."""
    told = []
    for name, text in templates().items():
        lines = [f"{name}: {text.splitlines()[1].lstrip('# ')}"]
        for variable in batch_script.variables(text):
            value = variable.value or "(to be set)"
            lines.append(f"    {variable.name}={value}".ljust(30) + f" {variable.comment}")
        told.append("\n".join(lines) + "\n")
    return "\n".join(told)


def check_syntax(name: str, text: str) -> None:
    """`bash -n`, where it is a script for bash or sh. Raises UsageError with bash's own words."""
    program = batch_script.interpreter(text)
    if not program:
        raise UsageError(f"{name}: its first line must say what runs it: #!/bin/bash")
    if program not in ("bash", "sh"):
        return
    done = subprocess.run(
        [program, "-n"],
        input=text,
        capture_output=True,
        text=True,
        env={**os.environ, "LC_ALL": "C"},
        check=False,
    )
    if done.returncode != 0:
        said = (done.stderr.strip().splitlines() or ["it says nothing"])[0]
        raise UsageError(f"{name} is no sound {program} script: {said.removeprefix(f'{program}: ')}")
