"""A process group whose inside can be replaced: real gloo between threads that play ranks."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from everstep.launcher import messages as m
from everstep.recovery.errors import Fault, UsageError
from everstep.recovery.group import Group, Inside
from everstep.recovery.sockets import descriptors
from everstep.recovery.underway import runners, waiting

HOST = "127.0.0.1"


class Party:
    """What the launcher is to the ranks of a test: entries go to everybody."""

    def __init__(self, world: int) -> None:
        self.changed = threading.Condition()
        self.entries: dict[tuple[int, str], bytes] = {}
        self.controls = [_Control(self) for _ in range(world)]

    def begin(self, generation: int) -> None:
        """A generation begins: whoever waits in an older one is told."""
        with self.changed:
            for control in self.controls:
                control.generation = generation
            self.changed.notify_all()


class _Control:
    """As much of `Control` as a group needs."""

    def __init__(self, party: Party) -> None:
        self._party = party
        self.generation = 1

    def send(self, message: Any) -> None:
        if isinstance(message, m.Published):
            with self._party.changed:
                self._party.entries[message.generation, message.key] = message.value
                self._party.changed.notify_all()

    def entry(self, generation: int, key: str) -> bytes | None:
        return self._party.entries.get((generation, key))

    def note(self) -> None:
        with self._party.changed:
            self._party.changed.notify_all()

    def wait_in(self, generation: int, ready: Callable[[], bool]) -> None:
        with self._party.changed:
            assert self._party.changed.wait_for(lambda: self.generation > generation or ready(), 60)
        if self.generation > generation:
            raise Fault("the next generation has begun")


def everyone(*jobs: Callable[[], Any]) -> list[Any]:
    """Do all at once; what each returned or raised."""
    results: list[Any] = [None] * len(jobs)

    def do(i: int) -> None:
        try:
            results[i] = jobs[i]()
        except Exception as error:
            results[i] = error

    threads = [threading.Thread(target=do, args=(i,)) for i in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "blocked"
    return results


def connected(party: Party, generation: int = 1) -> list[Inside]:
    world = len(party.controls)
    insides = [Inside(c, generation, r, world, HOST) for r, c in enumerate(party.controls)]  # type: ignore[arg-type]
    assert everyone(*(i.connect for i in insides)) == [None] * world
    return insides


@pytest.fixture
def three() -> Iterator[tuple[Party, list[Inside], list[Group]]]:
    party = Party(3)
    insides = connected(party)
    groups = [Group(r, 3) for r in range(3)]
    for group, inside in zip(groups, insides, strict=True):
        group.use(inside)
    yield party, insides, groups
    for group in groups:
        group.use(None)


def summed(group: Group) -> float:
    x = torch.full((1000,), float(group.rank() + 1))
    group.allreduce([x]).wait()
    return float(x[0])


def test_collectives_go_through_the_inside(three: Any) -> None:
    _, _, groups = three
    assert everyone(*(lambda g=g: summed(g) for g in groups)) == [6.0] * 3
    assert not any(g.broken() for g in groups)


def test_an_abort_frees_whoever_is_blocked_and_shows_everywhere(three: Any) -> None:
    """Rank 2 never comes: the others are blocked, until they are told to break off; it sees that too."""
    _, insides, groups = three
    began = threading.Barrier(3)

    def blocked(group: Group) -> None:
        began.wait()
        summed(group)

    def abort() -> None:
        began.wait()
        time.sleep(0.05)  # until they are in it; were they not, the collective would raise all the same
        insides[0].abort()
        insides[1].abort()

    first, second, _ = everyone(lambda: blocked(groups[0]), lambda: blocked(groups[1]), abort)
    assert isinstance(first, RuntimeError)
    assert isinstance(second, RuntimeError)
    assert all(group.broken() for group in groups)


def in_part(groups: list[Group]) -> tuple[Any, torch.Tensor]:
    """Rank 0 has received a part of a message from rank 1: its handle, and where it lands.

    The rest comes as long as somebody holds the sender's handle, `sent`.
    """
    room, much = torch.zeros(50_000_000), torch.ones(50_000_000)
    handle = groups[0].recv([room], 1, 7)
    handle.sent = groups[1].send([much], 0, 7)
    while room[0] == 0:
        time.sleep(0.0001)
    return handle, room


def test_an_abort_frees_whoever_waits_for_the_rest_of_a_message(three: Any) -> None:
    """Gloo itself fails what has not begun, and leaves this to its time-out."""
    _, insides, groups = three
    handle, room = in_part(groups)
    handle.sent = None

    def abort() -> None:
        insides[0].abort()
        assert insides[0].release()

    waited, _ = everyone(handle.wait, abort)
    assert not room[-1], "the message was received whole: it must be larger"
    assert isinstance(waited, RuntimeError)


def test_an_abort_frees_whoever_waits_late_for_a_message(three: Any) -> None:
    """Others come and go between its launch and the wait for it."""
    _, insides, groups = three
    handle, room = in_part(groups)
    handle.sent = None
    groups[0].send([torch.zeros(1)], 2, 9)

    def abort() -> None:
        time.sleep(0.05)  # until the other one waits
        insides[0].abort()
        assert insides[0].release()

    waited, _ = everyone(handle.wait, abort)
    assert not room[-1], "the message was received whole: it must be larger"
    assert isinstance(waited, RuntimeError)
    assert handle.given_up, "else it was freed by gloo's own time-out, a minute later"


def test_an_abort_frees_whoever_waits_behind_a_message_that_nobody_takes(three: Any) -> None:
    """Gloo has no place for the rest, reads no further, and does not see the connection's end by itself."""
    _, insides, groups = three
    handle, room = in_part(groups)
    handle._work = None  # as a collective does that fails on account of another peer
    behind = groups[0].recv([torch.zeros(4)], 1, 8)

    def abort() -> None:
        insides[0].abort()
        assert insides[0].release()

    waited, _ = everyone(behind.wait, abort)
    assert not room[-1], "the message was received whole: it must be larger"
    assert isinstance(waited, RuntimeError)


