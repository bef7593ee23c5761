"""`everstep doctor` on a login node, with a job of a second, and inside a job."""

from __future__ import annotations

import json

from slurm_cluster import Cluster


def levels(said: str) -> dict[str, str]:
    return {line["check"]: line["level"] for line in json.loads(said)["checks"]}


def test_on_a_login_node_it_says_what_it_cannot_see_and_how_it_could(cluster: Cluster) -> None:
    done = cluster.exec("login", "everstep doctor", check=False)
    assert done.returncode == 1, "the test cluster has no health program"
    assert "everstep doctor -- -N4" in done.stdout
    assert "\x1b" not in done.stdout
    assert cluster.jobs() == []


def test_nodes_are_asked_by_a_job_of_a_second(cluster: Cluster) -> None:
    said = cluster.exec("login", "everstep doctor --json -- -N2", check=False, timeout=90).stdout
    found = levels(said)
    assert (found["Slurm"], found["everstep and torch"], found["topology"]) == ("ok", "ok", "ok")
    assert (found["network for state"], found["permissions"]) == ("ok", "ok")
    assert "the same on 2 nodes" in said
    assert cluster.jobs() == []


def test_inside_a_job_its_nodes_are_asked_and_its_switches_seen(cluster: Cluster, folder: str) -> None:
    script = "#!/bin/bash\n#SBATCH -N3 --no-kill --requeue\neverstep doctor --json\n"
    cluster.write_shared(f"{folder}/job.sh", script)
    line = f"sbatch --wait --output={folder}/out.txt {folder}/job.sh"
    cluster.exec("login", line, cwd=folder, check=False, timeout=120)
    said = cluster.read_shared(f"{folder}/out.txt")
    found = levels(said)
    assert (found["this job: --no-kill"], found["requeue"]) == ("ok", "ok")
    assert found["everstep and torch"] == "ok"
    assert "the same on 3 nodes" in said
