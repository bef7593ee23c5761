"""What `everstep status` makes of the events: the run as it is now."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from everstep.launcher.picture import Picture, picture
from everstep.launcher.status import draw, find_events, parse_events, run_status
from everstep.recovery.errors import UsageError
from rich.console import Console


def event(t: float, name: str, generation: int, **fields: Any) -> dict[str, Any]:
    return {"t": t, "event": name, "generation": generation, **fields}


def started(t: float, node: str, worker: str, rank: int | None, generation: int = 1) -> dict[str, Any]:
    pid = 100 + int(worker[1:])
    return event(t, "worker_started", generation, node=node, worker=worker, pid=pid, rank=rank)


BEGUN = [
    started(0.0, "n1", "w0", 0),
    started(0.0, "n2", "w1", 1),
    event(1.0, "generation", 1, world=2, reason="the run begins"),
    started(1.1, "n1", "w2", None),
    started(1.1, "n3", "w3", None),
    event(2.0, "standby_ready", 1, node="n1", worker="w2"),
    event(2.1, "step", 1, rank=0, step=0),
    event(2.1, "step", 1, rank=1, step=0),
]
LOST = [
    event(5.0, "fault", 1, node="n1", rank=0, kind="SIGKILL", noticed="pidfd", worker="w0"),
    event(5.0, "generation", 2, world=2, reason="rank 0 on n1 died (SIGKILL)"),
    event(5.0, "placed", 2, rank=0, node="n1", worker="w2"),
    event(5.1, "abort_done", 2, rank=1, seconds=0.0),
    event(5.2, "restored", 2, rank=0, seconds=0.1),
    event(5.3, "group_ready", 2, rank=0, seconds=0.1),
]
AGAIN = [event(5.4, "step", 2, rank=0, step=9), event(5.4, "step", 2, rank=1, step=9)]


def now(events: list[dict[str, Any]]) -> Picture:
    found = picture(events)
    assert found is not None
    return found


def shown(found: Picture | None, clock: float = 10.0) -> str:
    console = Console(width=200, highlight=False, force_terminal=False)
    with console.capture() as captured:
        console.print(draw("job 7", found, clock))
    return captured.get()


def test_no_event_is_no_run_yet() -> None:
    assert picture([]) is None
    assert "no event yet" in shown(None)


def test_a_run_that_begins() -> None:
    found = now(BEGUN)
    assert (found.phase, found.generation, found.world) == ("running", 1, 2)
    assert [(s.rank, s.node, s.pid) for s in found.seats] == [(0, "n1", 100), (1, "n2", 101)]
    assert [(s.node, s.ready) for s in found.standbys] == [("n1", True), ("n3", False)]
    assert found.spares == ("n3",)
    assert now(BEGUN[:3]).phase == "starting"


def test_a_lost_rank_is_taken_by_a_standby() -> None:
    struck = now([*BEGUN, LOST[0]])
    assert struck.phase == "recovering"
    assert struck.seats[0].lost
    found = now([*BEGUN, *LOST])
    assert found.phase == "recovering"
    assert (found.seats[0].pid, found.seats[0].generation, found.seats[0].lost) == (102, 2, False)
    assert [s.node for s in found.standbys] == ["n3"]
    done = now([*BEGUN, *LOST, *AGAIN])
    assert done.phase == "running"
    assert done.seats[0].step == 9


def test_the_recovery_s_phases_are_shown_in_milliseconds() -> None:
    line = shown(now([*BEGUN, *LOST, *AGAIN])).splitlines()[-1]
    assert re.search(r"^2 at .* 100 ms +200 ms +300 ms +400 ms +rank 0 on n1 died \(SIGKILL\)", line), line


def test_a_lost_node_takes_its_standbys_along() -> None:
    fault = event(5.0, "fault", 1, node="n1", rank=0, ranks=[0], kind="node", noticed="4 missed heartbeats")
    found = now([*BEGUN, fault])
    assert found.lost_nodes == ("n1",)
    assert [s.node for s in found.standbys] == ["n3"]
    after = now(
        [
            *BEGUN,
            fault,
            event(5.0, "generation", 2, world=2, reason="node n1 was lost"),
            event(5.0, "placed", 2, rank=0, node="n3", worker="w3"),
        ]
    )
    assert [(s.rank, s.node) for s in after.seats] == [(0, "n3"), (1, "n2")]
    assert after.spares == ()
    assert "n1" in shown(after)


def test_a_lost_standby_is_no_recovery_but_a_note() -> None:
    found = now([*BEGUN, event(3.0, "fault", 1, node="n1", rank=None, kind="SIGKILL", worker="w2")])
    assert found.phase == "running"
    assert found.notes == ("a standby on n1 was lost (SIGKILL)",)


@pytest.mark.parametrize(
    ("last", "phase", "code"),
    [
        (event(9.0, "finished", 1, reason="all ranks are done"), "finished", 0),
        (event(9.0, "failed", 1, reason="step 3 failed 3 times", code=75), "failed", 75),
    ],
)
def test_how_it_ended(last: dict[str, Any], phase: str, code: int) -> None:
    found = now([*BEGUN, last])
    assert (found.phase, found.code, found.standbys) == (phase, code, ())
    assert f"job 7: {phase}" in shown(found)
    assert last["reason"] in shown(found)
    assert "9 s" in shown(found, clock=1e9), "its clock stands still"


def test_a_requeued_job_appends_to_the_file_and_the_last_attempt_counts() -> None:
    failed = event(9.0, "failed", 1, reason="nobody holds the state", code=75)
    found = now([*BEGUN, *LOST, failed, started(60.0, "n4", "w0", 0)])
    assert (found.attempt, found.generation, found.phase) == (2, 1, "starting")
    assert [s.node for s in found.seats] == ["n4"]
    cut_off = now([*BEGUN, *LOST, started(60.0, "n4", "w0", 0)])
    assert cut_off.attempt == 2, "the first one never said its last word"


def test_whole_group_restarts_are_the_same_run() -> None:
    again = [
        event(3.0, "fault", 1, node="n1", rank=0, kind="SIGKILL", worker="w0"),
        started(4.0, "n1", "w4", 0, generation=2),
        started(4.0, "n2", "w5", 1, generation=2),
    ]
    found = now([*BEGUN[:2], *again])
    assert found.attempt == 1
    assert [s.pid for s in found.seats] == [104, 105]


def test_unknown_events_and_torn_lines_are_no_trouble() -> None:
    lines = [json.dumps(e) for e in BEGUN]
    text = "\n".join([*lines, '{"t": 3, "event": "something new"}', "no json", "[]", '{"t": 3']).encode()
    assert now(list(parse_events(text))).phase == "running"


def test_it_is_json_for_programs() -> None:
    told = json.loads(json.dumps(now([*BEGUN, *LOST, *AGAIN]).to_json()))
    assert told["seats"][0]["node"] == "n1"
    assert round(told["recoveries"][0]["milliseconds"]["first step"]) == 400


# --- where the events are ---


def nowhere(job: int) -> str:
    return ""


def test_events_are_found_in_the_run_s_folder(tmp_path: Path) -> None:
    folder = tmp_path / ".everstep" / "7"
    folder.mkdir(parents=True)
    (folder / "events.jsonl").write_text("")
    assert find_events("7", tmp_path, nowhere) == folder / "events.jsonl"
    elsewhere = tmp_path / "elsewhere"
    assert find_events("7", elsewhere, lambda job: str(tmp_path)) == folder / "events.jsonl"


def test_the_run_s_state_names_another_file(tmp_path: Path) -> None:
    folder = tmp_path / ".everstep" / "7"
    folder.mkdir(parents=True)
    (tmp_path / "mine.jsonl").write_text("")
    (folder / "state.json").write_text(json.dumps({"events": str(tmp_path / "mine.jsonl")}))
    assert find_events("7", tmp_path, nowhere) == tmp_path / "mine.jsonl"


@pytest.mark.parametrize("job", ["7", "seven"])
def test_without_events_one_is_told_where_they_may_be(job: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--events FILE"):
        find_events(job, tmp_path, nowhere)


def test_either_a_job_or_a_file() -> None:
    for job, file in ((None, None), ("7", Path("x"))):
        with pytest.raises(UsageError, match="say which run"):
            run_status(job, file, watch=False, as_json=False)


def test_watching_ends_with_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "events.jsonl"
    events = [*BEGUN, event(9.0, "finished", 1, reason="done")]
    file.write_text("".join(json.dumps(e) + "\n" for e in events))
    assert run_status(None, file, watch=True, as_json=True) == 0
    assert json.loads(capsys.readouterr().out)["phase"] == "finished"