@pytest.mark.parametrize("how", ["wait", "future"])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_an_abort_frees_collectives_whose_message_is_on_its_way(how: str, count: int, three: Any) -> None:
    """A peer reads no further: what is sent to it is neither sent nor, for gloo, waiting to be."""
    party, insides, groups = three
    handle, _ = in_part(groups)
    handle._work = None  # rank 0 reads nothing more from rank 1, and rank 1's messages pile up
    own = insides[1]._underway
    assert own is not None

    def broadcasts(group: Group) -> list[Any]:
        return [group.broadcast([torch.full((4,), 5.0)], _from(1)) for _ in range(count)]

    works = broadcasts(groups[1])
    while waiting(runners() - own._before)[1] < min(count, 2):
        time.sleep(0.001)
    if count > 1:  # in a real run a process has one rank's threads alone
        own._before |= {x for x in runners() if waiting({x}) != (0, 1)}
    for group in (groups[0], groups[2]):
        broadcasts(group)

    def use() -> None:
        for work in works:
            if how == "wait":
                work.wait()
            else:
                work.get_future().wait()

    def abort() -> None:
        time.sleep(0.05)  # until the others wait; were they late, they would be freed all the same
        for inside in insides:
            inside.abort()
            assert inside.release()

    used, _ = everyone(use, abort)
    if how == "wait":
        assert isinstance(used, RuntimeError)
    assert all(work.is_completed() for work in works)
    # A collective that is launched too late, with no thread left to run it, hangs as little.
    late, _ = everyone(lambda: summed(groups[1]), lambda: None)
    assert isinstance(late, RuntimeError)
    party.begin(2)
    for group, inside in zip(groups, connected(party, 2), strict=True):
        group.use(inside)
    assert everyone(*(lambda g=g: summed(g) for g in groups)) == [6.0] * 3


def _from(root: int) -> Any:
    options = dist.BroadcastOptions()
    options.rootRank = root
    return options


