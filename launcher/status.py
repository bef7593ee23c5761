"""`everstep status`: find a run's events, and show the run as it is now, once or as it goes on."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from everstep.launcher import screen
from everstep.launcher.picture import Picture, Seat, picture, ranks_by_node
from everstep.launcher.slurm.client import fold
from everstep.launcher.timeline import Event, Recovery
from everstep.recovery.errors import UsageError

if TYPE_CHECKING:
    from rich.console import RenderableType

_LOOK_EVERY = 0.5
_SHOWN = 8  # the last recoveries
_STYLES = {"running": "green", "finished": "green", "failed": "bold red", "recovering": "yellow"}


def run_status(job: str | None, events: Path | None, *, watch: bool, as_json: bool) -> int:
    """Everything behind `everstep status`: the exit code. Raises UsageError."""
    if (job is None) == (events is None):
        raise UsageError("say which run: everstep status JOBID, or --events FILE")
    file = events if events is not None else find_events(job or "", Path.cwd(), _workdir)
    title = f"job {job}" if job else str(file)
    if not watch:
        now = picture(read_events(file))
        _print_once(title, now, as_json)
        return 0
    return _watch(title, file, as_json)


# --- finding and reading ----------------------------------------------------------------------------


def find_events(job: str, here: Path, workdir_of: Callable[[int], str]) -> Path:
    """A job's events file: in `.everstep/JOBID/` of this folder, or of the one it was submitted in.

    Raises UsageError where there is none.
    """
    if not job.isdigit():
        raise UsageError(f"{job!r} is no number of a job: everstep status JOBID, or --events FILE")
    if (found := _events_in(here / ".everstep" / job)) is not None:
        return found
    workdir = workdir_of(int(job))
    place = Path(workdir) / ".everstep" / job
    if workdir and (found := _events_in(place)) is not None:
        return found
    raise UsageError(
        f"no events of job {job} in {place if workdir else here / '.everstep' / job}: if its run was given "
        "--events FILE or --run-dir DIR, say so: everstep status --events FILE"
    )


def _events_in(folder: Path) -> Path | None:
    """events.jsonl there, or the file that the run's state.json names."""
    try:
        said = json.loads((folder / "state.json").read_text())
        named = Path(said["events"])
        if named.is_file():
            return named
    except (OSError, ValueError, KeyError, TypeError):
        pass  # no run has written there, or it did not say
    file = folder / "events.jsonl"
    return file if file.is_file() else None


def _workdir(job_id: int) -> str:
    from everstep.launcher.slurm.connect import connect

    try:
        return connect().job(job_id).workdir
    except UsageError:  # Slurm has forgotten it, or there is no Slurm here
        return ""


def read_events(file: Path) -> list[Event]:
    """The events in a file; a last line that is being written is left for the next time."""
    try:
        data = file.read_bytes()
    except OSError as error:
        raise UsageError(f"--events {file}: {error.strerror}") from error
    return list(parse_events(data))


def parse_events(data: bytes) -> Iterator[Event]:
    """The events of whole lines; what is no event is left out."""
    for line in data[: data.rfind(b"\n") + 1].splitlines():
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if isinstance(event, dict) and {"t", "event"} <= event.keys():
            yield event


# --- showing ------------------------------------------------------------------------------------------


def _print_once(title: str, now: Picture | None, as_json: bool) -> None:
    if as_json:
        print(json.dumps(now.to_json() if now else None), flush=True)
        return
    screen.show(draw(title, now, time.time()))


def _watch(title: str, file: Path, as_json: bool) -> int:
    """Show the run until it is over, or until one is tired of it."""
    if as_json or not sys.stdout.isatty():
        for now in _changes(file):
            _print_once(title, now, as_json)
        return 0
    from rich.live import Live

    with Live(refresh_per_second=4, screen=False) as live:
        for now in _changes(file, every_look=True):
            live.update(draw(title, now, time.time()), refresh=True)
    return 0


def _changes(file: Path, *, every_look: bool = False) -> Iterator[Picture | None]:
    """The run each time its file has grown (or at every look), up to its end."""
    seen = -1
    now: Picture | None = None
    while True:
        size = os.stat(file).st_size if file.exists() else 0
        if size != seen:
            seen, now = size, picture(read_events(file)) if size else None
            yield now
        elif every_look:
            yield now
        if now is not None and now.phase in ("finished", "failed"):
            return
        time.sleep(_LOOK_EVERY)


def draw(title: str, now: Picture | None, clock: float) -> RenderableType:
    """The screen. `clock`: unix seconds."""
    from rich.console import Group
    from rich.text import Text

    if now is None:
        return Text(f"{title}: no event yet")
    over = now.phase in ("finished", "failed")
    head = Text(f"{title}: ")
    head.append(now.phase, style=_STYLES.get(now.phase, ""))
    if now.phase == "failed" and now.code is not None:
        head.append(f" (exit code {now.code})")
    head.append(f", generation {now.generation}, world {now.world}")
    head.append(f", {_duration((now.last if over else clock) - now.began)}")
    if now.attempt > 1:
        head.append(f", attempt {now.attempt}")
    parts: list[RenderableType] = [head]
    if now.reason not in ("", now.phase):
        parts.append(Text(f"  {now.reason}", style="dim"))
    if now.seats:
        parts.append(_seats(now))
    if now.recoveries:
        parts.append(_recoveries(now.recoveries))
    parts += [Text(f"  {note}", style="dim") for note in now.notes]
    return Group(*parts)


def _seats(now: Picture) -> RenderableType:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, 2, 0, 0), title=None, header_style="bold")
    for name in ("node", "ranks (pid)", "standbys"):
        table.add_column(name, overflow="fold")
    waiting: dict[str, list[str]] = {}
    for standby in now.standbys:
        waiting.setdefault(standby.node, []).append("ready" if standby.ready else "starting")
    by_node = ranks_by_node(now.seats)
    for node, seats in by_node.items():
        style = "red" if node in now.lost_nodes else ""
        ranks = Text(", ".join(map(_seat, seats)))
        table.add_row(Text(node, style=style), ranks, _counted(waiting.get(node, [])))
    for node in now.spares:
        table.add_row(node, Text("spare", style="dim"), _counted(waiting.get(node, [])))
    gone = [node for node in now.lost_nodes if node not in by_node]
    if gone:
        table.add_row(Text(fold(gone), style="red"), Text("lost", style="red"), "")
    return table


def _seat(seat: Seat) -> str:
    if seat.lost:
        return f"{seat.rank} (lost)"
    pid = f" ({seat.pid})" if seat.pid is not None else ""
    since = f" since generation {seat.generation}" if seat.generation > 1 else ""
    return f"{seat.rank}{pid}{since}"


def _counted(words: list[str]) -> str:
    return ", ".join(f"{words.count(word)} {word}" for word in ("ready", "starting") if word in words)


def _recoveries(all_of_them: tuple[Recovery, ...]) -> RenderableType:
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("generation", no_wrap=True)
    for name, _ in all_of_them[0].phases(0.0)[1:]:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("why", overflow="fold")
    for recovery in all_of_them[-_SHOWN:]:
        times = [_ms(at) for _, at in recovery.phases(recovery.noticed)[1:]]
        at = datetime.fromtimestamp(recovery.noticed).strftime("%H:%M:%S")
        table.add_row(f"{recovery.generation} at {at}", *times, recovery.reason)
    return table


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f} ms"


def _duration(seconds: float) -> str:
    whole = max(0, int(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
