"""The ways to ask Slurm, on a live cluster: they agree, and requests do what the Protocol says."""

from __future__ import annotations

import json
import threading

from slurm_cluster import Cluster

ASK = """
import dataclasses, json, sys
from everstep.launcher.slurm.cli_json import CliJson
from everstep.launcher.slurm.cli_text import CliText
from everstep.launcher.slurm.pyslurm import client_for
commands = CliJson()
clients = {"json": commands, "words": CliText(), "pyslurm": client_for(commands)}
told = {}
for name, client in clients.items():
    if client is not None:
        job = client.job(int(sys.argv[1]))
        told[name] = [job, client.nodes(), client.nodes(["n2", "n1"]), client.partitions()]
print(json.dumps({name: repr(answers) for name, answers in told.items()}))
"""

LIFE = """
import time
from everstep.launcher.slurm.connect import connect
client = connect()
script = "#!/bin/bash\\nsleep 300\\n"
job = client.submit(["-N1", "-o", "/dev/null", "-w", "n1", "--requeue"], script=script)

def wait(happened):
    while not happened(client.job(job)):
        time.sleep(0.2)

wait(lambda told: told.running)
client.requeue(job, hold=True)
wait(lambda told: "COMPLETING" not in told.state)
client.update_job(job, ReqNodeList="", ExcNodeList="n1", StartTime="now", Comment="two words")
client.release(job)
wait(lambda told: told.running)
told = client.job(job)
print(told.nodes != ("n1",), told.excluded, told.restarts, told.comment)
client.cancel(job)
wait(lambda told: told.over)
client.cancel(job)
client.cancel(4711)
"""

PATIENT = """
from everstep.launcher.slurm.connect import connect
print("asking", flush=True)
print([node.name for node in connect().nodes()])
"""


def test_every_way_tells_the_same(cluster: Cluster) -> None:
    line = "sbatch --parsable -N2 --gpus-per-node=1 --begin=now+1hour --wrap 'sleep 60'"
    job = cluster.exec("login", line).stdout.strip()
    said = cluster.exec("login", ["python", "-c", ASK, job]).stdout
    told = json.loads(said)
    assert told.keys() >= {"json", "words"}
    assert len(set(told.values())) == 1, "\n".join(told.values())
    cluster.exec("login", ["scancel", job])


def test_a_job_is_requeued_at_once_without_a_node(cluster: Cluster) -> None:
    said = cluster.exec("login", ["python", "-c", LIFE], timeout=90)
    assert said.stdout.split(maxsplit=1) == ["True", "('n1',) 1 two words\n"]


def test_a_controller_that_is_away_for_seconds_is_waited_for(cluster: Cluster) -> None:
    cluster.pause_node("controller")
    asking = cluster.popen("login", ["python", "-c", PATIENT])
    asking.wait_for("asking", timeout=30)
    # Slurm's own time limit (MessageTimeout=5) ends the first try before the controller is back.
    unpaused = threading.Timer(7, cluster.unpause_node, ["controller"])
    unpaused.start()
    assert asking.wait(timeout=90) == 0, asking.output
    unpaused.join()
    assert "['n1', 'n2', 'n3', 'n4']" in asking.output
