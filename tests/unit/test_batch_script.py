"""What `everstep sbatch` makes of a script: variables filled, the job kept alive, all shown."""

from __future__ import annotations

from pathlib import Path

import pytest
from everstep.launcher.batch_script import difference, fill, interpreter, keep_alive, unset, variables
from everstep.launcher.sbatch import check_syntax, find_script, listing, parse, run_sbatch, templates
from everstep.launcher.slurm.srun_table import SBATCH
from everstep.recovery.errors import UsageError

SCRIPT = """\
#!/bin/bash
# Trains.
#SBATCH --nodes=4
#SBATCH --time=1:00

SCRIPT=  # your script
WORKERS=8 # on each node
NAME='two words'
HERE=$(pwd)
LAST=1

: "${SCRIPT:?set SCRIPT}"
LATER=3
everstep srun torchrun "$SCRIPT"
"""


def test_variables_are_the_plain_assignments_before_the_first_command() -> None:
    found = [(v.name, v.value, v.comment) for v in variables(SCRIPT)]
    assert found == [
        ("SCRIPT", "", "your script"),
        ("WORKERS", "8", "on each node"),
        ("NAME", "two words", ""),
        ("LAST", "1", ""),
    ]


def test_filling_quotes_for_the_shell_and_keeps_the_comment() -> None:
    text = fill(SCRIPT, {"SCRIPT": "my train.py", "WORKERS": "2"})
    assert "SCRIPT='my train.py'  # your script\nWORKERS=2  # on each node\n" in text
    assert text.count("\n") == SCRIPT.count("\n")
    assert unset(SCRIPT)[0].name == "SCRIPT"
    assert unset(text) == []


@pytest.mark.parametrize("value", ["$(reboot)", "a'b", "x; rm -rf ~", "`id`", ""])
def test_no_value_becomes_a_command(value: str, tmp_path: Path) -> None:
    import subprocess

    text = fill('#!/bin/bash\nA=1\nprintf %s "$A"\n', {"A": value})
    assert subprocess.run(["bash"], input=text, capture_output=True, text=True, check=True).stdout == value


def test_a_variable_that_is_not_there_is_refused_with_the_one_that_was_meant() -> None:
    with pytest.raises(UsageError, match="did you mean SCRIPT"):
        fill(SCRIPT, {"SCRPT": "x"})
    with pytest.raises(UsageError, match="no such variable at its top: it has SCRIPT, WORKERS"):
        fill(SCRIPT, {"QUITE_ANOTHER": "4"})


def test_what_keeps_the_job_alive_is_added_after_the_other_directives_with_reasons() -> None:
    kept = keep_alive(SCRIPT, [])
    assert "#SBATCH --time=1:00\n#SBATCH --no-kill\n#SBATCH --requeue\n\nSCRIPT=" in kept.text
    assert [option for option, _ in kept.added] == ["--no-kill", "--requeue"]
    assert all(why for _, why in kept.added)
    assert keep_alive(kept.text, []).added == ()


@pytest.mark.parametrize(
    ("directive", "given", "added", "warnings"),
    [
        ("#SBATCH -k --requeue", [], [], 0),
        ("#SBATCH --no-kill=off", [], ["--requeue"], 1),
        ("#SBATCH --no-kill=off", ["--no-kill"], ["--requeue"], 0),
        ("#SBATCH --no-requeue", [], ["--no-kill"], 1),
        ("", ["--no-requeue", "-N4"], ["--no-kill"], 1),
        ("", ["--no-kill"], ["--no-kill", "--requeue"], 0),
        ("##SBATCH --no-kill", [], ["--no-kill", "--requeue"], 0),
        ("#SBATCH --site-plugin=x --no-kill --requeue", [], [], 0),
    ],
)
def test_the_user_s_word_is_kept(directive: str, given: list[str], added: list[str], warnings: int) -> None:
    kept = keep_alive(f"#!/bin/bash\n{directive}\ntrue\n", given)
    assert [option for option, _ in kept.added] == added
    assert len(kept.warnings) == warnings


def test_a_script_without_directives_gets_them_after_its_first_line() -> None:
    assert keep_alive("#!/bin/sh", []).text == "#!/bin/sh\n#SBATCH --no-kill\n#SBATCH --requeue\n"


