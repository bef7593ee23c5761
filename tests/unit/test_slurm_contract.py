"""One contract for every way to ask Slurm: the same job is the same Job in JSON, in words, from pyslurm.

The answers are recorded from clusters of 22.05 and 24.11 (tests/fixtures/slurm): four jobs of 24.11, asked
for in three ways at one moment, and three of 22.05, whose scontrol has no JSON.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from everstep.launcher.slurm.cli_json import CliJson
from everstep.launcher.slurm.cli_text import CliText, gres_per_node, megabytes, minutes, pairs
from everstep.launcher.slurm.client import Job, Node, Partition, SlurmClient, SlurmError, UnknownJob
from everstep.launcher.slurm.pyslurm import PySlurm, load

FIXTURES = Path(__file__).parent.parent / "fixtures" / "slurm"
SCRIPT = "#!/bin/bash\n#SBATCH --no-kill\nsleep 600\n"


class Recorded:
    """Slurm's commands of a release, answering from the record."""

    def __init__(self, release: str, *, knows_json: bool) -> None:
        self.release, self.knows_json = release, knows_json

    def __call__(self, argv: Sequence[str], **_: Any) -> str:
        words = [word for word in argv if not word.startswith("-")]
        if words[:3] == ["scontrol", "write", "batch_script"]:
            return SCRIPT
        if argv[-1] == "--version":
            return f"slurm-wlm {self.release}.5\n"
        if words[:2] == ["scontrol", "requeue"]:
            raise UnknownJob("`scontrol requeue 99` failed: Invalid job id specified for job 99")
        if words[:2] != ["scontrol", "show"]:
            raise SlurmError("not recorded")
        if "--json" in argv and not self.knows_json:
            raise SlurmError('`scontrol` failed: Try "scontrol --help" for more information')
        what, *which = words[2:]
        if what == "config":
            return (FIXTURES / f"config-{self.release}.txt").read_text()
        name = {"job": "jobs", "nodes": "nodes", "node": "nodes", "partition": "partitions"}[what]
        if name == "nodes" and self.release == "24.11":
            name = "nodes-drained"
        text = (FIXTURES / f"{name}-{self.release}.{'json' if '--json' in argv else 'txt'}").read_text()
        if name == "jobs" and "--json" not in argv:
            lines = [line for line in text.splitlines() if line.startswith(f"JobId={which[0]} ")]
            if not lines:
                raise UnknownJob("`scontrol` failed: slurm_load_jobs error: Invalid job id specified")
            return lines[0]
        return text


class RecordedPyslurm(SimpleNamespace):
    """pyslurm, its objects' attributes as they were on the cluster."""

    class PyslurmError(Exception):
        """As pyslurm's."""

    def __init__(self) -> None:
        super().__init__()
        record = json.loads((FIXTURES / "pyslurm-24.11.json").read_text())
        known = record["jobs"]

        class Job:
            load = staticmethod(lambda number: self._job(known, number))

            def __init__(self, number: int) -> None:
                self.number = number

            def requeue(self, hold: bool) -> None:
                if str(self.number) not in known:
                    raise RecordedPyslurm.PyslurmError("Invalid job id specified")

        self.Job = Job
        self.Nodes = SimpleNamespace(load=lambda: _objects(record["nodes"]))
        self.Partitions = SimpleNamespace(load=lambda: _objects(record["partitions"]))

    def _job(self, jobs: dict[str, Any], number: int) -> SimpleNamespace:
        if str(number) not in jobs:
            raise self.PyslurmError("Invalid job id specified")
        told = dict(jobs[str(number)])
        layout = told.pop("layout")
        return SimpleNamespace(**told, get_resource_layout_per_node=lambda: layout)


def _objects(records: dict[str, Any]) -> dict[str, SimpleNamespace]:
    return {name: SimpleNamespace(**record) for name, record in records.items()}


def words_24_11() -> SlurmClient:
    return CliText(Recorded("24.11", knows_json=True), {})


