"""Every template submits and finishes, and a kill in its middle does what its comment promises.

DeepSpeed is not here, nor are GPUs: deepspeed.sbatch runs with a stand-in for the one, all of them on CPUs
with GPUs that exist in Slurm's books only.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

import plugin
from slurm_cluster import Cluster, wait_until

SCRIPTS = Path(__file__).parent / "scripts"
STEPS = 60
TINY = "--set WORKERS=1 --nodes=3 --gpus-per-node=2 --time=10"
WORLD = "--nnodes 2"  # two nodes of three train, one worker on each
PATIENCE = 240.0  # seconds, for a host whose few cores are busy


class Submitted:
    """A job made from a template: what it says, where it runs, how it ends."""

    def __init__(self, cluster: Cluster, folder: str, template: str, line: str, args: str) -> None:
        self.cluster, self.folder = cluster, folder
        said = cluster.exec(
            "login",
            f"cd {folder} && everstep sbatch {line} --output={folder}/out.txt {template} {args}",
        )
        self.job = re.search(r"Submitted batch job (\d+)", said.stdout)[1]

    @property
    def output(self) -> str:
        return self.cluster.exec("login", f"cat {self.folder}/out.txt 2>/dev/null || true").stdout

    def record(self) -> dict:
        said = self.cluster.exec("login", ["scontrol", "show", "job", self.job, "--json"], timeout=20)
        return json.loads(said.stdout)["jobs"][0]

    def nodes(self) -> list[str]:
        hosts = self.record()["nodes"]
        return self.cluster.exec("login", ["scontrol", "show", "hostnames", hosts]).stdout.split()

    def wait_for(self, pattern: str, times: int = 1, timeout: float = PATIENCE) -> None:
        try:
            wait_until(
                lambda: len(re.findall(pattern, self.output)) >= times, f"it says {pattern!r}", timeout, 0.5
            )
        except TimeoutError as error:
            raise AssertionError(f"{error}; it said:\n{self.output}") from None

    def wait_for_file(self, name: str) -> None:
        """Wait until its checkpoint is there."""
        there = ["sh", "-c", f"ls {self.folder}/{name}"]
        try:
            wait_until(
                lambda: self.cluster.exec("login", there, check=False).returncode == 0,
                f"{name} is there",
                PATIENCE,
                0.5,
            )
        except TimeoutError as error:
            raise AssertionError(f"{error}; it said:\n{self.output}") from None

    def kill_worker(self, node: str, script: str) -> None:
        """SIGKILL to one worker there that holds a rank."""
        oldest = f"pgrep -u hpc -f '^[^ ]*python[^ ]* -u {script}' | head -n 1"
        pid = self.cluster.exec(node, ["sh", "-c", oldest]).stdout.strip()
        self.cluster.exec(node, ["kill", "-9", pid])

    def end(self, timeout: float = PATIENCE) -> list[str]:
        """Its state once it is over. A requeued job need not wait here for its credentials to expire."""

        def over() -> bool:
            state = self.record()
            if "PENDING" in state["job_state"] and state["state_reason"] == "BeginTime":
                now = ["scontrol", "update", f"jobid={self.job}", "starttime=now"]
                self.cluster.exec("login", now, check=False)
            return not {"PENDING", "RUNNING", "COMPLETING", "REQUEUED"} & set(state["job_state"])

        try:
            wait_until(over, "the job is over", timeout, 0.5)
        except TimeoutError as error:
            raise AssertionError(f"{error}; it said:\n{self.output}") from None
        return self.record()["job_state"]

    def digests(self) -> set[str]:
        """What its ranks say at the end."""
        self.wait_for("digest [0-9a-f]{64}", timeout=10)
        return digests(self.output)


def digests(output: str) -> set[str]:
    return set(re.findall(r"digest ([0-9a-f]{64})", output))


_calm: dict[str, set[str]] = {}


def calm(cluster: Cluster, folder: str, script: str, args: str = "") -> set[str]:
    """The digest of an undisturbed run, from embedded mode on the login node."""
    if script not in _calm:
        line = f"everstep run {WORLD} --standby 0 {script} --steps {STEPS} --pace 0 {args}"
        _calm[script] = digests(cluster.exec("login", f"cd {folder} && {line}", timeout=180).stdout)
        assert len(_calm[script]) == 1
    return _calm[script]


def put(cluster: Cluster, folder: str, names: Sequence[str]) -> None:
    for name in names:
        cluster.write_shared(f"{folder}/{Path(name).name}", (SCRIPTS / name).read_text())


# --- the run recovers -----------------------------------------------------------------------------


def test_ddp_loses_a_worker_and_a_node_and_no_step(cluster: Cluster, folder: str) -> None:
    put(cluster, folder, ["train.py"])
    job = Submitted(
        cluster,
        folder,
        "ddp",
        f"{TINY} --set SCRIPT=train.py",
        f"--steps {STEPS} --checkpoint {folder}/saved",
    )
    job.wait_for_file("saved/*")
    nodes = job.nodes()
    job.kill_worker(nodes[0], "train.py")
    job.wait_for("generation 2 goes on")
    cluster.kill_node(nodes[1])
    job.wait_for("generation 3 goes on")
    assert job.end() == ["COMPLETED"], job.output
    assert job.digests() == calm(cluster, folder, "train.py")


def test_ddp_loses_a_node_and_has_no_spare_one(cluster: Cluster, folder: str) -> None:
    put(cluster, folder, ["train.py"])
    line = f"{TINY} --set SCRIPT=train.py --set SPARE_NODES=0 --nodes=2"
    job = Submitted(cluster, folder, "ddp", line, f"--steps {STEPS} --checkpoint {folder}/saved")
    job.wait_for_file("saved/*")
    cluster.kill_node(job.nodes()[1])
    assert job.end() == ["COMPLETED"], job.output
    assert job.digests() == calm(cluster, folder, "train.py")


def has_plugin(cluster: Cluster) -> bool:
    return "--auto-resume" in cluster.exec("login", "srun --help").stdout


def test_auto_resume_loses_a_worker_and_a_node_and_no_step(cluster: Cluster, folder: str) -> None:
    with plugin.installed(cluster):
        auto_resume_loses_a_worker_and_a_node(cluster, folder)


def auto_resume_loses_a_worker_and_a_node(cluster: Cluster, folder: str) -> None:
    put(cluster, folder, ["train.py"])
    args = f"--steps {STEPS} --checkpoint {folder}/saved"
    job = Submitted(cluster, folder, "auto-resume", f"{TINY} --set SCRIPT=train.py", args)
    job.wait_for_file("saved/*")
    nodes = job.nodes()
    job.kill_worker(nodes[0], "train.py")
    job.wait_for("generation 2 goes on")
    cluster.kill_node(nodes[1])
    job.wait_for("generation 3 goes on")
    assert job.end() == ["COMPLETED"], job.output
    assert job.digests() == calm(cluster, folder, "train.py")


def test_auto_resume_says_what_to_use_where_the_plugin_or_pyxis_is_missing(
    cluster: Cluster, folder: str
) -> None:
    line = f"{TINY} --set SCRIPT=train.py --set CONTAINER=/images/torch.sqsh"
    job = Submitted(cluster, folder, "auto-resume", line, "")
    assert job.end() == ["FAILED"]
    if has_plugin(cluster):
        job.wait_for(r"srun has no --container-image here \(Pyxis is not installed\)", timeout=10)
    else:
        job.wait_for("submit ddp instead", timeout=10)


# --- all workers start again ----------------------------------------------------------------------


def test_whole_group_restart_needs_no_line_in_the_script(cluster: Cluster, folder: str) -> None:
    put(cluster, folder, ["plain_ddp.py"])
    args = f"--steps {STEPS} --checkpoint {folder}/saved.pt"
    job = Submitted(cluster, folder, "whole-group-restart", f"{TINY} --set SCRIPT=plain_ddp.py", args)
    job.wait_for_file("saved.pt")
    nodes = job.nodes()
    job.kill_worker(nodes[0], "plain_ddp.py")
    job.wait_for(r"begins at step [1-9]\d*", times=1)
    cluster.kill_node(nodes[1])
    job.wait_for(r"begins at step [1-9]\d*", times=2)
    assert job.end() == ["COMPLETED"], job.output
    calm_args = f"--checkpoint {folder}/calm.pt"
    assert job.digests() == calm(cluster, folder, "plain_ddp.py", calm_args)


def test_deepspeed_goes_on_from_its_own_newest_checkpoint(cluster: Cluster, folder: str) -> None:
    put(cluster, folder, ["ds_train.py", "standin/deepspeed.py"])
    cluster.write_shared(f"{folder}/ds.json", json.dumps({"optimizer": {"params": {"lr": 0.01}}}))
    line = f"{TINY} --set SCRIPT=ds_train.py --set CONFIG=ds.json"
    args = f"--steps {STEPS} --checkpoint {folder}/saved"
    job = Submitted(cluster, folder, "deepspeed", line, args)
    job.wait_for_file("saved/latest")
    job.kill_worker(job.nodes()[1], "ds_train.py")
    job.wait_for(r"begins at step [1-9]\d*")
    assert job.end() == ["COMPLETED"], job.output
    job.wait_for("deepspeed is a stand-in here", timeout=10)
    calm_args = f"--checkpoint {folder}/calm --deepspeed_config ds.json"
    assert job.digests() == calm(cluster, folder, "ds_train.py", calm_args)


def test_deepspeed_says_so_where_there_is_none(cluster: Cluster, folder: str) -> None:
    put(cluster, folder, ["ds_train.py"])
    job = Submitted(cluster, folder, "deepspeed", f"{TINY} --set SCRIPT=ds_train.py --set CONFIG=ds.json", "")
    assert job.end() == ["FAILED"]
    job.wait_for("no DeepSpeed for this job's python", timeout=10)
