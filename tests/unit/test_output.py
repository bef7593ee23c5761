"""Workers' lines on their way out: each with its rank before it, none lost, none held up for good."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from everstep.launcher.output import Relay

PATIENCE = 20.0


class Out:
    """A pipe in the place of the terminal, read by a thread of its own."""

    def __init__(self) -> None:
        self._read, self.fd = os.pipe()
        self.data = b""
        self._thread = threading.Thread(target=self._collect)
        self._thread.start()

    def _collect(self) -> None:
        while chunk := os.read(self._read, 1 << 16):
            self.data += chunk
        os.close(self._read)

    def all(self) -> bytes:
        os.close(self.fd)
        self._thread.join(PATIENCE)
        return self.data


@pytest.fixture
def relay() -> Iterator[Relay]:
    one = Relay()
    yield one
    one.drain(PATIENCE)


def say(
    relay: Relay, out: int | None, *chunks: bytes, label: str = "[rank 0] ", file: Path | None = None
) -> None:
    """A worker that writes these chunks and ends."""
    read, write = os.pipe()
    relay.add(read, out, lambda: label, file)
    for chunk in chunks:
        while chunk:
            chunk = chunk[os.write(write, chunk) :]
    os.close(write)


def test_each_line_has_its_rank_before_it(relay: Relay) -> None:
    out = Out()
    say(relay, out.fd, b"one\ntwo\n\nthree\n")
    relay.drain(PATIENCE)
    assert out.all() == b"[rank 0] one\n[rank 0] two\n[rank 0] \n[rank 0] three\n"


def test_a_line_in_pieces_comes_out_as_one(relay: Relay) -> None:
    out = Out()
    say(relay, out.fd, b"a", b"b", b"c\nd", b"e\n")
    relay.drain(PATIENCE)
    assert out.all() == b"[rank 0] abc\n[rank 0] de\n"


def test_a_last_line_without_an_end_comes_out_when_the_worker_ends(relay: Relay) -> None:
    out = Out()
    say(relay, out.fd, b"Killed in mid-li")
    relay.drain(PATIENCE)
    assert out.all() == b"[rank 0] Killed in mid-li\n"


def test_a_standbys_lines_bear_its_rank_once_it_has_one(relay: Relay) -> None:
    out, labels = Out(), ["[n1 standby] "]
    read, write = os.pipe()
    seen = threading.Event()

    def label() -> str:
        seen.set()
        return labels[0]

    relay.add(read, out.fd, label, None)
    os.write(write, b"warm\n")
    assert seen.wait(PATIENCE)
    labels[0] = "[rank 3] "
    os.write(write, b"step 0\n")
    os.close(write)
    relay.drain(PATIENCE)
    assert out.all() == b"[n1 standby] warm\n[rank 3] step 0\n"


def test_a_huge_line_comes_out_whole(relay: Relay) -> None:
    out, line = Out(), b"x" * (5 << 20)
    say(relay, out.fd, line + b"\n")
    relay.drain(PATIENCE)
    assert out.all() == b"[rank 0] " + line + b"\n"


def test_bytes_that_are_no_text_pass_through(relay: Relay) -> None:
    out = Out()
    say(relay, out.fd, b"\xff\x00\xfe\n")
    relay.drain(PATIENCE)
    assert out.all() == b"[rank 0] \xff\x00\xfe\n"


def test_lines_of_many_workers_are_never_mixed(relay: Relay) -> None:
    out = Out()

    def lines_of(r: int) -> list[bytes]:
        return [b"%d-%d" % (r, i) for i in range(300)]

    def talk(r: int) -> None:
        say(relay, out.fd, *[line + b"\n" for line in lines_of(r)], label=f"[{r}] ")

    threads = [threading.Thread(target=talk, args=(r,)) for r in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    relay.drain(PATIENCE)
    lines = out.all().splitlines()
    for r in range(6):
        prefix = b"[%d] " % r
        assert [x for x in lines if x.startswith(prefix)] == [prefix + line for line in lines_of(r)]
    assert len(lines) == 1800


def test_a_log_file_gets_the_bytes_as_they_are(relay: Relay, tmp_path: Path) -> None:
    out, file = Out(), tmp_path / "stdout.log"
    say(relay, out.fd, b"one\r\ntwo", file=file)
    relay.drain(PATIENCE)
    assert file.read_bytes() == b"one\r\ntwo"
    assert out.all() == b"[rank 0] one\n[rank 0] two\n"


def test_a_redirected_stream_is_in_its_file_alone(relay: Relay, tmp_path: Path) -> None:
    say(relay, None, b"one\n", file=tmp_path / "f")
    relay.drain(PATIENCE)
    assert (tmp_path / "f").read_bytes() == b"one\n"


def test_when_our_reader_is_gone_workers_are_not_held_up(relay: Relay) -> None:
    read, write = os.pipe()
    os.close(read)
    say(relay, write, b"x" * (1 << 20) + b"\n")  # blocks for ever if nobody reads the worker's pipe
    relay.drain(PATIENCE)
    os.close(write)


def test_when_a_log_file_cannot_be_written_other_streams_go_on(relay: Relay) -> None:
    out = Out()
    say(relay, None, b"lost\n", file=Path("/dev/full"))
    say(relay, out.fd, b"one\n")
    relay.drain(PATIENCE)
    assert out.all() == b"[rank 0] one\n"


def test_when_a_log_file_cannot_be_opened_the_lines_are_still_shown(relay: Relay, tmp_path: Path) -> None:
    out = Out()
    say(relay, out.fd, b"one\n", file=tmp_path / "missing" / "f")
    relay.drain(PATIENCE)
    assert out.all() == b"[rank 0] one\n"
