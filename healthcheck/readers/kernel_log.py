"""The kernel log: events by pattern, each once, with when they last came. A million lines are no trouble."""

from __future__ import annotations

import calendar
import re
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

_PREFIX = re.compile(
    rb"^(?:<\d+>)?(?:[a-z]+ *:[a-z]+ *: *)?(?:"
    rb"\d+,\d+,(?P<kmsg>\d+),[^;]*;"  # /dev/kmsg
    rb"|\[ *(?P<up>\d+\.\d+)\] ?"  # dmesg, journalctl -o short-monotonic
    rb"|\[(?P<wall>[A-Z][a-z]{2} [A-Z][a-z]{2} +\d+ [\d:]{8} \d{4})\] ?"  # dmesg -T
    rb"|(?P<iso>\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?) "
    rb"|(?P<syslog>[A-Z][a-z]{2} +\d+ \d\d:\d\d:\d\d) "  # /var/log/kern.log, journalctl -o short
    rb")"
)
_HOST = re.compile(rb"^(?:\S+ )?kernel: (?:\[ *\d+\.\d+\] )?")
_BOOT = b"Linux version "  # the first thing that a kernel says
_CHUNK = 1 << 16  # bytes
_LONGEST = 400  # characters of a line that are kept
_LINE = 2048  # bytes of a line that are looked at; the kernel's own are half of that at the most


@dataclass(frozen=True)
class Stamp:
    """When a line was written, by one of two clocks; both None where the line does not say."""

    up: float | None = None
    """Seconds since boot."""
    wall: float | None = None
    """Unix seconds."""


class Pattern:
    """What to look for: a regular expression with groups, and words of which each match has one.

    Looking for a word first is what makes a log without it cheap, whatever its length.
    """

    def __init__(self, *words: bytes, regex: bytes) -> None:
        self.words = words
        self.regex = re.compile(regex)


@dataclass(frozen=True)
class Event:
    """What was found, once for each key however often it came."""

    key: tuple[str, ...]
    """The pattern's groups, or what was made of them."""
    count: int
    text: str
    """The last line of it, without its stamp."""
    age: float | None
    """Seconds since it last came; None where that is not told."""


