"""Every check passes on a sound node, finds its fault on another, and skips where there is nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from everstep.healthcheck import registry
from everstep.healthcheck.examine import Request, examine
from everstep.healthcheck.facts import Limits
from everstep.healthcheck.history import FileStore, Nowhere
from everstep.healthcheck.registry import Level
from everstep.healthcheck.result import Report, Status
from fault import Fault
from faults import FAULTS
from recorded import Node, sound

CHECKS = [
    name for name, each in registry.load(sites=False)[0].items() if each.run.__module__.startswith("everstep")
]


@pytest.fixture(autouse=True)
def _short_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tools that hang hang for a moment only; those that answer have time for it on a busy machine."""
    limits = [Limits(smi=10, tool=10, mount=10, dcgm=10, load=10)]
    hang = Node.hang

    def hang_shortly(node: Node, name: str) -> None:
        limits.append(Limits(smi=0.7, tool=0.7, mount=0.7, dcgm=0.7, load=0.7))
        hang(node, name)

    monkeypatch.setattr(Node, "hang", hang_shortly)
    monkeypatch.setattr(Limits, "of", classmethod(lambda cls, level: replace(limits[-1])))


def look(node: Node, fault: Fault, store: object, now: float) -> Report:
    """Run the check that looks for this fault."""
    request = Request(
        level=Level[fault.level.upper()],
        names=(fault.check,),
        root=node.root,
        idle_gpus=frozenset(range(8)) if fault.idle else None,
        site_checks=False,
    )
    return examine(request, store=store, now=now, sleep=lambda _: None)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", FAULTS)
def test_a_sound_node_passes_and_a_faulty_one_does_not(name: str, tmp_path: Path) -> None:
    fault = FAULTS[name]
    node = sound(fault.profile, tmp_path / "node")
    store = FileStore(tmp_path / "state" / "counters.json") if fault.growth else Nowhere()
    if fault.growth:
        look(node, fault, store, 1000.0)
    before = look(node, fault, store, 1270.0)
    assert [each.status for each in before.results] == [Status.OK], before.results

    fault.spoil(node)

    after = look(node, fault, store, 1540.0)
    assert after.profile == fault.profile
    found = [each for each in after.results if each.status >= Status.WARN]
    assert len(found) == 1, after.results
    assert found[0].status.word == fault.status
    assert found[0].severity.word == fault.severity
    assert found[0].device == fault.device or not fault.device
    assert fault.words in found[0].reason
    assert not after.faults


@pytest.mark.parametrize("check", CHECKS)
def test_where_there_is_nothing_to_read_a_check_skips(check: str, tmp_path: Path) -> None:
    report = examine(
        Request(names=(check,), root=tmp_path, profile="p5", site_checks=False),
        store=Nowhere(),
        sleep=lambda _: None,
    )
    assert [each.status for each in report.results] == [Status.SKIP], report.results
    assert not report.faults
    assert report.exit_code == 0


def test_every_check_has_a_fault_here() -> None:
    assert {fault.check for fault in FAULTS.values()} == set(CHECKS)


def test_what_hangs_is_told_once(tmp_path: Path) -> None:
    node = sound("p5", tmp_path)
    node.hang("nvidia-smi")
    report = examine(
        Request(level=Level.LIGHT, root=tmp_path, profile="p5", site_checks=False), store=Nowhere()
    )
    assert [each.check for each in report.findings] == ["gpu_smi"]
    silent = [each for each in report.results if "see gpu_smi" in each.reason]
    assert len(silent) > 10 and {each.status for each in silent} == {Status.SKIP}


def test_every_check_is_in_the_documentation() -> None:
    text = (Path(__file__).resolve().parents[3] / "docs" / "health-checks.md").read_text()
    checks = registry.load(sites=False)[0]
    for name in CHECKS:
        each = checks[name]
        words = (f"`{name}`", each.level.word, each.title.rstrip("."), each.source, each.action)
        assert f"| {' | '.join(words)} |" in text, name
