"""Who sends what to whom when a generation begins: a pure plan from the table of its members.

Every worker computes the same plan from the same `Go`, and so does the coordinator,
which must know whether the run can go on at all.

The rule: the highest step that a whole member has committed wins; whoever is behind,
new, or not whole receives from whole members at that step, newcomers spread over them.
When nobody holds the state in memory, the lowest rank that sees the newest valid
checkpoint reads it and is the donor of all others. When there has never been a
committed step, everybody starts from the beginning with the initial state of the lowest
rank that holds one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from everstep.launcher.messages import Member


@dataclass(frozen=True)
class Transfer:
    """`donor` sends its whole state to `receiver`; both are names of workers."""

    donor: str
    receiver: str


@dataclass(frozen=True)
class Plan:
    """Where state comes from. `loader` reads the checkpoint first, where the source is disk."""

    source: Literal["start", "peer", "disk"]
    committed: int
    transfers: tuple[Transfer, ...]
    reason: str
    loader: str = ""


@dataclass(frozen=True)
class Impossible:
    """The run cannot go on, and why."""

    reason: str


def plan(members: Sequence[Member], *, progress: bool) -> Plan | Impossible:
    """The plan for a generation of these members; `progress`: has the run ever committed a step.

    Members with rank -1 are donors only (workers that raised and are leaving).
    """
    ranked = sorted((x for x in members if x.rank >= 0), key=lambda x: x.rank)
    holders = [x for x in members if x.whole and not x.fresh]
    if holders:
        committed = max(x.committed for x in holders)
        donors = sorted((x for x in holders if x.committed == committed), key=lambda x: (x.rank < 0, x.rank))
        behind = [x for x in ranked if not (x.whole and not x.fresh and x.committed == committed)]
        transfers = _spread(donors, behind)
        if not behind:
            return Plan("peer", committed, (), f"every rank holds step {committed} already")
        who = f"rank{'s' * (len(behind) > 1)} {', '.join(str(x.rank) for x in behind)}"
        return Plan(
            "peer",
            committed,
            transfers,
            f"{who} restored to step {committed} from {_names(transfers, members)}",
        )
    newest = max((x.checkpoint for x in ranked), default=-1)
    if newest >= 0:
        loader = next(x for x in ranked if x.checkpoint == newest)
        others = [x for x in ranked if x is not loader]
        return Plan(
            "disk",
            newest,
            _spread([loader], others),
            f"nobody holds the state in memory: rank {loader.rank} reads the checkpoint of step {newest}",
            loader.worker,
        )
    if progress:
        return Impossible(
            "nobody holds the state in memory and there is no valid checkpoint: "
            "make some with run.checkpoint(path, every=STEPS), or start the job anew"
        )
    first = next((x for x in ranked if x.whole and x.fresh), None)
    if first is None:
        return Impossible("no rank holds an initial state: start the job anew")
    odd = [
        x
        for x in ranked
        if x is not first and not (x.whole and x.fingerprint and x.fingerprint == first.fingerprint)
    ]
    return Plan("start", 0, _spread([first], odd), "the run starts from step 0")


def _spread(donors: Sequence[Member], receivers: Sequence[Member]) -> tuple[Transfer, ...]:
    """Receivers over donors: the least loaded, on the receiver's own host where there is a choice."""
    load = {x.worker: 0 for x in donors}
    transfers = []
    for receiver in receivers:
        donor = min(donors, key=lambda x: (load[x.worker], x.host != receiver.host, x.rank < 0, x.rank))
        load[donor.worker] += 1
        transfers.append(Transfer(donor.worker, receiver.worker))
    return tuple(transfers)


def _names(transfers: Sequence[Transfer], members: Sequence[Member]) -> str:
    rank = {x.worker: x.rank for x in members}
    names = []
    for transfer in transfers:
        donor = rank[transfer.donor]
        name = f"rank {donor}" if donor >= 0 else "a worker that is leaving"
        if name not in names:
            names.append(name)
    return ", ".join(names)
