"""What a run asks of its Slurm job: another node like its own, a memory over requeues, a word to the site."""

from __future__ import annotations

import asyncio
import stat
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from everstep.launcher import blame, history
from everstep.launcher.blame import Blaming
from everstep.launcher.history import Attempt, Chronicle, History
from everstep.launcher.jobside import how_preempted, judge
from everstep.launcher.recruit import Recruiter, Terms, request
from everstep.launcher.roster import Recruit, RecruitFailed
from everstep.launcher.slurm.client import Job, Partition, SlurmBusy, SlurmError
from everstep.recovery.errors import UsageError

TERMS = Terms(7, "#!/bin/sh\n", {"EVERSTEP_SECRET": "hush"}, "/home/me", Path("/runs/7"), 600.0, ("n1", "n2"))
JOB = Job(
    7,
    frozenset({"RUNNING"}),
    ("n1", "n3"),
    cpus_per_node="8(x2)",
    partition="gpu",
    account="lab",
    qos="long",
    constraint="h100",
    gres="gpu:8",
    memory_per_node=64000,
    excluded=("n9",),
    end_time=10_000,
)


class TestRequest:
    def test_another_node_is_asked_for_as_the_runs_own_were(self) -> None:
        words = request(JOB, TERMS, [], now=4_000)
        for wanted in (
            *("--nodes=1", "--partition=gpu", "--account=lab", "--qos=long", "--constraint=h100"),
            *("--gres=gpu:8", "--cpus-per-task=8", "--mem=64000M", "--chdir=/home/me", "--no-requeue"),
        ):
            assert wanted in words
        assert "--time=100" in words, "no longer than the run itself"

    def test_neither_a_bad_node_nor_one_of_the_runs_own_will_do(self) -> None:
        assert "--exclude=n[1-3,5,9]" in request(JOB, TERMS, ["n5"], now=0)

    def test_the_secret_is_on_no_command_line(self) -> None:
        assert "hush" not in " ".join(request(JOB, TERMS, [], now=0))


@pytest.mark.parametrize(
    ("mode", "requeue", "comes_back"),
    [
        ("REQUEUE", True, True),
        ("GANG,REQUEUE", None, True),
        ("REQUEUE", False, False),
        ("CANCEL", True, False),
    ],
)
def test_a_preempted_job_that_slurm_itself_requeues_is_left_to_it(
    mode: str, requeue: bool | None, comes_back: bool
) -> None:
    partitions = [Partition("cpu", (), preempt_mode="OFF"), Partition("gpu", (), preempt_mode=mode)]
    found = how_preempted(replace(JOB, requeue=requeue), partitions)
    assert found.comes_back is comes_back
    assert ("Slurm puts the job back" in found.why) is comes_back


class FakeSlurm:
    """Slurm as far as a recruiter sees it: what it answers, and what was asked of it."""

    def __init__(self, *states: str, refuses: Exception | None = None) -> None:
        self.states = list(states)
        self.refuses = refuses
        self.submitted: list[Mapping[str, str] | None] = []
        self.cancelled: list[int] = []

    def job(self, number: int) -> Job:
        if number == 7:
            return JOB
        state = self.states.pop(0) if len(self.states) > 1 else self.states[0]
        return Job(number, frozenset({state}), ("n4",), reason="Resources")

    def submit(self, argv: Sequence[str], *, env: Mapping[str, str] | None = None, **_: Any) -> int:
        if self.refuses is not None:
            raise self.refuses
        self.submitted.append(env)
        return 41 + len(self.submitted)

    def cancel(self, number: int) -> None:
        self.cancelled.append(number)


class TestRecruiter:
    def search(self, slurm: FakeSlurm, within: float = 0.2) -> tuple[RecruitFailed, list[str]]:
        """Ask once, and wait for the bad news."""
        said: list[str] = []

        async def ask() -> RecruitFailed:
            came: asyncio.Future[RecruitFailed] = asyncio.get_running_loop().create_future()
            terms = Terms(7, "", {"SLURM_MEM_PER_NODE": "1", "PATH": "x"}, "/", None, within)
            client: Any = slurm
            recruiter = Recruiter(client, terms, came.set_result, said.append)
            recruiter.ask(Recruit(0.0, "why", ("n2",)))
            news = await asyncio.wait_for(came, 30)
            await recruiter.close()
            return news

        return asyncio.run(ask()), said

    def test_a_job_that_waits_too_long_is_cancelled_and_not_asked_for_again(self) -> None:
        slurm = FakeSlurm("PENDING")
        failed, said = self.search(slurm)
        assert failed == RecruitFailed("no node was free for replacement job 42 in 0.2 s", final=True)
        assert slurm.cancelled == [42]
        assert said == ["replacement job 42 is queued (Resources); --replace-within 0.2 s"]

    def test_a_job_that_fails_may_be_asked_for_again(self) -> None:
        failed, _ = self.search(FakeSlurm("PENDING", "FAILED"), within=60)
        assert failed == RecruitFailed("replacement job 42 ended (FAILED)", final=False)

    def test_what_slurm_refuses_it_would_refuse_again(self) -> None:
        refusal = SlurmError(
            "`sbatch …` failed: sbatch: error: Requested node configuration is not available"
        )
        failed, _ = self.search(FakeSlurm("PENDING", refuses=refusal))
        assert failed.final
        assert (
            failed.reason
            == "Slurm has no other node for this run (Requested node configuration is not available)"
        )

    def test_a_busy_controller_may_be_asked_again(self) -> None:
        failed, _ = self.search(FakeSlurm("PENDING", refuses=SlurmBusy("no answer")))
        assert not failed.final

    def test_the_job_that_we_are_in_is_not_told_on(self) -> None:
        slurm = FakeSlurm("FAILED")
        self.search(slurm)
        assert slurm.submitted == [{"PATH": "x"}]


