"""The plugin on Slurm 22.05: compiled there, with munge, on a cluster of its own."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

import plugin
import pytest
from runs import SCRIPT, STEPS, calm_digest, digests, standbys, wait_for_event, worker_of
from slurm_cluster import Cluster

pytestmark = pytest.mark.usefixtures("spank")


@pytest.fixture(scope="module")
def spank(old_cluster: Cluster) -> Iterator[None]:
    with plugin.installed(old_cluster):
        yield


def test_it_is_the_other_release(old_cluster: Cluster) -> None:
    assert old_cluster.exec("login", "srun --version").stdout.startswith("slurm-wlm 22.05")


def test_a_worker_of_a_stock_line_is_replaced(old_cluster: Cluster, folder: str) -> None:
    old_cluster.write_shared(f"{folder}/train.py", SCRIPT)
    line = f"srun -N2 -c2 --auto-resume=1 torchrun --nproc-per-node 1 train.py --steps {STEPS}"
    run = old_cluster.popen(
        "login", f"cd {folder}; export EVERSTEP_OPTIONS='--events {folder}/events.jsonl'; exec {line}"
    )
    victim = worker_of(wait_for_event(old_cluster, folder, run, standbys(2)), 1)
    old_cluster.exec(victim["node"], ["kill", "-9", str(victim["pid"])])
    assert run.wait(timeout=120) == 0, run.output
    assert digests(run.output) == {calm_digest(old_cluster, folder, 2)}


def test_a_job_s_node_dies_and_the_spare_one_takes_its_place(old_cluster: Cluster, folder: str) -> None:
    """With sbatch's option, a command that is no torchrun's, and another plugin's option."""
    task = f"echo at $SLURM_PROCID of $SLURM_NTASKS on $(hostname) in $TEST_IMAGE; until [ -e {folder}/go ]; do sleep 0.2; done"
    old_cluster.write_shared(f"{folder}/task.sh", task)
    old_cluster.write_shared(
        f"{folder}/job.sbatch",
        f"#!/bin/bash\n#SBATCH -N2 --auto-resume=1 --output={folder}/out.txt --export=NIL\n. /etc/profile\n"
        f"srun --auto-resume=1 --spare-nodes=1 --container-image=img sh {folder}/task.sh\necho exit $?\n",
    )
    old_cluster.exec("login", f"sbatch {folder}/job.sbatch", cwd=folder)
    from runs import Follower

    run = Follower(old_cluster, folder)
    run.wait_for_line(r"at 0 of 1 on old-n1 in img", timeout=60)
    assert "WARNING" not in run.output
    old_cluster.write_shared(f"{folder}/go", "")
    run.wait_for_last_line("exit ", timeout=60)
    assert run.output.splitlines()[-1] == "exit 0", run.output


def test_a_failed_command_is_started_again_on_all_nodes(old_cluster: Cluster, folder: str) -> None:
    script = f"echo try $SLURM_PROCID; [ $SLURM_PROCID = 0 ] || [ -e {folder}/seen ] || {{ touch {folder}/seen; exit 9; }}"
    text = old_cluster.exec("login", f"srun -N2 --auto-resume=1 sh -c '{script}'").stdout
    assert Counter(re.findall(r"^try \d$", text, re.MULTILINE)) == {"try 0": 2, "try 1": 2}


def test_wrong_values_are_refused_and_a_stock_srun_is_left_alone(old_cluster: Cluster) -> None:
    refused = old_cluster.exec("login", "srun --auto-resume=1 --standby=x hostname", check=False)
    assert refused.returncode != 0 and "--standby: a whole number" in refused.stderr
    with plugin.configured(old_cluster, "everstep=/nowhere/everstep"):
        done = old_cluster.exec("login", "srun -N2 env")
        assert "EVERSTEP" not in done.stdout and done.stderr == ""
        refused = old_cluster.exec("login", "srun --auto-resume=1 hostname", check=False)
        assert refused.returncode == 64 and "/nowhere/everstep is not here" in refused.stderr


def test_the_plugin_passes_its_own_check(old_cluster: Cluster) -> None:
    text = plugin.checked(old_cluster)
    assert "analyzer: nothing found" in text and "all is so" in text and "not installed" not in text
