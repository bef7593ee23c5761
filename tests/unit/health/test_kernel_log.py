"""The kernel log is read whatever wrote it, as far back as is asked, and each event once."""

from __future__ import annotations

import time

import pytest
from everstep.healthcheck.readers.kernel_log import KernelLog, Pattern, ago
from hypothesis import given
from hypothesis import strategies as st

EVENT = Pattern(b"event", regex=rb"event (\w+)")


@pytest.mark.parametrize(
    "line",
    [
        b"[ 1234.567890] event a",
        b"<4>[ 1234.567890] event a",
        b"kern  :warn  : [ 1234.567890] event a",
        b"4,812,1234567890,-;event a",
        b"[ 1234.567890] n1 kernel: event a",
        b"[Sun Feb 23 16:24:18 2025] event a",
        b"2025-02-23T16:24:18,123456+00:00 event a",
        b"2025-02-23T16:24:18+0000 n1 kernel: event a",
        b"Feb 23 16:24:18 n1 kernel: event a",
        b"Feb 23 16:24:18 n1 kernel: [ 1234.567890] event a",
        b"event a",
    ],
)
def test_every_format_is_read(line: bytes) -> None:
    log = KernelLog(line + b"\n", now=None, uptime=None)
    (event,) = log.find(EVENT, within=60)
    assert (event.key, event.count, event.text) == (("a",), 1, "event a")


def test_an_event_is_told_once_with_its_last_time() -> None:
    lines = b"".join(
        b"[%5d.000000] event %s\n" % (at, name) for at, name in ((1, b"a"), (2, b"b"), (3, b"a"))
    )
    log = KernelLog(lines, now=None, uptime=63.0)
    events = log.find(EVENT)
    assert [(each.key[0], each.count, each.age) for each in events] == [("b", 1, 61.0), ("a", 2, 60.0)]
    assert ago(events[1]) == "2 times, last 1 min ago"


def test_what_is_older_than_asked_for_is_left_out() -> None:
    log = KernelLog(b"[   10.0] event old\n[  990.0] event new\n", now=None, uptime=1000.0)
    assert [each.key[0] for each in log.find(EVENT, within=100)] == ["new"]


def test_wall_clock_stamps_are_compared_with_now() -> None:
    stamp = time.strftime("%a %b %d %H:%M:%S %Y", time.localtime(1_740_000_000)).encode()
    log = KernelLog(b"[%s] event a\n" % stamp, now=1_740_000_050.0, uptime=None)
    assert log.find(EVENT, within=60) and not log.find(EVENT, within=40)


def test_a_recorded_log_is_as_old_as_its_newest_line() -> None:
    log = KernelLog(
        b"[Sun Feb 23 16:00:00 2025] event old\n[Sun Feb 23 16:24:18 2025] event new\nno stamp here\n",
        now=None,
        uptime=5.0,
    )
    assert [each.key[0] for each in log.find(EVENT, within=600)] == ["new"]


def test_only_the_last_boot_counts() -> None:
    log = KernelLog(
        b"[    9.0] event before\n[    0.0] Linux version 6.8.0 #1\n[   5.0] event after\n",
        now=None,
        uptime=9.0,
    )
    assert [each.key[0] for each in log.find(EVENT)] == ["after"]
    assert not log.wrapped


def test_a_log_that_speaks_of_a_version_has_not_booted() -> None:
    log = KernelLog(b"[   8.0] event a\n[   9.0] tool: Linux version 1 wanted\n", now=None, uptime=9.0)
    assert log.find(EVENT)


def test_a_ring_that_has_wrapped_is_known() -> None:
    assert KernelLog(b"[ 5000.0] event a\n", now=None, uptime=9000.0).wrapped


@given(st.binary(max_size=400))
def test_no_bytes_break_it(data: bytes) -> None:
    log = KernelLog(data + b"\nevent a\n" + data, now=None, uptime=None)
    assert any(each.key == ("a",) for each in log.find(EVENT))


@given(st.lists(st.integers(0, 60), max_size=12), st.booleans())
def test_a_line_is_looked_at_as_far_as_the_kernel_s_own_go(lengths: list[int], ended: bool) -> None:
    import everstep.healthcheck.readers.kernel_log as reader

    lines = [bytes([97 + index % 26]) * length for index, length in enumerate(lengths)]
    end = b"\n" if ended and lines else b""
    old, reader._LINE = reader._LINE, 20
    try:
        assert reader._cut(b"\n".join(lines) + end) == b"\n".join(line[:20] for line in lines) + end
    finally:
        reader._LINE = old


@given(st.lists(st.sampled_from([b"a", b"b", b"c"]), max_size=60), st.integers(1, 40))
def test_counts_and_last_times_are_those_of_a_plain_count(names: list[bytes], size: int) -> None:
    import everstep.healthcheck.readers.kernel_log as reader

    data = b"".join(b"[%6d.0] event %s\n" % (at, name) for at, name in enumerate(names))
    old, reader._CHUNK = reader._CHUNK, size * 7
    try:
        log = KernelLog(data, now=None, uptime=float(len(names)))
        found = {each.key[0].encode(): (each.count, each.age) for each in log.find(EVENT)}
    finally:
        reader._CHUNK = old
    wanted = {
        name: (names.count(name), float(len(names) - max(i for i, each in enumerate(names) if each == name)))
        for name in set(names)
    }
    assert found == wanted
