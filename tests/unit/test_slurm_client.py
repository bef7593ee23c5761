"""Slurm's answers in JSON, of the releases that word them differently, become plain data."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from everstep.launcher.slurm import cli_json, nokill
from everstep.launcher.slurm.cli_json import CliJson, number, states
from everstep.launcher.slurm.client import Job, Node, SlurmClient, SlurmError, expand, fold
from everstep.recovery.errors import UsageError
from hypothesis import given
from hypothesis import strategies as st

FIXTURES = Path(__file__).parent.parent / "fixtures" / "slurm"
SCRIPT = "#!/bin/bash\n#SBATCH -N2\n{line}\n\nsrun hostname\n#SBATCH --no-kill\n"


def text(name: str) -> str:
    return (FIXTURES / name).read_text()


class Recorded:
    """Slurm commands that answer from a record; what is not recorded fails, as on a site without it."""

    def __init__(self, answers: Mapping[str, str]) -> None:
        self.answers = answers
        self.asked: list[str] = []

    def __call__(self, argv: Sequence[str], **_: Any) -> str:
        line = " ".join(argv)
        self.asked.append(line)
        for start, answer in self.answers.items():
            if line.startswith(start):
                return answer
        raise SlurmError(f"`{line}` failed")


def client(environ: Mapping[str, str] | None = None, **answers: str) -> CliJson:
    lines = {name.replace("_", " "): answer for name, answer in answers.items()}
    return CliJson(Recorded(lines), environ or {})


def recorded_job(name: str) -> tuple[int, str]:
    answer = text(name)
    return json.loads(answer)["jobs"][0]["job_id"], answer


# --- jobs and nodes ---


def test_a_job_of_slurm_24_11_is_read() -> None:
    number, answer = recorded_job("job-24.11.json")
    job = client(scontrol_show_job=answer).job(number)
    assert job.job_id == number
    assert job.state == {"RUNNING"}
    assert job.nodes == ("n1", "n2")
    assert job.cpus_per_node == "1,1"


def test_an_older_release_s_plain_strings_and_numbers_are_read_too() -> None:
    answer = json.dumps({"jobs": [{"job_id": 5, "job_state": "RUNNING", "nodes": "n[1-2]", "node_count": 2}]})
    assert client(scontrol_show_job=answer).job(5).state == {"RUNNING"}


@pytest.mark.parametrize(
    ("reason", "description", "waits_for"),
    [
        ("None", "", ""),
        ("Resources", "", "Resources"),
        ("JobHeldUser", "launch failed requeued held", "JobHeldUser: launch failed requeued held"),
        ("ReqNodeNotAvail", "ReqNodeNotAvail, UnavailableNodes:n4", "ReqNodeNotAvail, UnavailableNodes:n4"),
    ],
)
def test_why_a_job_waits_is_told_once(reason: str, description: str, waits_for: str) -> None:
    record = {"job_id": 5, "job_state": "PENDING", "state_reason": reason, "state_description": description}
    (job,) = client(scontrol_show_job=json.dumps({"jobs": [record]})).job_parts("5")
    assert job.waits_for == waits_for


def test_nodes_of_slurm_24_11_are_read_in_the_order_asked_for() -> None:
    nodes = client(scontrol_show_nodes=text("nodes-24.11.json")).nodes(["n2", "n1"])
    assert [node.name for node in nodes] == ["n2", "n1"]
    assert all(node.usable for node in nodes)


@pytest.mark.parametrize(
    ("record", "usable"),
    [
        ({"state": ["IDLE"]}, True),
        ({"state": ["DOWN", "NOT_RESPONDING"]}, False),
        ({"state": ["MIXED", "DRAIN"]}, False),
        ({"state": "down", "state_flags": ["NOT_RESPONDING"]}, False),
        ({"state": "idle", "state_flags": []}, True),
        ({"state": "IDLE+DRAIN"}, False),
        ({"state": "ALLOCATED*"}, False),
    ],
)
def test_a_node_s_state_is_understood_in_every_form(record: dict[str, Any], usable: bool) -> None:
    assert cli_json.read_node({"name": "n1", **record}).usable is usable


def test_state_words_come_as_a_list_or_as_a_string() -> None:
    assert states(["DOWN", "NOT_RESPONDING"]) == states("down*") == states("DOWN+NOT_RESPONDING")
    assert states(None) == frozenset()


def test_numbers_come_plain_or_with_whether_they_are_set() -> None:
    assert number(3) == 3
    assert number({"set": True, "infinite": False, "number": 3}) == 3
    assert number({"set": False, "infinite": False, "number": 0}) is None
    assert number({"set": True, "infinite": True, "number": 0}) is None
    assert number(None) is None
    assert number("3") is None


def test_the_client_is_what_the_launcher_asks_for() -> None:
    asked: SlurmClient = client(scontrol="slurm-wlm 24.11.5\n")
    assert asked.version() == "24.11.5"


# --- when Slurm cannot answer ---


def test_a_job_that_slurm_does_not_know_is_said_so() -> None:
    with pytest.raises(UsageError, match="no job 9: `squeue --me`"):
        client(scontrol_show_job=json.dumps({"jobs": []})).job(9)


def test_a_node_that_slurm_does_not_know_is_said_so() -> None:
    with pytest.raises(UsageError, match=r"no node x\[8-9\]"):
        client(scontrol_show_nodes=text("nodes-24.11.json")).nodes(["n1", "x8", "x9"])


@pytest.mark.parametrize(
    "answer", ["no word of it", "[]", "{}", '{"errors": [{"description": "no such plugin"}]}']
)
def test_an_answer_that_is_not_the_json_we_know_is_asked_again_in_words(answer: str) -> None:
    asked = Recorded({"scontrol show job": answer, "scontrol -o show -d job": "JobId=3 JobState=PENDING\n"})
    assert CliJson(asked, {}).job(3).pending
    with pytest.raises(UsageError) as error:
        client(scontrol_show_job=answer).job(3)
    assert "\n" not in str(error.value)


def test_without_slurm_s_commands_the_user_is_told_of_the_module_and_of_everstep_run(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as error:
        cli_json.require("srun", path=str(tmp_path))
    assert "srun not found" in str(error.value)
    assert "module load" in str(error.value)
    assert "everstep run" in str(error.value)
    assert error.value.exit_code == 64


def test_a_failing_command_is_quoted_with_its_own_last_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = tmp_path / "scontrol"
    fake.write_text("#!/bin/sh\necho trouble >&2\necho 'slurm_load_jobs error: Invalid job id' >&2\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with pytest.raises(
        UsageError, match=r"^`scontrol show job 3` failed: slurm_load_jobs error: Invalid job id$"
    ):
        cli_json.run_command(["scontrol", "show", "job", "3"])


# --- was the job made with --no-kill? ---


@pytest.mark.parametrize("name", ["job-24.11.json", "job-no-kill-24.11.json"])
def test_slurm_24_11_s_own_record_does_not_tell(name: str) -> None:
    number, answer = recorded_job(name)
    assert client(scontrol_show_job=answer).job(number).no_kill is None


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("#SBATCH --no-kill", True),
        ("#SBATCH -k", True),
        ("#SBATCH -n4 --no-kill # survive", True),
        ("#SBATCH --no-kill=off", False),
        ("##SBATCH --no-kill", None),
        ("# --no-kill", None),
        ("#SBATCH --comment='--no-kill is for others'", None),
    ],
)
def test_the_job_s_script_tells_by_its_directives(line: str, told: bool | None) -> None:
    number, answer = recorded_job("job-24.11.json")
    script = SCRIPT.format(line=line)
    job = client(scontrol_show_job=answer, scontrol_write=script).job(number)
    assert job.no_kill is told
    assert job.no_kill_reason


@pytest.mark.parametrize(
    ("submit_line", "told"),
    [
        ("sbatch --no-kill train.sh", True),
        ("sbatch --no-k train.sh", True),
        ("sbatch -k train.sh", True),
        ("sbatch -W -N4 train --no-kill", False),  # the script's own argument
        ("sbatch -a 1-3 --parsable -lk train", True),
        ("sbatch --site-plugin x --no-kill train.sh", True),
        ("sbatch --site-plugin x train.sh", False),
        ("sbatch --no-kill=off train.sh", False),
        ("salloc -N4", False),
    ],
)
def test_the_accounting_s_submit_line_tells(submit_line: str, told: bool) -> None:
    number, answer = recorded_job("job-24.11.json")
    job = client(
        scontrol_show_job=answer, scontrol_write=SCRIPT.format(line=""), sacct=submit_line + "\n"
    ).job(number)
    assert job.no_kill is told


def test_the_submit_line_overrides_the_script_as_for_sbatch() -> None:
    script = SCRIPT.format(line="#SBATCH --no-kill")
    assert nokill.judge(submit_line="sbatch --no-kill=off a.sh", script=script).value is False


def test_variables_that_sbatch_reads_tell_for_the_job_that_we_are_in() -> None:
    number, answer = recorded_job("job-24.11.json")
    environ = {"SBATCH_NO_KILL": "set", "SLURM_JOB_ID": str(number)}
    assert client(environ, scontrol_show_job=answer).job(number).no_kill is True
    elsewhere = {**environ, "SLURM_JOB_ID": str(number + 1)}
    assert client(elsewhere, scontrol_show_job=answer).job(number).no_kill is None


def test_a_release_that_shows_it_is_believed() -> None:
    assert nokill.judge(record={"kill_on_node_fail": True}).value is False
    assert nokill.judge(record={"kill_on_node_fail": False}).value is True
    assert nokill.judge(record={"submit_line": "sbatch -k a.sh"}).value is True


# --- lists of hosts ---


def test_host_lists_keep_slurm_s_order() -> None:
    assert expand("n[3,1-2],login") == ("n1", "n2", "n3", "login")
    assert expand("n9,n[1-2]") == ("n9", "n1", "n2")
    assert expand("") == ()
    assert fold(["n1", "n2", "n3"]) == "n[1-3]"


def test_a_host_list_that_cannot_be_read_is_said_so() -> None:
    with pytest.raises(UsageError, match="no list of hosts"):
        expand("n[1-")


@pytest.mark.parametrize(
    ("hostlist", "named"),
    [
        ("n[1-999999999]", "999,999,999"),
        ("n[1-99999999999999999999]", "99,999,999,999,999,999,999"),
        ("n[1-1000]-[1-1000]", "1,000,000"),
        ("login,n[1-60000],m[1-50000]", "110,001"),
    ],
)
def test_more_hosts_than_there_can_be_are_refused_before_they_are_named(hostlist: str, named: str) -> None:
    with pytest.raises(UsageError, match=f"names {named} hosts, and 100,000 are the most"):
        expand(hostlist)


@pytest.mark.parametrize(("hostlist", "count"), [("n[1-2000]!n[1-500]", 1500), ("n[0-999998/100]", 10000)])
def test_a_large_list_of_hosts_that_can_be_is_expanded(hostlist: str, count: int) -> None:
    assert len(expand(hostlist)) == count


@given(st.lists(st.integers(0, 300), unique=True, max_size=40))
def test_folding_and_expanding_is_lossless(numbers: list[int]) -> None:
    names = {f"n{index}" for index in numbers}
    assert set(expand(fold(names))) == names


def test_jobs_and_nodes_are_plain_values() -> None:
    assert Job(1, frozenset(), ("n1",)) == Job(1, frozenset(), ("n1",))
    assert Node("n1", frozenset({"IDLE"})).usable
