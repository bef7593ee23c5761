"""The health checks in a real Slurm: a sick node is kept out with its reason, a sound one never.

Each node has a recorded node under /opt/recorded, a link to a sound one or to one with a fault.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from slurm_cluster import NODES, Cluster, wait_until

MACHINES = ("controller", "login", *NODES)
EVERY_S = 15
SITE = """\
mode = "drain"
root = "/opt/recorded"
shared_dir = "/home/everstep-health"
[policy]
keep_pass_s = 0
[program]
level = "light"
[prolog]
limit_s = 45  # the machine may be a busy one
[epilog]
limit_s = 45
"""
COMMAND = "/opt/everstep/bin/everstep-health"
SLURM = f"""\
HealthCheckProgram={COMMAND}
HealthCheckInterval={EVERY_S}
HealthCheckNodeState=ANY
Prolog={COMMAND}
Epilog={COMMAND}
"""
SET_UP = """\
set -e
mkdir -p /etc/everstep
printf %s "$1" > /etc/everstep/health.toml
sed -i 's/^SchedulerParameters=.*/&,nohold_on_prolog_fail/' /etc/slurm/slurm.conf
printf %s "$2" >> /etc/slurm/slurm.conf
"""
RECORD = """\
set -e
rm -rf /opt/recorded /opt/sound /opt/sick
python /repo/tests/unit/health/recorded.py gpu /opt/sound
python /repo/tests/unit/health/recorded.py gpu /opt/sick pages-pending
ln -sfn /opt/sound /opt/recorded
"""
TEAR_DOWN = """\
rm -rf /etc/everstep /opt/recorded /opt/sound /opt/sick /var/lib/everstep /home/everstep-health
cp /repo/docker/slurm/slurm.conf /etc/slurm/
"""
HOLD = """\
rm -f /run/held
flock /var/lib/everstep/health/lock bash -c 'echo $$ > /run/held; exec sleep 300' > /dev/null 2>&1 &
until [ -s /run/held ]; do sleep 0.1; done
"""
REASON = "everstep: gpu_retired_pages gpu1 reboot: "


class Health:
    """The cluster with health checks: make nodes sick, see what becomes of them."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster

    def root(self, node: str, script: str, *words: str) -> str:
        return self.cluster.exec(node, ["bash", "-c", script, "bash", *words], user="root").stdout

    def set_up(self) -> None:
        for name in MACHINES:
            self.root(name, SET_UP, SITE, SLURM)
        for name in NODES:
            self.root(name, RECORD)
        self.root("controller", "scontrol reconfigure")

    def tear_down(self) -> None:
        for name in MACHINES:
            self.root(name, TEAR_DOWN)
        self.root("controller", "scontrol reconfigure")

    def sick(self, node: str) -> None:
        self.root(node, "ln -sfn /opt/sick /opt/recorded")

    def sound(self, node: str) -> None:
        self.root(node, "ln -sfn /opt/sound /opt/recorded")

    def last(self, node: str) -> dict[str, Any]:
        """What HealthCheckProgram, a Prolog or an Epilog left there last; empty where there is nothing."""
        said = self.root(node, "cat /var/lib/everstep/health/last.json || echo {}")
        return dict(json.loads(said))

    def run(self, node: str) -> dict[str, Any]:
        """Run HealthCheckProgram there now, as slurmd does every so often; what it left."""
        before = self.last(node).get("at", 0)

        def ran() -> bool:
            self.root(node, COMMAND)  # does nothing beside slurmd's own run
            return bool(self.last(node).get("at", 0) > before)

        wait_until(ran, f"the checks run on {node}", 60)
        return self.last(node)

    def reason(self, node: str) -> str:
        said = self.root("controller", f"scontrol show node {node} --json")
        return str(json.loads(said)["nodes"][0]["reason"])

    def report(self, words: str) -> tuple[int, str]:
        """`everstep health WORDS` of a plain user on the login node."""
        done = self.cluster.exec("login", f"everstep health {words}", check=False)
        return done.returncode, done.stdout + done.stderr


@pytest.fixture(scope="module")
def with_checks(cluster: Cluster) -> Iterator[Health]:
    cluster.clear()
    health = Health(cluster)
    try:
        health.set_up()
        yield health
    finally:
        health.tear_down()
        cluster.clear()


@pytest.fixture
def health(with_checks: Health) -> Iterator[Health]:
    """Sound nodes before and after each test, the controller's drains lifted."""
    yield with_checks
    for name in NODES:
        with_checks.sound(name)


