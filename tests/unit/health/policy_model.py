"""A node in a small Slurm, with everstep's memory of it: what the policy is tried on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from everstep.healthcheck.policy import Action, Decision, History, InSlurm, Mode, Settings, decide
from everstep.healthcheck.result import Result, Severity, Status

DRAIN = Settings(mode=Mode.DRAIN)
IDLE = InSlurm(frozenset({"IDLE"}))
HOUR = 3600.0


def result(
    check: str = "xid",
    status: Status = Status.CRITICAL,
    severity: Severity = Severity.RESET,
    device: str = "gpu3",
    reason: str = "Xid 95",
) -> Result:
    if status is not Status.CRITICAL:
        severity = Severity.OK
    return Result(status, reason, severity, device, check=check)


def good(check: str = "xid") -> Result:
    return result(check, Status.OK, device="")


@dataclass
class Node:
    """A node in a small Slurm, and our memory of it: what `hooks.program` does, without processes."""

    settings: Settings = DRAIN
    slurm: InSlurm = IDLE
    history: History = field(default_factory=History)
    now: float = 1000.0
    boot: str = "a"
    acts: list[Action] = field(default_factory=list)

    def run(
        self,
        *results: Result,
        faults: Sequence[str] = (),
        refused: bool = False,
        killed: bool = False,
        unseen: bool = False,
    ) -> Decision:
        """One run. `refused`: Slurm does not do it; `killed`: we end before it is; `unseen`: no answer."""
        self.now += 60
        decision = decide(
            results,
            None if unseen else self.slurm,
            self.history,
            self.settings,
            now=self.now,
            boot=self.boot,
            faults=faults,
        )
        action = decision.action
        if action is None or action.shadow:
            self.history = decision.history
            return decision
        if action.kind != "undrain":
            self.history = decision.history
        if killed or refused:
            return decision
        self.acts.append(action)
        if action.kind == "undrain":
            self.slurm = IDLE
            self.history = decision.history
        else:
            self.slurm = InSlurm(
                frozenset({"IDLE", action.state}), action.reason, "root", float(int(self.now))
            )
        return decision

    def person_drains(self, reason: str = "bad DIMM") -> None:
        self.now += 1
        self.slurm = InSlurm(frozenset({"IDLE", "DRAIN"}), reason, "alice", float(int(self.now)))

    def person_resumes(self) -> None:
        self.slurm = IDLE

    @property
    def kinds(self) -> list[str]:
        return [action.kind for action in self.acts]