class KernelLog:
    """The log since boot."""

    def __init__(
        self, data: bytes, *, now: float | None, uptime: float | None, source: str = "dmesg"
    ) -> None:
        """`now` is None for a recorded log: then the newest line is what is now."""
        self.source = source
        self.data = _cut(data)
        boot = self._last_boot()
        self.data = self.data[boot:]
        newest = self._newest()
        self._now = newest.wall if now is None else now
        self._seen: dict[Pattern, dict[tuple[bytes, ...], tuple[int, int]]] = {}
        self._lock = threading.Lock()
        self._uptime = max((each for each in (uptime, newest.up) if each is not None), default=None)

    @property
    def wrapped(self) -> bool:
        """Whether the beginning of this boot is not in it."""
        return not self.line(0).startswith(_BOOT.decode()) and (self.stamp(0).up or 0.0) > 60.0

    def find(
        self,
        pattern: Pattern,
        *,
        within: float | None = None,
        key: Callable[[tuple[str, ...]], tuple[str, ...]] | None = None,
    ) -> list[Event]:
        """The distinct matches, in the order of their last coming, as far back as `within` seconds.

        The groups, or what `key` makes of them, tell one event from another.
        """
        with self._lock:
            if pattern not in self._seen:
                self._seen[pattern] = self._scan(pattern)
            seen = self._seen[pattern]
        merged: dict[tuple[str, ...], list[int]] = {}
        for groups, (count, at) in seen.items():
            words = tuple(group.decode("utf-8", "replace") for group in groups)
            name = key(words) if key else words
            known = merged.setdefault(name, [0, at])
            known[0] += count
            known[1] = max(known[1], at)
        events = []
        for name, (count, at) in sorted(merged.items(), key=lambda each: each[1][1]):
            age = self.age(self.stamp(at))
            if within is None or age is None or age <= within:
                events.append(Event(name, count, self.line(at), age))
        return events

    def _scan(self, pattern: Pattern) -> dict[tuple[bytes, ...], tuple[int, int]]:
        """For each match's groups: how often, and where last."""
        counts: Counter[tuple[bytes, ...]] = Counter()
        last: dict[tuple[bytes, ...], int] = {}
        if any(word in self.data for word in pattern.words):
            end = len(self.data)
            while end > 0:  # from the end, so that where an event came last is looked for once
                start = self.data.rfind(b"\n", 0, max(0, end - _CHUNK)) + 1
                if all(self.data.find(word, start, end) < 0 for word in pattern.words):
                    end = start
                    continue
                found = pattern.regex.findall(self.data, start, end)
                if pattern.regex.groups == 1:
                    found = [(group,) for group in found]
                counts.update(found)
                if not last.keys() >= set(found):
                    here = pattern.regex.finditer(self.data, start, end)
                    last = {match.groups(b""): match.start() for match in here} | last
                end = start
        return {groups: (count, last[groups]) for groups, count in counts.items()}

    def age(self, stamp: Stamp) -> float | None:
        """Seconds since then."""
        if stamp.up is not None and self._uptime is not None:
            return max(0.0, self._uptime - stamp.up)
        if stamp.wall is not None and self._now is not None:
            return max(0.0, self._now - stamp.wall)
        return None

    def line(self, at: int) -> str:
        """The line around a position, without its stamp."""
        start = self.data.rfind(b"\n", 0, at) + 1
        end = self.data.find(b"\n", at)
        raw = self.data[start : end if end >= 0 else None]
        prefix = _PREFIX.match(raw)
        raw = raw[prefix.end() :] if prefix else raw
        host = _HOST.match(raw)
        raw = raw[host.end() :] if host else raw
        return raw[:_LONGEST].decode("utf-8", "replace").strip()

    def stamp(self, at: int) -> Stamp:
        """When the line around a position was written."""
        start = self.data.rfind(b"\n", 0, at) + 1
        found = _PREFIX.match(self.data[start : start + 120])
        if found is None:
            return Stamp()
        if found["kmsg"]:
            return Stamp(up=int(found["kmsg"]) / 1e6)
        if found["up"]:
            return Stamp(up=float(found["up"]))
        return Stamp(wall=_wall(found))

    def since_boot(self, event: Event) -> float | None:
        """How many seconds after the boot it last came; None where that is not told."""
        return None if event.age is None or self._uptime is None else self._uptime - event.age

    def _last_boot(self) -> int:
        at = len(self.data)
        while (at := self.data.rfind(_BOOT, 0, at)) >= 0:
            if self.line(at).startswith(_BOOT.decode()):
                return self.data.rfind(b"\n", 0, at) + 1
        return 0

    def _newest(self) -> Stamp:
        up = wall = None
        end = len(self.data)
        for _ in range(200):  # the newest lines may have no stamp
            if end <= 0 or (up is not None or wall is not None):
                break
            start = self.data.rfind(b"\n", 0, end - 1) + 1
            stamp = self.stamp(start)
            up, wall = stamp.up, stamp.wall
            end = start
        return Stamp(up, wall)


def _cut(data: bytes) -> bytes:
    """The same with no line longer than _LINE: patterns go through a line many times over."""
    pieces = []
    start = at = 0
    while at + _LINE < len(data):
        end = data.rfind(b"\n", at, at + _LINE + 1)
        if end >= 0:
            at = end + 1
            continue
        pieces.append(data[start : at + _LINE])
        end = data.find(b"\n", at + _LINE)
        start = at = len(data) if end < 0 else end
    return b"".join([*pieces, data[start:]]) if pieces else data


def _wall(found: re.Match[bytes]) -> float | None:
    try:
        if found["wall"]:
            return time.mktime(time.strptime(found["wall"].decode(), "%a %b %d %H:%M:%S %Y"))
        if found["iso"]:
            return _iso(found["iso"].decode())
        words = f"{time.localtime().tm_year} {found['syslog'].decode()}"
        at = time.mktime(time.strptime(words, "%Y %b %d %H:%M:%S"))
        return at if at <= time.time() + 86400 else at - 365 * 86400
    except (ValueError, OverflowError):
        return None


def _iso(text: str) -> float:
    zone = re.search(r"(Z|[+-]\d\d:?\d\d)$", text[19:])
    fields = time.strptime(text[:19].replace("T", " "), "%Y-%m-%d %H:%M:%S")
    if zone is None:
        return time.mktime(fields)
    offset = 0
    if zone.group(1) != "Z":
        digits = zone.group(1).replace(":", "")
        offset = int(f"{digits[0]}1") * (int(digits[1:3]) * 3600 + int(digits[3:5]) * 60)
    return calendar.timegm(fields) - offset


def ago(event: Event) -> str:
    """`3 times, last 5 min ago`, as far as that is known."""
    words = [f"{event.count} times"] if event.count > 1 else []
    if event.age is not None:
        last = "last " if event.count > 1 else ""
        for size, unit in ((86400, "d"), (3600, "h"), (60, "min"), (1, "s")):
            if event.age >= size or size == 1:
                words.append(f"{last}{event.age / size:.0f} {unit} ago")
                break
    return ", ".join(words)
