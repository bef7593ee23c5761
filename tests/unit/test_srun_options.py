"""`everstep srun`: srun's options, ours and the user's command are told apart, each kept as written."""

from __future__ import annotations

from pathlib import Path

import pytest
from everstep.launcher import options as own_options
from everstep.launcher import srun
from everstep.launcher.options import RunOptions
from everstep.launcher.slurm.srun_table import BUILTIN, Arity, merge, parse_completion, parse_help
from everstep.recovery.errors import UsageError
from hypothesis import given, settings
from hypothesis import strategies as st

FIXTURES = Path(__file__).parent.parent / "fixtures" / "slurm"
COMMAND = ("torchrun", "--nproc-per-node=2", "train.py", "--epochs", "3")
RELEASES = ["22.05", "24.11"]


def text(name: str) -> str:
    return (FIXTURES / name).read_text()


def truth(release: str) -> dict[str, Arity]:
    """What each option of a release takes, asked of that srun itself, one option at a time."""
    pairs = (line.split() for line in text(f"srun-arity-{release}.txt").splitlines())
    return {name: Arity(arity) for name, arity in pairs}


# --- the table ---


@pytest.mark.parametrize("release", RELEASES)
def test_the_table_from_a_release_s_help_agrees_with_its_srun(release: str) -> None:
    table = merge(text(f"srun-help-{release}.txt"))
    for name, arity in truth(release).items():
        long = name[2:] if name.startswith("--") else table.letters[name[1:]]
        if arity is Arity.REQUIRED:
            assert table.longs[long] is Arity.REQUIRED, name
        else:  # none or optional: the next word is never its value
            assert table.longs[long] is not Arity.REQUIRED, name


@pytest.mark.parametrize("release", RELEASES)
def test_without_any_srun_the_built_in_table_agrees_too(release: str) -> None:
    for name, arity in truth(release).items():
        long = name[2:] if name.startswith("--") else BUILTIN.letters[name[1:]]
        assert (BUILTIN.longs[long] is Arity.REQUIRED) == (arity is Arity.REQUIRED), name


def test_the_completion_list_of_srun_24_11_is_exact() -> None:
    told = parse_completion(text("srun-autocomplete-24.11.txt"))
    assert told == {name[2:]: arity for name, arity in truth("24.11").items() if name.startswith("--")}


def test_options_of_a_site_s_plugins_are_read_from_the_help() -> None:
    plugins = """
Options provided by plugins:
      --auto-resume=0|1       go on when a node dies
      --container-image=[USER@][REGISTRY#]IMAGE[:TAG]|PATH
                              [pyxis] the image to use
      --container-mount-home  [pyxis] bind mount the user's home directory
      --power-cap[=WATTS]     limit the power
"""
    table = merge(text("srun-help-24.11.txt") + plugins)
    assert table.longs["auto-resume"] is Arity.REQUIRED
    assert table.longs["container-image"] is Arity.REQUIRED
    assert table.longs["container-mount-home"] is Arity.NONE
    assert table.longs["power-cap"] is Arity.OPTIONAL
    parts = srun.split(["--container-image", "img", "--container-mount-home", *COMMAND], table)
    assert parts.command == COMMAND


def test_a_later_srun_that_gives_an_option_a_value_is_believed() -> None:
    assert merge("      --contiguous=n          how contiguous\n").longs["contiguous"] is Arity.REQUIRED


def test_help_text_that_is_no_option_is_not_taken_for_one() -> None:
    assert (
        parse_help(
            "Usage: srun [OPTIONS(0)...\n                              --mem >= --mem-per-cpu if\n"
        ).longs
        == {}
    )


# --- where the command begins ---


@pytest.mark.parametrize(
    "words",
    [
        ["-N2"],
        ["-N", "2"],
        ["--nodes=2"],
        ["--nodes", "2"],
        ["--node", "2"],  # begins nodes, nodelist and nodefile: all three take a value
        ["--nodel", "n[1-2]"],
        ["-lN2"],
        ["-luN", "2"],
        ["-K"],
        ["-K0"],
        ["-Kl"],  # an optional value takes the rest of the word
        ["--kill-on-bad-exit"],
        ["--kill-on-bad-exit=1"],
        ["--kill"],
        ["--x11"],
        ["--x11=first"],
        ["-I", "-k"],
        ["-I60"],
        ["--mpi", "pmix"],
        ["--het-group", "1"],
        ["--cpu-bind=none"],
        ["--cpu-bind", "none"],
        ["--container", "/bundle"],
        ["--comment", "torchrun"],  # a value that looks like the command
        ["-J", "--nodes"],  # a value that looks like an option
        ["-o", "-"],
        ["--some-plugin=x"],
        ["-vvv", "-Q"],
        [],
    ],
)
def test_every_spelling_of_srun_s_options_is_passed_through_untouched(words: list[str]) -> None:
    assert srun.split([*words, *COMMAND]) == srun.Split((), tuple(words), COMMAND)


def test_everstep_s_own_options_may_stand_anywhere_before_the_command() -> None:
    parts = srun.split(["--standby", "2", "-N4", "--events=e.jsonl", "-l", "--spare-nodes", "1", *COMMAND])
    assert parts.everstep == ("--standby", "2", "--events=e.jsonl", "--spare-nodes", "1")
    assert parts.srun == ("-N4", "-l")
    assert parts.command == COMMAND


