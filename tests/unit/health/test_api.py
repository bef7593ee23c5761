"""What the launcher asks: verdicts on the node, without ever waiting for a driver."""

from __future__ import annotations

import asyncio
import json
import sys

import pytest
from everstep.healthcheck import api, child
from everstep.healthcheck.api import Verdict
from everstep.healthcheck.child import Answer
from everstep.healthcheck.result import Report, Result, Severity, Status

BAD = Result(Status.CRITICAL, "Xid 95", Severity.RESET, "gpu3", check="xid")
WARN = Result(Status.WARN, "hot", Severity.MONITOR, "gpu3", check="temperature")


def line(*results: Result, faults: tuple[str, ...] = ()) -> str:
    return json.dumps({"report": Report("n1", "p5", "light", results).as_dict(), "faults": list(faults)})


def python(script: str) -> list[str]:
    return [sys.executable, "-c", script]


def test_something_critical_makes_a_node_unfit_with_the_gravest_reason() -> None:
    worse = Result(Status.CRITICAL, "row remap failed", Severity.REPLACE, "gpu1", check="remap")
    said = api.verdict([BAD, WARN, worse])
    assert said == Verdict(False, "remap gpu1 replace: row remap failed (and 1 more)")


@pytest.mark.parametrize(
    "answer", [Answer(None, ("broke",)), Answer(Report("n", "p", "light", (WARN,)), ("broke",))]
)
def test_a_fault_of_our_own_or_a_warning_gives_no_node_up(answer: Answer) -> None:
    assert api.verdict(answer) == Verdict(True, "", ("broke",))


def test_a_check_that_the_site_only_shows_gives_no_node_up() -> None:
    report = Report("n1", "p5", "light", (BAD,))
    assert api.verdict(Answer(report, report_only=frozenset({"xid"}))).fit
    assert not api.verdict(Answer(report, report_only=frozenset({"disk"}))).fit


def test_the_gate_runs_the_checks_in_a_process_and_does_not_block() -> None:
    async def both() -> tuple[Verdict, bool]:
        gate = asyncio.create_task(
            api.examine(argv=python(f"import time; time.sleep(0.2); print({line(BAD)!r})"))
        )
        await asyncio.sleep(0)
        return await gate, gate.done()

    said, _ = asyncio.run(both())
    assert not said.fit


def test_checks_that_hang_give_no_node_up() -> None:
    said = asyncio.run(api.examine(limit_s=0.5, argv=python("import time; time.sleep(60)")))
    assert said.fit
    assert "did not end" in said.faults[0]


def test_the_watch_says_each_verdict_and_ends_its_process() -> None:
    script = (
        "import sys\n"
        f"for text in ({line(WARN)!r}, 'no json', {line(BAD, faults=('x',))!r}):\n"
        "    print(text, flush=True)\n"
        "sys.stdin.read()\n"
    )

    async def three() -> list[Verdict]:
        said = []
        looks = api.watch(argv=python(script))
        async for each in looks:
            said.append(each)
            if len(said) == 3:
                break
        await looks.aclose()  # type: ignore[attr-defined]
        return said

    assert asyncio.run(three()) == [
        Verdict(True),
        Verdict(True),
        Verdict(False, "xid gpu3 reset: Xid 95", ("x",)),
    ]


def test_a_watch_whose_process_ends_says_so_and_starts_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "AGAIN_S", (0.01, 0.02))

    async def some() -> list[Verdict]:
        said = []
        looks = api.watch(argv=python(f"print({line(BAD)!r})"))
        async for each in looks:
            said.append(each)
            if len(said) == 4:
                break
        await looks.aclose()  # type: ignore[attr-defined]
        return said

    assert [each.fit for each in asyncio.run(some())] == [False, True, False, True]


def test_the_process_ends_when_whoever_started_it_is_gone() -> None:
    async def end() -> int:
        process = await asyncio.create_subprocess_exec(
            *child.command("light", limit_s=6, every_s=600),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        assert process.stdout is not None
        assert process.stdin is not None
        first = child.parse(await asyncio.wait_for(process.stdout.readline(), 60))
        assert first.report is not None
        process.stdin.close()
        return await asyncio.wait_for(process.wait(), 60)

    assert asyncio.run(end()) == 0


def test_a_run_under_way_can_do_without_slurm_s_own_services() -> None:
    gone = Result(Status.CRITICAL, "slurmd does not run", Severity.MONITOR, check="host_slurmd")
    assert api.verdict([gone]).fit
    assert not api.verdict([gone, BAD]).fit


@pytest.mark.parametrize("check", ["gpu_count", "gpu_init"])
def test_a_job_that_sees_only_its_own_gpus_misses_none(check: str) -> None:
    fewer = Result(Status.CRITICAL, "1 of 8 GPUs", Severity.REBOOT, check=check)
    assert api.verdict([fewer]).fit
    assert not api.verdict([fewer, BAD]).fit
