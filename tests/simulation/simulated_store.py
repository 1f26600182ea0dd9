"""A store and a network that follow a plan of faults, on the simulated clock.

A request takes some time to the store and some back. The store then holds what it would after it:
so two requests of two threads arrive in either order, and a process may be killed before its
request arrives or after. A write that got no answer may arrive later, until the store refuses it as
too old (see `deltawire.sync.chain.gc_intents.margin_s`).
"""

from __future__ import annotations

import copy
import hashlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

from simulated_faults import APART_S, BAD_ANSWERS, Fault
from simulated_time import START_S, Killed, SimulatedProcess, scheduler

from deltawire.errors import CorruptError, InputError, RetryError, ThrottledError
from deltawire.store import Bucket, ObjectMeta

NO_ANSWER_S = 20.0
"""A request without an answer is given up after this time."""

WRITES = frozenset({"put", "create", "delete"})


class Held(NamedTuple):
    """An object: its bytes, when it was stored and by whom, and what was there before it."""

    data: bytes
    stored_at: float
    by: str
    before: bytes | None = None


@dataclass
class Store:
    """The objects, everything that happened to them, and who is told of it.

    ``watch`` gets each change: the key, its bytes before and after, and the process. ``digest``
    is that of the whole history; two equal histories have equal digests.
    """

    objects: dict[str, Held] = field(default_factory=dict)
    watch: Callable[[str, bytes | None, bytes | None, str], None] = lambda *_: None
    history: deque[tuple[float, str]] = field(default_factory=lambda: deque(maxlen=400))
    digest: Any = field(default_factory=hashlib.sha256)
    requests: int = 0
    breaks: str = ""
    """A promise that the store breaks: ``create`` overwrites, ``flush`` loses what a process stored
    in the second before it was killed."""

    def note(self, what: str) -> None:
        """Adds a line to the history."""
        self.history.append((scheduler().now, what))
        self.digest.update(f"{scheduler().now!r} {what}\n".encode())

    def put(self, key: str, data: bytes, by: str) -> None:
        before = self.objects.get(key)
        replaced = None if before is None or before.data == data else before.data
        self.objects[key] = Held(bytes(data), scheduler().now, by, replaced)
        self.watch(key, None if before is None else before.data, bytes(data), by)

    def create(self, key: str, data: bytes, by: str) -> bool:
        if key in self.objects and self.breaks != "create":
            return False
        self.put(key, data, by)
        return True

    def delete(self, key: str, by: str) -> None:
        before = self.objects.pop(key, None)
        if before is not None:
            self.watch(key, before.data, None, by)

    def lose(self, by: str) -> None:
        """Takes what a killed process stored last, if the store does not flush."""
        if self.breaks == "flush":
            at = scheduler().now - 1.0
            lost = [k for k, held in self.objects.items() if held.by == by and held.stored_at > at]
            for key in lost:
                del self.objects[key]

    def listed(self, prefix: str, after: str | None) -> list[str]:
        found = (key for key in self.objects if key.startswith(prefix))
        return sorted(key for key in found if after is None or key > after)


@dataclass(eq=False)
class Connection:
    """One process's way to the store, with the faults that wait for its next requests."""

    process: SimulatedProcess
    latency_s: float
    faults: list[Fault] = field(default_factory=list)
    away_until: float = 0.0
    slow_until: float = 0.0
    full_until: float = -1e9
    refuses_until: float = 0.0
    last_bad: float = -APART_S
    poll_s: float = 0.5

    def fault_for(self, verb: str, key: str) -> Fault | None:
        """Takes the first fault that suits a request."""
        for fault in self.faults:
            bad = fault.kind in BAD_ANSWERS
            if bad and scheduler().now - self.last_bad < APART_S:
                continue
            if fault.suits(verb, key) and fault.counts_down():
                self.faults.remove(fault)
                self.last_bad = scheduler().now if bad else self.last_bad
                return fault
        return None

    def one_way_s(self) -> float:
        slower = 40.0 if scheduler().now < self.slow_until else 1.0
        return self.latency_s * slower * self.process.random.expovariate(1.0)