def json_24_11() -> SlurmClient:
    return CliJson(Recorded("24.11", knows_json=True), {})


def pyslurm_24_11() -> SlurmClient:
    return PySlurm(Recorded("24.11", knows_json=True), {}, RecordedPyslurm())


def commands_22_05() -> SlurmClient:
    return CliJson(Recorded("22.05", knows_json=False), {})


WAYS = [words_24_11, json_24_11, pyslurm_24_11]
way = pytest.mark.parametrize("client", WAYS)
every_way = pytest.mark.parametrize("client", [*WAYS, commands_22_05])

Client = Callable[[], SlurmClient]
NO_KILL = {"no_kill": True, "no_kill_reason": "an #SBATCH line of the job's script says so"}


def but_batch(job: Job) -> Job:
    """pyslurm does not say whether a job has a batch script."""
    return replace(job, batch=None)


@pytest.mark.parametrize("client", [words_24_11, json_24_11, commands_22_05])
def test_slurm_s_commands_say_whether_a_job_has_a_batch_script(client: Client) -> None:
    job = client().job(15 if client is not commands_22_05 else 1)
    assert job.batch is True


@way
def test_a_running_job_s_wishes_and_what_it_got(client: Client) -> None:
    assert but_batch(client().job(15)) == Job(
        job_id=15,
        state=frozenset({"RUNNING"}),
        nodes=("n1", "n2"),
        cpus_per_node="2,2",
        name="a name",
        user="hpc",
        partition="main",
        gres="gpu:2",
        cpus_per_task=2,
        memory_per_node=100,
        excluded=("n4",),
        num_nodes=2,
        time_limit=24 * 60 + 123,
        submit_time=1796070423,
        start_time=1796070424,
        end_time=1796164204,
        requeue=True,
        comment="two words",
        command="/shared/j.sh",
        workdir="/shared",
        stdout="/shared/slurm-15.out",
        **NO_KILL,
    )


@way
def test_gres_asked_for_by_the_task_are_those_of_a_node(client: Client) -> None:
    job = client().job(16)
    assert (job.gres, job.nodes, job.cpus_per_node) == ("gpu:2", ("n3",), "4")
    assert (job.memory_per_cpu, job.memory_per_node) == (50, None)
    assert job.exclusive
    assert job.requeue is False
    assert (job.time_limit, job.end_time) == (None, None), "no limit"


@way
def test_a_pending_job_s_wishes(client: Client) -> None:
    job = client().job(18)
    assert job.pending
    assert not job.running
    assert not job.over
    assert (job.nodes, job.num_nodes, job.gres, job.cpus_per_node) == ((), 2, "", "")
    assert (job.account, job.memory_per_node, job.time_limit) == ("lab", 1024, 90)
    assert job.reason == "BeginTime"


def test_a_job_of_22_05_with_features_and_gres() -> None:
    job = commands_22_05().job(1)
    assert (job.nodes, job.cpus_per_node, job.gres) == (("n1", "n2"), "2,2", "gpu:1")
    assert (job.name, job.comment, job.constraint) == ("a name", "two words", "big&fast")
    assert (job.time_limit, job.start_time, job.end_time) == (1563, 1796069891, 1796163671)
    assert (job.requeue, job.no_kill, job.exclusive) == (True, True, False)


def test_a_pending_job_of_22_05() -> None:
    job = commands_22_05().job(3)
    assert job.pending
    assert (job.gres, job.account, job.excluded) == ("gpu:2", "lab", ("n2",))
    assert (job.exclusive, job.num_nodes, job.time_limit, job.memory_per_node) == (True, 1, 90, None)
    unlimited = commands_22_05().job(2)
    assert (unlimited.time_limit, unlimited.end_time, unlimited.requeue) == (None, None, False)