def test_what_is_changed_is_shown() -> None:
    shown = difference(SCRIPT, keep_alive(SCRIPT, []).text, "job.sh")
    assert "+#SBATCH --no-kill" in shown
    assert "job.sh (as submitted)" in shown
    assert difference(SCRIPT, SCRIPT, "job.sh") == ""


def test_the_command_line_is_taken_apart() -> None:
    line = ["-N", "4", "--set", "A=b=c", "--dry-run", "--time=5", "job.sh", "--set", "-N1"]
    asked = parse(line, SBATCH)
    assert asked.settings == {"A": "b=c"}
    assert asked.dry_run
    assert asked.sbatch == ("-N", "4", "--time=5")
    assert (asked.script, asked.args) == ("job.sh", ("--set", "-N1"))
    assert parse(["--wait", "job.sh"], SBATCH).script == "job.sh", "sbatch's --wait takes no value"
    assert parse(["--wrap", "true"], SBATCH).script is None


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (["-N4"], "no script after"),
        (["--set", "A", "x"], "NAME=VALUE"),
        (["--frobnicate", "x"], "^sbatch: "),
        (["job.sh", "--epochs=3", "--dry-run"], "`everstep sbatch --dry-run`"),
    ],
)
def test_a_command_line_that_is_wrong_is_one_line(line: list[str], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        parse(line, SBATCH)


def test_a_script_with_dos_line_ends_is_submitted_with_unix_ones_and_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The job would fail at `bash^M`, or sbatch refuse it, though everything looks right in an editor."""
    script = tmp_path / "job.sh"
    script.write_bytes(b"#!/bin/bash\r\n#SBATCH --requeue --no-kill\r\nSTEPS=1\r\necho $STEPS\r\n")
    for name in ("sbatch", "scontrol"):  # not the release's own: what is given to them is kept
        (tmp_path / name).write_text(
            f'#!/bin/sh\nfor last; do :; done\n[ -f "$last" ] && cp "$last" {tmp_path}/kept\necho 7\n'
        )
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert run_sbatch(["--set", "STEPS=5", str(script)]) == 0
    assert (tmp_path / "kept").read_bytes().startswith(b"#!/bin/bash\n#SBATCH --requeue --no-kill\nSTEPS=5\n")
    assert "job.sh has DOS line ends" in capsys.readouterr().err
    assert b"\r\n" in script.read_bytes(), "the user's file is left as it is"


def test_a_file_comes_before_a_template_of_its_name(tmp_path: Path) -> None:
    assert find_script("ddp", tmp_path)[0] == "ddp.sbatch"
    assert find_script("ddp.sbatch", tmp_path)[2] is None
    (tmp_path / "ddp").write_text("#!/bin/sh\n")
    assert find_script("ddp", tmp_path)[1:] == ("#!/bin/sh\n", tmp_path / "ddp")
    with pytest.raises(UsageError, match="did you mean the template auto-resume"):
        find_script("autoresume", tmp_path)


@pytest.mark.parametrize(
    ("text", "said"),
    [("#!/bin/bash\nif true\n", "bash script: line 3: syntax error"), ("true\n", "first line")],
)
def test_a_script_that_is_not_sound_is_refused(text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        check_syntax("job.sh", text)
    check_syntax("job.py", "#!/usr/bin/env python3\nif True: pass\n")


@pytest.mark.parametrize(
    ("line", "program"),
    [("#!/bin/bash -l", "bash"), ("#!/usr/bin/env bash", "bash"), ("#! /bin/sh", "sh"), ("true", "")],
)
def test_the_interpreter_is_read(line: str, program: str) -> None:
    assert interpreter(line + "\n") == program


# --- the templates ---


@pytest.mark.parametrize("name", ["auto-resume", "ddp", "deepspeed", "whole-group-restart"])
def test_a_template_needs_nothing_added_and_says_what_a_kill_does(name: str) -> None:
    text = templates()[f"{name}.sbatch"]
    check_syntax(name, text)
    assert keep_alive(text, []).added == ()
    assert unset(text)[0].name == "SCRIPT"
    assert all(variable.comment for variable in variables(text))
    assert "# A kill in its middle:" in text
    assert f"{name}.sbatch: " in listing()