def test_options_after_the_command_s_name_are_the_command_s() -> None:
    command = ("torchrun", "-N3", "--standby=2", "--", "train.py", "--nodes", "3")
    assert srun.split(["-N2", *command]).command == command


def test_a_double_dash_ends_srun_s_options_and_is_left_out() -> None:
    assert srun.split(["-N2", "--", *COMMAND]) == srun.Split((), ("-N2",), COMMAND)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--some-plugin", "x"], "write --some-plugin=VALUE"),
        (["-y"], "-y: srun has no such option"),
        (["-N2"], "no command"),
        (["-N"], "-N needs a value"),
        (["--nodes"], "--nodes needs a value"),
        (["--standby"], "--standby needs a value"),
        (["-N1", "torchrun", "a.py", ":", "-N2", "torchrun", "b.py"], "heterogeneous"),
        (["--thread"], "--thread needs a value"),
        (["--ex", "torchrun"], "ambiguous (--exact, --exclude, --exclusive"),
    ],
)
def test_what_cannot_be_told_apart_is_refused_in_one_line(words: list[str], said: str) -> None:
    with pytest.raises(UsageError) as error:
        srun.split(words)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_asking_for_help_needs_no_command() -> None:
    assert srun.split(["--usage"]) == srun.Split((), ("--usage",), ())


NAMES = sorted(BUILTIN.longs)
OWN = sorted(own_options.names())
SHORTEST = {
    name: next(end for end in range(1, len(name) + 1) if BUILTIN.matching(name[:end]) == [name])
    for name in NAMES
}
LETTER_OF = {long: letter for letter, long in BUILTIN.letters.items()}
ATTACHED = st.sampled_from(
    [
        "2",
        "0",
        "n[1-2]",
        "--",
        "-",
        "-N",
        "--nodes",
        "--standby",
        "torchrun",
        "a b",
        "=",
        "=1",
        "k",
        "é",
        "\n",
        ":",
        "x",
    ]
)
VALUES = st.one_of(ATTACHED, st.just(""))


@st.composite
def srun_option(draw: st.DrawFn) -> list[str]:
    """One srun option in any spelling that getopt_long accepts."""
    name = draw(st.sampled_from(NAMES))
    arity = BUILTIN.longs[name]
    if name in LETTER_OF and draw(st.booleans()):
        word = "-" + draw(st.sampled_from(["", "l", "uQ", "vvv"])) + LETTER_OF[name]
        if arity is Arity.NONE:
            return [word]
        if arity is Arity.OPTIONAL:
            return [word + draw(VALUES)]
        return [word + draw(ATTACHED)] if draw(st.booleans()) else [word, draw(VALUES)]
    word = "--" + name[: draw(st.integers(SHORTEST[name], len(name)))]
    if arity is Arity.NONE or (arity is Arity.OPTIONAL and draw(st.booleans())):
        return [word]
    if arity is Arity.OPTIONAL or draw(st.booleans()):
        return [f"{word}={draw(VALUES)}"]
    return [word, draw(VALUES)]


@st.composite
def everstep_option(draw: st.DrawFn) -> list[str]:
    name = draw(st.sampled_from(OWN))
    return [f"{name}={draw(VALUES)}"] if draw(st.booleans()) else [name, draw(VALUES)]


@settings(max_examples=1000, deadline=None)
@given(
    st.lists(
        st.one_of(srun_option().map(lambda o: (False, o)), everstep_option().map(lambda o: (True, o))),
        max_size=7,
    ),
    st.booleans(),
    st.lists(VALUES.filter(lambda word: word != ":"), max_size=4),
)
def test_split_finds_the_command_and_loses_nothing(
    pieces: list[tuple[bool, list[str]]], separator: bool, arguments: list[str]
) -> None:
    words = [word for _, piece in pieces for word in piece]
    command = ["torchrun", *arguments]
    parts = srun.split([*words, *(["--"] if separator else []), *command])
    assert list(parts.everstep) == [word for ours, piece in pieces if ours for word in piece]
    assert list(parts.srun) == [word for ours, piece in pieces if not ours for word in piece]
    assert list(parts.command) == command


@settings(max_examples=500, deadline=None)
@given(st.lists(VALUES, max_size=6))
def test_any_words_at_all_are_split_or_refused_in_one_line(words: list[str]) -> None:
    try:
        parts = srun.split(words)
    except UsageError as error:
        assert str(error)
    else:
        dashes = words.count("--") - sum(part.count("--") for part in parts)
        assert sorted([*parts.everstep, *parts.srun, *parts.command, *["--"] * dashes]) == sorted(words)


# --- everstep's own options ---


def test_own_options_are_parsed_with_their_defaults() -> None:
    assert own_options.parse([]) == RunOptions()
    parsed = own_options.parse(["--standby=0", "--events", "e.jsonl", "--resume", "none"])
    assert parsed.standby == 0
    assert parsed.resume == "none"
    assert parsed.events == Path.cwd() / "e.jsonl"


@pytest.mark.parametrize(
    "words", [["--standby=-1"], ["--standby=x"], ["--resume=maybe"], ["--standbys=1"], ["x"]]
)
def test_own_options_that_will_not_do_are_refused_in_one_line(words: list[str]) -> None:
    with pytest.raises(UsageError) as error:
        own_options.parse(words)
    assert "\n" not in str(error.value)


def test_no_option_of_srun_is_shadowed_by_one_of_ours() -> None:
    assert not {name[2:] for name in own_options.names()} & set(BUILTIN.longs)
