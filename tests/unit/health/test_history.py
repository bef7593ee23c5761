"""Counters are remembered from run to run, for one boot, in a file that nobody else can write."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from everstep.healthcheck.history import FileStore, History, default_store


def kept(store: FileStore, *samples: tuple[float, float], boot: str = "b1") -> History:
    for at, value in samples:
        history = store.load(boot)
        history.add("x", at, {"n": value})
        store.save(history, at)
    return store.load(boot)


def test_growth_is_since_the_oldest_sample_of_the_window(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "d" / "f.json")
    history = kept(store, (0.0, 5), (100.0, 6), (200.0, 8))
    assert history.growth("x", 300.0, {"n": 9}) == (300.0, {"n": 4})
    assert store.load("b1").growth("x", 300.0, {"n": 9}, 150.0) == (100.0, {"n": 1})


def test_the_first_reading_has_grown_by_nothing() -> None:
    assert History().growth("x", 0.0, {"n": 10**9}) == (0.0, {})


def test_a_counter_that_was_reset_has_grown_by_what_it_shows(tmp_path: Path) -> None:
    history = kept(FileStore(tmp_path / "d" / "f.json"), (0.0, 500), (100.0, 3))
    assert history.growth("x", 200.0, {"n": 4})[1] == {"n": 4}


def test_another_boot_begins_anew(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "d" / "f.json")
    kept(store, (0.0, 5))
    assert store.load("b2").growth("x", 60.0, {"n": 9}) == (0.0, {})


def test_what_is_older_than_an_hour_is_forgotten(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "d" / "f.json")
    history = kept(store, (0.0, 5), (3000.0, 6))
    history.add("x", 4000.0, {"n": 7})
    store.save(history, 4000.0)
    assert [at for at, _ in store.load("b1").before["x"]] == [3000.0, 4000.0]


def test_a_clock_that_was_set_back_does_no_harm(tmp_path: Path) -> None:
    history = kept(FileStore(tmp_path / "d" / "f.json"), (1000.0, 5))
    assert history.growth("x", 10.0, {"n": 9}) == (0.0, {})


def test_the_file_is_private_and_whole(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "d" / "f.json")
    kept(store, (0.0, 5))
    assert store.path.stat().st_mode & 0o777 == 0o600
    assert store.path.parent.stat().st_mode & 0o777 == 0o700
    assert [each.name for each in store.path.parent.iterdir()] == ["f.json"]


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"boot": "b1"}', '{"boot": "b1", "samples": {"x": [1]}}', "\udcff"]
)
def test_a_file_that_is_broken_is_no_history(text: str, tmp_path: Path) -> None:
    path = tmp_path / "f.json"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    path.chmod(0o600)
    assert FileStore(path).load("b1").before == {}


def test_a_file_that_others_can_write_is_nobodys_word(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "d" / "f.json")
    kept(store, (0.0, 5))
    store.path.chmod(0o666)
    assert store.load("b1").before == {}


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "d" / "f.json")
    kept(store, (0.0, 5))
    link = tmp_path / "link.json"
    link.symlink_to(store.path)
    assert FileStore(link).load("b1").before == {}


def test_a_folder_that_others_can_write_is_not_written_to(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d").chmod(0o777)
    history = History("b1")
    history.add("x", 0.0, {"n": 1})
    with pytest.raises(PermissionError):
        FileStore(tmp_path / "d" / "f.json").save(history, 0.0)


def test_a_recorded_node_has_a_history_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    stores = [default_store(each) for each in (Path("/"), tmp_path / "a", tmp_path / "b", tmp_path / "a")]
    assert len({store.path for store in stores}) == 3
    assert all(tmp_path in store.path.parents for store in stores)


def test_samples_that_come_fast_are_thinned(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "d" / "f.json")
    kept(store, *((float(at), float(at)) for at in range(0, 300, 5)))
    samples = json.loads(store.path.read_text())["samples"]["x"]
    assert len(samples) < 20 and samples[0][0] == 0.0 and samples[-1][0] == 295.0
