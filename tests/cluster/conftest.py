"""Fixtures of the cluster tests: the cluster up for the session and clean for each test."""

from __future__ import annotations

import fcntl
import hashlib
import importlib
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from slurm_cluster import OLD, REPO, SHARED, Cluster, Layout, containers_exist

HERE = Path(__file__).parent
LIMIT_S = 1200  # a test, and before the first the images and the cluster: none takes so long by far
GRACE_S = 5.0  # how long a run's processes may outlive it


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.cluster)
            item.add_marker(pytest.mark.timeout(LIMIT_S))


@pytest.fixture(scope="session")
def cluster(pytestconfig: pytest.Config) -> Iterator[Cluster]:
    """The cluster. What is not up yet, engine included, is brought up here and taken down at the end."""
    with _brought_up(pytestconfig, Layout()) as made:
        yield made


@pytest.fixture(scope="module")
def old_cluster(pytestconfig: pytest.Config) -> Iterator[Cluster]:
    """The second, small cluster, of Slurm 22.05; a test that asks for it runs there."""
    with _brought_up(pytestconfig, OLD) as made:
        yield made


@contextmanager
def _brought_up(config: pytest.Config, layout: Layout) -> Iterator[Cluster]:
    if os.environ.get("CLUSTER") == "0":
        pytest.skip("CLUSTER=0: without the containerized Slurm cluster")
    with _only_session(layout):
        engine_was_there = _output("docker/engine.sh", "status") != "none"
        cluster_was_there = engine_was_there and containers_exist(_client(), layout)
        try:
            _bring_up(config, layout)
            yield Cluster(_client(), layout)
        finally:
            if not cluster_was_there:
                _output("docker/down.sh", *layout.release)
            if not engine_was_there:
                _output("docker/engine.sh", "stop")


@pytest.fixture
def here(request: pytest.FixtureRequest) -> Cluster:
    """The cluster that this test runs on."""
    name = "old_cluster" if "old_cluster" in request.fixturenames else "cluster"
    found: Cluster = request.getfixturevalue(name)
    return found


@pytest.fixture(autouse=True)
def clean_cluster(here: Cluster) -> Iterator[None]:
    """Idle nodes and an empty queue before each test; after it, nothing that it started may be left."""
    cluster = here
    cluster.clear()
    before = cluster.processes()
    yield
    cluster.stop_started()
    cluster.mend()
    deadline = time.monotonic() + GRACE_S
    while True:
        left = {name: those - before.get(name, set()) for name, those in cluster.processes().items()}
        jobs = cluster.jobs()
        if not jobs and not any(left.values()):
            return
        if time.monotonic() > deadline:
            break
        time.sleep(0.2)
    cluster.kill_processes(left)
    found = [f"{name}: {command}" for name, those in left.items() for _, command in sorted(those)]
    found += [f"in the queue: {job}" for job in jobs]
    pytest.fail(f"left behind {GRACE_S:g} s after the test:\n" + "\n".join(found), pytrace=False)


@pytest.fixture
def folder(here: Cluster, request: pytest.FixtureRequest) -> str:
    """An empty folder of this test's own in /shared, owned by hpc."""
    path = f"{SHARED}/tests/{re.sub(r'[^A-Za-z0-9_.-]+', '-', request.node.name)}"
    here.exec("login", ["sh", "-c", 'rm -rf "$1" && mkdir -p "$1"', "sh", path])
    return path


def _bring_up(config: pytest.Config, layout: Layout) -> None:
    """Run docker/up.sh and show what it says, since it may take minutes."""
    capture = config.pluginmanager.getplugin("capturemanager")
    said: list[str] = []
    with capture.global_and_fixture_disabled():
        up = subprocess.Popen(
            ["docker/up.sh", *layout.release],
            cwd=REPO,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for line in up.stderr or ():
            print(("" if said else "\n") + line, end="", file=sys.stderr, flush=True)
            said.append(line)
        code = up.wait()
    if code != 0:
        message = "the cluster could not be brought up (CLUSTER=0 leaves its tests out):\n"
        pytest.fail(message + "".join(said), pytrace=False)


def _output(*command: str) -> str:
    return subprocess.run(command, cwd=REPO, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


def _client() -> Any:
    # Here, so that CLUSTER=0 works where the SDK is not installed; and by its name, since a type checker that
    # starts in this repository takes the folder docker/ for it.
    return importlib.import_module("docker").from_env()


@contextmanager
def _only_session(layout: Layout) -> Iterator[None]:
    """One test session at a time uses a cluster of this checkout; a second one waits."""
    name = hashlib.sha256(str(layout.folder).encode()).hexdigest()[:12]
    with open(Path(tempfile.gettempdir()) / f"everstep-cluster-{name}.lock", "w", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
