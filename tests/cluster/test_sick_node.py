"""A node that goes bad while a run is under way: its ranks move, and not a bit is lost.

Each node has a recorded node under /opt/recorded, a link to a sound one or to one with a fault.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from runs import SCRIPT, STEPS, calm_digest, digests, events, standbys, wait_for_event, worker_of
from slurm_cluster import NODES, Cluster

RECORD = """\
set -e
mkdir -p /etc/everstep
echo 'root = "/opt/recorded"' > /etc/everstep/health.toml
python /repo/tests/unit/health/recorded.py gpu /opt/sound
python /repo/tests/unit/health/recorded.py gpu /opt/sick pages-pending
ln -sfn /opt/sound /opt/recorded
"""
MAKE_SICK = "ln -sfn /opt/sick /opt/recorded"


@pytest.fixture
def recorded(cluster: Cluster) -> Iterator[Cluster]:
    """The cluster, its nodes' health checks reading a recorded node that is sound."""
    for name in NODES:
        cluster.exec(name, ["bash", "-c", RECORD], user="root")
    yield cluster
    for name in NODES:
        cluster.exec(
            name, ["rm", "-rf", "/etc/everstep", "/opt/recorded", "/opt/sound", "/opt/sick"], user="root"
        )


def srun_line(folder: str) -> str:
    return (
        f"cd {folder} && exec everstep srun -N4 -c2 --spare-nodes 1 --standby 0 --health-every 2 "
        f"--events {folder}/events.jsonl torchrun --nproc-per-node 1 train.py --steps {STEPS} --pace 0.2"
    )


def test_a_node_that_turns_bad_in_training_costs_no_committed_step(recorded: Cluster, folder: str) -> None:
    recorded.write_shared(f"{folder}/train.py", SCRIPT)
    run = recorded.popen("login", srun_line(folder))
    so_far = wait_for_event(recorded, folder, run, standbys(1))
    bad = worker_of(so_far, 1)["node"]
    recorded.exec(bad, ["bash", "-c", MAKE_SICK], user="root")
    assert run.wait(timeout=180) == 0, run.output
    assert digests(run.output) == {calm_digest(recorded, folder, 3)}, run.output
    faults = [e for e in events(recorded, folder) if e["event"] == "fault"]
    assert [(f["node"], f["rank"], f["kind"]) for f in faults] == [(bad, 1, "health")], run.output


def test_a_node_that_is_bad_at_the_start_is_left_out(recorded: Cluster, folder: str) -> None:
    recorded.write_shared(f"{folder}/train.py", SCRIPT)
    recorded.exec("n2", ["bash", "-c", MAKE_SICK], user="root")
    run = recorded.popen("login", srun_line(folder).replace("--pace 0.2", "--pace 0"))
    assert run.wait(timeout=120) == 0, run.output
    assert "node n2 is not fit for work (gpu_retired_pages gpu1 reboot" in run.output
    started = {e["node"] for e in events(recorded, folder) if e["event"] == "worker_started"}
    assert started == {"n1", "n3", "n4"}