def test_words_and_json_tell_the_same_of_nodes() -> None:
    told = words_24_11().nodes()
    assert told == json_24_11().nodes()
    assert [node.gres_used for node in told] == ["gpu:2", "gpu:2", "gpu:2", "gpu:0"]
    assert (told[3].reason_by, told[3].reason_at) == ("root", 1796081230)


@every_way
def test_an_unknown_job_is_an_error_of_its_own(client: Client) -> None:
    with pytest.raises(UnknownJob, match=r"99|Invalid job id"):
        client().job(99)
    with pytest.raises(UnknownJob, match=r"Invalid job id"):
        client().requeue(99)


@way
def test_nodes_with_the_reason_of_who_drained_one(client: Client) -> None:
    nodes = client().nodes(["n4", "n1"])
    assert [node.name for node in nodes] == ["n4", "n1"]
    told = Node("n4", frozenset({"IDLE", "DRAIN"}), "fan is loud", (), "gpu:2", ("main", "urgent"), "24.11.5")
    unsaid = {"address": "", "gres_used": "", "reason_by": "", "reason_at": 0}  # by pyslurm
    assert replace(nodes[0], partitions=told.partitions, **unsaid) == told
    assert not nodes[0].usable
    assert nodes[1].usable


@every_way
def test_all_nodes(client: Client) -> None:
    nodes = client().nodes()
    assert len({node.name for node in nodes}) == len(nodes) > 1
    assert {node.gres for node in nodes} == {"gpu:2"}
    assert sum(not node.usable for node in nodes) == 1


def test_nodes_of_22_05_have_features() -> None:
    drained = commands_22_05().nodes(["n2"])[0]
    assert (drained.features, drained.reason, drained.version) == (("big", "fast"), "fan is loud", "22.05.8")


@way
def test_partitions(client: Client) -> None:
    assert client().partitions() == (
        Partition("main", ("n1", "n2", "n3", "n4"), default=True, preempt_mode="OFF", priority_tier=1),
    )


@every_way
def test_the_configuration(client: Client) -> None:
    config = client().config()
    assert config["JobRequeue"] == "1"
    assert config["SlurmdTimeout"] in ("10 sec", "60 sec")


def test_a_pyslurm_that_is_missing_or_made_for_another_release_is_not_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert load("24.11.5") is None
    monkeypatch.setattr("importlib.metadata.version", lambda name: "25.11.2")
    assert load("24.11.5") is None


# --- the words ---


def test_pairs_may_have_spaces_in_their_values() -> None:
    line = "JobId=3 JobName=a b=c Comment=x  Power= TresPerNode=gres:gpu:1 Account=(null)"
    told = pairs(line)
    assert (told["JobId"], told["Comment"], told["Power"]) == ("3", "x", "")
    assert (told["TresPerNode"], told["Account"]) == ("gres:gpu:1", "")


@pytest.mark.parametrize(
    ("text", "expected"),
    [("01:30:00", 90), ("1-02:03:00", 1563), ("00:00:30", 1), ("UNLIMITED", None), ("Partition_Limit", None)],
)
def test_time_limits_are_minutes(text: str, expected: int | None) -> None:
    assert minutes(text) == expected


@pytest.mark.parametrize(("text", "expected"), [("100M", 100), ("4G", 4096), ("0", None), ("", None)])
def test_memory_is_megabytes_and_all_of_it_is_no_number(text: str, expected: int | None) -> None:
    assert megabytes(text) == expected


@pytest.mark.parametrize(
    ("asked", "given", "expected"),
    [
        ("gres/gpu:2", "", "gpu:2"),
        ("gres:gpu:a100:2,gres:shard:1", "", "gpu:a100:2,shard:1"),
        ("gres/gpu=2", "", "gpu:2"),
        ("", "gpu:a100:2(IDX:0,2),shard:4(0/4,2/4)", "gpu:a100:2,shard:4"),
        ("", "", ""),
    ],
)
def test_gres_are_told_as_the_option_takes_them(asked: str, given: str, expected: str) -> None:
    assert gres_per_node(asked, given) == expected
