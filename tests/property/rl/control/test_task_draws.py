"""A run draws every position once, whatever workers come, die, return, and whenever the trainer is
replaced."""

from __future__ import annotations

from collections import Counter

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from deltawire.data import take
from deltawire.rl.control.draws import NOT_KNOWN, DrawBook
from deltawire.wire.status import Draws

WORKERS = ("a", "b", "c")
ROWS = 7


class Fleet:
    """Workers with leases, credits and stored groups, as the trainer's book sees them."""

    def __init__(self) -> None:
        self.book = DrawBook()
        self.lease = dict.fromkeys(WORKERS, 0)
        self.first = dict.fromkeys(WORKERS, 0)
        self.granted = dict.fromkeys(WORKERS, 0)
        self.started: dict[str, dict[int, int]] = {name: {} for name in WORKERS}
        self.drawn = dict.fromkeys(WORKERS, 0)
        self.stored: dict[str, list[tuple[int, int, int]]] = {name: [] for name in WORKERS}
        self.read = dict.fromkeys(WORKERS, 0)
        self.settled: set[tuple[str, int]] = set()

    def cover(self, name: str) -> None:
        self.book.cover(
            name,
            self.lease[name],
            max(0, self.granted[name] - self.first[name]),
            complete=self.read[name] >= self.first[name],
        )

    def start(self, name: str) -> None:
        """Start the next group, if it has a task."""
        position = self.book.position(name, self.lease[name], self.drawn[name])
        if position is not None:
            self.started[name][self.drawn[name]] = position
            self.drawn[name] += 1

    def finish(self, name: str, choice: int) -> None:
        """Store one of the groups under way: they end in any order."""
        if under_way := sorted(self.started[name]):
            number = under_way[choice % len(under_way)]
            position = self.started[name].pop(number)
            self.stored[name].append((self.lease[name], number, position))

    def take_groups(self, name: str) -> None:
        """The trainer reads what is stored."""
        for sequence in range(self.read[name], len(self.stored[name])):
            lease, number, position = self.stored[name][sequence]
            found = self.book.arrive(name, sequence, lease, number)
            assert found in (position, None if position is None else position)
        self.read[name] = len(self.stored[name])

    def settle(self, name: str, choice: int) -> None:
        open_ = [s for s in range(self.read[name]) if (name, s) not in self.settled]
        if open_:
            sequence = open_[choice % len(open_)]
            self.settled.add((name, sequence))
            self.book.settle(name, sequence)

    def restart_worker(self, name: str) -> None:
        """It loses what was under way, and numbers its groups from 0 again."""
        self.started[name].clear()
        self.lease[name] += 1
        self.drawn[name] = 0
        self.first[name] = len(self.stored[name])

    def restart_trainer(self) -> None:
        """A new trainer has the status, and reads again what is not settled."""
        listed = msgspec.json.decode(
            msgspec.json.encode(self.book.listed()), type=dict[str, list[Draws]]
        )
        self.book = DrawBook(
            next_position=self.book.next_position, returned=self.book.returned, draws=listed
        )
        for name in WORKERS:
            for sequence in range(self.read[name]):
                if (name, sequence) not in self.settled:
                    lease, number, position = self.stored[name][sequence]
                    assert self.book.arrive(name, sequence, lease, number) == position

    def check(self) -> None:
        """Every position that was given out is stored once, under way, or free."""
        stored = [position for groups in self.stored.values() for _, _, position in groups]
        assert max(Counter(stored).values(), default=0) <= 1, "drawn twice"
        held = {
            position
            for leases in self.book.listed().values()
            for one in leases
            for position in one.positions
        }
        free = set(self.book.returned)
        assert not free & held
        assert not free & set(stored)
        assert set(range(self.book.next_position)) == set(stored) | held | free


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(
            ["grant", "start", "finish", "read", "settle", "restart", "trainer", "leave"]
        ),
        st.sampled_from(WORKERS),
        st.integers(0, 5),
    ),
    max_size=120,
)


@settings(deadline=None, max_examples=150)
@given(ACTIONS)
def test_every_position_is_drawn_once(actions: list[tuple[str, str, int]]) -> None:
    fleet = Fleet()
    for kind, name, choice in actions:
        match kind:
            case "grant":
                fleet.granted[name] += choice
                fleet.cover(name)
            case "start":
                fleet.start(name)
            case "finish":
                fleet.finish(name, choice)
            case "read":
                fleet.take_groups(name)
            case "settle":
                fleet.settle(name, choice)
            case "restart":
                fleet.restart_worker(name)
            case "trainer":
                fleet.restart_trainer()
            case "leave":
                fleet.take_groups(name)
                fleet.book.forget(name)
                fleet.restart_worker(name)
        fleet.check()
    _finish(fleet)
    rows = [take(position, ROWS, seed=3) for position in range(fleet.book.next_position)]
    stored = sorted(p for groups in fleet.stored.values() for _, _, p in groups)
    assert stored == list(range(fleet.book.next_position)), "nothing is left out"
    whole = fleet.book.next_position // ROWS
    drawn = Counter(row for epoch, row in rows if epoch < whole)
    assert set(drawn.values()) <= {whole}, "each row once an epoch"


def _finish(fleet: Fleet) -> None:
    """All workers return, and finish whatever is given out."""
    for name in WORKERS:
        fleet.restart_worker(name)
        fleet.take_groups(name)
        fleet.cover(name)
    while fleet.book.returned:
        fleet.granted["a"] += 1
        fleet.cover("a")
    for name in WORKERS:
        while fleet.book.position(name, fleet.lease[name], fleet.drawn[name]) is not None:
            fleet.start(name)
        while fleet.started[name]:
            fleet.finish(name, 0)
        fleet.take_groups(name)
    fleet.check()


def test_a_group_that_comes_too_late_has_no_position() -> None:
    book = DrawBook()
    book.cover("a", 0, 2)
    book.cover("a", 1, 1)
    assert book.position("a", 1, 0) == 0, "what was given back is given out first"
    assert book.arrive("a", 0, 0, 1) == NOT_KNOWN
    assert book.arrive("z", 0, 0, 1) is None, "it never had draws"
    book.cover("a", 0, 9)
    assert book.next_position == 2, "an earlier lease gets nothing"
