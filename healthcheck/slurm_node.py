"""This node as Slurm has it in its books, read and changed by scontrol."""

from __future__ import annotations

from dataclasses import dataclass

from everstep.healthcheck.errors import HealthError
from everstep.healthcheck.policy import Action, InSlurm
from everstep.launcher.slurm.cli_json import CliJson
from everstep.launcher.slurm.commands import Commands, Patience, Runner
from everstep.recovery.errors import UsageError

LIMIT_S = 4.0
"""For one command. Three of them and the checks fit in the 60 s that HealthCheckProgram has."""


_within_limit: Runner = Commands(Patience(timeout=LIMIT_S, limit=LIMIT_S))


@dataclass(frozen=True)
class SlurmNode:
    """Slurm, asked about one node at a time."""

    field: str | None = None
    """comment or extra: where our short result goes."""
    run: Runner = _within_limit

    def look(self, node: str) -> tuple[InSlurm, str]:
        """What Slurm says of the node, and what our field of it holds. Raises HealthError."""
        try:
            found = CliJson(self.run).nodes([node])[0]
        except UsageError as error:
            raise HealthError(str(error)) from error
        held = {"comment": found.comment, "extra": found.extra}.get(self.field or "", "")
        return InSlurm(found.state, found.reason, found.reason_by, found.reason_at), held

    def act(self, node: str, action: Action) -> None:
        """Drain it, give the drain another reason, or resume it. Raises HealthError."""
        words = [f"state={action.state}"]
        if action.reason:
            words.append(f"reason={action.reason}")
        self._update(node, *words)

    def write_field(self, node: str, text: str) -> None:
        """Write our short result. Raises HealthError."""
        self._update(node, f"{self.field}={text}")

    def _update(self, node: str, *words: str) -> None:
        try:
            self.run(["scontrol", "update", f"nodename={node}", *words])
        except UsageError as error:
            raise HealthError(str(error)) from error
