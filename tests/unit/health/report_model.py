"""Slurm's answers as recorded, nodes and last results: what the report is tried on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from everstep.healthcheck.records import Record
from everstep.healthcheck.result import Report, Result, Severity, Status
from everstep.launcher.slurm.cli_json import CliJson
from everstep.launcher.slurm.client import Node, SlurmError
from everstep.recovery.errors import UsageError

FIXTURES = Path(__file__).parents[2] / "fixtures" / "slurm"
NOW = 1796070000.0
OURS = "everstep: xid gpu3 reset: Xid 95: uncontained ECC error"
OLD_SCONTROL = '`scontrol show` failed: Try "scontrol --help" for more information'


class Recorded:
    """Slurm's commands, answering from a record; what is not recorded fails."""

    def __init__(self, answers: Mapping[str, str | UsageError]) -> None:
        self.answers = answers
        self.asked: list[str] = []

    def __call__(self, argv: Sequence[str], **_: Any) -> str:
        line = " ".join(argv)
        self.asked.append(line)
        for start, answer in self.answers.items():
            if line.startswith(start):
                if isinstance(answer, UsageError):
                    raise answer
                return answer
        raise SlurmError(f"`{line}` failed")


def text(name: str) -> str:
    return (FIXTURES / name).read_text()


def slurm_24() -> CliJson:
    return CliJson(
        Recorded(
            {
                "scontrol show nodes": text("nodes-24.11.json"),
                "scontrol show job": text("job-24.11.json"),
                "scontrol --version": "slurm-wlm 24.11.5\n",
            }
        ),
        {},
    )


def slurm_22() -> CliJson:
    """22.05's scontrol has no --json."""
    return CliJson(
        Recorded(
            {
                "scontrol show": SlurmError(OLD_SCONTROL),
                "sinfo --json": text("nodes-22.05.json"),
                "squeue --json": text("jobs-22.05.json"),
                "scontrol --version": "slurm-wlm 22.05.8\n",
            }
        ),
        {},
    )


def node(name: str = "n1", *state: str, **more: Any) -> Node:
    settings = {
        "partitions": ("main",),
        "gres": "gpu:h100:8(S:0-1)",
        "gres_used": "gpu:h100:0(IDX:N/A)",
        **more,
    }
    return Node(name, frozenset(state or ("IDLE",)), **settings)


def record(
    name: str = "n1", *results: Result, at: float = NOW - 60, mode: str = "report", source: str = "x"
) -> Record:
    found = results or (Result(Status.OK, "in order", check="gpu_count"),)
    return Record(Report(name, "p5", "full", found), at, "program", mode, source=source)


def bad(
    device: str = "gpu3",
    status: Status = Status.CRITICAL,
    severity: Severity = Severity.RESET,
    check: str = "xid",
) -> Result:
    return Result(status, "Xid 95", severity, device, check=check)
