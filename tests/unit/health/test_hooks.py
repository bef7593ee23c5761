"""HealthCheckProgram, Prolog and Epilog: what they ask, leave behind and answer, and that they fail open."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest
from everstep.healthcheck import child, hooks, records, site
from everstep.healthcheck.child import Answer
from everstep.healthcheck.errors import HealthError
from everstep.healthcheck.hooks import Machine, epilog, keep_last, program, prolog
from everstep.healthcheck.policy import Action, InSlurm
from everstep.healthcheck.records import Record
from everstep.healthcheck.result import Report, Result, Severity, Status
from everstep.healthcheck.site import Loaded, Policy, Site, Switch
from everstep.healthcheck.slurm_node import SlurmNode
from everstep.recovery.errors import UsageError

BAD = Result(Status.CRITICAL, "Xid 95", Severity.RESET, "gpu3", check="xid")
GOOD = Result(Status.OK, "no Xid", check="xid")
IDLE = InSlurm(frozenset({"IDLE"}))
OURS = "everstep: xid gpu3 reset: Xid 95"


@pytest.fixture(autouse=True)
def not_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """Root trusts nothing below /tmp, where tests are; that it does not is for test_site."""
    monkeypatch.setattr(os, "geteuid", lambda: 1000)


@dataclass
class Books:
    """A Slurm that knows one node."""

    now: InSlurm = IDLE
    held: str = ""
    fails: str = ""
    acts: list[Action] = field(default_factory=list)
    fields: list[str] = field(default_factory=list)

    def look(self, node: str) -> tuple[InSlurm, str]:
        if self.fails == "look":
            raise HealthError("slurmctld gave no answer")
        return self.now, self.held

    def act(self, node: str, action: Action) -> None:
        if self.fails == "act":
            raise HealthError("Access denied")
        self.acts.append(action)
        drained = action.kind != "undrain"
        self.now = InSlurm(frozenset({"IDLE", "DRAIN"} if drained else {"IDLE"}), action.reason, "root", 7.0)

    def write_field(self, node: str, text: str) -> None:
        self.fields.append(text)
        self.held = text


class Bench:
    """A machine whose checks say what they are told to."""

    def __init__(self, folder: Path, **settings: object) -> None:
        self.folder = folder
        self.slurm = Books()
        self.results: Sequence[Result] | None = (GOOD,)
        self.faults: tuple[str, ...] = ()
        self.asked: list[tuple[str, float]] = []
        self.moments: list[bool] = []
        self.gpus = ""
        self.now = 1000.0
        self.boot = "a"
        self.said: list[str] = []
        self.site = Site(**{"mode": "drain", "state_dir": str(folder / "state"), **settings})  # type: ignore[arg-type]

    def machine(self) -> Machine:
        self.now += 60
        return Machine(
            Loaded(self.site, "test"),
            self.slurm,
            self.checks,
            clock=lambda: self.now,
            log=self.said.append,
            boot=self.boot,
            environ={"SLURM_JOB_ID": "12", "SLURMD_NODENAME": "n1", "SLURM_JOB_GPUS": self.gpus},
        )

    def checks(self, level: str, limit_s: float, moment: bool) -> Answer:
        self.asked.append((level, limit_s))
        self.moments.append(moment)
        if self.results is None:
            return Answer(None, ("the checks did not end in 45 s and were killed",))
        return Answer(Report("n1", "p5", level, tuple(self.results)), self.faults)

    @property
    def last(self) -> Record:
        return records.from_json((self.folder / "state" / "last.json").read_bytes())


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


# --- HealthCheckProgram ---


def test_a_sick_node_is_drained_and_given_back_when_it_is_sound(bench: Bench) -> None:
    bench.results = (BAD,)
    assert program(bench.machine()) == 0
    bench.results = (GOOD,)
    assert program(bench.machine()) == 0
    assert bench.slurm.acts == [Action("drain", "DRAIN", OURS), Action("undrain", "RESUME", "")]
    assert bench.asked == [("full", 45.0), ("full", 45.0)]


def test_the_last_result_says_what_was_found_and_asked_for(bench: Bench) -> None:
    bench.results = (BAD, Result(Status.OK, "fine", check="disk"))
    program(bench.machine())
    assert bench.last.report.results == tuple(bench.results)
    assert (bench.last.by, bench.last.mode, bench.last.boot, bench.last.at) == (
        "program",
        "drain",
        "a",
        1060.0,
    )
    assert bench.last.action == f"drain {OURS}"
    assert bench.last.notes == ("drained: xid gpu3 reset: Xid 95",)
    fixed = json.loads((bench.folder / "state" / "last.json").read_bytes())
    assert list(fixed)[:6] == ["node", "profile", "level", "status", "severity", "results"]


def test_the_last_result_is_left_in_the_shared_folder_too(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    bench = Bench(tmp_path, shared_dir=str(tmp_path / "shared"))
    program(bench.machine())
    found, faults = records.read_folder(tmp_path / "shared", ["n1"])
    assert faults == []
    assert found["n1"].report.status is Status.OK


def test_a_person_s_drain_is_left_alone(bench: Bench) -> None:
    bench.slurm.now = InSlurm(frozenset({"IDLE", "DRAIN"}), "ticket 7", "alice", 5.0)
    for bench.results in ((BAD,), (GOOD,)):
        program(bench.machine())
    assert bench.slurm.acts == []
    assert "left alone: alice drained the node: ticket 7" in bench.said


def test_checks_that_do_not_end_drain_nothing_and_are_said(bench: Bench) -> None:
    program(bench.machine())
    bench.results = None
    assert program(bench.machine()) == 0
    assert bench.slurm.acts == []
    assert any("did not end in 45 s" in each for each in bench.said)
    assert bench.last.at == 1060.0  # the last one that there is stays


@pytest.mark.parametrize("what", ["look", "act"])
def test_a_slurm_that_does_not_answer_is_tried_again_the_next_time(bench: Bench, what: str) -> None:
    bench.results = (BAD,)
    bench.slurm.fails = what
    assert program(bench.machine()) == 0
    assert bench.slurm.acts == []
    bench.slurm.fails = ""
    program(bench.machine())
    assert [each.kind for each in bench.slurm.acts] == ["drain"]
    assert any("no answer" in each or "Access denied" in each for each in bench.said)


def test_an_undrain_that_fails_is_tried_again(bench: Bench) -> None:
    bench.results = (BAD,)
    program(bench.machine())
    bench.results, bench.slurm.fails = (GOOD,), "act"
    program(bench.machine())
    bench.slurm.fails = ""
    program(bench.machine())
    assert [each.kind for each in bench.slurm.acts] == ["drain", "undrain"]


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b'{"drain": 3}', b"\xff"])
def test_a_record_that_cannot_be_read_makes_no_drain_ours(bench: Bench, text: bytes) -> None:
    bench.results = (BAD,)
    program(bench.machine())
    (bench.folder / "state" / hooks.HISTORY).write_bytes(text)
    bench.results = (GOOD,)
    program(bench.machine())
    assert [each.kind for each in bench.slurm.acts] == ["drain"]
    assert any("record of our drains" in each for each in bench.said)


def test_a_state_folder_that_cannot_be_written_does_not_keep_a_sick_node_in(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("a file in its place")
    bench = Bench(tmp_path)
    bench.results = (BAD,)
    assert program(bench.machine()) == 0
    assert [each.kind for each in bench.slurm.acts] == ["drain"]


def test_two_at_once_are_one(bench: Bench) -> None:
    bench.results = (BAD,)
    inner = bench.machine()
    outer = bench.machine()
    outer.checks = lambda *words: (program(inner), bench.checks(*words))[1]
    program(outer)
    assert len(bench.asked) == 1
    assert "another run is under way: this one does nothing" in bench.said


def test_mode_report_asks_nothing_of_slurm(tmp_path: Path) -> None:
    bench = Bench(tmp_path, mode="report")
    bench.results, bench.slurm.fails = (BAD,), "look"
    program(bench.machine())
    assert bench.said == ["mode report: xid gpu3 reset: Xid 95"]


def test_mode_shadow_says_what_it_would_do(tmp_path: Path) -> None:
    bench = Bench(tmp_path, mode="shadow")
    bench.results = (BAD,)
    program(bench.machine())
    assert bench.slurm.acts == []
    assert bench.last.action == f"would drain {OURS}"


def test_a_switched_check_is_shown_and_drains_nothing(tmp_path: Path) -> None:
    bench = Bench(tmp_path, checks={"xid": Switch("report")})
    bench.results = (BAD,)
    program(bench.machine())
    assert prolog(bench.machine()) == 0
    assert bench.slurm.acts == []


# --- Slurm's own field ---


def test_the_result_goes_into_slurm_s_field_when_it_is_news(tmp_path: Path) -> None:
    bench = Bench(tmp_path, mode="report", slurm_field="extra")
    program(bench.machine())
    program(bench.machine())
    assert len(bench.slurm.fields) == 1
    bench.results = (BAD,)
    program(bench.machine())
    assert bench.slurm.fields[1].startswith("everstep critical reset ")
    bench.now += hooks.FIELD_EVERY_S
    program(bench.machine())
    assert len(bench.slurm.fields) == 3


def test_somebody_else_s_words_in_the_field_stay(tmp_path: Path) -> None:
    bench = Bench(tmp_path, mode="report", slurm_field="comment")
    bench.slurm.held = "rack 7"
    program(bench.machine())
    assert bench.slurm.fields == []
    assert "the node's comment holds other words: left alone" in bench.said


def test_scontrol_is_given_the_reason_as_one_word() -> None:
    asked: list[list[str]] = []

    def runner(argv: Sequence[str]) -> str:
        asked.append(list(argv))
        return ""

    node = SlurmNode("extra", runner)
    node.act("n1", Action("drain", "DRAIN", 'everstep: a "b" c'))
    node.act("n1", Action("undrain", "RESUME", ""))
    node.write_field("n1", "everstep ok")
    assert asked == [
        ["scontrol", "update", "nodename=n1", "state=DRAIN", 'reason=everstep: a "b" c'],
        ["scontrol", "update", "nodename=n1", "state=RESUME"],
        ["scontrol", "update", "nodename=n1", "extra=everstep ok"],
    ]


def test_what_scontrol_refuses_is_an_error_of_ours() -> None:
    def runner(argv: Sequence[str]) -> str:
        raise UsageError("`scontrol update` failed: Access denied")

    with pytest.raises(HealthError, match="Access denied"):
        SlurmNode(None, runner).act("n1", Action("drain", "DRAIN", "x"))
    with pytest.raises(HealthError):
        SlurmNode(None, runner).look("n1")


# --- Prolog and Epilog ---


@pytest.mark.parametrize("hook", [prolog, epilog])
def test_a_sick_node_is_refused_without_a_word_to_slurm(
    bench: Bench, hook: hooks.Callable[[Machine], int]
) -> None:
    bench.results, bench.slurm.fails = (BAD,), "look"
    assert hook(bench.machine()) == 1
    assert bench.slurm.acts == []
    assert bench.last.action.endswith("refused job 12")
    assert bench.asked == [("light", 8.0)]
    assert OURS in bench.said[0]


@pytest.mark.parametrize("mode", ["report", "shadow"])
def test_only_mode_drain_refuses(tmp_path: Path, mode: str) -> None:
    bench = Bench(tmp_path, mode=mode)
    bench.results = (BAD,)
    assert prolog(bench.machine()) == 0
    assert "not refused" in bench.said[0]


@pytest.mark.parametrize("results", [None, (), (dataclasses.replace(BAD, status=Status.SKIP),)])
def test_a_fault_of_our_own_or_a_skip_refuses_nothing(bench: Bench, results: Sequence[Result] | None) -> None:
    bench.results = results
    bench.faults = ("a check raised",)
    assert prolog(bench.machine()) == 0


def test_a_pass_is_kept_for_a_while(tmp_path: Path) -> None:
    bench = Bench(tmp_path, policy=Policy(keep_pass_s=100))
    program(bench.machine())
    bench.results = (BAD,)
    assert prolog(bench.machine()) == 0
    assert len(bench.asked) == 1
    assert prolog(bench.machine()) == 1  # two minutes later
    assert prolog(bench.machine()) == 1  # a finding is not kept


@pytest.mark.parametrize("hook", [prolog, epilog])
def test_a_pass_says_nothing_of_what_a_job_has_left_since(
    tmp_path: Path, hook: hooks.Callable[[Machine], int]
) -> None:
    bench = Bench(tmp_path, policy=Policy(keep_pass_s=3600))
    program(bench.machine())
    before = bench.last
    bench.gpus, bench.results = "0-3", (dataclasses.replace(GOOD, check="gpu_processes"),)
    assert hook(bench.machine()) == 0
    assert bench.moments == [False, True]
    assert bench.last == before  # a look at one thing is no new pass of them all
    bench.results = (dataclasses.replace(BAD, check="gpu_processes"),)
    assert hook(bench.machine()) == 1
    assert {each.check for each in bench.last.report.results} == {"xid", "gpu_processes"}
    assert hook(bench.machine()) == 1
    assert bench.moments == [False, True, True, False]  # a finding is not kept: all is looked at again


def test_a_pass_is_all_that_is_asked_where_the_job_had_no_gpus(tmp_path: Path) -> None:
    bench = Bench(tmp_path, policy=Policy(keep_pass_s=3600))
    program(bench.machine())
    bench.results = (BAD,)
    assert epilog(bench.machine()) == 0
    assert bench.moments == [False]


def test_a_pass_of_another_boot_is_not_kept(tmp_path: Path) -> None:
    bench = Bench(tmp_path, policy=Policy(keep_pass_s=100))
    program(bench.machine())
    bench.boot, bench.results = "b", (BAD,)
    assert prolog(bench.machine()) == 1


def record(level: str, status: Status, at: float, boot: str = "a") -> Record:
    found = Result(status, "", Severity.RESET if status is Status.CRITICAL else Severity.OK, check="x")
    return Record(Report("n1", "p5", level, (found,)), at, boot=boot)


@pytest.mark.parametrize(
    ("old", "new", "kept"),
    [
        (None, record("light", Status.OK, 100), "new"),
        (record("full", Status.CRITICAL, 0), record("light", Status.OK, 100), "old"),
        (record("full", Status.CRITICAL, 0), record("full", Status.OK, 100), "new"),
        (record("full", Status.OK, 0), record("light", Status.CRITICAL, 100), "new"),
        (record("full", Status.OK, 0), record("light", Status.OK, 100), "new"),
        (record("full", Status.CRITICAL, 0), record("light", Status.OK, hooks.KEEP_WORSE_S), "new"),
        (record("full", Status.CRITICAL, 0), record("light", Status.OK, 100, "b"), "new"),
        (record("full", Status.CRITICAL, 200), record("light", Status.OK, 100), "new"),
    ],
)
def test_a_lighter_run_does_not_hide_what_a_deeper_one_found(
    old: Record | None, new: Record, kept: str
) -> None:
    assert keep_last(old, new) is (new if kept == "new" else old)


# --- the doors ---


@pytest.mark.parametrize("text", ["mode = \n", "mood = 1\n", None])
@pytest.mark.parametrize("name", ["program", "prolog", "epilog"])
def test_a_site_file_that_is_not_right_fails_open_and_says_so(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], name: str, text: str | None
) -> None:
    path = tmp_path / "health.toml"
    if text is not None:
        path.write_text(text)
    assert hooks.run(name, str(path)) == 0
    assert "nothing was checked" in capfd.readouterr().err


def test_a_fault_of_our_own_fails_open(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def breaks(*_: object) -> Machine:
        raise ZeroDivisionError("ours")

    monkeypatch.setattr(hooks, "_machine", breaks)
    assert hooks.run("prolog") == 0
    assert "a fault of everstep's own" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("context", "name"),
    [("prolog_slurmd", "prolog"), ("epilog_slurmd", "epilog"), ("", "program"), ("x", "program")],
)
def test_one_command_serves_all_three(monkeypatch: pytest.MonkeyPatch, context: str, name: str) -> None:
    ran: list[str] = []
    monkeypatch.setenv("SLURM_SCRIPT_CONTEXT", context)
    monkeypatch.setattr(hooks, "run", lambda each: ran.append(each) or 0)
    assert hooks.main() == 0
    assert ran == [name]


def test_slurm_s_commands_are_found_beside_the_slurmd_that_started_us(tmp_path: Path) -> None:
    (tmp_path / "sbin").mkdir()
    shutil.copy("/bin/sleep", tmp_path / "sbin" / "slurmd")
    with subprocess.Popen([tmp_path / "sbin" / "slurmd", "60"]) as slurmd:
        try:
            assert hooks._slurm_bin(slurmd.pid) == [str(tmp_path / "bin")]
        finally:
            slurmd.kill()
    assert hooks._slurm_bin(os.getpid()) == []


# --- the checks in a process of their own ---


def test_a_run_that_hangs_is_killed_with_all_that_it_started(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    script = (
        "import subprocess, sys, time\n"
        "tool = subprocess.Popen(['sleep', '60'], start_new_session=True)\n"
        f"open({str(pid_file)!r}, 'w').write(str(tool.pid))\n"
        "time.sleep(60)\n"
    )
    answer = child.run("light", limit_s=1.0, argv=[sys.executable, "-c", script])
    assert answer == Answer(None, ("the checks did not end in 1 s and were killed",))
    tool = int(pid_file.read_text())
    assert not psutil.pid_exists(tool) or psutil.Process(tool).status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("raise SystemExit('no torch here')", "ended with code 1: no torch here"),
        ("print('hello')", "ended with code 0: nothing said"),
        ("print('{\"report\": {}}')", "ended with code 0"),
        ("import os; os.kill(os.getpid(), 9)", "ended with code -9"),
    ],
)
def test_a_run_without_an_answer_is_a_fault_of_ours(script: str, said: str) -> None:
    answer = child.run("light", limit_s=20, argv=[sys.executable, "-c", script])
    assert answer.report is None
    assert said in answer.faults[0]


def test_the_site_s_file_says_what_is_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "root").mkdir()
    checks = tmp_path / "checks"
    checks.mkdir()
    (checks / "mine.py").write_text(
        "from everstep.healthcheck.registry import Level, check\n"
        "from everstep.healthcheck.result import ok\n"
        "@check('mine', Level.LIGHT, source='', action='')\n"
        "def run(facts, profile):\n"
        "    return ok(profile.name)\n"
    )
    path = tmp_path / "health.toml"
    path.write_text(
        f"profile = 'cpu'\nroot = '{tmp_path}/root'\nplugins = ['{checks}']\nnode_name = 'n7'\n"
        "[checks.xid]\nact = 'off'\n"
    )
    assert site.load(path).site.off() == {"xid"}
    assert child.main(["--level", "light", "--config", str(path)]) == 0
    answer = child.parse(capsys.readouterr().out)
    assert answer.report is not None
    by_check = {each.check: each for each in answer.report.results}
    assert by_check["mine"].reason == "cpu"
    assert "xid" not in by_check
    assert (answer.report.node, answer.report.profile) == ("n7", "cpu")
    assert answer.report_only == {"xid"}


def test_an_unreadable_root_is_a_fault_and_no_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "health.toml"
    path.write_text(f"root = '{tmp_path}/none'\n")
    child.main(["--level", "light", "--config", str(path)])
    answer = child.parse(capsys.readouterr().out)
    assert answer.report is None
    assert "none" in answer.faults[0]