class SimulatedBucket(Bucket):
    """The bucket of one process."""

    def __init__(self, store: Store, connection: Connection, url: str, *, local: bool) -> None:
        super().__init__(None, url, local=local)  # type: ignore[arg-type]
        self._objects = store
        self._connection = connection
        self._timeout_s = NO_ANSWER_S

    def with_timeout(self, seconds: float) -> SimulatedBucket:
        """The same bucket, with requests that are given up earlier."""
        other = copy.copy(self)
        other._timeout_s = seconds
        return other

    @property
    def poll_s(self) -> float:
        return self._connection.poll_s

    def _request(
        self, verb: str, key: str, act: Callable[[], Any], damage: Callable[[Fault], Any] | None
    ) -> Any:
        """Makes a request; ``damage`` makes the answer of a read that a fault changes."""
        connection, process, clock = self._connection, self._connection.process, scheduler()
        if process.dead:
            raise Killed
        self._objects.requests += 1
        fault = connection.fault_for(verb, key)
        kind = "" if fault is None else fault.kind
        if clock.now < connection.away_until:
            kind = "lost"
        clock.block(connection.one_way_s())
        if kind in ("kill before", "stop before"):
            assert fault is not None
            fault.strike(process)
            clock.block(0.0)
        if kind == "late":
            assert fault is not None
            clock.after(fault.seconds, lambda: self._arrive_late(verb, key, act))
        if kind in ("lost", "late"):
            self._say(verb, key, f"{kind}, no answer")
            clock.block(self._timeout_s)
            raise RetryError(f"cannot {verb}: no answer", run=self.url, key=key)
        self._refuse(verb, key)
        answer = act()
        self._say(verb, key, f"{kind} {_short(answer)}")
        if kind in ("kill after", "stop after"):
            assert fault is not None
            fault.strike(process)
            clock.block(0.0)
        if kind == "unanswered":
            clock.block(self._timeout_s)
            raise RetryError(f"cannot {verb}: no answer", run=self.url, key=key)
        if kind in BAD_ANSWERS and fault is not None and damage is not None:
            answer = damage(fault)
        clock.block(connection.one_way_s())
        return answer

    def _refuse(self, verb: str, key: str) -> None:
        """Raises what a store answers that takes no request now, or has no space left."""
        connection, now = self._connection, scheduler().now
        if now < connection.refuses_until:
            self._say(verb, key, "refused")
            raise ThrottledError(f"cannot {verb}: too many requests", run=self.url, key=key)
        if verb in ("put", "create") and now < connection.full_until:
            self._say(verb, key, "no space")
            raise InputError(f"cannot {verb}: no space left", run=self.url, key=key)

    def _arrive_late(self, verb: str, key: str, act: Callable[[], Any]) -> None:
        self._say(verb, key, "arrives late")
        act()

    def _say(self, verb: str, key: str, what: str) -> None:
        self._objects.note(f"{self._connection.process.name}: {verb} {key} {what}")

    def _data(self, key: str) -> bytes | None:
        held = self._objects.objects.get(key)
        return None if held is None else held.data

    def _damaged(self, key: str, fault: Fault) -> bytes | None:
        held = self._objects.objects.get(key)
        if held is None or fault.kind == "missing":
            return None
        if fault.kind == "stale":
            return held.data if held.before is None else held.before
        return fault.damage(held.data)

    def get(self, key: str, *, limit: int) -> bytes | None:
        data = self._request(
            "get", key, lambda: self._data(key), lambda fault: self._damaged(key, fault)
        )
        if data is not None:
            self._check_size(len(data), limit, key)
        return data

    def read_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> list[memoryview] | None:
        data = self._request(
            "range", key, lambda: self._data(key), lambda fault: self._damaged(key, fault)
        )
        if data is None:
            return None
        if len(data) < max(start + length for start, length in ranges):
            if len(data) == len(self._data(key) or b""):
                raise CorruptError("the object ends within the range", run=self.url, key=key)
            raise RetryError("the response was cut short", run=self.url, key=key)
        return [memoryview(data)[start : start + length] for start, length in ranges]

    def put(self, key: str, data: bytes) -> None:
        by = self._connection.process.name
        self._request("put", key, lambda: self._objects.put(key, data, by), None)

    def create(self, key: str, data: bytes) -> bool:
        by = self._connection.process.name
        return bool(self._request("create", key, lambda: self._objects.create(key, data, by), None))

    def head(self, key: str) -> ObjectMeta | None:
        return self._request("head", key, lambda: self._meta(key), lambda _: None)  # type: ignore[no-any-return]

    def _meta(self, key: str) -> ObjectMeta | None:
        held = self._objects.objects.get(key)
        if held is None:
            return None
        modified = datetime.fromtimestamp(START_S, UTC) + timedelta(seconds=held.stored_at)
        return ObjectMeta(key, len(held.data), modified)

    def list_objects(self, prefix: str, *, after: str | None = None) -> Sequence[ObjectMeta]:
        def act() -> list[ObjectMeta]:
            found = self._objects.listed(prefix, after)
            return [meta for key in found if (meta := self._meta(key)) is not None]

        def short(fault: Fault) -> list[ObjectMeta]:
            found = act()
            return [one for n, one in enumerate(found) if n != fault.place(len(found))]

        return self._request("list", prefix, act, short)  # type: ignore[no-any-return]

    def is_listed(self, key: str) -> bool:
        folder = f"{key.rpartition('/')[0]}/" if "/" in key else ""
        return key in self.list(folder, after=key[:-1])

    def list_prefixes(self, prefix: str) -> Sequence[str]:
        below = [key.removeprefix(prefix) for key in self.list(prefix)]
        return sorted({key.partition("/")[0] for key in below if "/" in key})

    def delete(self, key: str) -> None:
        by = self._connection.process.name
        self._request("delete", key, lambda: self._objects.delete(key, by), None)

    def reconnect(self) -> None:
        """Connections are not modelled: each answer is damaged or not."""


class ReadOnly(SimulatedBucket):
    """The objects at one moment, for checks that no fault reaches and that take no time."""

    def __init__(self, store: Store, url: str, *, local: bool) -> None:
        super().__init__(store, Connection(SimulatedProcess("check", ""), 0.0), url, local=local)

    def _request(
        self,
        verb: str,
        key: str,
        act: Callable[[], Any],
        damage: Callable[[Fault], Any] | None,
    ) -> Any:
        assert verb not in WRITES, key
        return act()


def _short(answer: Any) -> str:
    if isinstance(answer, bytes):
        return hashlib.sha256(answer).hexdigest()[:8]
    if isinstance(answer, list):
        return f"{len(answer)} keys"
    return "" if answer is None or isinstance(answer, ObjectMeta) else str(answer)
