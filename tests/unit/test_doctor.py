"""`everstep doctor`'s checks: facts in, one line out, with the fix where it is not well."""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest
from everstep.launcher.doctor import gather
from everstep.launcher.doctor.checks import Line, examine, exit_code
from everstep.launcher.doctor.facts import Facts, HostFacts, Interface, Loose, Plugin, SlurmFacts
from everstep.launcher.doctor.report import show, summary, to_json
from everstep.launcher.slurm.client import Job, Node, Partition

ETH = Interface("eth0", "10.0.0.1", 10_000)
IB = Interface("ib0", "10.1.0.1", 200_000)


def host(name: str, **changes: Any) -> HostFacts:
    told: dict[str, Any] = {
        "host": name, "everstep": "0.1.0", "torch": "2.13.0", "python": "3.11.2", "prefix": "/opt/env",
        "interfaces": (ETH,), "chosen": "10.0.0.1",
    }  # fmt: skip
    return HostFacts(**{**told, **changes})


CONFIG = {
    "SlurmdTimeout": "300 sec",
    "JobRequeue": "1",
    "PreemptType": "preempt/partition_prio",
    "PreemptMode": "REQUEUE",
    "TopologyPlugin": "topology/tree",
    "HealthCheckProgram": "/opt/health",
    "HealthCheckInterval": "300 sec",
}
SLURM = SlurmFacts(
    release="24.11.5",
    config=CONFIG,
    partitions=(Partition("main", ("n1", "n2"), grace_time=60, preempt_mode="REQUEUE"),),
    nodes=tuple(Node(name, frozenset({"IDLE"}), version="24.11.5") for name in ("n1", "n2")),
    job=Job(7, frozenset({"RUNNING"}), ("n1", "n2"), no_kill=True, no_kill_reason="so", requeue=True),
    plugin=Plugin(offered=True, path="/lib/x.so", built_for="24.11"),
)
FACTS = Facts(host("n1"), SLURM, hosts=(host("n1"), host("n2")), asked=("n1", "n2"))


def slurm(**changes: Any) -> Facts:
    return dataclasses.replace(FACTS, slurm=dataclasses.replace(SLURM, **changes))


def config(**changes: str) -> Facts:
    return slurm(config={**CONFIG, **changes})


def job(**changes: Any) -> Facts:
    assert SLURM.job is not None
    return slurm(job=dataclasses.replace(SLURM.job, **changes))


def hosts(*found: HostFacts, **changes: Any) -> Facts:
    return dataclasses.replace(FACTS, hosts=found, **changes)


def line(facts: Facts, check: str) -> Line:
    return next(line for line in examine(facts) if line.check.startswith(check))


def test_all_is_well() -> None:
    lines = examine(FACTS)
    assert {line.level for line in lines} == {"ok"}, [line for line in lines if line.level != "ok"]
    assert exit_code(lines) == 0
    assert summary(lines).endswith("checks: all well")


@pytest.mark.parametrize(
    ("facts", "check", "level", "text", "fix"),
    [
        (Facts(host("n1"), slurm_problem="scontrol not found"), "Slurm", "fail", "not found", "Slurm module"),
        (slurm(release="21.08.1"), "Slurm", "fail", "21.08.1", "22.05"),
        (slurm(release="24.05.3"), "Slurm", "warn", "24.11.5 on n[1-2]", "each"),
        (slurm(plugin=Plugin()), "SPANK", "warn", "not installed", "everstep srun"),
        (
            slurm(plugin=Plugin(configured=("required x.so",), config_file="/etc/p.conf")),
            "SPANK", "fail", "/etc/p.conf loads it", "srun -vv",
        ),
        (
            slurm(plugin=Plugin(configured=("optional x.so",), path="/x.so", built_for="22.05")),
            "SPANK", "fail", "built for Slurm 22.05, and this is 24.11", "make -C slurm_spank",
        ),
        (hosts(host("n1"), host("n2", everstep="0.2.0")), "everstep", "fail", "0.2.0, torch", "the same"),
        (hosts(host("n1"), host("n2", torch="")), "everstep", "fail", "torch -", "the same"),
        (hosts(host("n1"), ask_problem="execve: no file"), "everstep", "fail", "n2: execve", "/opt/env"),
        (hosts(asked=(), ask_problem="srun: error: x"), "everstep", "fail", "srun: error: x", ""),
        (hosts(asked=()), "everstep", "skip", "nodes not asked", "everstep doctor -- -N4"),
        (job(no_kill=False), "this job", "fail", "ends job 7 when a node dies", "everstep sbatch"),
        (job(no_kill=None, no_kill_reason="who knows"), "this job", "warn", "who knows", "#SBATCH --no-kill"),
        (slurm(job=None), "this job", "skip", "not in a job", "inside"),
        (job(requeue=False), "requeue", "warn", "may not be requeued", "--requeue"),
        (job(restarts=2), "requeue", "ok", "2 times", ""),
        (dataclasses.replace(config(JobRequeue="0"), slurm=dataclasses.replace(
            SLURM, job=None, config={"JobRequeue": "0"})), "requeue", "warn", "JobRequeue=0", "--requeue"),
        (config(PreemptType="(null)"), "preemption", "ok", "none", ""),
        (config(PreemptType="preempt/none"), "preemption", "ok", "none", ""),
        (
            slurm(partitions=(Partition("low", (), preempt_mode="REQUEUE"),)),
            "preemption", "warn", "GraceTime=0 in low", "GraceTime=60",
        ),
        (
            slurm(partitions=(Partition("low", (), preempt_mode="SUSPEND,GANG", grace_time=9),)),
            "preemption", "warn", "suspends jobs", "REQUEUE",
        ),
        (
            slurm(partitions=(Partition("high", (), preempt_mode="OFF"),)),
            "preemption", "ok", "partition_prio", "",
        ),
        (config(SlurmdTimeout="0 sec"), "dead nodes", "warn", "never", "SlurmdTimeout"),
        (config(SlurmdTimeout="3600 sec"), "dead nodes", "warn", "3600 s", "SlurmdTimeout"),
        (config(TopologyPlugin="topology/flat"), "topology", "warn", "share a switch", "topology.conf"),
        (config(HealthCheckProgram="(null)"), "health", "warn", "none", "HealthCheckProgram"),
        (config(HealthCheckInterval="0 sec"), "health", "warn", "never runs", "HealthCheckInterval"),
        (
            hosts(host("n1", interfaces=(ETH, IB)), host("n2")),
            "network", "warn", "eth0 (10 Gbit/s), and ib0 is faster", "--interface ib0",
        ),
        (hosts(host("n1", chosen="127.0.1.1"), host("n2")), "network", "fail", "loopback", "/etc/hosts"),
        (hosts(host("n1"), host("n2", chosen="")), "network", "fail", "n2 cannot resolve", "name resolution"),
        (hosts(host("n1"), asked=("n1",)), "network", "ok", "eth0 (10 Gbit/s)", ""),
        (
            hosts(host("n1", loose=(Loose("/opt/env", "the Python"),)), host("n2")),
            "permissions", "fail", "write /opt/env (the Python, seen on n1)", "chmod go-w /opt/env",
        ),
    ],
)  # fmt: skip
def test_what_is_not_well_is_said_with_the_fix(
    facts: Facts, check: str, level: str, text: str, fix: str
) -> None:
    found = line(facts, check)
    assert found.level == level, found.text
    assert text in found.text
    assert fix in found.fix


