"""A checkpoint is complete and verified, or it is not there; whatever happens while it is written."""

from __future__ import annotations

import json
import os
import pickle
import resource
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from everstep.recovery import checkpoint as module
from everstep.recovery import state
from everstep.recovery.checkpoint import Checkpoints, TornCheckpoint
from everstep.recovery.errors import UsageError
from torch import nn


def objects(value: float = 1.0, size: int = 4) -> dict[str, Any]:
    model = nn.Linear(size, size)
    with torch.no_grad():
        model.weight.fill_(value)
        model.bias.fill_(value)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, size)).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer, "scaler": torch.amp.GradScaler("cpu")}


def snap(value: float = 1.0, size: int = 4) -> state.Snapshot:
    return state.snapshot(objects(value, size))


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def store(tmp_path: Path, said: list[str]) -> Iterator[Checkpoints]:
    yield Checkpoints(tmp_path / "ck", every=10, keep=2, log=said.append)
    for fd in module._locks.values():
        os.close(fd)
    module._locks.clear()


def visible(store: Checkpoints) -> list[str]:
    return sorted(p.name for p in store.path.iterdir() if p.name != ".everstep-lock")


# ------------------------------------------------------------------ writing and reading


def test_a_checkpoint_comes_back_bit_for_bit(store: Checkpoints, said: list[str]) -> None:
    a, b = objects(2.0), objects(3.0)
    path = store.save(20, state.snapshot(a), {"replicas": 3})
    found = store.newest_valid()
    assert found is not None and (found.path, found.committed, found.extra) == (path, 20, {"replicas": 3})
    state.load(b, found.skeleton, found.tensors)
    assert state.digest(a) == state.digest(b)
    assert len(said) == 1 and "\n" not in said[0]
    assert visible(store) == ["step-00000020"]


def test_all_kinds_of_tensors_come_back(store: Checkpoints) -> None:
    class Box:
        def state_dict(self) -> Any:
            return {
                "bf16": torch.ones(3).bfloat16(), "empty": torch.empty(0, 2), "scalar": torch.tensor(True),
                "turned": torch.arange(6).reshape(2, 3).t(), "wide": torch.ones(1).expand(3),
                "conj": torch.tensor([1 + 2j]).conj(), "a.b": torch.ones(1), "a": {"b": torch.zeros(1)},
                "\udce9": torch.ones(2), "part": torch.arange(10)[3:5],
                "fp8": torch.ones(2).to(torch.float8_e5m2),
            }  # fmt: skip

        def load_state_dict(self, value: Any) -> None:
            pass

    given = state.snapshot({"box": Box()})
    store.save(10, given, {})
    skeleton, tensors = store.load(10)
    assert skeleton == given.skeleton
    assert state.fingerprint(state.Snapshot(skeleton, tensors)) == state.fingerprint(given)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_pytorchs_own_tools_read_it_by_readable_names(store: Checkpoints) -> None:
    path = store.save(10, snap(5.0), {})
    names = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    assert {"model.weight", "optimizer.state.0.exp_avg", "everstep-skeleton"} <= set(names)
    wanted = {"model.weight": torch.zeros(4, 4)}
    dcp.load(wanted, checkpoint_id=path)
    assert torch.equal(wanted["model.weight"], objects(5.0)["model"].weight)


def test_checkpoints_are_due_at_multiples(store: Checkpoints) -> None:
    assert [n for n in range(31) if store.due(n)] == [10, 20, 30]


def test_the_newest_keep_remain_and_torn_ones_do_not_count(store: Checkpoints) -> None:
    for n in (10, 20, 30):
        store.save(n, snap(n), {})
    assert store.candidates() == [30, 20]
    (store.path / "step-00000030" / "manifest.json").unlink()
    store.save(40, snap(40), {})
    assert store.candidates() == [40, 30, 20]
    store.save(50, snap(50), {})
    assert store.candidates() == [50, 40]


def test_other_things_in_the_directory_are_left_alone(store: Checkpoints) -> None:
    (store.path / "notes.txt").write_text("mine")
    (store.path / "step-7").mkdir()
    (store.path / "step-00000099").write_text("a file, not a checkpoint")
    for n in (10, 20, 30):
        store.save(n, snap(n), {})
    assert visible(store) == ["notes.txt", "step-00000020", "step-00000030", "step-00000099", "step-7"]


# ------------------------------------------------------------------ what is torn is skipped


def flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


