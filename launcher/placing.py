"""Who takes an empty rank: a pure choice among standbys, and the words for it.

A standby on the rank's own node; else a spare node's; and as a last resort, where there
are no devices to be shared out, a standby of any node. A standby that is being started
is waited for, one that can be started is started: each waiting rank has its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from everstep.launcher.roster import Node, Roster, Worker
from everstep.launcher.tries import STANDBY_TRIES


@dataclass
class Choice:
    """For each empty rank: the standby that takes it, the one it waits for, or nothing at all."""

    taken: dict[int, Worker] = field(default_factory=dict)
    waiting: dict[int, Node] = field(default_factory=dict)
    to_start: list[Node] = field(default_factory=list)  # a new standby each, at once
    hopeless: list[int] = field(default_factory=list)


def choose(roster: Roster) -> Choice:
    """Who takes which empty rank."""
    choice = Choice()
    claimed: set[str] = set()
    moved: dict[str, int] = {}  # ranks that come to a node in this choice
    for rank in roster.empty():
        if not _choose_for(rank, roster, choice, claimed, moved):
            choice.hopeless.append(rank)
    return choice


def _choose_for(rank: int, roster: Roster, choice: Choice, claimed: set[str], moved: dict[str, int]) -> bool:
    home = roster.nodes[roster.seats[rank].node]
    for group in _candidates(home, roster, moved):
        for node in group:
            ready = next((w for w in roster.idle(node, "standby") if w.id not in claimed), None)
            if ready is not None:
                choice.taken[rank] = ready
                claimed.add(ready.id)
                return _moves(node, home, moved)
        for node in group:
            coming = next((w for w in roster.idle(node, "starting") if w.id not in claimed), None)
            if coming is not None:
                claimed.add(coming.id)
            elif may_start(node, roster):
                choice.to_start.append(node)
            else:
                continue
            choice.waiting[rank] = node
            return _moves(node, home, moved)
    return False


def _moves(node: Node, home: Node, moved: dict[str, int]) -> bool:
    if node is not home:
        moved[node.name] = moved.get(node.name, 0) + 1
    return True


def _candidates(home: Node, roster: Roster, moved: dict[str, int]) -> list[list[Node]]:
    others = [n for n in roster.alive() if n is not home and not n.unfit]
    room = [n for n in others if roster.hosted(n) + moved.get(n.name, 0) < roster.config.nproc]
    near = "standby" in roster.config.allowed
    return [
        [home] if home.alive and near and not home.unfit else [],
        [n for n in room if n.hello.spare] if "spare" in roster.config.allowed else [],
        [n for n in others if not n.hello.devices] if near else [],
    ]


def takers(node: Node, roster: Roster) -> int:
    """How many ranks of this node could be taken at once by standbys that are ready elsewhere."""
    ready = 0
    _, spare, anywhere = _candidates(node, roster, {})
    for other in {n.name: n for n in (*spare, *anywhere)}.values():
        idle = len(roster.idle(other, "standby"))
        ready += idle if other in anywhere else min(idle, roster.config.nproc - roster.hosted(other))
    return ready


def wanted(node: Node, roster: Roster) -> int:
    """How many standbys the node should have: a spare one stands in for a whole node."""
    if node.hello.spare:
        return max(roster.config.standby, roster.config.nproc - roster.hosted(node))
    return roster.config.standby


def may_start(node: Node, roster: Roster) -> bool:
    """May one more standby be started there for a rank that waits?"""
    return wanted(node, roster) > 0 and node.broken < STANDBY_TRIES


def missing(node: Node, roster: Roster) -> int:
    """How many standbys have to be started to have as many as wanted."""
    if node.broken >= STANDBY_TRIES or node.unfit:
        return 0
    return max(0, wanted(node, roster) - len(roster.idle(node, "standby", "starting")))


def in_words(choice: Choice, it: Sequence[int]) -> list[str]:
    """What is decided, for people. `it`: the ranks that the sentence before was about."""
    words = []
    by_node: dict[str, list[int]] = {}
    for rank, worker in choice.taken.items():
        by_node.setdefault(worker.node, []).append(rank)
    for node, ranks in by_node.items():
        whom = _pronoun(ranks, it)
        words.append(
            f"standby on {node} takes {whom}" if len(ranks) == 1 else f"standbys on {node} take {whom}"
        )
    by_node = {}
    for rank, place in choice.waiting.items():
        by_node.setdefault(place.name, []).append(rank)
    for node, ranks in by_node.items():
        whom = _pronoun(ranks, it)
        if len(ranks) == 1:
            words.append(f"{whom} waits for a standby on {node} to be ready")
        else:
            words.append(f"{whom.replace('them', 'they')} wait for standbys on {node} to be ready")
    return words


def names(ranks: Sequence[int]) -> str:
    """`rank 1`, or `ranks 2, 3`."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(str(r) for r in ranks)}"


def _pronoun(ranks: Sequence[int], it: Sequence[int]) -> str:
    if list(ranks) == list(it):
        return "it" if len(ranks) == 1 else "them"
    return names(ranks)
