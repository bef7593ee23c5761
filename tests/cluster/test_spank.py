"""`srun --auto-resume=1 torchrun …` by the SPANK plugin: the line as it stands, and nothing else touched."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

import plugin
import pytest
from runs import (
    SCRIPT,
    STEPS,
    Follower,
    calm_digest,
    digests,
    events,
    is_step_of,
    standbys,
    wait_for_event,
    worker_of,
)
from slurm_cluster import Cluster, wait_until

pytestmark = pytest.mark.usefixtures("spank")


@pytest.fixture(scope="module")
def spank(cluster: Cluster) -> Iterator[None]:
    with plugin.installed(cluster):
        yield


@pytest.fixture
def job(cluster: Cluster, folder: str) -> str:
    """A folder on the shared file system with the training script in it."""
    cluster.write_shared(f"{folder}/train.py", SCRIPT)
    return folder


def train(folder: str, srun_options: str, workers: int = 1) -> str:
    """A stock line, but for --auto-resume."""
    line = f"srun --auto-resume=1 {srun_options} torchrun --nproc-per-node {workers} train.py --steps {STEPS}"
    return f"cd {folder} && export EVERSTEP_OPTIONS='--events {folder}/events.jsonl' && {line}"


def said(cluster: Cluster, line: str, folder: str, timeout: float = 60) -> tuple[int, str]:
    """A line's exit code and all it says."""
    done = cluster.exec("login", f"cd {folder}; {line}", check=False, timeout=timeout)
    return done.returncode, done.stdout + done.stderr


# --- faults ---------------------------------------------------------------------------------------


def test_a_worker_of_a_stock_line_is_replaced(cluster: Cluster, job: str) -> None:
    run = cluster.popen("login", train(job, "-N3 -c2", workers=2))
    so_far = wait_for_event(cluster, job, run, standbys(3))
    victim = worker_of(so_far, 3)
    cluster.exec(victim["node"], ["kill", "-9", str(victim["pid"])])
    assert run.wait(timeout=120) == 0, run.output
    assert digests(run.output) == {calm_digest(cluster, job, 6)}
    assert [e["kind"] for e in events(cluster, job) if e["event"] == "fault"] == ["SIGKILL"]


def test_a_node_of_a_stock_line_is_replaced_by_the_spare_one(cluster: Cluster, job: str) -> None:
    run = cluster.popen("login", train(job, "-N4 -c2 --spare-nodes=1 --standby=0"))
    so_far = wait_for_event(cluster, job, run, standbys(1))
    cluster.kill_node(worker_of(so_far, 2)["node"])
    assert run.wait(timeout=120) == 0, run.output
    assert digests(run.output) == {calm_digest(cluster, job, 3)}
    assert [e["kind"] for e in events(cluster, job) if e["event"] == "fault"] == ["node"]
    wait_until(lambda: cluster.jobs() == [], "no job is left", 30)


def test_given_to_sbatch_it_reaches_the_torchrun_inside_and_the_job_outlives_its_node(
    cluster: Cluster, job: str
) -> None:
    line = f"srun --export=ALL --container-image=img torchrun --nproc-per-node 1 train.py --steps {STEPS}"
    cluster.write_shared(
        f"{job}/job.sbatch",
        "#!/bin/bash\n#SBATCH --nodes=4 --cpus-per-task=2 --auto-resume --spare-nodes=1 --export=NIL\n"
        f"#SBATCH --container-image=job-img --output={job}/out.txt\n. /etc/profile\ncd {job}\n"
        "srun -N1 -n1 /bin/hostname\nsrun -N1 -n1 /usr/bin/printenv TEST_IMAGE\n"
        f"export EVERSTEP_OPTIONS='--events {job}/events.jsonl'\n{line}\necho exit $?\n",
    )
    cluster.exec("login", f"sbatch {job}/job.sbatch", cwd=job)
    run = Follower(cluster, job)
    so_far = wait_for_event(cluster, job, run, standbys(4))
    victim = worker_of(so_far, 0)
    cluster.exec(victim["node"], ["kill", "-9", str(victim["pid"])])
    so_far = wait_for_event(cluster, job, run, lambda es: any(is_step_of(e, 0) for e in es), timeout=30)
    cluster.kill_node(worker_of(so_far, 1)["node"])
    run.wait_for_last_line("exit ", timeout=120)
    output = run.output.splitlines()
    assert output[-1] == "exit 0", run.output
    assert digests(run.output) == {calm_digest(cluster, job, 3)}
    assert "WARNING" not in run.output, run.output
    assert output[0] in ("n1", "n2", "n3", "n4") and output[1] == "job-img", "other steps are as ever"


