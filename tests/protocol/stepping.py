"""Runs the code of one process up to its next request to the store, and no further.

The code under test is deterministic, given the answers to its requests. So where a process is
follows from the answers that it got, and a position is reached again by running the code from its
start with these answers. Each position is reached once; the explorer then moves between positions
without running any code.
"""

from __future__ import annotations

import secrets
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from types import FrameType
from typing import Any
from unittest import mock

from deltawire.errors import DeltawireError, RetryError
from deltawire.store import Bucket, ObjectMeta, retrying
from deltawire.sync.chain import gc_intents
from deltawire.sync.maintain.region_anchors import RegionAnchors
from deltawire.sync.publish import interpreter_exit
from deltawire.sync.publish.sharded import ShardPublisher

URL = "memory://protocol"
START = datetime(2026, 1, 1, tzinfo=UTC)
MOST_REQUESTS = 400
"""A process with more requests than this is one that does not end."""

INTENT_TICKS = 1
LATE_TICKS = 1
"""The two times of an intent in ticks of the clock. That they differ from those of a run
changes nothing, because the code compares sums of them only."""

LOST = "no answer"
DAMAGED = "damaged"

AT_EXIT = ("opened", "staged", "told", "committed", "closed")
"""Functions by which publishers tell the end of the interpreter, which does not come here."""

POLLING_LOOPS = {
    gc_intents._wait_for.__code__: lambda _: True,
    ShardPublisher._await_manifest.__code__: lambda _: True,
    # A leader keeps the parts that it has read.
    ShardPublisher._await_parts.__code__: lambda poll: {one.verb for one in poll} == {"list"},
}
"""Functions that poll until something changes, and whether they keep nothing from a poll with some
requests. A process that sleeps after such a poll is where it was before the poll, so its position
is that one."""


def moment(clock: int) -> datetime:
    """The store's time at a tick of the clock."""
    return START + timedelta(seconds=clock)


@dataclass(frozen=True)
class Request:
    """One operation on the store, or a look at the process's own clock (``uptime``)."""

    verb: str
    key: str
    data: bytes = b""
    after: str | None = None
    sure: bool = False
    """A question of the test's own, whose answer is never damaged."""


class _Pause(BaseException):
    """Ends a run of the code at its next request; no handler of the code takes it."""


@dataclass(eq=False)
class Position:
    """Where a process is: its next ``request``, or its ``end``.

    ``notes`` are what the process has stated so far, for invariants. ``checked`` is what its own
    clock showed last.
    """

    number: int
    above: Position | None
    answer: Any
    request: Request | None = None
    end: str = ""
    notes: tuple[Any, ...] = ()
    checked: int | None = None
    repeats: Position | None = None
    """Set where the process sleeps in a polling loop: the position that it then has again."""
    next: dict[Any, Position] = field(default_factory=dict)

    def answers(self) -> list[Any]:
        """The answers that lead here from the start."""
        found = []
        at: Position | None = self
        while at is not None and at.above is not None:
            found.append(at.answer)
            at = at.above
        return found[::-1]


class ScriptedBucket(Bucket):
    """Answers requests from a list, and pauses the code when that is used up."""

    def __init__(self, answers: Sequence[Any]) -> None:
        super().__init__(None, URL, local=True)  # type: ignore[arg-type]
        self.answers = answers
        self.requests: list[Request] = []
        self.polled_from = 0
        """The number of the first request of this poll, in a polling loop."""
        self._loop: FrameType | None = None
        self.pending: Request | None = None
        self.slept = False
        self.notes: list[Any] = []
        self.checked: int | None = None

    poll_s = 0.0

    def ask(
        self,
        verb: str,
        key: str,
        data: bytes = b"",
        after: str | None = None,
        *,
        sure: bool = False,
    ) -> Any:
        if self.pending is not None or self.slept:
            raise _Pause  # A cleanup on the way out.
        request = Request(verb, key, data, after, sure)
        at = len(self.requests)
        self.requests.append(request)
        if (loop := _loop()) is not self._loop:
            self._loop, self.polled_from = loop, at
        assert at < MOST_REQUESTS, f"a process made {at} requests: {self.requests[-8:]}"
        if at == len(self.answers):
            self.pending = request
            raise _Pause
        answer = self.answers[at]
        if answer == LOST:
            raise RetryError("no answer", run=URL, key=key)
        return answer

    def note(self, *what: Any) -> None:
        """States something that invariants look at."""
        if self.pending is None and not self.slept:
            self.notes.append(what)

    def uptime(self) -> float:
        self.checked = self.ask("uptime", "")
        return float(self.checked)

    def sleep(self, seconds: float = 0.0) -> None:
        loop = sys._getframe(2)  # The caller of `_Running.sleep`.
        if self.pending is not None or self.slept or loop.f_code not in POLLING_LOOPS:
            return
        poll = self.requests[self.polled_from :]
        if len(self.requests) == len(self.answers) and POLLING_LOOPS[loop.f_code](poll):
            self.slept = True
            raise _Pause
        self.polled_from = len(self.requests)

    def get(self, key: str, *, limit: int) -> bytes | None:
        return self.ask("get", key)

    def read_ranges(self, key: str, ranges: Any) -> Any:
        data = self.ask("get", key)
        return None if data is None else [memoryview(data)[a : a + n] for a, n in ranges]

    def put(self, key: str, data: bytes) -> None:
        self.ask("put", key, bytes(data))

    def create(self, key: str, data: bytes) -> bool:
        return self.ask("create", key, bytes(data))

    def head(self, key: str) -> ObjectMeta | None:
        found = self.ask("head", key)
        return None if found is None else ObjectMeta(key, found[0], moment(found[1]))

    def exists(self, key: str) -> bool:
        return self.ask("size", key) is not None

    def size(self, key: str) -> int | None:
        return self.ask("size", key)

    def list(self, prefix: str, *, after: str | None = None) -> list[str]:
        return list(self.ask("keys", prefix, after=after))

    def list_objects(self, prefix: str, *, after: str | None = None) -> list[ObjectMeta]:
        found = self.ask("list", prefix, after=after)
        return [ObjectMeta(key, size, moment(at)) for key, size, at in found]

    def is_listed(self, key: str) -> bool:
        folder = f"{key.rpartition('/')[0]}/" if "/" in key else ""
        return key in self.ask("keys", folder, after=key[:-1])

    def list_prefixes(self, prefix: str) -> list[str]:
        below = [key.removeprefix(prefix) for key in self.ask("keys", prefix)]
        return sorted({key.partition("/")[0] for key in below if "/" in key})

    def delete(self, key: str) -> None:
        self.ask("delete", key)

    def reconnect(self) -> None:
        """New connections give the same answers here: the explorer damages any of them."""


