"""The same script without a launcher, and scripts that never import everstep: torchrun's semantics."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable

from harness import TORCHRUN, Job

Launch = Callable[..., Job]


def seen(job: Job, attempt: int = 0) -> list[dict[str, str]]:
    return [json.loads((job.folder / f"seen-{rank}-{attempt}.json").read_text()) for rank in range(2)]


def test_the_same_script_under_plain_python(
    command: Callable[..., Job], undisturbed: Callable[..., str]
) -> None:
    words = ("mlp.py", "--steps", "10")
    ended = command([sys.executable, *words]).end()
    assert ended.code == 0
    assert f"digest {undisturbed(*words, nnodes=1)}\n" in ended.output


def test_a_script_that_never_imports_everstep_sees_what_torchrun_sets(
    command: Callable[..., Job], launch: Launch
) -> None:
    under_torchrun = command([TORCHRUN, "--standalone", "--nproc-per-node", "2", "plain.py", "0"])
    under_us = launch("plain.py", "0", nnodes=1, options=("--nproc-per-node", "2"))
    assert under_torchrun.end().code == 0
    assert under_us.end().code == 0
    for theirs, ours in zip(seen(under_torchrun), seen(under_us), strict=True):
        assert ours.keys() - theirs.keys() == set()
        assert theirs.keys() - ours.keys() <= {"TORCHELASTIC_ERROR_FILE"}
        free = {"MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE"}
        free.add("TORCHELASTIC_USE_AGENT_STORE")  # torchrun's agent serves one at MASTER_PORT; ours does not
        assert {k: v for k, v in ours.items() if k not in free} == {
            k: v for k, v in theirs.items() if k in ours and k not in free
        }


def test_it_is_restarted_as_a_whole_up_to_max_restarts(launch: Launch) -> None:
    again = ("--nproc-per-node", "2", "--max-restarts", "1")
    enough = launch("plain.py", "1", nnodes=1, options=again)
    assert enough.end().code == 0
    assert [x["TORCHELASTIC_RESTART_COUNT"] for x in seen(enough, 1)] == ["1", "1"]
    ended = launch("plain.py", "2", nnodes=1, options=again).end()
    assert ended.code == 7
    assert "rank 1 on n1" in ended.error