# --- commands that are not torchrun's -------------------------------------------------------------


def test_a_failed_command_is_started_again_on_all_nodes(cluster: Cluster, folder: str) -> None:
    once = f"[ -e {folder}/seen ] || {{ touch {folder}/seen; exit 9; }}"
    script = f"echo try $SLURM_PROCID of $SLURM_NTASKS; [ $SLURM_PROCID = 0 ] || {once}"
    code, text = said(cluster, f"srun -N2 -n2 -Q --auto-resume=1 sh -c '{script}'", folder)
    assert code == 0, text
    assert Counter(re.findall(r"^try \d of \d$", text, re.MULTILINE)) == {"try 0 of 2": 2, "try 1 of 2": 2}


def test_a_command_that_always_fails_ends_with_its_own_code(cluster: Cluster, folder: str) -> None:
    code, text = said(cluster, "srun -N2 -Q --auto-resume=1 sh -c 'echo try; exit 3'", folder)
    assert code == 3, text
    assert text.count("try\n") >= 4  # the first time, and three more
    code, text = said(
        cluster, "srun -N1 -Q --auto-resume=1 --resume-policy=none sh -c 'echo try; exit 3'", folder
    )
    assert (code, text.count("try\n")) == (3, 1), text


def test_other_options_keep_their_meaning(cluster: Cluster, folder: str) -> None:
    """--jobid from outside, --gres, --mem, -c, --export and another plugin's option, all at once."""
    job = cluster.exec("login", "salloc --no-shell -N3 -c2 --gres=gpu:2 --no-kill 2>&1").stdout
    number = re.search(r"allocation (\d+)", job)
    assert number, job
    shown = ("SLURM_NNODES", "SLURM_CPUS_PER_TASK", "CUDA_VISIBLE_DEVICES", "TEST_IMAGE")
    show = f"echo {' '.join(f'${name}' for name in shown)} ${{MINE-none}}"
    options = f"--jobid={number[1]} -N2 -c2 --gres=gpu:1 --mem=100 --container-image img --export=NONE"
    code, text = said(cluster, f"MINE=1 srun -Q --auto-resume=1 {options} /bin/sh -c '{show}'", folder)
    assert code == 0, text
    assert [line for line in text.splitlines() if "img" in line] == ["2 2 0 img none"] * 2, text
    cluster.exec("login", ["scancel", number[1]])


def test_an_interactive_step_is_left_as_it_is(cluster: Cluster, folder: str) -> None:
    step = "srun -N1 --auto-resume=1 --pty sh -c 'tty; env | grep -c EVERSTEP_'"
    text = said(cluster, f'script -qc "{step}" /dev/null', folder)[1]
    assert "--pty: an interactive step is left as it is" in text
    plain = text.replace("^@", "").replace("\0", "")  # the terminal's echo of script's empty input
    assert re.search(r"^/dev/pts/\d+\s+0\s", plain, re.MULTILINE), text


# --- refusals, before anything starts ---------------------------------------------------------------


def test_what_cannot_work_is_refused_with_the_cure(cluster: Cluster, folder: str) -> None:
    refusals = {
        "--auto-resume=yes": "--auto-resume: 0 or 1 is wanted",
        "--auto-resume=1 --standby=many": "--standby: a whole number",
        "--auto-resume=1 --spare-nodes=-1": "--spare-nodes: a whole number",
        "--auto-resume=1 --resume-policy=spares": "--resume-policy: all, none, or some of",
        "--auto-resume=1 -n4": "-n4 is not one task on each of 2 nodes",
        "--auto-resume=1 --spare-nodes=2": "leaves no node of 2 to train on",
        "--auto-resume=1 hostname :": "heterogeneous",
    }
    for options, words in refusals.items():
        _refused(cluster, folder, f"srun -N2 {options} hostname", words)