def _loop() -> FrameType | None:
    """Returns the polling loop that makes a request, if there is one."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code not in POLLING_LOOPS:
        frame = frame.f_back
    return frame


class Process:
    """A process of the protocol: ``body`` is the code, which gets its bucket. Its code runs within
    `scripted` only.

    ``writes`` are the beginnings of all keys that it may write or delete.
    """

    def __init__(
        self, name: str, body: Callable[[ScriptedBucket], None], *, writes: Sequence[str] = ()
    ) -> None:
        self.name = name
        self.writes = tuple(writes)
        self.runs = 0
        self._body = body
        self.positions: list[Position] = []

    def begin(self) -> None:
        """Runs the code up to its first request, which makes position 0."""
        self._reach(None, None)

    def after(self, position: Position, answer: Any) -> Position:
        """Returns where the process is once its request got an answer."""
        found = position.next.get(answer)
        if found is None:
            found = self._reach(position, answer)
            found = found.repeats or found
            position.next[answer] = found
        return found

    def _reach(self, above: Position | None, answer: Any) -> Position:
        position = Position(len(self.positions), above, answer)
        bucket = ScriptedBucket([] if above is None else position.answers())
        self.runs += 1
        _running.name, _running.drawn, _running.bucket = self.name, iter(range(10_000)), bucket
        try:
            self._body(bucket)
            position.end = "done"
        except _Pause:
            pass
        except DeltawireError as error:
            position.end = f"{type(error).__name__}: {error.message}"
        if above is not None:
            made = bucket.requests[len(bucket.answers) - 1]
            assert made == above.request, f"{self.name} asked for {above.request}, now for {made}"
        position.notes = tuple(bucket.notes)
        position.checked = bucket.checked
        if bucket.slept:
            at: Position | None = position
            while at is not None and len(at.answers()) > bucket.polled_from:
                at = at.above
            position.repeats = at
            return position
        position.request = bucket.pending
        assert position.request is not None or position.end
        if position.request is not None and position.request.verb in ("put", "create", "delete"):
            key = position.request.key
            assert key.startswith(self.writes), f"{self.name} writes {key}, which it does not state"
        self.positions.append(position)
        return position


def _submit(pool: Any, work: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
    """Runs a task in the thread that submits it, so that requests come in one order."""
    done: Future[Any] = Future()
    try:
        done.set_result(work(*args, **kwargs))
    except Exception as error:
        done.set_exception(error)
    return done


class _Running:
    """The process whose code runs now, and what it draws."""

    name = ""
    drawn: Iterator[int] = iter(())
    bucket: ScriptedBucket

    def token(self, size: int = 8) -> str:
        return f"{self.name}{next(self.drawn):x}".encode().hex().zfill(32)

    def sleep(self, seconds: float = 0.0) -> None:
        self.bucket.sleep(seconds)

    def uptime(self) -> float:
        return self.bucket.uptime()


_running = _Running()


@contextmanager
def scripted() -> Iterator[None]:
    """Takes everything from the code that could make two of its runs differ: time, threads, random
    names, and what is left for the end of the interpreter.
    """

    def nothing(_: Any) -> None:
        pass

    with ExitStack() as stack:
        for owner, attribute, value in (
            (retrying, "FIRST_PAUSE_S", 0.0),
            (gc_intents, "_uptime", _running.uptime),
            (gc_intents, "INTENT_S", float(INTENT_TICKS)),
            (gc_intents, "MARGIN_S", float(LATE_TICKS)),
            (ThreadPoolExecutor, "submit", _submit),
            (time, "sleep", _running.sleep),
            (time, "time", lambda: 1.8e9),
            (time, "monotonic", lambda: 0.0),
            (secrets, "token_hex", _running.token),
            (RegionAnchors, "wake", lambda *_: None),  # It starts a thread.
            *((interpreter_exit, name, nothing) for name in AT_EXIT),
        ):
            stack.enter_context(mock.patch.object(owner, attribute, value))
        yield
