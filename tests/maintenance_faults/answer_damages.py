"""Runs a command while one answer of its stores is damaged.

A command is declared in `maintenance_commands`, a damage in `DAMAGES`. The objects in the store
stay whole; what is damaged is one answer, that of the nth request of a verb for a key. The clocks
of the process and of the stores are one clock, which sleeping advances.
"""

import re
import time
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import cache
from itertools import count
from typing import Any

import pytest
from blake3 import blake3

from deltawire.errors import DeltawireError
from deltawire.store import ObjectMeta, RetryingBucket, open_bare_bucket, retrying
from deltawire.store.delegating import DelegatingBucket
from deltawire.testing.faulty import FaultyBucket, flip_bit, half

LATE_S = 600.0
"""An answer that comes late comes ten minutes after its request took place."""
ARRIVES_S = 240.0
"""A delete that got no answer takes place this much later."""
DAY_S = 86400.0
LONGEST_NAP_S = 10.0
"""A sleep takes at least this long, so that a wait for minutes is a few steps."""
EPOCH = datetime(2026, 1, 1, tzinfo=UTC)


class Clock:
    """The time of a process and of its stores; requests that are under way arrive as it passes."""

    def __init__(self):
        self.now = 10 * DAY_S
        self._arrivals = []

    def advance(self, seconds):
        self.now += seconds
        due = [one for one in self._arrivals if one[0] <= self.now]
        self._arrivals = [one for one in self._arrivals if one[0] > self.now]
        for _, deliver in due:
            deliver()

    def arrive_in(self, seconds, deliver):
        self._arrivals.append((self.now + seconds, deliver))

    @contextmanager
    def in_force(self):
        """Makes this the time of the process, and retries without pauses."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(time, "monotonic", lambda: self.now)
            patch.setattr(time, "time", lambda: self.now)
            patch.setattr(time, "clock_gettime", lambda _clock: self.now)
            patch.setattr(time, "sleep", lambda s: self.advance(max(s, LONGEST_NAP_S)))
            patch.setattr(retrying, "FIRST_PAUSE_S", 0.0)
            yield


class DatedBucket(DelegatingBucket):
    """A bucket in memory whose objects are dated by a clock."""

    def __init__(self, clock):
        super().__init__(open_bare_bucket("memory://"))
        self.clock = clock
        self.dates = {}

    def _call(self, verb, key, operation):
        before = verb == "create" and super().exists(key)
        result = operation()
        if verb in ("put", "create") and not before:
            self.dates[key] = self.clock.now
        return result

    def head(self, key):
        return self._dated(self.inner.head(key))

    def list_objects(self, prefix, *, after=None):
        return [self._dated(one) for one in self.inner.list_objects(prefix, after=after)]

    def _dated(self, found):
        if found is None:
            return None
        date = EPOCH + timedelta(seconds=self.dates.get(found.key, 0.0))
        return ObjectMeta(found.key, found.bytes, date)

    def contents(self):
        return {key: self.inner.get(key, limit=1 << 30) for key in self.inner.list("")}

    def copy(self, clock):
        made = DatedBucket(clock)
        for key, data in self.contents().items():
            made.inner.put(key, data)
        made.dates = dict(self.dates)
        return made


@dataclass
class Stage:
    """The subject of a command: stores by name, each with a faulty bucket around it, and facts.

    ``earlier`` are copies of the stores from before the last objects were written: a stale answer
    is what they would say.
    """

    clock: Clock
    stores: dict[str, DatedBucket]
    earlier: dict[str, DatedBucket]
    facts: dict[str, Any] = field(default_factory=dict)
    faulty: dict[str, FaultyBucket] = field(default_factory=dict)

    @classmethod
    def begin(cls, *names):
        """Begins a stage with empty stores of these names."""
        clock = Clock()
        stores = {name: DatedBucket(clock) for name in names}
        return cls(clock, stores, {})

    def remember(self):
        """Keeps the stores as they are now, for stale answers."""
        self.earlier = {name: store.copy(self.clock) for name, store in self.stores.items()}

    def copy(self):
        clock = Clock()
        clock.now = self.clock.now
        stores = {name: store.copy(clock) for name, store in self.stores.items()}
        made = Stage(clock, stores, self.earlier, self.facts)
        made.faulty = {name: FaultyBucket(store) for name, store in stores.items()}
        return made

    def bucket(self, name="run"):
        """The bucket that a command gets: one that repeats, as `open_bucket` returns it."""
        return RetryingBucket(self.faulty[name])

    def sound(self, name="run"):
        """The bucket that an audit reads."""
        return self.stores[name]


@dataclass(frozen=True)
class Answer:
    """The nth answer to requests of a verb for keys of a pattern, in one of the stores."""

    store: str
    verb: str
    key: str
    nth: int

    @property
    def seed(self):
        return int.from_bytes(blake3(repr(self).encode()).digest(4))


def answers_of(stage):
    """Returns the answers that a command got on this stage, in order."""
    found = []
    for name, bucket in stage.faulty.items():
        seen = Counter()
        for verb, key in bucket.operations:
            pattern = _pattern(key)
            seen[verb, pattern] += 1
            found.append(Answer(name, verb, pattern, seen[verb, pattern]))
    return found


def _pattern(key):
    """Returns a pattern for keys that are drawn at random, such as those of deletion intents."""
    return re.sub(r"(?<![0-9a-f])[0-9a-f]{32}(?![0-9a-f])", "*", key)


def _changed(change, *, times=1):
    """Makes a damage of the ``change`` of an answer's bytes."""

    def damage(stage, answer):
        stage.faulty[answer.store].damage(
            answer.key, change(stage, answer), verb=answer.verb, at=answer.nth, times=times
        )

    return damage