def test_who_waits_in_a_collective_is_told_from_who_waits_for_work() -> None:
    """As the kernel shows it: with a time limit, without one, for a lock, running, gone."""
    calls = {
        1: "202 0x7fd3 0x189 0x0 0x7fd335d24240 0x0 0xffffffff 0x7fd335d240f0 0x7fd3594a3f16",
        2: "202 0x7fd3 0x189 0x0 0x0 0x0 0xffffffff 0x7fd334d22d10 0x7fd3594a3f16",
        3: "98 0x7fd3 0x189 0x0 0x7fd335d24240 0x0 0xffffffff 0x7fd335d240f0 0x7fd3594a3f16",
        4: "202 0x5610 0x80 0x2 0x0 0x0 0x0 0x7fd336d26e98 0x7fd35881de8e",
        5: "running",
        6: "",
        7: "232 0x5 0x7fd337527b80 0x40 0xa 0x0 0x7fd330005830 0x7fd337527940 0x7fd359526f36",
    }
    assert waiting({1, 2, 3, 4, 5, 6, 7}, calls.__getitem__) == (1, 2)


def test_the_next_inside_makes_a_broken_group_whole_again(three: Any) -> None:
    party, insides, groups = three
    insides[1].abort()
    assert groups[0].broken()
    party.begin(2)
    for group, inside in zip(groups, connected(party, 2), strict=True):
        group.use(inside)
    assert not any(g.broken() for g in groups)
    assert everyone(*(lambda g=g: summed(g) for g in groups)) == [6.0] * 3


def test_a_rank_that_never_comes_does_not_hold_the_others_when_the_next_generation_begins() -> None:
    party = Party(3)
    insides = [Inside(c, 1, r, 3, HOST) for r, c in enumerate(party.controls)]  # type: ignore[arg-type]

    def give_up() -> None:
        with party.changed:
            assert party.changed.wait_for(lambda: len(party.entries) >= 2, 60)
        party.begin(2)

    first, second, _ = everyone(insides[0].connect, insides[1].connect, give_up)
    assert isinstance(first, Fault)
    assert isinstance(second, Fault)
    for group, inside in zip([Group(r, 3) for r in range(3)], connected(party, 2), strict=True):
        group.use(inside)
        group.use(None)


def test_thirty_generations_leave_no_descriptor_and_no_thread_behind() -> None:
    party = Party(2)
    groups = [Group(r, 2) for r in range(2)]

    def generation(number: int) -> None:
        party.begin(number)
        for group, inside in zip(groups, connected(party, number), strict=True):
            group.use(inside)
        assert everyone(*(lambda g=g: summed(g) for g in groups)) == [3.0] * 2
        groups[number % 2]._inside.abort()  # type: ignore[union-attr]

    def used() -> tuple[int, int]:
        for group in groups:
            group.use(None)
        deadline = time.monotonic() + 10
        while len(os.listdir("/proc/self/task")) > tasks and time.monotonic() < deadline:
            time.sleep(0.01)
        return len(descriptors()), len(os.listdir("/proc/self/task"))

    for number in range(1, 4):
        generation(number)
    tasks = 0
    tasks = len(os.listdir("/proc/self/task"))
    before = used()
    for number in range(4, 34):
        generation(number)
    after = used()
    assert after[0] <= before[0]
    assert after[1] <= before[1]


def test_a_collective_that_cannot_be_ended_is_known(three: Any) -> None:
    """One of gloo's own threads does something else: its result is not declared behind its back."""

    class Future:
        def done(self) -> bool:
            return False

    class Never:
        def is_completed(self) -> bool:
            return False

        def get_future(self) -> Future:
            return Future()

    _, insides, groups = three
    assert everyone(*(lambda g=g: summed(g) for g in groups)) == [6.0] * 3
    insides[0].abort()
    assert insides[0].release()
    insides[0].launched("allreduce", Never(), ([torch.ones(1)],))
    assert not insides[0]._underway.release(patience=0.1)  # type: ignore[union-attr]
    insides[0]._underway._launched.clear()  # type: ignore[union-attr]


