"""Explores every order in which processes reach the store, breadth first, with faults of it.

A state is what the store holds, what its clock shows, the requests under way that got no answer,
how many faults may still come, and where each process is. From a state there is one step for each
answer that a process may get next, each late arrival, and each tick of the clock. States are kept
by their value, so each is explored once; the first one found that breaks an invariant has a
shortest trace. A process that is killed is one that takes no further step, which is a part of each
exploration.

Two reductions, both without loss:

- A request that conflicts with no other process (see `_Exploration.is_independent`) is answered
  first. It commutes with every step of the others, and makes none of them possible or impossible: a
  fault of it costs one that any of them could have had, but every order in which they have theirs
  first is an order with fewer faults of this one. Only steps that state nothing (`notes`) and write
  nothing are taken first, so no invariant can tell the orders apart. Each such step makes the
  history of one process longer, so there is no cycle of them.
- A process that polls until something changes is, after a poll, where it was before it (see
  `stepping.POLLING_LOOPS`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from stepping import LATE_TICKS, LOST, Position, Process, Request, scripted

from deltawire.wire import keys

DATED = (keys.BLOBS, keys.CLOCK, keys.DELETION_INTENTS, keys.RETENTION_FLOORS, keys.PARTS)
"""The objects whose ages decide something. All others are as old as the run."""

WRITES = frozenset({"put", "create", "delete"})
FENCED = "fenced"
"""The note of a process that was told that it may no longer write."""


class Held(NamedTuple):
    """An object in the store: its bytes, when it was written, and the bytes that it had before."""

    key: str
    data: bytes
    modified: int
    before: bytes | None = None


Objects = tuple[Held, ...]


class Flight(NamedTuple):
    """A request that got no answer and may still arrive, until the store refuses it as too old."""

    request: Request
    until: int | None


class State(NamedTuple):
    """One state; ``store`` and ``at`` are numbers of what was seen."""

    store: int
    clock: int
    flights: tuple[Flight, ...]
    faults: int
    at: tuple[int, ...]


@dataclass(frozen=True)
class Bounds:
    """How much is explored: at most ``faults`` faults and ``ticks`` ticks of the clock.

    ``kinds`` are the faults: ``lost`` (a write that was done, or not, without an answer), ``late``
    (one without an answer that arrives later), ``damaged`` (an object with a flipped bit, *not
    found* for an object that is there, the bytes that it had before), ``short`` (a listing without
    one of its keys).
    """

    faults: int = 0
    ticks: int = 0
    kinds: frozenset[str] = frozenset({"lost", "late", "damaged", "short"})
    most_states: int = 20_000_000


@dataclass
class World:
    """Says what is explored: the objects at the start, the processes, and what must hold.

    ``invariant`` gets the objects by key and the notes of each process by its name, and says what
    is wrong. ``may_write`` gets a key with its bytes before and after each write.
    """

    objects: dict[str, bytes]
    processes: Sequence[Process]
    invariant: Callable[[dict[str, bytes], dict[str, tuple[Any, ...]]], str | None]
    may_write: Callable[[str, bytes | None, bytes | None], str | None] = lambda *_: None
    stalls: bool = False
    """A process may stand between the check of its clock and the request that follows for longer
    than a deletion without an answer may take. The protocol assumes that none does."""


@dataclass
class Found:
    """The result of an exploration; ``fault`` and ``trace`` are empty if all invariants hold."""

    states: int = 0
    steps: int = 0
    depth: int = 0
    seconds: float = 0.0
    runs: int = 0
    ends: set[tuple[str, ...]] = field(default_factory=set)
    fault: str = ""
    trace: list[str] = field(default_factory=list)


class _Step(NamedTuple):
    cost: int
    label: str
    answer: Any
    store: int
    flight: Request | None = None
    fault: str | None = None


class _Way(NamedTuple):
    """A step of one process, with the number of the position that it leads to."""

    cost: int
    label: str
    at: int
    store: int
    flight: Flight | None
    fault: str | None


class _Branch(NamedTuple):
    """The steps of one process; ``first`` says that they may be taken before all others."""

    first: bool
    ways: list[_Way]


class _Exploration:
    def __init__(self, world: World, bounds: Bounds, *, reduced: bool) -> None:
        self.world = world
        self._reduced = reduced
        self.bounds = bounds
        self.found = Found()
        self._stores: list[Objects] = []
        self._numbers: dict[Objects, int] = {}
        self._steps: dict[tuple[int, int, Request], list[_Step]] = {}
        self._checked: dict[Any, str | None] = {}
        self._branches: dict[tuple[int, int, int, int], _Branch | None] = {}

    def explore(self) -> Found:
        began = time.process_time()
        start = State(
            self._number(tuple(Held(k, d, 0) for k, d in sorted(self.world.objects.items()))),
            0,
            (),
            self.bounds.faults,
            tuple(0 for _ in self.world.processes),
        )
        seen: dict[State, tuple[State, str] | None] = {start: None}
        level = [start]
        found = self.found
        while level and not found.fault:
            following: list[State] = []
            for state in level:
                for label, reached, fault in self._after(state):
                    found.steps += 1
                    if reached in seen and not fault:
                        continue
                    if fault := fault or self._fault(reached):
                        found.fault, found.trace = fault, [*_trace(seen, state), label]
                        break
                    seen[reached] = (state, label)
                    following.append(reached)
                if found.fault:
                    break
                if len(seen) > self.bounds.most_states:
                    raise MemoryError(f"more than {self.bounds.most_states} states")
            level = following
            found.depth += 1
        found.states = len(seen)
        found.seconds = time.process_time() - began
        found.runs = sum(process.runs for process in self.world.processes)
        return found

    def _position(self, number: int, state: State) -> Position:
        return self.world.processes[number].positions[state.at[number]]

    def _after(self, state: State) -> Iterable[tuple[str, State, str | None]]:
        ended = True
        branches = []
        for number, at in enumerate(state.at):
            branch = self._branch(number, at, state.store, state.clock)
            if branch is None:
                continue
            if branch.first:
                yield from self._answered(number, state, branch)
                return
            ended = False
            branches.append((number, branch))
        for number, branch in branches:
            yield from self._answered(number, state, branch)
        if ended:
            self.found.ends.add(
                tuple(self._position(n, state).end for n in range(len(self.world.processes)))
            )
        for flight in state.flights:
            yield self._arrived(flight, state)
        if not ended or state.flights:
            yield from self._ticked(state)

    def _branch(self, number: int, at: int, store: int, clock: int) -> _Branch | None:
        """Returns the steps of one process, None if it has ended."""
        key = (number, at, store, clock)
        if key in self._branches:
            return self._branches[key]
        process = self.world.processes[number]
        position = process.positions[at]
        request = position.request
        branch = None
        if request is not None:
            steps = []
            fenced = request.verb in WRITES and (FENCED,) in position.notes
            for step in self._outcomes(store, clock, request):
                if step.cost > self.bounds.faults:
                    continue
                reached = process.after(position, step.answer)
                flight = None
                if step.flight is not None:
                    flight = Flight(step.flight, self._until(position, clock))
                    if flight.until is not None and flight.until < clock:
                        continue
                fault = step.fault
                if fenced:
                    fault = f"{process.name} writes although it was fenced"
                label = f"{process.name}: {step.label}"
                steps.append(_Way(step.cost, label, reached.number, step.store, flight, fault))
            first = (
                self._reduced
                and self.is_independent(number, at)
                and all(process.positions[way.at].notes == position.notes for way in steps)
            )
            branch = _Branch(first, steps)
        self._branches[key] = branch
        return branch

    def _until(self, position: Position, clock: int) -> int | None:
        """Returns the last tick at which a request that got no answer may arrive."""
        assert position.request is not None
        if position.request.verb != "delete":
            return None
        sent = clock if position.checked is None else position.checked
        return sent + LATE_TICKS

    def _answered(
        self, number: int, state: State, branch: _Branch
    ) -> Iterable[tuple[str, State, str | None]]:
        for way in branch.ways:
            if way.cost > state.faults:
                continue
            flights = state.flights
            if way.flight is not None:
                flights = tuple(sorted((*flights, way.flight), key=repr))
            at = (*state.at[:number], way.at, *state.at[number + 1 :])
            reached = State(way.store, state.clock, flights, state.faults - way.cost, at)
            yield way.label, reached, way.fault

    def _arrived(self, flight: Flight, state: State) -> tuple[str, State, str | None]:
        left = list(state.flights)
        left.remove(flight)
        store, _, fault = self._write(state.store, state.clock, flight.request)
        label = f"late: {flight.request.verb} {flight.request.key} arrives"
        return label, state._replace(store=store, flights=tuple(left)), fault

    def _ticked(self, state: State) -> Iterable[tuple[str, State, str | None]]:
        """Yields the state a tick later, unless a deletion that is about to be sent would then be
        later than the protocol assumes."""
        clock = state.clock + 1
        if clock > self.bounds.ticks:
            return
        if not self.world.stalls and any(
            self._latest(number, at) < clock for number, at in enumerate(state.at)
        ):
            return
        left = tuple(one for one in state.flights if one.until is None or one.until >= clock)
        yield "the clock ticks", state._replace(clock=clock, flights=left), None

    def _latest(self, number: int, at: int) -> float:
        """Returns the last tick at which a process may send its next request."""
        position = self.world.processes[number].positions[at]
        request = position.request
        if request is None or position.checked is None:
            return math.inf
        if request.verb != "delete" or not request.key.startswith(keys.BLOBS):
            return math.inf
        return position.checked + LATE_TICKS

    def is_independent(self, number: int, at: int) -> bool:
        """Returns whether a request reads only what no other process ever writes."""
        request = self.world.processes[number].positions[at].request
        if request is None or request.verb not in ("get", "head", "size", "list", "keys"):
            return False
        for other, process in enumerate(self.world.processes):
            for prefix in process.writes:
                if other == number:
                    continue
                if request.key.startswith(prefix):
                    return False
                if request.verb in ("list", "keys") and prefix.startswith(request.key):
                    return False
        return True

    def _outcomes(self, store: int, clock: int, request: Request) -> list[_Step]:
        found = self._steps.get((store, clock, request))
        if found is None:
            found = self._steps[store, clock, request] = list(
                self._compute_outcomes(store, clock, request)
            )
        return found

    def _compute_outcomes(self, store: int, clock: int, request: Request) -> Iterable[_Step]:
        verb, key, kinds = request.verb, request.key, self.bounds.kinds
        say = f"{verb} {key}"
        if verb == "uptime":
            yield _Step(0, "looks at its clock", clock, store)
            return
        if verb in WRITES:
            after, answer, fault = self._write(store, clock, request)
            done = f"{say} → {answer}" if verb == "create" else say
            yield _Step(0, done, answer, after, fault=fault)
            if "lost" in kinds:
                yield _Step(1, f"{say}: done, the answer is lost", LOST, after, fault=fault)
                yield _Step(1, f"{say}: not done, no answer", LOST, store)
            if "late" in kinds:
                yield _Step(1, f"{say}: no answer, still under way", LOST, store, request)
            return
        objects = self._stores[store]
        if verb in ("list", "keys"):
            listed = tuple(
                one.key if verb == "keys" else (one.key, len(one.data), one.modified)
                for one in objects
                if one.key.startswith(key) and (request.after is None or one.key > request.after)
            )
            yield _Step(0, f"{say} → {len(listed)} keys", listed, store)
            if "short" in kinds:
                for n, one in enumerate(listed):
                    label = f"{say}: the answer lacks {one if verb == 'keys' else one[0]}"
                    yield _Step(1, label, listed[:n] + listed[n + 1 :], store)
            return
        held = next((one for one in objects if one.key == key), None)
        if held is None:
            yield _Step(0, f"{say} → not found", None, store)
            return
        size = len(held.data)
        answer = {"get": held.data, "size": size, "head": (size, held.modified)}[verb]
        yield _Step(0, f"{say} → found", answer, store)
        if "damaged" in kinds and not request.sure:
            yield _Step(1, f"{say}: the answer says not found", None, store)
            if verb == "get":
                middle = len(held.data) // 2
                bit = bytes([held.data[middle] ^ 1]) if held.data else b"?"
                flipped = held.data[:middle] + bit + held.data[middle + 1 :]
                yield _Step(1, f"{say}: the answer has a flipped bit", flipped, store)
                if held.before is not None:
                    yield _Step(1, f"{say}: the answer is a stale copy", held.before, store)

    def _write(
        self, store: int, clock: int, request: Request
    ) -> tuple[int, bool | None, str | None]:
        objects = {one.key: one for one in self._stores[store]}
        held = objects.get(request.key)
        answer: bool | None = None
        if request.verb == "create":
            answer = held is None
            if held is not None:
                return store, answer, None
        if request.verb == "delete":
            objects.pop(request.key, None)
        else:
            before = None
            if held is not None:
                before = held.before if held.data == request.data else held.data
            if not request.key.startswith(keys.MANIFESTS):
                before = None
            at = clock if request.key.startswith(DATED) else 0
            objects[request.key] = Held(request.key, request.data, at, before)
        number = self._number(tuple(objects[key] for key in sorted(objects)))
        after = objects.get(request.key)
        fault = self.world.may_write(
            request.key, held.data if held else None, after.data if after else None
        )
        return number, answer, fault

    def _number(self, objects: Objects) -> int:
        number = self._numbers.get(objects)
        if number is None:
            number = self._numbers[objects] = len(self._stores)
            self._stores.append(objects)
        return number

    def _fault(self, state: State) -> str | None:
        notes = tuple(
            self._position(number, state).notes for number in range(len(self.world.processes))
        )
        known = (state.store, notes)
        if known not in self._checked:
            objects = {one.key: one.data for one in self._stores[state.store]}
            names = [process.name for process in self.world.processes]
            self._checked[known] = self.world.invariant(
                objects, dict(zip(names, notes, strict=True))
            )
        return self._checked[known]


def _trace(seen: dict[State, tuple[State, str] | None], state: State) -> list[str]:
    found = []
    while (before := seen[state]) is not None:
        state, label = before
        found.append(label)
    return found[::-1]


def explore(world: World, bounds: Bounds, *, reduced: bool = True) -> Found:
    """Explores all interleavings of a world's processes within ``bounds``."""
    with scripted():
        for process in world.processes:
            process.begin()
        return _Exploration(world, bounds, reduced=reduced).explore()
