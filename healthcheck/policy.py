"""What follows from a node's results: drain it, give it back, or leave it alone. Pure, with its reasons.

The rules, in the order in which they are asked:

1. Mode `report` never acts. Mode `shadow` says what `drain` would do, and does not do it.
2. Where Slurm gives no answer, nothing is done. Where a check of ours broke, nothing is undone.
3. A node that is out of service for a reason that is not ours is left alone, whatever the checks say.
4. A critical result drains. A warning, a skip and a check that did not run never do.
5. A drain of ours is lifted when every check that it was made for passes again and nothing else is critical.
   What a kernel log said is not mended by the line growing old: that takes a reboot as well.
6. The third drain in a day (settable) stays until a person resumes the node.

What is ours is known by our own record of the drain, which must agree with Slurm word for word and, once seen
there, in its time. A record that is lost, or words that somebody changed, make the drain somebody else's.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from everstep.healthcheck.result import Result, Severity, Status

PREFIX = "everstep: "
LONGEST_REASON = 240  # characters; Slurm takes more, but people read it in a table

CONTRACT: Mapping[Severity, str] = {Severity.REPLACE: "Action:Replace", Severity.REBOOT: "Action:Reboot"}
"""Reasons that a cluster manager (AWS's, say) acts on. They must be the whole reason, to the letter."""

DO: Mapping[Severity, str] = {
    Severity.OK: "look",
    Severity.MONITOR: "look",
    Severity.RESET: "reset",
    Severity.REBOOT: "reboot",
    Severity.REPLACE: "replace",
}
"""What a person should do, as one word of the drain's reason."""

_DRAIN = frozenset({"DRAIN", "DRAINED", "DRAINING"})
_NOT_OURS_TO_MOVE = frozenset(
    {
        "BLOCKED",
        "DOWN",
        "ERROR",
        "FAIL",
        "FAILING",
        "FUTURE",
        "INVALID",
        "INVALID_REG",
        "MAINT",
        "MAINTENANCE",
    }
    | {"NOT_RESPONDING", "POWERED_DOWN", "POWERING_DOWN", "POWER_DOWN", "REBOOT", "REBOOT_ISSUED"}
    | {"REBOOT_REQUESTED", "UNKNOWN"}
)


class Mode(str, Enum):
    """How far the policy goes."""

    REPORT = "report"
    SHADOW = "shadow"
    DRAIN = "drain"


@dataclass(frozen=True)
class Settings:
    """The site's choices."""

    mode: Mode = Mode.REPORT
    undrain: bool = True
    confirm: int = 1
    """In how many runs in a row a finding must be seen before it drains."""
    passes: int = 1
    """In how many runs in a row the checks must pass before a drain of ours is lifted."""
    flap_limit: int = 3
    """With this many drains in the window, the last one stays until a person resumes the node."""
    flap_window_s: float = 86400.0
    contract: bool = False
    """Use `Action:Replace` and `Action:Reboot` as reasons, and state FAIL: the node is not ours any more."""
    report_only: frozenset[str] = frozenset()
    """Checks that are shown and never act."""
    after_boot: frozenset[str] = frozenset()
    """Checks whose pass mends nothing until the node has booted: they read events, which grow old."""


@dataclass(frozen=True)
class InSlurm:
    """What Slurm says of the node now."""

    state: frozenset[str]
    reason: str = ""
    by: str = ""
    since: float = 0.0
    """When the reason was set, by Slurm's clock; 0 where it does not say."""

    @property
    def drained(self) -> bool:
        """Whether the node takes no new jobs because of a drain."""
        return bool(self.state & _DRAIN)


@dataclass(frozen=True)
class Ours:
    """A drain of ours, as we recorded it before we asked for it."""

    reason: str
    at: float
    checks: tuple[str, ...]
    severity: Severity
    boot: str = ""
    """The boot that it was made in."""
    since: float | None = None
    """Slurm's time of it; None until it was seen in place."""
    held: bool = False
    """Stays until a person resumes the node."""
    counted: bool = False
    """Whether `History.drains` has it."""
    was: str = ""
    """The reason before this one, which is still Slurm's where our request to change it failed."""


@dataclass(frozen=True)
class History:
    """What is remembered of a node from one run to the next."""

    drain: Ours | None = None
    drains: tuple[float, ...] = ()
    """When drains of ours were first seen in place; those in the window only."""
    seen: Mapping[str, int] = field(default_factory=dict)
    """For each finding, in how many runs in a row it was there."""
    passes: int = 0
    """In how many runs in a row all that our drain was for has passed."""
    shadowed: str = ""
    """What shadow mode said last, so that it says it once."""


@dataclass(frozen=True)
class Action:
    """What to ask of Slurm: `scontrol update nodename=NODE state=STATE reason=REASON`."""

    kind: str
    """drain, update (another reason for a drain of ours) or undrain.

    Remember the history before the first two are asked for, and after the third is done: whoever is stopped
    in between must not take somebody else's drain for ours, nor lose one of ours.
    """
    state: str
    reason: str
    shadow: bool = False
    """Only said, not done."""


@dataclass(frozen=True)
class Decision:
    """What to do now, what to remember, and why, in words."""

    action: Action | None
    history: History
    notes: tuple[str, ...]


def decide(
    results: Sequence[Result],
    slurm: InSlurm | None,
    history: History,
    settings: Settings,
    *,
    now: float,
    boot: str = "",
    faults: Sequence[str] = (),
) -> Decision:
    """What follows from one run's results.

    `slurm` is None where Slurm gave no answer; `boot` names the node's boot; `faults` are failures of our
    own, which only ever lead to less being done. Times are Unix seconds.
    """
    findings = actionable(results, settings)
    seen = {key(each): history.seen.get(key(each), 0) + 1 for each in findings}
    history = replace(history, seen=seen, drains=_recent(history.drains, settings, now))
    notes = tuple(f"a fault of our own, which drains nothing: {fault}" for fault in faults)
    if settings.mode is Mode.REPORT:
        return Decision(None, history, (*notes, *(f"mode report: {worded(each)}" for each in findings)))
    if slurm is None:
        return Decision(None, history, (*notes, "Slurm gave no answer about this node: nothing is done"))
    history, whose = _reconcile(slurm, history)
    notes += (whose,) if whose else ()
    if stays := sorted(slurm.state & _NOT_OURS_TO_MOVE):
        return Decision(None, history, (*notes, f"left alone: Slurm calls the node {'+'.join(stays)}"))
    if slurm.drained and history.drain is None:
        return Decision(None, history, (*notes, _foreign(slurm)))

    confirmed = tuple(each for each in findings if seen[key(each)] >= settings.confirm)
    run = _Run(tuple(results), tuple(findings), confirmed, settings, now, boot, bool(faults))
    if history.drain is not None:
        wanted = _while_ours(run, history, history.drain)
    elif confirmed:
        wanted = _drain(run, history)
    else:
        early = [f"seen {seen[key(each)]} of {settings.confirm} times: {worded(each)}" for each in findings]
        wanted = Decision(None, replace(history, passes=0), tuple(early))
    return _in_mode(replace(wanted, notes=(*notes, *wanted.notes)), history, settings)


def refuse(results: Sequence[Result], settings: Settings) -> str:
    """Why a Prolog or an Epilog should fail here; empty where it should not, as in any mode but `drain`."""
    findings = actionable(results, settings)
    return reason_for(findings) if findings and settings.mode is Mode.DRAIN else ""


def fresh_pass(at: float, boot: str, passed: bool, *, now: float, now_boot: str, keep_s: float) -> bool:
    """Whether a pass at `at` still stands, so that the checks need not run again.

    It does for `keep_s` seconds of the same boot. A time in the future is a clock that was set: it does not.
    """
    return passed and boot == now_boot and 0 <= now - at < keep_s


def actionable(results: Iterable[Result], settings: Settings) -> list[Result]:
    """The results that may drain a node: critical, of a check that may act, each once; the gravest first."""
    found: dict[str, Result] = {}
    for each in results:
        if each.status is Status.CRITICAL and each.check not in settings.report_only:
            kept = found.get(key(each))
            if kept is None or kept.severity < each.severity:
                found[key(each)] = each
    return sorted(found.values(), key=lambda each: (-int(each.severity), each.check, each.device))


def key(result: Result) -> str:
    """What tells one finding from another: the check and the device, not the words, which carry values."""
    return f"{result.check} {_word(result.device)}"


def worded(result: Result) -> str:
    """`CHECK DEVICE ACTION: why`: the check and the device first, since sinfo cuts reasons short."""
    return f"{key(result)} {DO[result.severity]}: {one_line(result.reason)}"


def reason_for(findings: Sequence[Result], note: str = "") -> str:
    """The drain's reason for findings, the gravest first: `everstep: xid gpu3 reset: … (and 2 more)`."""
    more = (f" (and {len(findings) - 1} more)" if len(findings) > 1 else "") + note
    text = f"{PREFIX}{worded(findings[0])}"
    if len(text) + len(more) > LONGEST_REASON:
        text = text[: LONGEST_REASON - len(more) - 3].rstrip() + "..."
    return text + more


@dataclass(frozen=True)
class Told:
    """A drain reason of ours, read."""

    check: str
    device: str
    do: str
    text: str


def read_reason(reason: str) -> Told | None:
    """The parts of a reason in our words; None for anybody else's."""
    found = re.fullmatch(r"everstep: (\S+) (\S+) (\w+): (.*)", reason.strip())
    return Told(*found.groups()) if found else None


@dataclass(frozen=True)
class _Run:
    """One run of the checks, and what was made of it so far."""

    results: tuple[Result, ...]
    findings: tuple[Result, ...]
    confirmed: tuple[Result, ...]
    settings: Settings
    now: float
    boot: str
    broken: bool
    """Whether something of our own broke."""


def _while_ours(run: _Run, history: History, ours: Ours) -> Decision:
    """The node is drained, by us: go on, say something graver, or give it back."""
    if run.findings:
        worse = bool(run.confirmed) and run.confirmed[0].severity > ours.severity
        others = bool(run.confirmed) and not {each.check for each in run.findings} & set(ours.checks)
        if worse or others:
            return _drain(run, history, ours)
        checks = tuple(sorted({*ours.checks, *(each.check for each in run.confirmed)}))
        kept = replace(history, drain=replace(ours, checks=checks), passes=0)
        return Decision(None, kept, (f"still so: {worded(run.findings[0])}",))
    if run.broken:
        return _stay(history, 0, "a check of ours broke")
    if lacking := [name for name in ours.checks if not passed(name, run.results)]:
        return _stay(history, 0, f"{', '.join(lacking)} did not pass in this run")
    passes = history.passes + 1
    if ours.held:
        return _stay(history, passes, "it came and went too often; a person must resume the node")
    if not run.settings.undrain:
        return _stay(history, passes, "the checks pass, but this site lifts drains by hand")
    events = [name for name in ours.checks if name in run.settings.after_boot]
    if events and (not run.boot or run.boot == ours.boot):
        return _stay(history, passes, f"{', '.join(events)} passes, but the node has not booted since")
    if passes < run.settings.passes:
        return _stay(history, passes, f"passed {passes} of {run.settings.passes} times")
    given_back = replace(history, drain=None, passes=0)
    return Decision(
        Action("undrain", "RESUME", ""), given_back, (f"given back: {', '.join(ours.checks)} passes again",)
    )


def _stay(history: History, passes: int, why: str) -> Decision:
    return Decision(None, replace(history, passes=passes), (f"our drain stays: {why}",))


def passed(check: str, results: Iterable[Result]) -> bool:
    """Whether the check ran and found everything right: each of its results ok, and at least one."""
    statuses = [each.status for each in results if each.check == check]
    return bool(statuses) and all(status is Status.OK for status in statuses)


def _drain(run: _Run, history: History, known: Ours | None = None) -> Decision:
    """Drain for what is confirmed; where a drain of ours (`known`) is in place, give it another reason."""
    worst, settings = run.confirmed[0], run.settings
    times = len(history.drains) + (known is None)
    held = times >= settings.flap_limit or (known is not None and known.held)
    if settings.contract and worst.severity in CONTRACT and not held:
        # From here on the node is the cluster manager's: not recorded as ours, so never given back by us. It
        # is counted, since a node that a reboot does not mend must not be rebooted for ever.
        handed = replace(history, drain=None, drains=(*history.drains, run.now), passes=0)
        action = Action("drain", "FAIL", CONTRACT[worst.severity])
        return Decision(action, handed, (f"handed over: {worded(worst)}",))
    note = ""
    if held:
        hours = settings.flap_window_s / 3600
        note = f" [drained {times} times in {hours:g} h: resume it by hand]"
    checks = tuple(sorted({each.check for each in run.confirmed}))
    ours = Ours(
        reason=reason_for(run.confirmed, note),
        at=known.at if known else run.now,
        checks=checks,
        severity=worst.severity,
        boot=run.boot,
        held=held,
        counted=known is not None and known.counted,
        was=known.reason if known else "",
    )
    action = Action("update" if known else "drain", "DRAIN", ours.reason)
    return Decision(action, replace(history, drain=ours, passes=0), (f"drained: {worded(worst)}",))


def _reconcile(slurm: InSlurm, history: History) -> tuple[History, str]:
    """Whether the drain that we have on record is the one in place, and what that says."""
    ours = history.drain
    if ours is None:
        return history, ""
    lost = replace(history, drain=None, passes=0)
    if not slurm.drained:
        if ours.since is None:  # asked for, and never seen: Slurm refused, or we were stopped in between
            return lost, ""
        # Somebody has looked at the node: it starts afresh.
        return replace(lost, drains=()), "a person resumed the node"
    if ours.since is None and ours.was and slurm.reason == ours.was:
        # To change the reason was asked for and did not happen: any finding is graver than what is known now.
        ours = replace(ours, reason=ours.was, severity=Severity.OK)
    if slurm.reason != ours.reason or ours.since not in (None, slurm.since):
        return lost, "our drain is another's now: its reason was set anew"
    if ours.since is None:
        # Counted when it is seen, so that a request that never took effect is no flap.
        drains = history.drains if ours.counted else (*history.drains, ours.at)
        return replace(history, drain=replace(ours, since=slurm.since, counted=True), drains=drains), ""
    return history, ""


def _foreign(slurm: InSlurm) -> str:
    if read_reason(slurm.reason):
        return f"left alone: {slurm.reason!r} reads like ours and is not on our record: resume it by hand"
    return f"left alone: {slurm.by or 'somebody'} drained the node: {slurm.reason or 'no reason given'}"


def _in_mode(wanted: Decision, before: History, settings: Settings) -> Decision:
    """In shadow mode: the same words, once, with nothing done and nothing remembered as done."""
    if settings.mode is not Mode.SHADOW or wanted.action is None:
        return replace(wanted, history=replace(wanted.history, shadowed=""))
    told = f"{wanted.action.kind} {_key_of(wanted.action.reason)}"
    kept = replace(before, shadowed=told)
    if told == before.shadowed:
        return Decision(None, kept, ())
    notes = tuple(f"shadow, not done: {note}" for note in wanted.notes)
    return Decision(replace(wanted.action, shadow=True), kept, notes)


def _key_of(reason: str) -> str:
    told = read_reason(reason)
    return f"{told.check} {told.device} {told.do}" if told else reason


def _recent(times: Iterable[float], settings: Settings, now: float) -> tuple[float, ...]:
    return tuple(time for time in times if now - time < settings.flap_window_s)


def _word(device: str) -> str:
    return "_".join(one_line(device).split()) or "node"


def one_line(text: str) -> str:
    """One line of printable text, whatever a tool, a kernel log or somebody's reason has in it."""
    return " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())
