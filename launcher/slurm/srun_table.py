"""Which of srun's options take a value: known facts, corrected by what the installed release says.

srun says it in two ways. `srun --autocomplete=--` (24.11 and later) lists every option as getopt
knows it; `srun --help` (every release) leaves some out and does not mark every value, but shows
the options of site plugins. What neither shows is known here.
"""

from __future__ import annotations

import enum
import re
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field


class Arity(enum.Enum):
    """Whether an option takes a value, as getopt understands it."""

    NONE = "none"
    OPTIONAL = "optional"
    """Only attached: `--nice=5`, `-K0`; the next word is never its value."""
    REQUIRED = "required"
    """Attached or as the next word."""


@dataclass(frozen=True)
class OptionTable:
    """The long options with their arity, and the long name behind each letter."""

    longs: Mapping[str, Arity]
    letters: Mapping[str, str] = field(default_factory=dict)

    def matching(self, name: str) -> list[str]:
        """The long options that `name` may stand for, as getopt_long has it: itself, or all it begins."""
        if name in self.longs:
            return [name]
        return sorted(long for long in self.longs if long.startswith(name))


_NONE = """
    contiguous debugger-test disable-status exact help hold interactive label multi-prog no-allocate
    overcommit oversubscribe preserve-env quiet quit-on-interrupt reboot spread-job stepmgr test-only
    unbuffered usage use-min-nodes verbose version whole
"""
_OPTIONAL = """
    bcast compress exclusive external-launcher immediate kill-on-bad-exit nice no-kill oom-kill-step
    overlap propagate pty resv-ports send-libs x11
"""
_REQUIRED = """
    accel-bind account acctg-freq autocomplete bb bbf bcast-exclude begin chdir cluster
    cluster-constraint clusters comment constraint container container-id context core-spec
    cores-per-socket cpu-bind cpu-freq cpu_bind cpus-per-gpu cpus-per-task deadline delay-boot
    dependency distribution epilog error exclude export extra extra-node-info gid gpu-bind gpu-freq gpus
    gpus-per-node gpus-per-socket gpus-per-task gres gres-flags het-group hint input job-name jobid
    licenses mail-type mail-user mcs-label mem mem-bind mem-per-cpu mem-per-gpu mincpus mpi msg-timeout
    network nodefile nodelist nodes ntasks ntasks-per-core ntasks-per-gpu ntasks-per-node
    ntasks-per-socket ntasks-per-tres open-mode output pack-group partition power prefer priority profile
    prolog qos relative reservation segment signal slurmd-debug sockets-per-node switches task-epilog
    task-prolog tasks-per-node thread-spec threads threads-per-core time time-min tmp treewidth tres-bind
    tres-per-task uid wait wckey
"""
_LETTERS = """
    A:account B:extra-node-info C:constraint D:chdir E:preserve-env F:nodefile G:gpus H:hold I:immediate
    J:job-name K:kill-on-bad-exit L:licenses M:clusters N:nodes O:overcommit Q:quiet S:core-spec
    T:threads V:version W:wait X:disable-status Z:no-allocate b:begin c:cpus-per-task d:dependency
    e:error h:help i:input k:no-kill l:label m:distribution n:ntasks o:output p:partition q:qos r:relative
    s:oversubscribe t:time u:unbuffered v:verbose w:nodelist x:exclude
"""

BUILTIN = OptionTable(
    longs={
        **dict.fromkeys(_NONE.split(), Arity.NONE),
        **dict.fromkeys(_OPTIONAL.split(), Arity.OPTIONAL),
        **dict.fromkeys(_REQUIRED.split(), Arity.REQUIRED),
    },
    letters=dict(pair.split(":", 1) for pair in _LETTERS.split()),
)
"""What srun 22.05 to 24.11 take, asked of the programs themselves (tests/fixtures/slurm)."""

SBATCH = OptionTable(
    longs={
        **BUILTIN.longs,
        **dict.fromkeys(["array", "batch", "export-file", "kill-on-invalid-dep", "wrap"], Arity.REQUIRED),
        **dict.fromkeys(["ignore-pbs", "no-requeue", "parsable", "requeue", "wait"], Arity.NONE),
        "get-user-env": Arity.OPTIONAL,
    },
    letters={**BUILTIN.letters, "a": "array", "W": "wait"},
)
"""sbatch's options, near enough: most are srun's, and --wait takes no value."""

_HELP_LINE = re.compile(
    r"""^\s{2,6}(?:-(?P<letter>[A-Za-z]),?\s+)?   # -N,
        --(?P<name>[A-Za-z0-9][\w-]*)             # --nodes
        (?P<value>\[?=\S*)?                       # =N or [=N]
        (?:\s|$)""",
    re.VERBOSE,
)


def parse_help(text: str) -> OptionTable:
    """The options that a text of `srun --help` shows, plugins' options included."""
    longs: dict[str, Arity] = {}
    letters: dict[str, str] = {}
    for line in text.splitlines():
        if not (found := _HELP_LINE.match(line)):
            continue
        name, value = found["name"], found["value"]
        if value is None:
            longs.setdefault(name, Arity.NONE)
        else:
            longs[name] = Arity.OPTIONAL if value.startswith("[") else Arity.REQUIRED
        if found["letter"]:
            letters[found["letter"]] = name
    return OptionTable(longs, letters)


def parse_completion(text: str) -> Mapping[str, Arity]:
    """The long options in the output of `srun --autocomplete=--`.

    One that takes a value ends in `=`; one that may or may not is there twice, with it and without.
    """
    spellings: dict[str, set[bool]] = {}
    for word in text.split():
        if word.startswith("--") and len(word) > 2:
            spellings.setdefault(word[2:].rstrip("="), set()).add(word.endswith("="))
    arity = {frozenset([False]): Arity.NONE, frozenset([True]): Arity.REQUIRED}
    return {name: arity.get(frozenset(seen), Arity.OPTIONAL) for name, seen in spellings.items()}


def merge(help_text: str = "", completion_text: str = "", known: OptionTable = BUILTIN) -> OptionTable:
    """The table of a release: what it says itself where it can be trusted, the known facts for the rest.

    The help is trusted for options that are not built in and, of those that are, never for there
    being no value (it shows `--container` and `--kill-on-bad-exit` bare). The completion is getopt's
    own table and wins.
    """
    shown = parse_help(help_text)
    longs = dict(known.longs)
    longs.update(_news(shown.longs, known))
    longs.update(parse_completion(completion_text))
    # Only for options nobody knows: a site's plugin has no letters, a later Slurm may.
    letters = {**shown.letters, **known.letters}
    return OptionTable(longs, letters)


def _news(shown: Mapping[str, Arity], table: OptionTable) -> Iterator[tuple[str, Arity]]:
    for name, arity in shown.items():
        known = table.longs.get(name)
        if known is None or (known is Arity.NONE and arity is not Arity.NONE):
            yield name, arity


def installed_table(srun: str = "srun", timeout: float = 10.0) -> OptionTable:
    """The table of the srun on this machine; the built-in one where it does not answer.

    Whether srun is there at all is not asked here: `cli_json.require` does, with a message.
    """
    known = SBATCH if srun.rpartition("/")[2] == "sbatch" else BUILTIN
    return merge(_output(srun, "--help", timeout), _output(srun, "--autocomplete=--", timeout), known)


def help_of(command: str, timeout: float = 10.0) -> str:
    """What `command --help` prints, site plugins' options included; empty where it does not answer."""
    return _output(command, "--help", timeout)


def _output(srun: str, option: str, timeout: float) -> str:
    try:
        done = subprocess.run(
            [srun, option],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""