def test_slurm_drains_a_sick_node_with_its_reason_and_gives_it_back_when_it_is_sound(health: Health) -> None:
    for name in NODES:
        health.run(name)
    assert health.report("")[0] == 0
    health.sick("n3")
    health.cluster.wait_state("n3", {"IDLE", "DRAIN"})
    assert health.reason("n3").startswith(REASON)

    code, said = health.report("--json")
    nodes = {each["node"]: each for each in json.loads(said)["nodes"]}
    assert code == 2
    assert {name: each["usable"] for name, each in nodes.items()} == {name: name != "n3" for name in NODES}, (
        "a sound node is never drained"
    )
    assert "reboot the node" in nodes["n3"]["next"]
    assert [each["source"] for each in nodes["n3"]["sources"]] == ["Slurm", "/home/everstep-health"]
    assert all(0 <= each["age_s"] < 60 for each in nodes["n3"]["sources"])

    health.sound("n3")
    health.cluster.wait_state("n3", {"IDLE"})
    assert health.report("")[0] == 0


def test_a_person_s_drain_stays_whatever_the_checks_say(health: Health) -> None:
    health.root("controller", "scontrol update nodename=n2 state=drain reason='ticket 7'")
    health.sick("n2")
    assert "left alone: root drained the node: ticket 7" in health.run("n2")["notes"]
    health.sound("n2")
    health.run("n2")
    assert health.cluster.node_state("n2") == {"IDLE", "DRAIN"}
    assert health.reason("n2") == "ticket 7"
    code, said = health.report("-R -w n2")
    assert code == 2
    assert "ticket 7" in said


def test_a_prolog_keeps_a_job_off_a_sick_node_and_the_job_lands_elsewhere(
    health: Health, folder: str
) -> None:
    # While its lock is held, HealthCheckProgram leaves the node to the Prolog.
    health.root("n1", HOLD)
    try:
        health.sick("n1")
        others = ",".join(name for name in NODES if name != "n1")
        sbatch = f"sbatch --parsable -N1 --exclude={others} --output={folder}/out --wrap hostname"
        job = health.cluster.exec("login", sbatch, cwd=folder).stdout.strip()
        health.cluster.wait_state("n1", {"IDLE", "DRAIN"})
        assert health.reason("n1") == "Prolog error"
        code, said = health.report("-R -w n1")
        assert code == 2
        assert "Prolog error; everstep found gpu_retired_pages gpu1 reboot" in said
        code, said = health.report(f"-j {job}")
        assert (code, f"job {job} is PENDING" in said) == (0, True)
        # Slurm lets a requeued job wait for two minutes.
        health.cluster.exec("login", f"scontrol update jobid={job} excnodelist= starttime=now")
        wait_until(lambda: _has(health.cluster, f"{folder}/out"), "the job has run elsewhere", 60)
        assert health.cluster.read_shared(f"{folder}/out").strip() in others.split(",")
    finally:
        health.root("n1", "kill $(cat /run/held)")


def test_a_user_is_told_whether_the_own_job_is_touched(health: Health) -> None:
    job = health.cluster.exec(
        "login", "sbatch --parsable -w n[3-4] --output=/dev/null --wrap 'exec sleep 300'"
    ).stdout.strip()
    wait_until(lambda: f"{job} RUNNING wrap" in health.cluster.jobs(), "the job runs", 60)
    code, said = health.report(f"-j {job}")
    assert (code, said.splitlines()[0]) == (
        0,
        f"job {job} is RUNNING and runs on n[3-4]: none of its nodes is bad",
    )
    health.sick("n4")
    health.run("n4")
    assert "DRAIN" in health.cluster.node_state("n4")
    code, said = health.report(f"-j {job}")
    assert code == 2
    assert said.startswith(f"job {job} is RUNNING and runs on n[3-4]: touched, 1 of its 2 nodes: n4")
    assert f"{job} RUNNING wrap" in health.cluster.jobs(), "a drain ends no job"
    health.cluster.exec("login", f"scancel {job}")
    wait_until(lambda: not health.cluster.jobs(), "the job is gone", 60)


def test_a_site_s_file_that_is_broken_keeps_no_job_out(health: Health) -> None:
    health.root("n2", "mv /etc/everstep/health.toml /tmp && echo 'mode = ' > /etc/everstep/health.toml")
    try:
        health.sick("n2")
        assert health.cluster.exec("login", "srun -w n2 hostname").stdout == "n2\n"
        assert health.root("n2", f"{COMMAND} 2>&1; echo $?").splitlines()[-1] == "0"
    finally:
        health.sound("n2")
        health.root("n2", "mv /tmp/health.toml /etc/everstep/")


def test_a_question_that_slurm_cannot_answer_is_one_line_and_exit_code_3(health: Health) -> None:
    for words in ("-p nope", "-w n9", "-j 99999"):
        code, said = health.report(words)
        assert (code, len(said.splitlines())) == (3, 1), said


def _has(cluster: Cluster, path: str) -> bool:
    return cluster.exec("login", f"test -s {path}", check=False).returncode == 0