def _flipped(_stage, answer):
    """Flips one bit, another one in each answer."""
    seeds = count(answer.seed, 7919)
    return lambda data: flip_bit(data, next(seeds))


def _another_object(stage, answer):
    """The bytes of the last other object in the same folder."""
    store = stage.sound(answer.store)

    def other(data):
        folder = answer.key.rsplit("/", 1)[0] + "/" if "/" in answer.key else ""
        bodies = [store.inner.get(key, limit=1 << 30) for key in store.inner.list(folder)]
        return next((body for body in reversed(bodies) if body != data), b"")

    return other


def _replaced(change):
    def damage(stage, answer):
        stage.faulty[answer.store].replace(
            answer.verb, answer.key, at=answer.nth, answer=change(stage, answer)
        )

    return damage


def _listing(change):
    """Makes a damage of the ``change`` of a listing; an object that is asked for is not in it."""
    return _replaced(lambda *_: lambda got: not isinstance(got, bool) and change(got))


def _stale(stage, answer):
    earlier = stage.earlier[answer.store]

    def stale(found):
        if isinstance(found, bool):
            return earlier.is_listed(answer.key)
        if answer.verb == "list":
            there = {one.key for one in earlier.list_objects(answer.key)}
            return [one for one in found if one.key in there]
        if answer.verb == "head":
            return earlier.head(answer.key)
        return earlier.get(answer.key, limit=1 << 30)

    return stale


def _late(stage, answer):
    stage.faulty[answer.store].pause(
        answer.verb, answer.key, at=answer.nth, done=True,
        wait=lambda: stage.clock.advance(LATE_S),
    )  # fmt: skip


def _late_delete(stage, answer):
    bucket = stage.faulty[answer.store]
    bucket.postpone("delete", answer.key, at=answer.nth)
    stage.clock.arrive_in(ARRIVES_S, bucket.deliver)


@dataclass(frozen=True)
class Damage:
    name: str
    verbs: frozenset[str]
    apply: Callable[[Stage, Answer], None]


def _damage(name, verbs, apply):
    return Damage(name, frozenset(verbs.split()), apply)


DAMAGES = {
    one.name: one
    for one in (
        _damage("flipped bit", "get range", _changed(_flipped)),
        _damage("flipped bit in two answers", "get range", _changed(_flipped, times=2)),
        _damage("short", "get range", _changed(lambda *_: half)),
        _damage("empty", "get range", _changed(lambda *_: lambda _data: b"")),
        _damage("another object's bytes", "get range", _changed(_another_object)),
        _damage("short listing", "list", _listing(lambda got: got[: len(got) // 2])),
        _damage("empty listing", "list", _listing(lambda _got: [])),
        _damage("without the newest", "list", _listing(lambda got: got[:-1])),
        _damage("stale copy", "get head list", _replaced(_stale)),
        _damage("absent once", "get range head", _replaced(lambda *_: lambda _got: None)),
        _damage("late by ten minutes", "get range head list put create delete", _late),
        _damage("delete that arrives later", "delete", _late_delete),
    )
}


@dataclass(frozen=True)
class Command:
    """One command: how its stage is made, what it does, and what must hold afterwards.

    ``audit`` gets the stage and what the command returned, None after an error. ``finished`` gets
    the stage after a second, sound run and the stage of a run without damage. ``meanwhile`` is
    another process that works after the first run. ``quick`` is the damage of the short test.
    """

    name: str
    make: Callable[[], Stage]
    run: Callable[[Stage], Any]
    audit: Callable[[Stage, Any], None]
    finished: Callable[[Stage, Stage], None]
    meanwhile: Callable[[Stage], None] = lambda _stage: None
    quick: str = "flipped bit"


@dataclass(frozen=True)
class Trial:
    """A command's stage, its outcome without damage, and the answers that it got."""

    command: Command
    stage: Stage
    result: Stage
    answers: list[Answer]


@cache
def trial_of(command):
    """Runs a command once without damage; its stage is made once and copied for each case."""
    stage = command.make()
    result = stage.copy()
    with result.clock.in_force():
        outcome = command.run(result)
        command.audit(result, outcome)
        command.finished(result, result)
    return Trial(command, stage, result, answers_of(result))


def cases_of(trial, damages):
    """Lists the pairs of an answer and a damage that can happen to it."""
    return [
        (answer, damage)
        for damage in damages
        for answer in trial.answers
        if answer.verb in damage.verbs
    ]


def fault_of(trial, answer, damage):
    """Runs one case; returns what went wrong, empty if nothing did."""
    command, stage = trial.command, trial.stage.copy()
    damage.apply(stage, answer)
    try:
        with stage.clock.in_force():
            try:
                outcome = command.run(stage)
            except DeltawireError:
                outcome = None
            for bucket in stage.faulty.values():
                bucket.heal()
            command.audit(stage, outcome)
            command.meanwhile(stage)
            stage.clock.advance(DAY_S)
            command.audit(stage, outcome)
            again = command.run(stage)
            stage.clock.advance(DAY_S)
            command.audit(stage, again)
            command.finished(stage, trial.result)
    except (AssertionError, DeltawireError) as error:
        text = str(error).splitlines() or [type(error).__name__]
        return f"{damage.name}, {answer.verb} {answer.key} number {answer.nth}: {text[0]}"
    return ""
