"""A stock srun line that the SPANK plugin hands over: what becomes of it, and what is left alone."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import pytest
from everstep.launcher import native, report, srun, torchrun
from everstep.launcher.keys import keys_from, new_secret
from everstep.launcher.options import RunOptions, decode_orders
from everstep.launcher.slurm.srun_table import BUILTIN, OptionTable
from everstep.recovery.errors import UsageError

TABLE = OptionTable({**BUILTIN.longs, **native.PLUGIN_OPTIONS}, BUILTIN.letters)
WORDS = ("srun", "-N3", "--auto-resume=1", "--spare-nodes", "1", "torchrun", "train.py", "--auto-resume")


def line(*words: str, command_at: int) -> native.Line:
    return native.Line.cut("/usr/bin/srun", words, command_at)


def test_slurm_says_where_the_command_begins() -> None:
    cut = line(*WORDS, command_at=5)
    assert cut.options == ("-N3", "--auto-resume=1", "--spare-nodes", "1")
    assert cut.command == ("torchrun", "train.py", "--auto-resume")
    assert not cut.separator


def test_the_separator_before_the_command_is_no_option() -> None:
    cut = line("srun", "-N3", "--", "torchrun", command_at=3)
    assert (cut.options, cut.separator, cut.command) == (("-N3",), True, ("torchrun",))


def test_the_command_stays_and_no_export_is_added() -> None:
    cut = line(*WORDS, command_at=5)
    plan = srun.plan(
        ("--export=NONE", *cut.options),
        cut.command,
        RunOptions(spare_nodes=1),
        {},
        "",
        version="1",
        secret="s",  # noqa: S106
        table=TABLE,
        native=True,
    )
    assert plan.argv[-len(cut.command) :] == cut.command
    assert {"--no-kill", "--kill-on-bad-exit=0", "--wait=0", "--ntasks-per-node=1"} <= set(plan.argv)
    assert [word for word in plan.argv if "export" in word] == ["--export=NONE"]
    assert decode_orders(plan.env["EVERSTEP_AGENT"]).command == cut.command


@pytest.mark.parametrize(
    ("words", "inherited", "ours"),
    [
        (("torchrun", "train.py"), True, True),
        (("/sw/bin/python3.11", "-m", "torch.distributed.run", "train.py"), True, True),
        (("python", "train.py"), True, False),
        (("hostname",), True, False),
        (("hostname",), False, True),
    ],
)
def test_a_job_s_option_means_its_training_and_a_line_s_own_means_any_command(
    words: tuple[str, ...], inherited: bool, ours: bool
) -> None:
    why_not = native.left_alone(line("srun", *words, command_at=1), inherited, TABLE)
    assert why_not == (None if ours else "")


def test_an_interactive_step_is_left_alone_and_that_is_said() -> None:
    step = line("srun", "--pty", "torchrun", "train.py", command_at=2)
    assert "--pty" in (native.left_alone(step, False, TABLE) or "")
    assert native.left_alone(step, True, TABLE) == ""


def test_a_plugin_of_another_interface_is_refused() -> None:
    with pytest.raises(UsageError, match=r"interface 0, and everstep .* by 1: install the plugin of"):
        native.take_over(
            WORDS, interface="0", program="/usr/bin/srun", command_at=5, inherited=False, settings={}
        )


def test_the_plugin_s_options_come_after_those_of_the_environment(tmp_path: Path) -> None:
    environ = {native.MORE_OPTIONS: f"--standby 5 --interface ib0 --events {tmp_path}/e.jsonl"}
    options = native.own_options({"standby": "2", "spare_nodes": "1"}, environ)
    assert (options.standby, options.spare_nodes, options.interface) == (2, 1, "ib0")
    assert options.events == tmp_path / "e.jsonl"
    with pytest.raises(UsageError, match="EVERSTEP_OPTIONS cannot be read"):
        native.own_options({}, {native.MORE_OPTIONS: "--events 'x"})


def test_a_plain_command_is_one_worker_a_node_as_it_is() -> None:
    spec = native.plain_spec(("python", "train.py", "${local_rank}"), retries=3)
    assert torchrun.decode_spec(torchrun.encode_spec(spec)) == spec
    assert (spec.plain, spec.nproc_per_node, spec.max_restarts, spec.script) == (True, 1, 3, "train.py")
    assert torchrun.worker_argv(spec, 0) == ["python", "train.py", "${local_rank}"]


def test_a_moved_task_gets_the_lost_one_s_place_in_the_step() -> None:
    env = torchrun.task_environment(rank=2, node_rank=2, nnodes=3)
    assert env["SLURM_PROCID"] == env["SLURM_NODEID"] == "2"
    assert env["SLURM_NTASKS"] == env["SLURM_NNODES"] == "3"
    assert not any(name in env for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"))


def test_srun_s_ear_is_told_a_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        heard: list[bytes] = []

        def listen() -> None:
            caller, _ = server.accept()
            with caller:
                heard.append(caller.recv(200))

        thread = threading.Thread(target=listen)
        thread.start()
        report.tell(f"line:127.0.0.1:{server.getsockname()[1]}:abcd", keys_from(new_secret()), 7)
        thread.join()
    assert heard == [b"everstep abcd 7\n"]


def test_workers_run_under_the_python_of_the_torchrun_that_was_named(tmp_path: Path) -> None:
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.touch(0o755)
    program = python.with_name("torchrun")
    program.write_text(f"#!{python}\n")
    program.chmod(0o755)
    environ = {"PATH": str(python.parent)}
    assert native._python_of(("torchrun", "train.py"), environ) == {"PYTHON_EXEC": str(python)}
    assert native._python_of(("hostname",), environ) == {}
    assert native._python_of(("torchrun", "train.py"), {**environ, "PYTHON_EXEC": "/x"}) == {}
