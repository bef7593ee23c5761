"""Fixtures of the embedded tests: real worker processes on this machine, no Slurm."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import harness
import pytest

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.embedded)


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., harness.Job]]:
    """Start a job (see `harness.everstep`); whatever is left of it is ended after the test."""
    jobs: list[harness.Job] = []

    def everstep(*script: str, **how: Any) -> harness.Job:
        jobs.append(harness.everstep(tmp_path / f"job{len(jobs)}", *script, **how))
        return jobs[-1]

    yield everstep
    for job in jobs:
        job.clear()


@pytest.fixture
def command(tmp_path: Path) -> Iterator[Callable[..., harness.Job]]:
    """Start any command as a job."""
    jobs: list[harness.Job] = []

    def start(words: Sequence[str], **how: Any) -> harness.Job:
        jobs.append(harness.start(tmp_path / f"command{len(jobs)}", words, **how))
        return jobs[-1]

    yield start
    for job in jobs:
        job.clear()


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """The digest of a run that nothing happens to, once for each script with its arguments."""
    known: dict[Any, str] = {}

    def digest(*script: str, nnodes: int = 3, options: Sequence[str] = ()) -> str:
        key = (script, nnodes, tuple(options))
        if key not in known:
            folder = tmp_path_factory.mktemp("undisturbed")
            job = harness.everstep(folder, *script, nnodes=nnodes, standby=0, options=options)
            try:
                ended = job.end()
            finally:
                job.clear()
            assert ended.code == 0, ended.output
            assert ended.generations == 1
            assert len(set(ended.digests.values())) == 1, ended.output
            known[key] = ended.digests[0]
        return known[key]

    return digest
