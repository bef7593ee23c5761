"""torchrun's options mean here what they mean to torchrun; what it would refuse is refused in one line."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from everstep.launcher import options as own_options
from everstep.launcher import torchrun
from everstep.launcher.torchrun import Streams, WorkerSpec
from everstep.recovery.errors import UsageError

CPU_NODE: Callable[[], int] = lambda: 0  # noqa: E731


@pytest.fixture(autouse=True)
def _directory_with_a_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("")
    for name in [*os.environ]:
        if name.startswith("PET_") or name in ("OMP_NUM_THREADS", "PYTHON_EXEC"):
            monkeypatch.delenv(name)


def parse(
    *argv: str, devices: int = 0, environ: dict[str, str] | None = None, on_node: bool = True
) -> WorkerSpec:
    environ = {"PATH": os.environ["PATH"]} if environ is None else environ
    return torchrun.parse(argv, environ=environ, on_node=on_node, device_count=lambda: devices)


def refusal(*argv: str, **kwargs: Any) -> str:
    with pytest.raises(UsageError) as error:
        parse(*argv, **kwargs)
    assert "\n" not in str(error.value)
    assert error.value.exit_code == 64
    return str(error.value)


# --- what a worker's command line is ---


def test_a_script_is_run_unbuffered_with_its_own_arguments() -> None:
    spec = parse("--nproc-per-node=2", "train.py", "--nproc-per-node", "9", "-m")
    assert spec.entry == (sys.executable, "-u", "train.py", "--nproc-per-node", "9", "-m")
    assert spec.script == "train.py"
    assert spec.nproc_per_node == 2


def test_a_module_is_run_as_one() -> None:
    spec = parse("-m", "json.tool", "--indent", "2")
    assert spec.entry == (sys.executable, "-u", "-m", "json.tool", "--indent", "2")
    assert spec.script is None


def test_a_program_is_run_as_it_is() -> None:
    assert parse("--no-python", "sh", "-c", "true").entry == ("sh", "-c", "true")


def test_run_path_runs_the_script_as_main_with_its_own_argv(tmp_path: Path) -> None:
    script = tmp_path / "show.py"
    script.write_text("import sys; print(__name__, sys.argv[1:], sys.argv[0] == __file__)")
    spec = parse("--run-path", str(script), "--a", "b")
    shown = subprocess.run(spec.entry, capture_output=True, text=True, check=True).stdout
    assert shown == "__main__ ['--a', 'b'] True\n"


def test_another_interpreter_is_taken_from_python_exec_as_torchrun_does() -> None:
    assert parse("train.py", environ={"PYTHON_EXEC": "/opt/py"}).command[0] == "/opt/py"


def test_the_local_rank_macro_is_replaced_in_arguments_only() -> None:
    spec = parse("train.py", "--device=cuda:${local_rank}", "$HOME", "${other}")
    assert torchrun.worker_argv(spec, 3)[2:] == ["train.py", "--device=cuda:3", "$HOME", "${other}"]


@pytest.mark.parametrize(
    "argv",
    [
        ["train.py", "x"],
        ["--nproc-per-node=2", "--max-restarts", "3", "train.py"],
        ["-m", "json.tool", "${local_rank}"],
        ["--no-python", "sh", "-c", "x"],
        ["--log-dir=logs", "-r3", "--tee", "0:1,1:2", "--role=trainer", "train.py"],
        ["--nnodes=3", "--rdzv-id", "job7", "train.py"],
        ["--nno", "2", "train.py"],  # an abbreviation
        ["--nproc_per_node=2", "train.py"],
        ["--local-ranks-filter=1,0", "--nproc-per-node=3", "train.py"],
    ],
)
def test_torch_s_own_reading_of_the_same_line_agrees(argv: list[str]) -> None:
    from torch.distributed import run

    config, command, arguments = run.config_from_args(run.parse_args(argv))
    os.environ.pop("OMP_NUM_THREADS", None)  # config_from_args sets it
    spec = parse(*argv)
    assert [command, *arguments] == list(spec.entry)
    assert config.nproc_per_node == spec.nproc_per_node
    assert config.max_restarts == spec.max_restarts
    assert config.max_nodes == (spec.nnodes or 1)
    assert config.role == spec.role
    assert config.monitor_interval == spec.monitor_interval
    assert config.run_id == (spec.run_id or "none")


def test_torchrun_s_pet_variables_count_as_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PET_NPROC_PER_NODE", "3")
    assert parse("train.py").nproc_per_node == 3
    assert parse("--nproc-per-node=2", "train.py").nproc_per_node == 2


def test_the_specification_travels_as_plain_data() -> None:
    spec = parse("--nproc-per-node=2", "--tee=3", "train.py", "x")
    assert msgspec.json.decode(msgspec.json.encode(spec), type=WorkerSpec) == spec


# --- nodes and workers ---


def test_no_number_of_nodes_is_none() -> None:
    assert parse("train.py").nnodes is None
    assert parse("--nnodes=1", "train.py").nnodes == 1
    assert parse("--nnodes=4:4", "train.py").nnodes == 4


@pytest.mark.parametrize(
    ("nnodes", "said"),
    [
        ("1:4", "say --nnodes 4"),
        ("x", "a number of nodes"),
        ("0", "1 or more"),
        ("1:2:3", "a number of nodes"),
    ],
)
def test_a_number_of_nodes_that_will_not_do_is_refused(nnodes: str, said: str) -> None:
    assert said in refusal(f"--nnodes={nnodes}", "train.py")


def test_more_workers_than_devices_are_refused_with_how_many_there_are() -> None:
    said = refusal("--nproc-per-node=3", "train.py", devices=2)
    assert "this node has 2 CUDA devices" in said
    assert "--nproc-per-node 2" in said
    assert parse("--nproc-per-node=2", "train.py", devices=2).nproc_per_node == 2


def test_a_node_without_devices_runs_any_number_of_workers() -> None:
    assert parse("--nproc-per-node=64", "train.py", devices=0).nproc_per_node == 64


def test_the_words_for_a_number_are_torch_s() -> None:
    from torch.distributed.run import determine_local_world_size

    for word in ("auto", "cpu"):
        assert parse(
            f"--nproc-per-node={word}", "train.py", devices=64
        ).nproc_per_node == determine_local_world_size(word)


def test_gpus_asked_for_where_there_are_none_name_the_way_to_get_some(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "--gres=gpu:N" in refusal("--nproc-per-node=gpu", "train.py")


@pytest.mark.parametrize("nproc", ["0", "-1", "many"])
def test_a_number_of_workers_that_will_not_do_is_refused(nproc: str) -> None:
    assert "--nproc-per-node" in refusal(f"--nproc-per-node={nproc}", "train.py")
    assert "--nproc-per-node" in refusal(f"--nproc-per-node={nproc}", "train.py", on_node=False)


def test_on_a_login_node_devices_are_not_counted_and_gpu_is_left_open() -> None:
    def counted() -> int:
        raise AssertionError("devices were counted on a login node")

    spec = torchrun.parse(["--nproc-per-node=gpu", "train.py"], on_node=False, device_count=counted)
    assert spec.nproc_per_node == 0
    assert (
        torchrun.parse(["--nproc-per-node=9", "train.py"], on_node=False, device_count=counted).nproc_per_node
        == 9
    )


# --- what is refused ---


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--nproc-per-nod3=2", "train.py"], "did you mean --nproc-per-node?"),
        (["--epochs=3", "train.py"], "options for your script go after its name"),
        (["--max-restarts=x", "train.py"], "--max-restarts"),
        (["--max-restarts=-1", "train.py"], "0 or more"),
        (["--n=2", "train.py"], "ambiguous"),
        ([], "name your script"),
        (["--nproc-per-node"], "expected one argument"),
        (["--no-python", "-m", "json"], "do not go together"),
        (["--tee=9", "train.py"], "--tee 9"),
        (["--redirects=0:9", "train.py"], "--redirects 0:9"),
        (["--local-ranks-filter=a", "train.py"], "--local-ranks-filter a"),
        (["--log-dir=train.py", "train.py"], "is a file"),
        (["trian.py"], "did you mean train.py?"),
        (["deep/down/x.py"], "does not exist"),
        (["nothing-like-it"], "no such script"),
        (["."], "is a directory"),
        (["-m", "no_such_module_anywhere.train"], "no module 'no_such_module_anywhere'"),
        (["--no-python", "no-such-program-anywhere"], "no such program"),
        (["--no-python", "./train.py"], "not executable"),
    ],
)
def test_each_mistake_is_one_line_that_helps(argv: list[str], said: str) -> None:
    assert said in refusal(*argv)


def test_a_script_of_that_name_in_a_folder_is_found() -> None:
    Path("examples").mkdir()
    Path("examples/char_gpt.py").write_text("")
    assert "did you mean examples/char_gpt.py?" in refusal("char_gpt.py")


def test_a_script_is_looked_for_where_the_workers_will_run(tmp_path: Path) -> None:
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "run.py").write_text("")
    assert torchrun.parse(["run.py"], cwd=tmp_path / "job", device_count=CPU_NODE).script == "run.py"


def test_a_folder_with_a_main_is_a_script_as_for_python() -> None:
    Path("pkg").mkdir()
    Path("pkg/__main__.py").write_text("")
    assert parse("pkg").script == "pkg"


# --- options that have no use here ---


def test_rendezvous_options_are_said_to_be_unused_only_when_given() -> None:
    assert parse("--nproc-per-node=2", "train.py").notes == ()
    assert parse("--master-addr=127.0.0.1", "train.py").notes == ()  # torchrun's own default
    (note,) = parse("--rdzv-backend=c10d", "--rdzv-endpoint=h:1", "--standalone", "train.py").notes
    assert note.startswith("--rdzv-backend, --rdzv-endpoint, --standalone: not used")


def test_a_run_id_is_kept() -> None:
    spec = parse("--rdzv-id=job7", "train.py")
    assert spec.run_id == "job7"
    assert spec.notes == ()


# --- everstep run: our options among torchrun's ---


def test_our_options_may_stand_among_torchrun_s() -> None:
    own = own_options.names()
    words, spec = torchrun.parse_run(
        [
            "--standby",
            "2",
            "--nproc-per-node",
            "2",
            "--resume=none",
            "--nnodes=3",
            "train.py",
            "--standby",
            "9",
        ],
        own,
        device_count=CPU_NODE,
    )
    assert own_options.parse(words).standby == 2
    assert own_options.parse(words).resume == "none"
    assert (spec.nproc_per_node, spec.nnodes) == (2, 3)
    assert spec.arguments == ("--standby", "9")


def test_an_unknown_option_may_be_a_misspelling_of_ours() -> None:
    with pytest.raises(UsageError, match=r"did you mean --standby\?"):
        torchrun.parse_run(["--stanby=1", "train.py"], own_options.names(), device_count=CPU_NODE)


# --- the environment of a worker ---


def environment(spec: WorkerSpec, **changes: Any) -> dict[str, str]:
    facts: dict[str, Any] = {
        "rank": 3,
        "local_rank": 1,
        "world_size": 4,
        "nnodes": 2,
        "node_rank": 1,
        "master_addr": "n1",
        "master_port": 2345,
        "restart_count": 0,
        "run_id": "r",
        "environ": {},
    }
    return torchrun.rank_environment(spec, **{**facts, **changes})


SHOW = """
import json, os, sys
json.dump(dict(os.environ), open(sys.argv[1] + os.environ["RANK"], "w"))
"""


def test_a_worker_s_variables_are_exactly_torchrun_s(tmp_path: Path) -> None:
    show = tmp_path / "show.py"
    show.write_text(SHOW)
    argv = [
        "--nproc-per-node=2",
        "--max-restarts=2",
        "--role=trainer",
        "--rdzv-id=r",
        str(show),
        f"{tmp_path}/env.",
    ]
    subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--master-port=0", *argv],
        check=True,
        capture_output=True,
    )
    before = set(os.environ)
    theirs = msgspec.json.decode((tmp_path / "env.1").read_bytes(), type=dict[str, str])
    ours = environment(parse(*argv), rank=1, local_rank=1, world_size=2, nnodes=1, node_rank=0)
    # The error file comes with the log files; the others are readline's and the C library's doing.
    apart = {"TORCHELASTIC_ERROR_FILE", "LINES", "COLUMNS", "LC_CTYPE"}
    added = {name for name in theirs if name not in before} - apart
    assert set(ours) == added
    differing = {"MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"}
    for name in added - differing:
        assert ours[name] == theirs[name], name


def test_threads_are_limited_to_one_only_where_workers_share_a_node_and_the_user_said_nothing() -> None:
    assert parse("--nproc-per-node=2", "train.py").env["OMP_NUM_THREADS"] == "1"
    assert "OMP_NUM_THREADS" not in parse("--nproc-per-node=1", "train.py").env
    assert (
        "OMP_NUM_THREADS" not in parse("--nproc-per-node=2", "train.py", environ={"OMP_NUM_THREADS": "4"}).env
    )


def test_a_virtual_local_rank_sees_its_own_device_alone() -> None:
    spec = parse("--virtual-local-rank", "--nproc-per-node=2", "train.py")
    made = environment(spec, environ={"CUDA_VISIBLE_DEVICES": "4, 7"})
    assert (made["LOCAL_RANK"], made["CUDA_VISIBLE_DEVICES"]) == ("0", "7")
    assert environment(spec)["CUDA_VISIBLE_DEVICES"] == "1"
    with pytest.raises(UsageError, match="local rank 1 has no device"):
        environment(spec, environ={"CUDA_VISIBLE_DEVICES": "4"})


# --- where output goes ---


@pytest.mark.parametrize(
    ("options", "local_rank", "wanted"),
    [
        ([], 0, Streams("console", "console")),
        (["-r3"], 0, Streams("file", "file")),
        (["-r1"], 0, Streams("file", "console")),
        (["-t3"], 1, Streams("tee", "tee")),
        (["-t2", "-r1"], 0, Streams("file", "tee")),
        (["-r0:1,1:2"], 0, Streams("file", "console")),
        (["-r0:1,1:2"], 1, Streams("console", "file")),
        (["-r0:1,1:2"], 2, Streams("console", "console")),
        (["-t3", "--local-ranks-filter=0"], 1, Streams("file", "file")),
        (["-t3", "--local-ranks-filter=0"], 0, Streams("tee", "tee")),
        (["--local-ranks-filter=0,2"], 1, Streams("drop", "drop")),
        (["-r1", "--local-ranks-filter=0"], 1, Streams("file", "drop")),
    ],
)
def test_output_goes_where_torchrun_sends_it(options: list[str], local_rank: int, wanted: Streams) -> None:
    spec = parse("--nproc-per-node=3", *options, "train.py")
    assert torchrun.streams(spec, local_rank) == wanted
    assert torchrun.streams(spec, local_rank) == by_torch(options, local_rank)


def by_torch(options: list[str], local_rank: int) -> Streams:
    """What torch's own DefaultLogsSpecs makes of the same options."""
    from torch.distributed import run

    arguments: argparse.Namespace = run.parse_args(
        ["--nproc-per-node=3", "--log-dir=logs", *options, "train.py"]
    )
    config, _, _ = run.config_from_args(arguments)
    os.environ.pop("OMP_NUM_THREADS", None)
    made = config.logs_specs.reify({rank: {} for rank in range(3)})

    def way(to: dict[int, str], tee: dict[int, str]) -> Any:
        if to[local_rank] == os.devnull:
            return "drop"
        return ("tee" if local_rank in tee else "file") if to[local_rank] else "console"

    return Streams(way(made.stdouts, made.tee_stdouts), way(made.stderrs, made.tee_stderrs))


def test_log_files_lie_where_torchrun_puts_them() -> None:
    files = torchrun.log_files(Path("logs/job7_x"), 1, 2)
    assert files.stdout == Path("logs/job7_x/attempt_1/2/stdout.log")
    assert files.stderr == Path("logs/job7_x/attempt_1/2/stderr.log")
    assert files.error == Path("logs/job7_x/attempt_1/2/error.json")


# --- a quick command line ---


def test_importing_the_command_line_s_parts_does_not_import_torch() -> None:
    code = (
        "import sys, everstep.launcher.torchrun, everstep.launcher.srun, everstep.launcher.slurm.cli_json; "
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_an_agent_that_was_given_a_specification_does_not_import_torch() -> None:
    text = msgspec.json.encode(parse("--tee=0:3", "--nproc-per-node=2", "train.py")).decode()
    code = (
        "import sys, msgspec; from everstep.launcher import torchrun as t; "
        "spec = msgspec.json.decode(sys.argv[1], type=t.WorkerSpec); "
        "ways = [t.streams(spec, rank).stdout for rank in (0, 1)]; "
        "assert ways == ['tee', 'console'] and t.worker_argv(spec, 0); "
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, text], check=True)
