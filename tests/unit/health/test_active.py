"""The active tests: what a measurement says, and that there is one."""

from __future__ import annotations

from pathlib import Path

import pytest
from everstep.healthcheck.checks.active import judge
from everstep.healthcheck.examine import Request, examine
from everstep.healthcheck.history import Nowhere
from everstep.healthcheck.registry import Level
from everstep.healthcheck.result import Status


def measured(*values: float, wrong: int | None = None) -> dict[str, object]:
    return {"results": [{"device": f"gpu{i}", "value": v, "wrong": i == wrong} for i, v in enumerate(values)]}


def test_what_is_as_fast_as_wanted_passes() -> None:
    (result,) = judge(measured(500.0, 510.0), 450.0, "TFLOP/s")
    assert (result.status, result.value, result.limit) == (Status.OK, 500.0, 450.0)


def test_without_a_threshold_a_test_measures_and_passes() -> None:
    (result,) = judge(measured(1.0), None, "TFLOP/s")
    assert (result.status, result.value) == (Status.OK, 1.0)


def test_a_device_that_is_slower_than_its_siblings_is_worth_a_look() -> None:
    results = judge(measured(600.0, 610.0, 490.0, 605.0), 450.0, "TFLOP/s")
    assert [(each.device, each.status) for each in results] == [("gpu2", Status.WARN)]


def test_wrong_results_are_worse_than_slow_ones() -> None:
    (result,) = judge(measured(600.0, 100.0, 600.0, wrong=1), 450.0, "TFLOP/s")
    assert (result.device, result.severity.word) == ("gpu1", "replace")


def test_what_cannot_be_measured_is_a_skip() -> None:
    assert judge({"skip": "torch sees no GPU"}, 1.0, "GB/s")[0].status is Status.SKIP
    assert judge({"results": []}, 1.0, "GB/s")[0].status is Status.SKIP


@pytest.mark.parametrize(("least", "status"), [("0.000001", Status.OK), ("1000.0", Status.CRITICAL)])
def test_the_hosts_processors_are_measured_where_a_profile_asks_for_it(least: str, status: Status) -> None:
    pytest.importorskip("torch")
    request = Request(
        level=Level.DEEP,
        names=("load_matmul",),
        profile="mine",
        root=Path("/"),
        site_profiles={"mine": f"[active]\nmatmul_tflops = {least}\n"},
        site_checks=False,
    )
    report = examine(request, store=Nowhere())
    assert report.status in (status, Status.SKIP), report.results  # a skip: where there is a GPU to measure
    assert report.faults == ()
