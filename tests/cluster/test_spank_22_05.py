"""The plugin on Slurm 22.05: compiled there, with munge, on a cluster of its own."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

import plugin
import pytest
from runs import SCRIPT, STEPS, Follower, calm_digest, digests, standbys, wait_for_event, worker_of
from slurm_cluster import Cluster, wait_until

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


def test_given_to_sbatch_it_reaches_the_sruns_inside(old_cluster: Cluster, folder: str) -> None:
    old_cluster.write_shared(
        f"{folder}/job.sbatch",
        f"#!/bin/bash\n#SBATCH -N2 --auto-resume=1 --output={folder}/out.txt --export=NIL\n. /etc/profile\n"
        "env | grep NO_KILL\nsrun -N1 -n1 /usr/bin/env | grep -c AGENT\n"
        "srun torchrun nothere.py\necho exit $?\n",
    )
    old_cluster.exec("login", f"sbatch --wait {folder}/job.sbatch", cwd=folder)
    output = Follower(old_cluster, folder).output
    assert output.splitlines() == [
        "SLURM_EVERSTEP_NO_KILL=1",
        "0",
        f"everstep: error: nothere.py: no such script in {folder}",
        "exit 64",
    ]


def test_a_command_loses_a_node_and_srun_ends_with_the_run_s_code(old_cluster: Cluster, folder: str) -> None:
    script = "echo in $TEST_IMAGE on $SLURM_PROCID; sleep 60"
    run = old_cluster.popen("login", f"srun -N2 --auto-resume=1 --container-image=img sh -c '{script}'")
    run.wait_for("in img on 0", timeout=30)
    run.wait_for("in img on 1", timeout=30)
    old_cluster.kill_node("old-n2")
    assert run.wait(timeout=60) == 75, run.output
    assert "no standby is left for rank 1" in run.output, run.output
    assert "submit the job again (exit code 75)" in run.output, run.output
    # srun gives the job back, and Slurm takes its time over it.
    wait_until(lambda: old_cluster.jobs() == [], "no job is left", 30)


def test_a_failed_command_is_started_again_on_all_nodes(old_cluster: Cluster, folder: str) -> None:
    once = f"[ -e {folder}/seen ] || {{ touch {folder}/seen; exit 9; }}"
    script = f"echo try $SLURM_PROCID; [ $SLURM_PROCID = 0 ] || {once}"
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


def test_a_stock_srun_makes_the_same_system_calls(old_cluster: Cluster, folder: str) -> None:
    with_it = plugin.traced(old_cluster, f"{folder}/with")
    with plugin.taken_out(old_cluster):
        without = plugin.traced(old_cluster, f"{folder}/without")
    own = {call for call in with_it if "everstep" in call}  # its file and its line in plugstack.conf
    assert own and all(call.startswith("openat") for call in own), own
    assert {call: n for call, n in with_it.items() if call not in own} == without


def test_the_plugin_passes_its_own_check(old_cluster: Cluster) -> None:
    text = plugin.checked(old_cluster)
    assert "analyzer: nothing found" in text and "all is so" in text and "not installed" not in text