DAMAGE = {
    "a flipped byte in the tensors": lambda d: flip(d / "__0_0.distcp"),
    "a flipped byte in the index": lambda d: flip(d / ".metadata"),
    "cut off tensors": lambda d: os.truncate(d / "__0_0.distcp", 100),
    "no tensors": lambda d: (d / "__0_0.distcp").unlink(),
    "no index": lambda d: (d / ".metadata").unlink(),
    "a cut off manifest": lambda d: os.truncate(d / "manifest.json", 60),
    "an empty manifest": lambda d: os.truncate(d / "manifest.json", 0),
    "no manifest": lambda d: (d / "manifest.json").unlink(),
    "nothing": lambda d: [p.unlink() for p in d.iterdir()],
    "another step's manifest": lambda d: edit(d / "manifest.json", committed=19),
    "another format": lambda d: edit(d / "manifest.json", format=2),
    "another state": lambda d: edit(d / "manifest.json", fingerprint="0" * 32),
    "a manifest that lists nothing": lambda d: edit(d / "manifest.json", files={}),
    "a manifest of files elsewhere": lambda d: edit(
        d / "manifest.json", files={name: {"bytes": 0, "xxh3_128": ""} for name in ("../x", ".metadata")}
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_torn_checkpoint_is_named_and_the_next_older_one_used(
    store: Checkpoints, said: list[str], damage: str
) -> None:
    store.save(10, snap(1.0), {})
    path = store.save(20, snap(2.0), {})
    assert path is not None
    DAMAGE[damage](path)
    with pytest.raises(TornCheckpoint) as caught:
        store.load(20)
    assert caught.value.reason
    said.clear()
    found = store.newest_valid()
    assert found is not None and found.committed == 10
    assert len(said) == 1 and "step-00000020 is skipped" in said[0] and "\n" not in said[0]
    # The run comes to that step again, and replaces it.
    assert store.save(20, snap(2.0), {}) == path
    assert store.load(20)


def test_nothing_valid_is_nothing_found(store: Checkpoints) -> None:
    assert store.newest_valid() is None
    path = store.save(10, snap(), {})
    assert path is not None
    flip(path / ".metadata")
    assert store.newest_valid() is None


def test_the_index_of_a_checkpoint_that_does_not_match_is_never_unpickled(store: Checkpoints) -> None:
    class Trap:
        def __reduce__(self) -> Any:
            return (Path.touch, (store.path / "sprung",))

    path = store.save(10, snap(), {})
    assert path is not None
    (path / ".metadata").write_bytes(pickle.dumps(Trap()))
    assert store.newest_valid() is None
    assert not (store.path / "sprung").exists()


# ------------------------------------------------------------------ accidents while writing

# Forks a writer for each line it reads, which says "there" and stops where it is to be killed.
WRITERS = """
import json, os, signal, sys
sys.path.insert(0, os.path.dirname(sys.argv[1]))
import test_checkpoint as t
from everstep.recovery import checkpoint

for line in sys.stdin:
    job = json.loads(line)
    child = os.fork()
    if child:
        print(child, flush=True)
        os.waitpid(child, 0)
        print("ended", flush=True)
        continue
    owner = getattr(checkpoint, job["owner"]) if job["owner"] else checkpoint
    real = getattr(owner, job["name"])
    def stop(*args, **kwargs):
        if job["after"]:
            real(*args, **kwargs)
        print("there", flush=True)
        signal.pause()
    setattr(owner, job["name"], stop)
    checkpoint.Checkpoints(job["path"], every=10).save(20, t.snap(2.0), {})
    os._exit(1)
"""


@pytest.fixture(scope="module")
def writers() -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", WRITERS, __file__]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()


@pytest.mark.parametrize(
    ("owner", "name", "after"),
    [
        ("FileSystemWriter", "finish", False),
        ("", "dcp_save", True),
        ("", "_sync", False),
        ("Checkpoints", "_publish", False),
        ("Checkpoints", "_publish", True),
    ],
)
def test_a_writer_that_is_killed_leaves_nothing_half_visible(
    store: Checkpoints, said: list[str], writers: subprocess.Popen[str], owner: str, name: str, after: bool
) -> None:
    assert writers.stdin is not None and writers.stdout is not None
    job = {"owner": owner, "name": name, "after": after, "path": str(store.path)}
    writers.stdin.write(json.dumps(job) + "\n")
    writers.stdin.flush()
    pid = int(writers.stdout.readline())
    try:
        assert writers.stdout.readline() == "there\n"
        # While it lives, it is the only one to write.
        assert store.save(10, snap(1.0), {}) is None
        assert f"another run is writing there ({socket.gethostname()}, process {pid})" in said[-1]
    finally:
        os.kill(pid, signal.SIGKILL)
        assert writers.stdout.readline() == "ended\n"
    published = name == "_publish" and after
    assert store.candidates() == ([20] if published else [])
    assert (store.newest_valid() is not None) == published
    assert store.save(30, snap(3.0), {}) is not None
    assert [n for n in visible(store) if n.startswith(".")] == []


def test_a_file_that_cannot_grow_costs_one_message_and_no_older_checkpoint(
    store: Checkpoints, said: list[str]
) -> None:
    store.save(10, snap(1.0), {})
    said.clear()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, hard))
    try:
        assert store.save(20, snap(2.0, size=200), {}) is None
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert visible(store) == ["step-00000010"]
    assert len(said) == 1 and "WARNING: no checkpoint at step 20" in said[0] and "\n" not in said[0]
    assert "step-00000010" in said[0]
    assert store.save(20, snap(2.0, size=200), {}) is not None


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system takes root")
def test_a_full_disk_costs_one_message_and_no_older_checkpoint(
    tmp_path: Path, said: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    small = tmp_path / "small"
    small.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(small)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("no mounting here")
    try:
        store = Checkpoints(small, every=10, log=said.append)
        assert store.save(10, snap(1.0), {}) is not None
        for size in (300, 600):  # the first fits, by itself, but for its rest
            assert store.save(20, snap(2.0, size=size), {}) is None
            assert "No space left" in said[-1] and "\n" not in said[-1]
        assert visible(store) == ["step-00000010"] and store.load(10)
        assert "Traceback" not in "".join(capfd.readouterr())
    finally:
        for fd in module._locks.values():
            os.close(fd)
        module._locks.clear()
        subprocess.run(["umount", str(small)], check=True)


def test_a_directory_that_vanishes_costs_a_message(store: Checkpoints, said: list[str]) -> None:
    shutil.rmtree(store.path)
    assert store.candidates() == []
    assert store.save(10, snap(), {}) is None
    assert "WARNING" in said[0]


# ------------------------------------------------------------------ two runs, and starting over


def test_the_same_step_done_again_is_kept_and_a_different_one_refused(
    store: Checkpoints, said: list[str]
) -> None:
    path = store.save(20, snap(1.0), {})
    assert store.save(20, snap(1.0), {}) == path
    assert store.save(20, snap(2.0), {}) is None
    assert store.save(10, snap(2.0), {}) is None
    assert "step-00000020 there is from another run" in said[-1] and "\n" not in said[-1]
    assert store.load(20)[0] == snap(1.0).skeleton


def test_a_run_that_starts_over_sets_the_old_ones_aside(store: Checkpoints) -> None:
    assert store.set_aside() is None
    for n in (10, 20):
        store.save(n, snap(n), {})
    folder = store.set_aside()
    assert folder is not None
    assert sorted(p.name for p in folder.iterdir()) == ["step-00000010", "step-00000020"]
    assert store.candidates() == []
    assert store.save(10, snap(5.0), {}) is not None
    assert store.set_aside() != folder


def test_where_locks_do_not_work_only_what_dead_processes_left_is_deleted(
    store: Checkpoints, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(*_: Any) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(module.fcntl, "lockf", no_locks)
    ended = subprocess.Popen(["true"])
    ended.wait()
    host = module._host()
    for name in (f"{host}-{ended.pid}-ab", f"{host}-{os.getppid()}-cd", f"elsewhere-{ended.pid}-ef"):
        (store.path / f".everstep-tmp-step-00000010-{name}").mkdir()
    assert store.save(10, snap(), {}) is not None
    assert [n for n in visible(store) if n.startswith(".everstep-tmp")] == sorted(
        f".everstep-tmp-step-00000010-{n}" for n in (f"{host}-{os.getppid()}-cd", f"elsewhere-{ended.pid}-ef")
    )
    store.save(20, snap(), {})
    assert sum("without locks" in line for line in said) == 1


# ------------------------------------------------------------------ bad input


@pytest.mark.parametrize(("every", "keep"), [(0, 1), (-5, 1), (1.5, 1), (True, 1), (10, 0)])
def test_counts_that_make_no_sense_are_refused(tmp_path: Path, every: Any, keep: Any) -> None:
    with pytest.raises(UsageError, match="whole number of at least 1"):
        Checkpoints(tmp_path, every=every, keep=keep)


def test_a_path_that_is_a_file_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(UsageError, match="cannot write there") as caught:
            Checkpoints(path, every=10)
        assert "\n" not in str(caught.value)


def test_a_directory_without_permission_is_refused_at_once(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    try:
        with pytest.raises(UsageError, match="Permission denied"):
            Checkpoints(tmp_path, every=10)
        with pytest.raises(UsageError, match="Permission denied"):
            Checkpoints(tmp_path / "below", every=10)
    finally:
        if root:
            os.seteuid(0)
        tmp_path.chmod(0o700)


def test_files_are_made_with_the_umask_so_that_a_group_can_share_them(store: Checkpoints) -> None:
    before = os.umask(0o027)
    try:
        path = store.save(10, snap(), {})
    finally:
        os.umask(before)
    assert path is not None
    assert path.stat().st_mode & 0o777 == 0o750
    assert {p.stat().st_mode & 0o777 for p in path.iterdir()} == {0o640}