def test_the_exit_code_is_the_worst_line_s() -> None:
    assert exit_code(examine(slurm(job=None))) == 0, "not looked at is not bad"
    assert exit_code(examine(config(TopologyPlugin="topology/flat"))) == 1
    assert exit_code(examine(job(no_kill=False))) == 2


def test_without_slurm_there_is_one_line() -> None:
    assert [line.check for line in examine(Facts(host("n1"), slurm_problem="no"))] == ["Slurm"]


def test_it_is_json_for_programs() -> None:
    told = json.loads(to_json(examine(job(no_kill=False))))
    assert told["level"] == "fail"
    assert {"check", "level", "text", "fix"} == told["checks"][0].keys()


def test_the_screen_has_no_colour_codes_when_it_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    show(examine(job(no_kill=False)))
    said = capsys.readouterr().out
    assert "\x1b" not in said
    assert "fail  this job: --no-kill" in said
    assert said.splitlines()[-1] == "11 checks: 1 to mend"


# --- gathering ---


def test_a_host_tells_of_itself_and_is_understood() -> None:
    told = gather.host_facts(["localhost"])
    assert told.torch
    assert told.chosen == "127.0.0.1"
    assert all(not found.address.startswith("127.") for found in told.interfaces)
    said = "srun's own words\n" + msgspec.json.encode(told).decode() + "\n"
    assert list(gather._answers(said)) == [told]


def test_what_everybody_may_write_is_found_and_a_sticky_folder_is_none(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    file = tmp_path / "tool"
    file.write_text("")
    assert gather.others_may_write(file) is None
    file.chmod(0o777)
    assert gather.others_may_write(file) == file
    file.chmod(0o755)
    tmp_path.chmod(0o777)
    assert gather.others_may_write(file) == tmp_path
    assert gather.others_may_write(tmp_path / "missing") is None


def test_plugstack_is_read_with_what_it_includes(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "plugstack.conf").write_text("# optional everstep.so\ninclude d/*.conf\noptional other.so\n")
    (tmp_path / "d" / "e.conf").write_text("required everstep.so path=/opt/everstep # ours\n")
    lines = list(gather.plugstack(tmp_path / "plugstack.conf"))
    assert lines == ["required everstep.so path=/opt/everstep", "optional other.so"]
    assert list(gather.plugstack(tmp_path / "missing.conf")) == []


@pytest.mark.skipif(shutil.which("gcc") is None, reason="no C compiler")
def test_the_release_a_plugin_was_built_for_is_read_from_it(tmp_path: Path) -> None:
    source = (
        "extern int slurm_info(void); unsigned plugin_version = 0x160508; int f(void){return slurm_info();}"
    )
    library = tmp_path / "x.so"
    subprocess.run(
        ["gcc", "-shared", "-fPIC", "-o", library, "-x", "c", "-"], input=source, text=True, check=True
    )
    assert gather.built_for(str(library)) == "22.05"
    assert gather.built_for(str(tmp_path / "missing.so")) == ""
    assert gather.built_for("") == ""
