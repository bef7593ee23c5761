"""No standby is left: another node, or the queue. And a run that is told to stop loses and leaves nothing."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from runs import SCRIPT, STEPS, Follower, calm_digest, digests, events, wait_for_event, worker_of
from slurm_cluster import Cluster, wait_until


@pytest.fixture
def job(cluster: Cluster, folder: str) -> str:
    """A folder on the shared file system with the training script in it."""
    cluster.write_shared(f"{folder}/train.py", SCRIPT)
    return folder


class Batch(Follower):
    """A batch job that trains, on three nodes and without standbys."""

    def __init__(
        self, cluster: Cluster, folder: str, options: str = "", script: str = "", pace: float = 0.15
    ) -> None:
        super().__init__(cluster, folder)
        self.cluster, self.folder = cluster, folder
        cluster.write_shared(
            f"{folder}/job.sbatch",
            "#!/bin/bash\n#SBATCH --nodes=3 --ntasks-per-node=1 --cpus-per-task=2 --no-kill --requeue\n"
            f"#SBATCH --open-mode=append --output={folder}/out.txt --chdir={folder}\n"
            f"everstep srun --standby 0 {options} --events {folder}/events.jsonl "
            f"torchrun --nproc-per-node 1 train.py --steps {STEPS} --pace {pace} {script}\necho exit $?\n",
        )
        self.number = cluster.exec("login", f"sbatch --parsable {folder}/job.sbatch").stdout.strip()

    def running(self) -> list[dict]:
        """The events, once every rank has committed a step."""
        return self.wait(lambda es: sum(e["event"] == "step" for e in es) >= 3)

    def wait(self, wanted: Callable[[list[dict]], bool], timeout: float = 120) -> list[dict]:
        return wait_for_event(self.cluster, self.folder, self, wanted, timeout)

    def lose_rank_1(self) -> str:
        node = worker_of(self.running(), 1)["node"]
        self.cluster.kill_node(node)
        return str(node)

    def field(self, name: str) -> str:
        """One field of the job as Slurm shows it."""
        shown = self.cluster.ask("scontrol", "show", "job", self.number).split()
        return next((word.partition("=")[2] for word in shown if word.startswith(f"{name}=")), "")

    def is_requeued(self) -> None:
        """It goes back to the queue; where it never does, what it said instead is shown."""
        deadline = time.monotonic() + 60
        while (state := self.field("JobState")) != "PENDING":
            assert time.monotonic() < deadline, f"{state}, not requeued; the job said:\n{self.output}"
            time.sleep(0.1)

    def starts_again(self) -> None:
        """It is requeued, and does not wait the two minutes that Slurm would have it wait."""
        self.is_requeued()
        time.sleep(2)  # a start within the second of its end is refused by slurmd ("Job credential revoked")

        def runs() -> bool:
            # Asked for while the old attempt is being cleaned up, the time would be set back once more.
            self.cluster.exec("login", f"scontrol update jobid={self.number} starttime=now", check=False)
            return self.field("JobState") not in ("PENDING", "COMPLETING")

        wait_until(runs, "it runs again", 90, every=1.0)

    def ends(self, code: int = 0) -> None:
        wait_until(lambda: self.output.rstrip().endswith(f"exit {code}"), self.output[-3000:], 120)


HOG = "sbatch --parsable --exclusive -w n4 -o /dev/null --wrap 'sleep 900'"


def rungs(es: list[dict]) -> list[str]:
    return [e["rung"] for e in es if e["event"] == "rung"]


def waiting_for_a_run(cluster: Cluster) -> list[str]:
    """The replacement jobs that there are."""
    return [line for line in cluster.jobs() if "everstep-" in line]


def test_a_replacement_that_waits_is_cancelled_where_the_coordinator_is_lost_with_its_node(
    cluster: Cluster, job: str
) -> None:
    """Its batch host: srun and the script are gone with it, and the survivor is alone to know."""
    hog = cluster.exec("login", HOG).stdout.strip()
    run = Batch(cluster, job)
    run.lose_rank_1()
    wait_until(lambda: waiting_for_a_run(cluster) != [], "a replacement job is queued", 60)
    cluster.kill_node(run.field("BatchHost"))
    wait_until(lambda: waiting_for_a_run(cluster) == [], "the replacement job is cancelled", 60)

    def nothing_left() -> bool:
        # A controller that looks for lost nodes may not answer in time.
        cluster.exec("login", f"scancel {hog} {run.number}", check=False)
        return cluster.jobs() == []

    wait_until(nothing_left, "both jobs are cancelled", 90, every=1.0)


def test_a_replacement_node_joins_the_run_and_takes_the_rank(cluster: Cluster, job: str) -> None:
    run = Batch(cluster, job)
    run.lose_rank_1()
    run.ends()
    assert digests(run.output) == {calm_digest(cluster, job, 3)}, run.output
    assert run.output.count("digest") == 3, "what the replacement node prints is shown with the rest"
    assert rungs(events(cluster, job)) == ["replace"]


def test_no_node_is_free_so_the_job_is_requeued_without_the_bad_one_and_goes_on(
    cluster: Cluster, job: str
) -> None:
    hog = cluster.exec("login", HOG).stdout.strip()
    run = Batch(cluster, job, "--replace-within 3", f"--checkpoint {job}/saved")
    bad = run.lose_rank_1()
    run.is_requeued()
    assert run.field("ExcNodeList") == bad, run.output
    assert rungs(events(cluster, job)) == ["replace", "requeue"]
    assert waiting_for_a_run(cluster) == [], "no job is left in the queue for it"
    cluster.exec("login", f"scancel {hog}")
    run.starts_again()
    run.ends()
    assert f"attempt 2 of job {run.number}" in run.output
    assert digests(run.output) == {calm_digest(cluster, job, 3)}, run.output


def test_a_preempted_job_saves_its_state_and_goes_on_when_it_is_its_turn_again(
    cluster: Cluster, job: str
) -> None:
    run = Batch(cluster, job, script=f"--checkpoint {job}/saved")
    run.running()
    urgent = "sbatch --parsable -p urgent --exclusive --nodes=4 -o /dev/null --wrap true"
    cluster.exec("login", urgent)
    run.starts_again()
    assert "a checkpoint of step" in run.output or "the newest checkpoint is of step" in run.output
    run.ends()
    assert digests(run.output) == {calm_digest(cluster, job, 3)}, run.output
    wait_until(lambda: cluster.jobs() == [], "it has ended for good, and is not requeued once more", 20)
    assert run.field("Restarts") == "1"


def test_scancel_leaves_a_checkpoint_and_no_job_in_the_queue(cluster: Cluster, job: str) -> None:
    hog = cluster.exec("login", HOG).stdout.strip()
    run = Batch(cluster, job, script=f"--checkpoint {job}/saved")
    run.lose_rank_1()
    run.wait(lambda es: rungs(es) == ["replace"])
    wait_until(lambda: any("everstep" in line for line in cluster.jobs()), "a job for another node", 20)
    cluster.exec("login", f"scancel {run.number}")
    cluster.exec("login", f"scancel {hog}")
    wait_until(lambda: cluster.jobs() == [], "nothing of it is in the queue", 40)
    assert "a checkpoint of step" in run.output, run.output
    # (that no process is left on the nodes is checked after every test)


def test_a_warning_ahead_of_the_time_limit_brings_the_job_back_to_the_queue(
    cluster: Cluster, job: str
) -> None:
    run = Batch(cluster, job, script=f"--checkpoint {job}/saved")
    run.running()
    cluster.exec("login", f"scancel --signal=USR1 {run.number}")
    run.starts_again()
    run.ends()
    assert digests(run.output) == {calm_digest(cluster, job, 3)}, run.output


def test_a_bug_in_the_script_takes_no_nodes_and_ends_with_the_workers_own_code(
    cluster: Cluster, job: str
) -> None:
    cluster.write_shared(f"{job}/train.py", SCRIPT.replace("loss.backward()", BUG + "loss.backward()"))
    began = time.time()
    run = Batch(cluster, job, "--standby 1", pace=0.0)
    run.ends(1)
    assert "RuntimeError: a bug at step 7" in run.output, f"{run.output}\n{time.time() - began:.0f} s"
    assert "step 7 failed 3 times" in run.output
    assert rungs(events(cluster, job)) == []


BUG = "if step == 7: raise RuntimeError('a bug at step 7')\n        "
