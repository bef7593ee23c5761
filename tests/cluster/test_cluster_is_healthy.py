"""The containerized cluster is what the other cluster tests take it for."""

from __future__ import annotations

import json

import pytest
from slurm_cluster import NODES, Cluster


def test_all_four_nodes_are_idle(cluster: Cluster) -> None:
    assert {name: cluster.node_state(name) for name in NODES} == {name: {"IDLE"} for name in NODES}


def test_a_plain_user_runs_a_step_on_every_node(cluster: Cluster) -> None:
    said = cluster.exec("login", "srun -N4 sh -c 'echo $(hostname) $(id -un)'")
    assert sorted(said.stdout.splitlines()) == [f"{name} hpc" for name in NODES]


def test_a_step_with_gpus_sees_them_in_cuda_visible_devices(cluster: Cluster) -> None:
    assert cluster.exec("login", "srun -N1 --gpus-per-node=2 printenv CUDA_VISIBLE_DEVICES").stdout == "0,1\n"
    assert cluster.exec("login", "srun -N1 --gpus-per-node=1 printenv CUDA_VISIBLE_DEVICES").stdout == "0\n"


@pytest.mark.parametrize(("node", "switch"), [("n1", "s0"), ("n2", "s0"), ("n3", "s1"), ("n4", "s1")])
def test_a_task_is_told_its_switch(cluster: Cluster, node: str, switch: str) -> None:
    ask = "printenv SLURM_TOPOLOGY_ADDR SLURM_TOPOLOGY_ADDR_PATTERN"
    said = cluster.exec("login", f"srun --nodelist={node} {ask}")
    assert said.stdout.splitlines() == [f"top.{switch}.{node}", "switch.switch.node"]


def test_a_batch_job_writes_to_the_shared_folder(cluster: Cluster, folder: str) -> None:
    job = "#!/bin/bash\nsrun hostname\nprintenv OMP_NUM_THREADS\n"
    script = cluster.write_shared(f"{folder}/job.sh", job)
    cluster.exec("login", f"sbatch --wait -N2 --nodelist=n3,n4 --output={folder}/out {script}", cwd=folder)
    assert sorted(cluster.read_shared(f"{folder}/out").splitlines()) == ["1", "n3", "n4"]


def test_ssh_from_the_login_node_needs_no_password(cluster: Cluster) -> None:
    assert cluster.exec("login", "ssh n1 'hostname; id -un'").stdout.split() == ["n1", "hpc"]


def test_slurm_speaks_json(cluster: Cluster) -> None:
    said = json.loads(cluster.exec("login", "scontrol show nodes --json").stdout)
    assert [node["name"] for node in said["nodes"]] == list(NODES)
    assert said["meta"]["slurm"]["version"]["major"] == "24"


@pytest.mark.parametrize(
    "way_in",
    [
        "{}",
        "ssh n2 {}",
        "srun -N1 --nodelist=n4 {}",
        "srun -N1 --export=NONE --nodelist=n4 /bin/bash -lc '{}'",
    ],
    ids=["login shell", "ssh", "srun", "srun without the caller's environment"],
)
def test_every_way_in_finds_the_commands(cluster: Cluster, way_in: str) -> None:
    said = cluster.exec("login", way_in.format("which everstep python torchrun"))
    assert said.stdout.split() == [f"/opt/everstep/bin/{name}" for name in ("everstep", "python", "torchrun")]


def test_the_checkout_is_what_python_imports_on_a_node(cluster: Cluster) -> None:
    code = (
        "import torch, everstep.launcher, everstep.recovery as recovery;"
        "from importlib.metadata import version;"
        "print(torch.__version__.split('+')[0], recovery.__path__[0], version('everstep'))"
    )
    said = cluster.exec("login", ["srun", "-N1", "python", "-c", code])
    torch, path, version = said.stdout.split()
    assert (torch, path) == ("2.13.0", "/opt/src/everstep/recovery")
    assert version


def test_pidfd_works_for_a_plain_user_in_a_container(cluster: Cluster) -> None:
    code = "import os, select; pid = os.spawnlp(os.P_NOWAIT, 'true', 'true');"
    code += "print(select.select([os.pidfd_open(pid)], [], [], 10)[0] != [])"
    assert cluster.exec("n1", ["python", "-c", code]).stdout == "True\n"


def test_a_killed_node_is_noticed_and_comes_back_idle(cluster: Cluster) -> None:
    cluster.kill_node("n3")
    cluster.wait_state("n3", {"DOWN", "NOT_RESPONDING"})
    cluster.start_node("n3")
    assert cluster.exec("login", "srun --nodelist=n3 --gpus-per-node=2 hostname").stdout == "n3\n"


def test_a_node_cut_off_the_network_runs_on_and_comes_back(cluster: Cluster) -> None:
    cluster.cut_off("n2")
    assert cluster.exec("n2", "getent hosts controller", check=False).stdout == ""
    cluster.reconnect("n2")
    cluster.wait_idle()
    assert cluster.exec("login", "srun --nodelist=n2 hostname").stdout == "n2\n"


def test_a_paused_node_goes_on_where_it_was(cluster: Cluster) -> None:
    step = cluster.popen("login", "srun --nodelist=n4 sh -c 'echo started; sleep 2; echo done'")
    step.wait_for("started", timeout=20)
    cluster.pause_node("n4")
    cluster.unpause_node("n4")
    assert step.wait(timeout=20) == 0
    assert step.output.splitlines() == ["started", "done"]


def test_a_step_outlives_a_node_of_its_own_when_told_to(cluster: Cluster, folder: str) -> None:
    keep = "srun --no-kill --kill-on-bad-exit=0 --wait=0 --unbuffered"
    task = f"hostname; until [ -e {folder}/go ]; do sleep 0.2; done; echo $(hostname) at the end"
    step = cluster.popen("login", f"salloc --no-kill -N3 --nodelist=n[1-3] {keep} sh -c '{task}'")
    for name in ("n1", "n2", "n3"):
        step.wait_for(f"^{name}$", timeout=20)
    cluster.kill_node("n3")
    step.wait_for("Node failure on n3", timeout=60)
    cluster.write_shared(f"{folder}/go", "")
    step.wait(timeout=60)
    assert {"n1 at the end", "n2 at the end"} <= set(step.output.splitlines())
    assert "n3 at the end" not in step.output
