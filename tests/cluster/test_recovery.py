"""A worker and a node lost under `everstep srun`: the run goes on and its digest is that of a calm one."""

from __future__ import annotations

import re
import time

import pytest
from runs import (
    SCRIPT,
    STEPS,
    Follower,
    calm_digest,
    digests,
    events,
    is_step_of,
    standbys,
    wait_for_event,
    worker_of,
)
from slurm_cluster import Cluster


def srun_line(folder: str, options: str = "-N3 -c2", workers: int = 1, script: str = "") -> str:
    return (
        f"cd {folder} && exec everstep srun {options} --events {folder}/events.jsonl "
        f"torchrun --nproc-per-node {workers} train.py --steps {STEPS} {script}"
    )


@pytest.fixture
def job(cluster: Cluster, folder: str) -> str:
    """A folder on the shared file system with the training script in it."""
    cluster.write_shared(f"{folder}/train.py", SCRIPT)
    return folder


def test_a_killed_worker_is_replaced_on_its_node(cluster: Cluster, job: str) -> None:
    run = cluster.popen("login", srun_line(job))
    so_far = wait_for_event(cluster, job, run, standbys(3))
    victim = worker_of(so_far, 1)
    cluster.exec(victim["node"], ["kill", "-9", str(victim["pid"])])
    assert run.wait(timeout=120) == 0, run.output
    assert digests(run.output) == {calm_digest(cluster, job, 3)}
    faults = [e for e in events(cluster, job) if e["event"] == "fault"]
    assert [(f["rank"], f["kind"]) for f in faults] == [(1, "SIGKILL")]


def test_a_killed_node_is_replaced_by_the_spare_node(cluster: Cluster, job: str) -> None:
    run = cluster.popen("login", srun_line(job, "-N4 -c2 --spare-nodes 1 --standby 0"))
    so_far = wait_for_event(cluster, job, run, standbys(1))
    victim = worker_of(so_far, 2)
    killed = time.time()
    cluster.kill_node(victim["node"])
    after = wait_for_event(cluster, job, run, lambda es: any(is_step_of(e, 2) for e in es), timeout=30)
    took = next(e["t"] for e in after if is_step_of(e, 2)) - killed
    print(f"node killed -> next committed step: {took:.2f} s")
    assert run.wait(timeout=120) == 0, run.output
    assert digests(run.output) == {calm_digest(cluster, job, 3)}
    assert [f["kind"] for f in after if f["event"] == "fault"] == ["node"]


def test_inside_sbatch_a_worker_and_then_a_node_are_lost(cluster: Cluster, job: str) -> None:
    line = srun_line(job, "--spare-nodes 1", workers=1)
    cluster.write_shared(
        f"{job}/job.sbatch",
        "#!/bin/bash\n#SBATCH --nodes=4 --cpus-per-task=2 --no-kill --ntasks-per-node=1\n"
        f"#SBATCH --output={job}/out.txt\n{line.replace('exec ', '')}\necho exit $?\n",
    )
    number = cluster.exec("login", f"sbatch --parsable {job}/job.sbatch").stdout.strip()
    run = Follower(cluster, job)
    so_far = wait_for_event(cluster, job, run, standbys(4))
    victim = worker_of(so_far, 0)
    cluster.exec(victim["node"], ["kill", "-9", str(victim["pid"])])
    so_far = wait_for_event(cluster, job, run, lambda es: any(is_step_of(e, 0) for e in es), timeout=30)
    lost = worker_of(so_far, 1)
    cluster.kill_node(lost["node"])
    wait_for_event(cluster, job, run, lambda es: es[-1]["event"] in ("finished", "failed"), timeout=120)
    deadline = time.monotonic() + 60
    while "exit" not in run.output.splitlines()[-1] and time.monotonic() < deadline:
        time.sleep(0.3)
    assert run.output.splitlines()[-1] == "exit 0", run.output
    assert digests(run.output) == {calm_digest(cluster, job, 3)}
    assert "WARNING" not in run.output, number


def test_an_allocation_without_no_kill_is_warned_of(cluster: Cluster, job: str) -> None:
    cluster.write_shared(
        f"{job}/job.sbatch",
        "#!/bin/bash\n#SBATCH --nodes=2 --cpus-per-task=2\n"
        f"#SBATCH --output={job}/out.txt\n{srun_line(job, '').replace('exec ', '')} --pace 0\necho exit $?\n",
    )
    cluster.exec("login", f"sbatch --wait {job}/job.sbatch", timeout=120)
    output = Follower(cluster, job).output
    assert re.search(r"WARNING: .*--no-kill", output), output
    assert output.splitlines()[-1] == "exit 0", output


def test_a_cancelled_job_leaves_nothing_behind(cluster: Cluster, job: str) -> None:
    run = cluster.popen("login", srun_line(job))
    wait_for_event(cluster, job, run, standbys(3))
    (number,) = {line.split()[0] for line in cluster.jobs()}
    cluster.exec("login", ["scancel", number])
    assert run.wait(timeout=60) != 0
    # (that nothing is left on the nodes is checked after every test)


def test_a_node_with_another_everstep_is_refused(cluster: Cluster, job: str) -> None:
    run = cluster.popen(
        "login",
        f"cd {job} && exec everstep srun -N2 -c2 bash -c 'true'",
    )
    assert run.wait(timeout=60) == 64
    assert "torchrun" in run.output
