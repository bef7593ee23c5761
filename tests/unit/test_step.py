"""`everstep srun` beside its srun: what is said where srun ends without a word of the run."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from everstep.launcher import step
from everstep.launcher.keys import keys_from, new_secret
from everstep.launcher.report import Ear


@pytest.fixture
def ear() -> Iterator[Ear]:
    ear = Ear(keys_from(new_secret()))
    yield ear
    ear.close()


def test_whoever_kills_srun_is_told_how_to_end_its_step(ear: Ear, capfd: pytest.CaptureFixture[str]) -> None:
    assert step._run(["sh", "-c", "kill -9 $$"], os.environ, ear) == 137
    said = capfd.readouterr().err
    assert "srun was killed (SIGKILL)" in said and "scancel JOBID.STEPID" in said


def test_sruns_own_code_is_passed_on(ear: Ear, capfd: pytest.CaptureFixture[str]) -> None:
    assert step._run(["sh", "-c", "exit 3"], os.environ, ear) == 3
    assert "srun ended with exit code 3, and no word of how the run ended" in capfd.readouterr().err


def test_a_run_that_went_well_needs_no_words(ear: Ear, capfd: pytest.CaptureFixture[str]) -> None:
    assert step._run(["true"], os.environ, ear) == 0
    assert capfd.readouterr().err == ""
