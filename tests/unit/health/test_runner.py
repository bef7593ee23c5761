"""The door to the node: nothing that is read or run holds us up, and a recorded node stays in its folder."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import psutil
import pytest
from everstep.healthcheck.runner import System
from recorded import Node


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path / "node")


def test_a_recorded_node_has_only_the_tools_in_its_usr_bin(node: Node) -> None:
    node.tool("dmesg", "recorded\n")
    runner = System(node.root)
    assert runner.run(["dmesg"], 5).out == b"recorded\n"
    assert runner.run(["cat", "/etc/hostname"], 5).missing
    assert runner.which("sh") is None


def test_a_recorded_node_has_only_the_files_in_its_folder(node: Node) -> None:
    node.write("/proc/uptime", "1 2\n")
    runner = System(node.root)
    assert runner.read("/proc/uptime") == b"1 2\n"
    assert runner.read("/proc/meminfo") is None
    assert runner.names("/sys/class") == []


def test_a_recorded_node_may_be_named_from_where_we_are(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    node.tool("dmesg", "recorded\n")
    monkeypatch.chdir(node.root.parent)
    assert System(node.root.name).run(["dmesg"], 5).out == b"recorded\n"


def test_a_file_that_cannot_be_executed_is_no_tool(node: Node) -> None:
    node.write("/usr/bin/dmesg", "text")
    assert System(node.root).run(["dmesg"], 5).missing


def test_what_a_tool_says_and_its_exit_code_are_told(node: Node) -> None:
    node.script("tool", "echo out; echo err >&2; exit 9")
    ran = System(node.root).run(["tool"], 5)
    assert (ran.code, ran.out, ran.err, ran.said) == (9, b"out\n", b"err\n", "err")


def test_arguments_are_words_and_no_shell_reads_them(node: Node) -> None:
    node.script("tool", 'printf "%s\\n" "$@"')
    assert System(node.root).run(["tool", "$(id)", "a b; c"], 5).out == b"$(id)\na b; c\n"


def test_a_tool_that_hangs_is_ended_with_its_children(node: Node) -> None:
    node.script("tool", 'sleep 1000 & echo $! > "$HERE/child"; wait')
    ran = System(node.root).run(["tool"], 0.5)
    assert ran.timed_out and ran.code is None
    child = int(node.read("/child"))
    with pytest.raises(psutil.NoSuchProcess):
        psutil.Process(child).wait(5)
        psutil.Process(child)


def test_a_tool_whose_child_keeps_its_output_open_has_ended_all_the_same(node: Node) -> None:
    node.script("tool", 'sleep 1000 &\necho $! > "$HERE/child"\necho done\nexit 9')
    start = time.monotonic()
    ran = System(node.root).run(["tool"], 60)
    assert (ran.timed_out, ran.code, ran.out) == (False, 9, b"done\n")
    assert time.monotonic() - start < 30
    with pytest.raises(psutil.NoSuchProcess):  # nobody waits for it any more
        psutil.Process(int(node.read("/child"))).wait(5)
        psutil.Process(int(node.read("/child")))


def test_a_tool_that_closes_its_output_and_goes_on_is_out_of_time(node: Node) -> None:
    node.script("tool", "echo done; exec >&- 2>&-; sleep 1000")
    ran = System(node.root).run(["tool"], 0.5)
    assert ran.timed_out and ran.out == b"done\n"


def test_a_tool_that_goes_on_for_ever_is_stopped_after_its_first_line(node: Node) -> None:
    node.script("tool", "echo first\nwhile :; do echo more; sleep 1; done")
    start = time.monotonic()
    ran = System(node.root).run(["tool"], 30, first_line=True)
    assert ran.code == 0 and ran.out.startswith(b"first\n") and time.monotonic() - start < 25


def test_much_output_is_taken_whole(node: Node) -> None:
    node.script("tool", "head -c 3000000 /dev/zero; head -c 1000000 /dev/zero >&2")
    ran = System(node.root).run(["tool"], 30)
    assert (len(ran.out), len(ran.err), ran.code) == (3000000, 1000000, 0)


def test_no_tool_runs_beyond_the_deadline(node: Node) -> None:
    node.hang("tool")
    ran = System(node.root, deadline=time.monotonic() + 0.3).run(["tool"], 1000)
    assert ran.timed_out


def test_a_tool_is_given_neither_our_environment_nor_our_input(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET", "x")
    node.script("tool", "env; cat")
    out = System(node.root).run(["tool"], 5).out
    assert b"SECRET" not in out and b"LC_ALL=C" in out


def test_a_fifo_in_a_files_place_is_no_file_and_holds_nobody_up(node: Node) -> None:
    node.write("/proc/x", "")
    os.mkfifo(node.root / "proc/mounts")
    assert System(node.root).read("/proc/mounts") is None


def test_a_look_that_hangs_is_ended(node: Node) -> None:
    node.write("/x", "")
    os.mkfifo(node.root / "stuck")
    ran = System(node.root).run_python(
        "import sys; open(sys.argv[1]).read()", [str(node.root / "stuck")], 0.5
    )
    assert ran.timed_out


def test_a_stuck_mount_is_seen_without_a_stat_tool(node: Node) -> None:
    from everstep.healthcheck.examine import Request, examine
    from everstep.healthcheck.history import Nowhere
    from everstep.healthcheck.registry import Level

    node.write("/proc/mounts", "fs:/a /a nfs4 rw 0 0\nfs:/b /b nfs4 rw 0 0\nfs:/c /c nfs4 rw 0 0\n")
    (node.root / "a").mkdir()
    os.mkfifo(node.root / "b")
    request = Request(root=node.root, names=("mount_stuck",), level=Level.LIGHT, site_checks=False)
    report = examine(request, store=Nowhere())
    assert [(each.device, each.status.word) for each in report.results] == [("/b", "critical")]


def test_folders_of_a_recording_do_not_tell_how_full_this_machine_is(node: Node) -> None:
    (node.root / "scratch").mkdir(parents=True)
    assert System(node.root).usage("/scratch") is None
    here = System("/").usage("/")
    assert here is not None and here.size > 0


def test_a_fact_is_read_once_whoever_asks(node: Node) -> None:
    from everstep.healthcheck.facts import Facts

    node.script("dmesg", 'echo x >> "$HERE/asked"; echo "[ 1.0] line"')
    facts = Facts(System(node.root))
    threads = [threading.Thread(target=lambda: facts.kernel_log) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert node.read("/asked") == "x\n"
