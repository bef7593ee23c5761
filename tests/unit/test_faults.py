"""What EVERSTEP_FAULTS may say."""

from __future__ import annotations

import os

import pytest
from everstep.recovery.errors import UsageError
from everstep.recovery.faults import VARIABLE, Drill, Fault, parse


def test_several_faults_with_their_defaults() -> None:
    assert parse("kill:rank=1,at=begin; stop:rank=0,step=7,at=send,gen=2,n=3;") == [
        Fault("kill", 1, "begin"),
        Fault("stop", 0, "send", step=7, gen=2, n=3),
    ]


def test_no_faults_are_no_drill(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert parse("") == []
    assert not Drill()


@pytest.mark.parametrize(
    "text",
    ["kill", "kill:rank=1", "kill:at=begin", "kill:rank=x,at=begin", "hurt:rank=1,at=begin",
     "kill:rank=1,at=nowhere", "kill:rank=1,at=begin,colour=2", "kill:rank=1,at=begin,step="],
)  # fmt: skip
def test_what_is_not_understood_is_said(text: str) -> None:
    with pytest.raises(UsageError, match=VARIABLE):
        parse(text)


def test_a_fault_happens_at_the_nth_time_that_its_point_is_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    happened = []
    monkeypatch.setattr(os, "kill", lambda pid, number: happened.append(number.name))
    monkeypatch.setenv(VARIABLE, "kill:rank=1,step=5,at=collective,n=2;stop:rank=1,at=done,gen=3")
    drill = Drill()
    for where in [
        ("collective", 0, 5, 1),
        ("collective", 1, 4, 1),
        ("begin", 1, 5, 1),
        ("collective", 1, 5, 1),
    ]:
        drill.reach(*where)
    assert not happened
    drill.reach("collective", 1, 5, 1)
    assert happened == ["SIGKILL"]
    drill.reach("collective", 1, 5, 1)
    drill.reach("done", 1, 9, 1)
    assert happened == ["SIGKILL"]
    drill.reach("done", 1, 9, 3)
    assert happened == ["SIGKILL", "SIGSTOP"]