class TestHistory:
    def test_a_requeued_job_knows_what_came_before_and_a_new_one_of_that_number_does_not(
        self, tmp_path: Path
    ) -> None:
        first = Chronicle(tmp_path / "7", "7", restart=0)
        first.lost("n2", "4 missed heartbeats")
        first.ended(53, "node n2 was lost")
        again = Chronicle(tmp_path / "7", "7", restart=1)
        assert (
            again.earlier
            == "attempt 2 of job 7; attempt 1 ended after step 52: node n2 was lost; lost so far: n2"
        )
        assert again.history.bad_nodes() == {"n2": "4 missed heartbeats"}
        assert Chronicle(tmp_path / "7", "7", restart=0).earlier == ""

    def test_it_is_for_its_owner_alone(self, tmp_path: Path) -> None:
        Chronicle(tmp_path / "7", "7", restart=0)
        assert stat.S_IMODE((tmp_path / "7" / history.STATE).stat().st_mode) == 0o600
        assert stat.S_IMODE((tmp_path / "7").stat().st_mode) == 0o700

    def test_a_folder_that_cannot_be_made_is_no_place_for_events(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        assert not history.make(tmp_path / "file" / "7")
        assert history.make(tmp_path / "7")

    def test_a_file_that_is_torn_is_no_history(self, tmp_path: Path) -> None:
        (tmp_path / history.STATE).write_text('{"job": "7", "attem')
        assert history.load(tmp_path, "7") == History(job="7")

    @pytest.mark.parametrize(
        ("committed", "fruitless"), [([5], 0), ([5, 5], 1), ([5, 5, 4], 2), ([5, 5, 9], 0)]
    )
    def test_attempts_that_bring_the_run_no_further_are_counted(
        self, committed: list[int], fruitless: int
    ) -> None:
        attempts = [Attempt(restart=i, began=0, committed=c) for i, c in enumerate(committed)]
        assert History(job="7", attempts=attempts).fruitless() == fruitless


class TestBlame:
    @pytest.mark.parametrize(
        ("action", "fields"),
        [
            ("none", {}),
            ("command", {}),
            ("comment", {"Comment": "everstep: lost by job 7 (silent)"}),
            ("drain", {"State": "DRAIN", "Reason": "everstep: lost by job 7 (silent)"}),
            ("fail", {"State": "FAIL", "Reason": "Action:Reboot everstep: lost by job 7 (silent)"}),
        ],
    )
    def test_what_a_site_may_want_done(self, action: str, fields: dict[str, str]) -> None:
        assert blame.fields(Blaming(action, "Action:Reboot"), "7", "silent") == fields

    def test_a_sites_command_is_given_node_job_and_reason_as_words(self, tmp_path: Path) -> None:
        client: Any = None
        out = tmp_path / "out"
        command = ("/bin/sh", "-c", f'printf "%s|" "$@" > {out}', "x")
        said = blame.report(Blaming("command", command=command), client, "n2", "7", "it; rm -rf")
        assert out.read_text() == "n2|7|it; rm -rf|"
        assert said == "/bin/sh n2: exit code 0"

    def test_what_slurm_refuses_is_said_and_costs_nothing_else(self) -> None:
        class Refusing:
            def update_nodes(self, names: Sequence[str], **fields: str) -> None:
                raise SlurmError("Access/permission denied")

        client: Any = Refusing()
        said = blame.report(Blaming("drain"), client, "n2", "7", "silent")
        assert said == "node n2 could not be reported (drain): Access/permission denied"

    @pytest.mark.parametrize(
        ("text", "wrong"),
        [
            ('[lost_nodes]\naction = "explode"', "none, comment, drain, fail, command"),
            ('[lost_nodes]\naction = "command"', "there is no command"),
            ('[lost_nodes]\naction = "fail"\nreason = "x"', "Action:Replace"),
            ("[lost_nodes", "cannot be read"),
        ],
    )
    def test_a_wrong_site_file_is_said_in_one_line(self, tmp_path: Path, text: str, wrong: str) -> None:
        (tmp_path / "launcher.toml").write_text(text)
        with pytest.raises(UsageError, match=wrong):
            blame.read(tmp_path / "launcher.toml")

    def test_without_a_file_nothing_is_done(self, tmp_path: Path) -> None:
        assert blame.read(tmp_path / "launcher.toml") == Blaming()


@pytest.mark.parametrize(
    ("fields", "can", "why"),
    [
        ({"batch": True, "requeue": True}, True, ""),
        ({"batch": False, "requeue": True}, False, "job 7 is no batch job, so it cannot be requeued"),
        ({"batch": True, "requeue": False}, False, "job 7 may not be requeued (sbatch --requeue lets it)"),
    ],
)
def test_which_jobs_can_be_requeued(fields: dict[str, bool], can: bool, why: str) -> None:
    here = judge(Job(7, frozenset({"RUNNING"}), (), batch=fields["batch"], requeue=fields["requeue"]))
    assert (here.can_requeue, here.why_not) == (can, why)