def test_what_the_site_did_wrong_is_said_to_those_who_ask_for_it(cluster: Cluster, folder: str) -> None:
    refusals = {
        "everstep=/nowhere/everstep": "/nowhere/everstep is not here or cannot be executed",
        "everstep=/bin/false": "",
        "everstep=bin/everstep": "plugstack.conf is wrong: everstep=bin/everstep: a full path is wanted",
        "standby=many": "plugstack.conf is wrong: standby=many",
        "users=ann,bob": "--auto-resume is not open to you",
        "groups=gpu": "--auto-resume is not open to you",
    }
    for arguments, words in refusals.items():
        with plugin.configured(cluster, arguments):
            _refused(cluster, folder, "srun -N1 --auto-resume=1 hostname", words)
    with plugin.configured(cluster, "everstep=/nowhere/everstep auto_resume=maybe"):
        code, text = said(cluster, "srun -N1 hostname", folder)
        assert code == 0 and "everstep" not in text, text


def _refused(cluster: Cluster, folder: str, line: str, words: str) -> None:
    code, text = said(cluster, line, folder)
    assert code != 0 and words in text, text
    assert "Traceback" not in text and not re.search(r"^n\d$", text, re.MULTILINE), text


def test_a_site_can_have_it_on_for_all_torchruns_of_some(cluster: Cluster, job: str) -> None:
    with plugin.configured(cluster, "auto_resume=1 groups=hpc users=ann"):
        code, text = said(cluster, "srun -N1 hostname", job)
        assert code == 0 and "everstep" not in text, text
        code, text = said(cluster, "srun -N1 torchrun nothere.py", job)
        assert code == 64 and "nothere.py: no such script" in text, text


def test_a_node_without_everstep_ends_the_step_and_is_named(cluster: Cluster, folder: str) -> None:
    here, hidden = "/opt/everstep/bin/everstep", "/opt/everstep/bin/hidden"
    cluster.exec("n2", ["mv", here, hidden], user="root")
    try:
        code, text = said(cluster, "srun -N2 --nodelist=n[1-2] --auto-resume=1 sleep 1", folder)
    finally:
        cluster.exec("n2", ["mv", hidden, here], user="root")
    assert code == 64, text
    assert "everstep cannot be started on n2" in text


# --- what is not ours --------------------------------------------------------------------------------


def test_the_task_of_a_stock_srun_sees_nothing_of_it(cluster: Cluster, folder: str) -> None:
    with_it = plugin.environment(cluster)
    with plugin.taken_out(cluster):
        assert plugin.environment(cluster) == with_it


def test_an_argument_of_a_batch_script_is_none_of_sbatch_s_options(cluster: Cluster, folder: str) -> None:
    cluster.write_shared(f"{folder}/args.sh", "#!/bin/sh\necho $@\nenv | grep -E 'NO_KILL|SPANK'\n")
    cluster.exec("login", "sbatch --wait --output=args.txt args.sh --auto-resume=1", cwd=folder, check=False)
    assert cluster.read_shared(f"{folder}/args.txt") == "--auto-resume=1\n"


def test_a_script_from_a_pipe_is_warned_of(cluster: Cluster, folder: str) -> None:
    script = "printf '#!/bin/sh\\nenv\\n'"
    text = said(cluster, f"{script} | sbatch --wait --auto-resume=1 --output=piped.txt", folder)[1]
    assert "WARNING" in text and "#SBATCH --no-kill" in text
    text = said(
        cluster, f"{script} > s; sbatch --wait --auto-resume=1 --output=file.txt < s; cat file.txt", folder
    )[1]
    assert "WARNING" not in text and "SBATCH_NO_KILL=set" in text


def test_the_plugin_passes_its_own_check(cluster: Cluster) -> None:
    text = plugin.checked(cluster)  # valgrind is there on the other cluster
    assert "analyzer: nothing found" in text and "all is so" in text
