"""PURE reading of srun's options as getopt_long reads them, each kept exactly as it was written."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from everstep.launcher.slurm.srun_table import Arity, OptionTable
from everstep.recovery.errors import UsageError


@dataclass(frozen=True)
class Option:
    """One option: its long name, its value, and which words it was read from."""

    name: str
    """The long name in full; the abbreviation itself where several options begin so."""
    value: str | None
    spelling: str
    """What the user wrote, without the value: `-N`, `--nodes`, `--node`."""


class Piece(NamedTuple):
    """Words that belong together, as written, and the options in them (a cluster `-lN2` holds two)."""

    words: tuple[str, ...]
    options: tuple[Option, ...]


class Reading(NamedTuple):
    """A command line up to its first word that is no option."""

    pieces: list[Piece]
    separator: bool
    """Whether `--` ended the options."""
    rest: list[str]

    @property
    def options(self) -> list[Option]:
        return [option for piece in self.pieces for option in piece.options]


def read(
    argv: Sequence[str], table: OptionTable, own: Mapping[str, bool] | None = None, program: str = "srun"
) -> Reading:
    """Read options up to the first word that is none, or `--`.

    Parameters
    ----------
    argv
        The words after the program's name.
    table
        srun's options.
    own
        Everstep's options in full (`--standby`), and whether a value follows each; they may stand
        anywhere among srun's and are never abbreviated, so that they cannot shadow one of srun's.
    program
        Whose options these are, for messages: srun or sbatch.

    Raises
    ------
    UsageError
        An option without its value, or an unknown one of which it cannot be told whether the next
        word is its value.
    """
    own = own or {}
    pieces: list[Piece] = []
    at = 0
    while at < len(argv):
        word = argv[at]
        if word == "--":
            return Reading(pieces, True, list(argv[at + 1 :]))
        if word == "-" or not word.startswith("-"):
            break
        following = argv[at + 1] if at + 1 < len(argv) else None
        name, attached, _ = word.partition("=")
        if name in own:
            piece = _long(word, following, Arity.REQUIRED if own[name] else Arity.NONE, name[2:])
        elif word.startswith("--"):
            if not table.matching(name[2:]) and not attached:
                raise UsageError(
                    f"{program}: {name}: not an option of this release that Everstep knows, so it cannot "
                    f"tell where your command begins: if it belongs to a plugin, write {name}=VALUE"
                )
            full, arity = _resolve(name[2:], table, program)
            piece = _long(word, following, arity, full)
        else:
            piece = _cluster(word, following, table, program)
        pieces.append(piece)
        at += len(piece.words)
    return Reading(pieces, False, list(argv[at:]))


def _resolve(name: str, table: OptionTable, program: str) -> tuple[str, Arity]:
    candidates = table.matching(name)
    if not candidates:
        return name, Arity.OPTIONAL  # unknown, and its value is attached: passed through
    arities = {table.longs[candidate] for candidate in candidates}
    if len(candidates) == 1:
        return candidates[0], arities.pop()
    # Ambiguous to us, but perhaps not to srun, whose release may lack one of them; what matters here
    # is only whether the next word belongs to it.
    if Arity.REQUIRED not in arities:
        return name, Arity.OPTIONAL
    if len(arities) == 1:
        return name, Arity.REQUIRED
    listed = ", ".join(f"--{candidate}" for candidate in candidates)
    raise UsageError(f"{program}: --{name} is ambiguous ({listed}): write the option in full")


def _long(word: str, following: str | None, arity: Arity, name: str) -> Piece:
    spelling, attached, value = word.partition("=")
    if attached or arity is not Arity.REQUIRED:
        return Piece((word,), (Option(name, value if attached else None, spelling),))
    if following is None:
        raise UsageError(f"{spelling} needs a value: {spelling}=VALUE")
    return Piece((word, following), (Option(name, following, spelling),))


def _cluster(word: str, following: str | None, table: OptionTable, program: str) -> Piece:
    options: list[Option] = []
    for at, letter in enumerate(word[1:], start=1):
        name = table.letters.get(letter)
        if name is None:
            raise UsageError(
                f"{program}: -{letter}: {program} has no such option (in {word!r}); see `{program} --help`"
            )
        arity, attached = table.longs[name], word[at + 1 :]
        if arity is Arity.NONE:
            options.append(Option(name, None, f"-{letter}"))
            continue
        if arity is Arity.OPTIONAL or attached:
            options.append(Option(name, attached or None, f"-{letter}"))
            return Piece((word,), tuple(options))
        if following is None:
            raise UsageError(f"{program}: -{letter} needs a value, as in -{letter} VALUE")
        options.append(Option(name, following, f"-{letter}"))
        return Piece((word, following), tuple(options))
    return Piece((word,), tuple(options))


_ALIASES = {"tasks-per-node": "ntasks-per-node", "cpu_bind": "cpu-bind", "nodefile": "nodelist"}


class Given:
    """srun's options as the user gave them; the last of several with one name counts, as for srun."""

    def __init__(self, options: Iterable[Option]) -> None:
        self._options = {_ALIASES.get(option.name, option.name): option for option in options}

    @classmethod
    def of(cls, argv: Sequence[str], table: OptionTable) -> Given:
        return cls(read(argv, table).options)

    def __contains__(self, name: str) -> bool:
        return name in self._options

    def any(self, *names: str) -> bool:
        return any(name in self._options for name in names)

    def value(self, name: str) -> str | None:
        option = self._options.get(name)
        return option.value if option else None

    def shown(self, name: str) -> str:
        """As the user wrote it, near enough to be recognised."""
        option = self._options[name]
        if option.value is None:
            return option.spelling
        return f"{option.spelling}{'=' if option.spelling.startswith('--') else ''}{option.value}"
