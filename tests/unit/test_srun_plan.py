"""`everstep srun`: what is added to the user's srun options, and what is refused or warned of."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from everstep.launcher import srun
from everstep.launcher.options import RunOptions, decode_orders
from everstep.launcher.slurm.client import Job, Node
from everstep.recovery.errors import UsageError

COMMAND = ("torchrun", "--nproc-per-node=2", "train.py", "--epochs", "3")

IN_JOB = {
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NUM_NODES": "4",
    "SLURM_JOB_NODELIST": "n[1-4]",
    "SLURM_JOB_CPUS_PER_NODE": "8(x4)",
    "SLURM_NTASKS": "32",
    "SLURM_NTASKS_PER_NODE": "8",
}


def plan(
    *srun_words: str,
    environ: dict[str, str] | None = None,
    options: RunOptions | None = None,
    allocation: srun.Allocation | None = None,
    command: tuple[str, ...] = COMMAND,
) -> srun.SrunPlan:
    return srun.plan(
        srun_words,
        command,
        options or RunOptions(),
        environ or {},
        "/opt/everstep/bin/everstep",
        version="1.2",
        secret="s3cret",  # noqa: S106
        allocation=allocation,
    )


def refusal(*srun_words: str, **kwargs: object) -> str:
    with pytest.raises(UsageError) as error:
        plan(*srun_words, **kwargs)  # type: ignore[arg-type]
    assert "\n" not in str(error.value)
    return str(error.value)


def test_the_step_is_kept_alive_with_one_agent_a_node() -> None:
    made = plan("-N4", "-c8", "--gres=gpu:2", "-x", "n9")
    assert made.argv == (
        "srun",
        "--no-kill",
        "--kill-on-bad-exit=0",
        "--wait=0",
        "--ntasks=4",
        "--ntasks-per-node=1",
        "--cpu-bind=none",
        *("-N4", "-c8", "--gres=gpu:2", "-x", "n9"),
        *("/opt/everstep/bin/everstep", "agent", "--slurm"),
    )
    assert made.nodes == 4
    assert not made.warnings
    assert made.unset == ()


def test_the_orders_travel_in_the_environment_and_the_secret_in_no_argument() -> None:
    options = RunOptions(standby=2, events=Path("/shared/e.jsonl"), interface="ib0")
    made = plan("-N2", "-c4", options=options)
    assert not any("s3cret" in word or "train.py" in word for word in made.argv)
    assert made.env["EVERSTEP_SECRET"] == "s3cret"  # noqa: S105
    assert "s3cret" not in made.env["EVERSTEP_AGENT"]
    assert "s3cret" not in repr(made)
    orders = decode_orders(made.env["EVERSTEP_AGENT"])
    assert orders.options == options
    assert orders.command == COMMAND
    assert (orders.nnodes, orders.everstep) == (2, "1.2")


def test_orders_that_are_none_are_refused_with_a_word_on_who_starts_agents() -> None:
    for bad in ("", "{}", "[]", json.dumps({"options": {"standby": "x"}})):
        with pytest.raises(UsageError, match="everstep srun"):
            decode_orders(bad)


@pytest.mark.parametrize(
    "words", [["-k"], ["--no-kill"], ["-K0"], ["--kill-on-bad-exit=0"], ["-W0"], ["--wait", "0"]]
)
def test_a_switch_that_the_user_gave_the_same_way_is_neither_doubled_nor_warned_of(words: list[str]) -> None:
    made = plan("-N2", "-c4", *words)
    assert not made.warnings
    kept_alive = [
        word for word in made.argv if word.startswith(("--no-kill", "-k", "--kill", "-K", "--wait", "-W"))
    ]
    assert len(kept_alive) == 3


@pytest.mark.parametrize(
    ("word", "cost"),
    [
        ("--no-kill=off", "when one node fails"),
        ("-K", "when one node's agent fails"),
        ("-K1", "when one node's agent fails"),
        ("--wait=30", "so many seconds after"),
    ],
)
def test_a_switch_given_another_way_is_kept_with_a_loud_word_on_its_cost(word: str, cost: str) -> None:
    made = plan("-N2", "-c4", word)
    assert word in made.argv
    (warning,) = made.warnings
    assert word in warning
    assert cost in warning


def test_in_an_allocation_all_its_nodes_are_used_and_its_task_counts_are_overridden() -> None:
    made = plan(environ=IN_JOB)
    assert made.nodes == 4
    assert {"--nodes=4", "--ntasks=4", "--ntasks-per-node=1"} <= set(made.argv)
    assert not any(word.startswith("--nodelist") for word in made.argv)


@pytest.mark.parametrize(
    ("words", "nodes"),
    [
        (["-w", "n[2-3]"], 2),
        (["--nodelist=n1"], 1),
        (["-x", "n[1-2],n9"], 2),
        (["-r1"], 3),
        (["--nodes=2", "-w", "n[1-4]"], 2),
        (["-N2-2"], 2),
    ],
)
def test_chosen_or_excluded_nodes_say_how_many_there_are(words: list[str], nodes: int) -> None:
    assert plan(*words, environ=IN_JOB).nodes == nodes


def test_outside_a_job_without_a_number_there_is_one_node_as_with_srun() -> None:
    assert plan("-c4").nodes == 1


@pytest.mark.parametrize(
    ("words", "cure"),
    [
        (["-N2", "-n8"], "-N2 with torchrun --nproc-per-node=4"),
        (["-n8"], "-N1 with torchrun --nproc-per-node=8"),
        (["-N2", "--ntasks-per-node=8"], "torchrun --nproc-per-node=8"),
        (["-N2", "--tasks-per-node", "8"], "torchrun --nproc-per-node=8"),
        (["-N2", "--ntasks-per-gpu=1"], "leave it out"),
        (["-N2-4"], "-N4"),
        (["-N", "many"], "-N4"),
        (["-N0"], "-N4"),
        (["-N2", "--multi-prog"], "after torchrun"),
        (["-w", "./hosts"], "with -N"),
        (["-F", "hosts"], "with -N"),
        (["--jobid=9"], "with -N"),
        (["--het-group=0,1"], "name one"),
        (["-w", "n[1"], "no list of hosts"),
    ],
)
def test_what_does_not_go_with_one_agent_a_node_is_refused_with_the_cure(words: list[str], cure: str) -> None:
    assert cure in refusal(*words)


def test_one_task_a_node_in_the_user_s_own_words_is_fine() -> None:
    made = plan("-N2", "-n2", "--ntasks-per-node=1", "-c4")
    assert [word for word in made.argv if "ntasks" in word] == ["--ntasks-per-node=1"]


def test_excluding_every_node_of_the_job_is_refused() -> None:
    assert "no node left" in refusal("-x", "n[1-4]", environ=IN_JOB)


def test_spare_nodes_must_leave_one_to_train_on() -> None:
    assert "-N3" in refusal("-N2", options=RunOptions(spare_nodes=2))


@pytest.mark.parametrize(("nnodes", "trains"), [(None, 3), (3, 3)])
def test_nodes_that_train_are_the_step_s_without_the_spare_ones(nnodes: int | None, trains: int) -> None:
    assert srun.world_nodes(4, RunOptions(spare_nodes=1), nnodes) == trains


def test_a_number_of_nodes_for_torchrun_that_does_not_fit_names_the_cure() -> None:
    with pytest.raises(UsageError, match="add --spare-nodes 1, or leave --nnodes out"):
        srun.world_nodes(4, RunOptions(), 3)
    with pytest.raises(UsageError, match="leave --nnodes out"):
        srun.world_nodes(2, RunOptions(), 8)


# --- a whole node for each agent ---


def test_per_task_shares_of_the_job_do_not_squeeze_the_agent_and_still_reach_the_workers() -> None:
    environ = {**IN_JOB, "SLURM_CPUS_PER_TASK": "2", "SLURM_TRES_PER_TASK": "cpu=2"}
    made = plan(environ=environ)
    assert made.unset == ("SLURM_CPUS_PER_TASK", "SLURM_TRES_PER_TASK")
    assert decode_orders(made.env["EVERSTEP_AGENT"]).worker_env["SLURM_CPUS_PER_TASK"] == "2"
    assert any("SLURM_TRES_PER_TASK" in reason for reason in made.reasons)
    assert not any(word.startswith("--gpus") for word in made.argv)


@pytest.mark.parametrize("tres", ["cpu=2,gres/gpu=1", "cpu=2,gres/gpu:a100=1", "gres/gpu:1"])
def test_gpus_asked_for_by_the_task_are_asked_for_by_the_node(tres: str) -> None:
    environ = {**IN_JOB, "SLURM_TRES_PER_TASK": tres, "SLURM_TASKS_PER_NODE": "8(x4)"}
    assert "--gpus-per-node=8" in plan(environ=environ).argv
    assert "--gpus-per-node=4" in plan(environ={**environ, "SLURM_GPUS_ON_NODE": "4"}).argv
    assert "--gpus-per-node=8" not in plan("--gres=gpu:1", environ=environ).argv


def test_on_a_login_node_the_user_s_own_per_task_variables_are_left_alone() -> None:
    assert plan("-N2", environ={"SLURM_CPUS_PER_TASK": "8"}).unset == ()


def test_a_node_with_one_core_for_all_its_workers_is_warned_of() -> None:
    assert "add -c" in plan("-N2").warnings[0]
    assert "add -c" in plan("-N2", "--exclusive").warnings[0]
    allocation = srun.Allocation("7", 4, cpus_per_node="8(x4)", no_kill=True)
    assert "add -c8" in plan("--exact", environ=IN_JOB, allocation=allocation).warnings[0]
    assert not plan(environ=IN_JOB, allocation=allocation).warnings
    assert not plan("--exact", "-c8", environ=IN_JOB, allocation=allocation).warnings


@pytest.mark.parametrize("words", [["--cpu-bind=cores"], ["--cpu_bind=cores"], ["--hint=nomultithread"]])
def test_binding_that_the_user_chose_is_kept(words: list[str]) -> None:
    assert "--cpu-bind=none" not in plan("-N2", "-c4", *words).argv


def test_cpu_bind_is_left_out_beside_a_hint_in_the_environment() -> None:
    assert "--cpu-bind=none" not in plan(environ={**IN_JOB, "SLURM_HINT": "nomultithread"}).argv


# --- what the agents' environment is made of ---


@pytest.mark.parametrize(
    ("words", "environ", "wanted"),
    [
        (["--export=NONE"], {}, "--export=EVERSTEP_AGENT,EVERSTEP_SECRET,EVERSTEP_SPEC,EVERSTEP_REPORT"),
        (["--export", "NIL"], {}, "--export=EVERSTEP_AGENT,EVERSTEP_SECRET,EVERSTEP_SPEC,EVERSTEP_REPORT"),
        (
            ["--export=HOME,A=1"],
            {},
            "--export=HOME,A=1,EVERSTEP_AGENT,EVERSTEP_SECRET,EVERSTEP_SPEC,EVERSTEP_REPORT",
        ),
        (
            [],
            {"SLURM_EXPORT_ENV": "NONE"},
            "--export=EVERSTEP_AGENT,EVERSTEP_SECRET,EVERSTEP_SPEC,EVERSTEP_REPORT",
        ),
        ([], {"SLURM_EXPORT_ENV": "ALL"}, None),
        (["--export=ALL,A=1"], {}, "--export=ALL,A=1"),
        (["--export=all"], {"SLURM_EXPORT_ENV": "NONE"}, "--export=all"),
        ([], {}, None),
    ],
)
def test_an_export_that_would_hide_the_orders_is_extended(
    words: list[str], environ: dict[str, str], wanted: str | None
) -> None:
    made = plan("-N2", "-c4", *words, environ=environ)
    exports = [word for word in made.argv if word.startswith("--export")]
    assert exports == ([wanted] if wanted else [])
    assert any("--export" in reason for reason in made.reasons) == bool(exports and exports[0] not in words)


# --- the job itself ---


def test_a_job_made_without_no_kill_is_warned_of_loudly() -> None:
    allocation = srun.Allocation("7", 4, no_kill=False, no_kill_reason="neither here nor there")
    (warning,) = plan(environ=IN_JOB, allocation=allocation).warnings
    assert "WILL NOT SURVIVE A LOST NODE" in warning
    assert "sbatch --no-kill" in warning
    assert "neither here nor there" in warning


def test_a_job_of_which_it_cannot_be_told_is_warned_of_as_such() -> None:
    (warning,) = plan(environ=IN_JOB).warnings
    assert "cannot be seen" in warning


def test_outside_a_job_there_is_nothing_to_warn_of() -> None:
    assert not plan("-N2", "-c4").warnings


@pytest.mark.parametrize(
    ("words", "environ", "job"),
    [([], {}, None), ([], IN_JOB, 7), (["--jobid=12"], IN_JOB, 12), (["--jobid", "12"], {}, 12)],
)
def test_the_job_that_the_step_runs_in(words: list[str], environ: dict[str, str], job: int | None) -> None:
    assert srun.job_of(words, environ) == job


class Slurm:
    """A Slurm that knows one job, or answers nothing."""

    def __init__(self, job: Job | None = None) -> None:
        self._job = job

    def version(self) -> str:
        return "24.11.5"

    def job(self, job_id: int) -> Job:
        if self._job is None or self._job.job_id != job_id:
            raise UsageError("slurmctld does not answer")
        return self._job

    def nodes(self, names: Sequence[str]) -> tuple[Node, ...]:
        return ()


def test_slurm_s_word_on_the_job_counts_more_than_the_environment_s() -> None:
    # A node was lost since the batch script began: its variables still say four.
    slurm = Slurm(Job(7, frozenset({"RUNNING"}), ("n1", "n2", "n4"), no_kill=True))
    allocation = srun.find_allocation([], IN_JOB, slurm)
    assert allocation is not None
    assert allocation.no_kill is True
    assert plan(environ=IN_JOB, allocation=allocation).nodes == 3


def test_where_slurm_does_not_answer_the_environment_is_believed() -> None:
    allocation = srun.find_allocation([], IN_JOB, Slurm())
    assert allocation is not None
    assert (allocation.nodes, allocation.no_kill) == (4, None)
    assert allocation.no_kill_reason == "slurmctld does not answer"
    with pytest.raises(UsageError, match="does not answer"):
        srun.find_allocation(["--jobid=9"], IN_JOB, Slurm())


def test_on_a_login_node_there_is_no_job_to_ask_for() -> None:
    assert srun.find_allocation(["-N2"], {}, Slurm()) is None


# --- the command ---


@pytest.mark.parametrize(
    "start",
    [
        ["torchrun"],
        ["/opt/v/bin/torchrun"],
        ["python", "-m", "torch.distributed.run"],
        ["python3.11", "-u", "-m", "torch.distributed.launch"],
    ],
)
def test_every_way_to_start_torchrun_is_known(start: list[str]) -> None:
    assert srun.torchrun_arguments([*start, "--nproc-per-node=2", "train.py"]) == (
        "--nproc-per-node=2",
        "train.py",
    )


@pytest.mark.parametrize(
    "start", [["train.py"], ["python", "train.py"], ["accelerate", "launch"], ["bash", "-c", "x"]]
)
def test_another_command_is_refused_with_an_example(start: list[str]) -> None:
    assert "torchrun --nproc-per-node=8 train.py" in refusal("-N2", command=tuple(start))
