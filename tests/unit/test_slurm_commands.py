"""Slurm's commands are run with patience, and requests become the right words."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from everstep.launcher.slurm.cli_json import CliJson
from everstep.launcher.slurm.client import SlurmBusy, SlurmClient, SlurmError, UnknownJob
from everstep.launcher.slurm.commands import Commands, Patience, outside_job, wait_before_retry

DOWN = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)"
OVERLOADED = "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation"
PATIENCE = Patience(timeout=5, limit=60, first_wait=0.5, longest_wait=8)


def wait(said: str, tries: int = 1, passed: float = 0.0, once: bool = False) -> float | None:
    return wait_before_retry(said, tries=tries, passed=passed, once=once, patience=PATIENCE)


def test_a_controller_that_is_not_there_is_asked_again_ever_more_slowly() -> None:
    assert [wait(DOWN, tries) for tries in (1, 2, 3, 4, 5, 6, 7)] == [0.5, 1, 2, 4, 8, 8, 8]


def test_patience_ends() -> None:
    assert wait(DOWN, tries=9, passed=59.0) is None


def test_what_must_not_be_done_twice_is_tried_again_only_if_it_cannot_have_been_done() -> None:
    assert wait(OVERLOADED) == 0.5
    assert wait(OVERLOADED, once=True) is None
    assert wait(DOWN, once=True) == 0.5


@pytest.mark.parametrize(
    "said", ["Invalid job id specified", "Requested node configuration is not available", ""]
)
def test_a_refusal_is_final(said: str) -> None:
    assert wait(said) is None


class Fake:
    """Commands in a folder of its own that stand first on the PATH."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        monkeypatch.setenv("PATH", str(folder), prepend=":")
        self.waited: list[float] = []

    def put(self, name: str, script: str) -> None:
        path = self.folder / name
        path.write_text(f"#!/bin/sh\nfolder={self.folder}\n{script}\n")
        path.chmod(0o755)

    @property
    def run(self) -> Commands:
        return Commands(PATIENCE, sleep=self.waited.append)


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fake:
    return Fake(tmp_path, monkeypatch)


def test_the_third_try_finds_the_controller_restarted(fake: Fake) -> None:
    fake.put(
        "scontrol",
        "echo x >> $folder/tries\n"
        f'[ $(wc -l < $folder/tries) -lt 3 ] && {{ echo "{DOWN}" >&2; exit 1; }}\necho ok',
    )
    assert fake.run(["scontrol", "ping"]) == "ok\n"
    assert fake.waited == [0.5, 1.0]


def test_a_controller_that_never_answers_is_said_to_be_busy(fake: Fake) -> None:
    fake.put("scontrol", f'echo "{DOWN}" >&2; exit 1')
    ticking = iter(range(0, 1000, 20))
    run = Commands(PATIENCE, sleep=fake.waited.append, clock=lambda: float(next(ticking)))
    with pytest.raises(SlurmBusy, match=r"failed \(3 times in 60 s\): .*scontrol ping"):
        run(["scontrol", "show", "job", "3"])


def test_a_silent_command_is_ended(fake: Fake) -> None:
    fake.put("scontrol", "exec sleep 60")
    with pytest.raises(SlurmBusy, match=r"gave no answer in 0.2 s"):
        Commands(Patience(timeout=0.2))(["scontrol", "ping"])


def test_an_unknown_job_is_an_error_of_its_own(fake: Fake) -> None:
    fake.put("scontrol", "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
    with pytest.raises(UnknownJob):
        fake.run(["scontrol", "requeue", "3"])


# --- requests ---


class Told:
    """Writes down what was asked, and how."""

    def __init__(self, answer: str = "", error: SlurmError | None = None) -> None:
        self.answer, self.error = answer, error
        self.argv: list[str] = []
        self.how: dict[str, Any] = {}

    def __call__(self, argv: Sequence[str], **how: Any) -> str:
        self.argv, self.how = list(argv), how
        if self.error is not None:
            raise self.error
        return self.answer


def client(told: Told) -> SlurmClient:
    return CliJson(told, {})


@pytest.mark.parametrize("answer", ["17\n", "17;cluster\n", "a site's own words\n17\n"])
def test_a_submitted_job_s_number_is_read(answer: str) -> None:
    told = Told(answer)
    assert client(told).submit(["-N2", "job.sh", "--epochs", "3"], env={"A": "b"}) == 17
    assert told.argv == ["sbatch", "--parsable", "-N2", "job.sh", "--epochs", "3"]
    assert told.how["env"] == {"A": "b"}
    assert told.how["once"], "two jobs would be one too many"


def test_a_script_goes_in_as_text() -> None:
    told = Told("18")
    client(told).submit(["-N1"], script="#!/bin/sh\ntrue\n")
    assert told.how["stdin"] == "#!/bin/sh\ntrue\n"


def test_an_answer_without_a_number_is_an_error() -> None:
    with pytest.raises(SlurmError, match="no number of a job"):
        client(Told("thanks")).submit(["job.sh"])


def test_what_test_only_says_is_said_among_the_errors() -> None:
    told = Told("sbatch: Job 5 to start at 2026-11-30T20:00:00\n")
    assert client(told).test_submit(["job.sh"]).startswith("sbatch: Job 5")
    assert told.how["errors_too"]


def test_a_job_that_is_over_is_cancelled_by_doing_nothing() -> None:
    client(Told(error=UnknownJob("gone"))).cancel(5)
    with pytest.raises(SlurmError):
        client(Told(error=SlurmError("Access/permission denied"))).cancel(5)


def test_requests_become_scontrol_s_words() -> None:
    told = Told()
    slurm = client(told)
    slurm.cancel(5, "TERM")
    assert told.argv == ["scancel", "--signal", "TERM", "5"]
    slurm.requeue(5)
    assert told.argv == ["scontrol", "requeue", "5"]
    slurm.requeue(5, hold=True)
    assert told.argv == ["scontrol", "requeuehold", "5"]
    slurm.release(5)
    assert told.argv == ["scontrol", "release", "5"]
    slurm.update_job(5, ExcNodeList="n[1-2]", Comment="two words")
    assert told.argv == ["scontrol", "update", "JobId=5", "ExcNodeList=n[1-2]", "Comment=two words"]
    slurm.update_nodes(["n1", "n2"], State="DRAIN", Reason="everstep: lost twice")
    assert told.argv == [
        "scontrol",
        "update",
        "NodeName=n[1-2]",
        "State=DRAIN",
        "Reason=everstep: lost twice",
    ]


def test_a_job_submitted_from_within_a_job_does_not_inherit_what_slurm_said_of_that() -> None:
    environ = {"PATH": "/bin", "SLURM_JOB_ID": "5", "SBATCH_EXCLUSIVE": "1", "SLURM_CONF": "/etc/slurm.conf"}
    assert outside_job(environ) == {"PATH": "/bin", "SLURM_CONF": "/etc/slurm.conf"}