def test_a_collective_of_nccl_that_its_abort_does_not_end_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Played: there is no CUDA here. The rank gives up its place rather than hold up everybody."""

    class Handle:
        over = False

        def is_completed(self) -> bool:
            return self.over

    monkeypatch.setattr("everstep.recovery.group.PATIENCE", 0.1)
    inside = connected(Party(1))[0]
    handle = Handle()
    inside._backends.append(None)  # gloo is not alone
    assert inside.launched("barrier", handle, ()) is handle
    inside._backends.pop()
    inside.abort()
    assert not inside.release()
    handle.over = True
    assert inside.release()
    inside.close()


def test_a_collective_that_is_over_keeps_no_tensor(three: Any) -> None:
    _, insides, groups = three
    for _ in range(5):
        assert everyone(*(lambda g=g: summed(g) for g in groups)) == [6.0] * 3
    assert all(len(inside._underway._launched) < 5 for inside in insides)  # type: ignore[union-attr]


def test_a_collective_that_only_waits_for_its_peers_is_not_given_up(three: Any) -> None:
    """As long as a connection is open, gloo may come back to it, and would find its future taken."""
    _, insides, groups = three
    work = groups[0].allreduce([torch.ones(1000)])
    assert not insides[0]._underway.release(patience=0.2)  # type: ignore[union-attr]
    assert not work.is_completed()
    assert everyone(*(lambda g=g: summed(g) for g in groups[1:]), work.wait)[2] is True


def test_a_collective_under_way_with_a_peer_gone_is_overdue(
    three: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("everstep.recovery.group.BROKEN", timedelta(seconds=0.05))
    _, insides, groups = three
    work = groups[0].allreduce([torch.ones(4)])
    time.sleep(0.1)
    assert not insides[0].overdue(), "a peer may be long in coming"
    monkeypatch.setattr("everstep.recovery.group.TIMEOUT", timedelta(seconds=0.05))
    assert insides[0].overdue(), "but not for ever"
    monkeypatch.undo()
    monkeypatch.setattr("everstep.recovery.group.BROKEN", timedelta(seconds=0.05))
    # Gloo ends it where it waits for the peer that is gone, but not where it waits for another one first.
    monkeypatch.setattr(insides[0], "broken", lambda: True)
    assert insides[0].overdue()
    insides[0].abort()
    assert insides[0].release()
    with pytest.raises(RuntimeError):
        work.wait()
    assert not insides[0].overdue(), "it has ended"


def test_without_an_inside_collectives_are_answered_locally() -> None:
    group = Group(1, 3)
    x = torch.ones(4)
    work = group.allreduce([x])
    assert work.wait()
    assert work.get_future().value() == [x]
    gathered = [[torch.zeros(4) for _ in range(3)]]
    group.allgather(gathered, [x]).wait()
    assert all(torch.equal(t, x) for t in gathered[0])
    group.barrier().wait()
    options = dist.BroadcastOptions()
    group.broadcast([x], options).wait()
    dist._broadcast_coalesced(group, [x, torch.ones(2, dtype=torch.int64)], 1 << 20, 0)
    assert torch.equal(x, torch.ones(4))
    assert (group.size(), group.rank()) == (3, 1)


def test_a_collective_that_is_refused_says_why() -> None:
    group = Group(0, 1)
    group.refusal = "not now"
    with pytest.raises(UsageError, match="not now"):
        group.allreduce([torch.ones(1)])


def test_a_child_keeps_no_connection_of_its_parents_open(three: Any) -> None:
    """Or peers of a dead parent would wait for its children to end."""
    _, insides, groups = three
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(write)
            for inside in insides:
                inside.forget()
            os.read(read, 1)  # lives on until the parent lets it go
        finally:
            os._exit(0)
    os.close(read)
    try:
        insides[0].close()
        groups[0]._inside = None
        deadline = time.monotonic() + 10
        while not groups[1].broken() and time.monotonic() < deadline:
            time.sleep(0.001)
        assert groups[1].broken()
    finally:
        os.close(write)
        os.waitpid(child, 0)
