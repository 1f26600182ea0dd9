"""Wraps a bucket so that it fails on command.

bucket = FaultyBucket(open_bare_bucket("memory://"))
bucket.fail(at=3)                                  # the third operation from now, not done
bucket.fail(at=3, done=True)                       # done, but its answer is lost
bucket.fail("create", "weights/blobs/*", times=None, error=disk_full)   # from now on
bucket.pause("create", "weights/manifests/*", wait=rival.publish)   # meanwhile, something else
bucket.damage("weights/blobs/*", lambda data: flip_bit(data, 17))
bucket.damage("*", half, at=3, times=1)            # the third answer from now is cut short
bucket.fail("range", "*", error=short_answer)      # coalesced ranges come back incomplete
bucket.replace("list", "weights/manifests/", answer=lambda found: found[:-1])   # a short one
bucket.postpone("delete", "weights/blobs/*")       # no answer; it takes place at bucket.deliver()
bucket.hide("weights/manifests/0000000002.json")
bucket.shuffle(seed=1)                             # listings come in any order
bucket.heal()
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal, TypeVar

from deltawire.errors import CorruptError, DeltawireError, InputError, RetryError
from deltawire.store import Bucket, DelegatingBucket, ObjectMeta
from deltawire.store.delegating import Verb

T = TypeVar("T")


def no_answer(verb: str, key: str) -> DeltawireError:
    """Makes the error of a store that did not answer: the operation may have been done."""
    return RetryError(f"cannot {verb}: injected timeout", key=key)


def disk_full(verb: str, key: str) -> DeltawireError:
    """Makes the error of a store that has no space left."""
    return InputError(f"cannot {verb}: injected lack of space", key=key)


def short_answer(verb: str, key: str) -> DeltawireError:
    """Makes the error of an answer that ended before the object did."""
    return RetryError(f"cannot {verb}: the answer was cut short", key=key)


def half(data: bytes) -> bytes:
    """Returns the first half of ``data``: a short body."""
    return data[: len(data) // 2]


def flip_bit(data: bytes, number: int) -> bytes:
    """Returns ``data`` with bit ``number`` (modulo its length) inverted."""
    if not data:
        return data
    place, bit = divmod(number % (8 * len(data)), 8)
    return data[:place] + bytes([data[place] ^ 1 << bit]) + data[place + 1 :]


@dataclass
class _Rule:
    """Selects operations: of a verb, on a key, the ``at``-th such and the next ``times`` ones."""

    verb: Verb | None
    key: str
    at: int = 1
    times: int | None = None
    done: bool = False
    error: Callable[[str, str], DeltawireError] | None = None
    wait: Callable[[], object] | None = None
    change: Callable[[bytes], bytes] | None = None
    replace: Callable[[Any], Any] | None = None
    postpone: bool = False
    seen: int = 0

    def applies(self, verb: Verb, key: str) -> bool:
        """Counts an operation if it is of this kind; return whether the rule applies to it."""
        if self.change is not None and verb not in ("get", "range"):
            return False
        if self.verb not in (None, verb) or not fnmatchcase(key, self.key):
            return False
        self.seen += 1
        return self.seen >= self.at and (self.times is None or self.seen < self.at + self.times)


class FaultyBucket(DelegatingBucket):
    """Fails, delays, damages or hides chosen operations on ``inner``.

    ``operations`` lists every (verb, key) in order, failed ones too. Safe for use by several
    threads.
    """

    def __init__(self, inner: Bucket) -> None:
        super().__init__(inner)
        self.operations: list[tuple[Verb, str]] = []
        self._rules: list[_Rule] = []
        self._hidden: list[str] = []
        self._shuffled: list[random.Random] = []  # At most one.
        self._postponed: list[Callable[[], object]] = []
        self._lock = threading.Lock()
        self._waiting: set[int] = set()

    def with_inner(self, inner: Bucket) -> FaultyBucket:
        """As `DelegatingBucket.with_inner`; both fail by the same rules, and count together."""
        return self._moved(inner)

    def fail(
        self,
        verb: Verb | None = None,
        key: str = "*",
        *,
        at: int = 1,
        times: int | None = 1,
        done: bool = False,
        error: Callable[[str, str], DeltawireError] = no_answer,
    ) -> None:
        """Fails the ``at``-th operation from now of this verb on such a key, and those after it.

        ``key`` is a pattern as in a shell, ``verb`` None is any, and ``times`` limits how many fail
        in all (None is no limit). With ``done`` the operation takes place before ``error`` is
        raised.
        """
        self._add(_Rule(verb, key, at, times, done, error=error))

    def pause(
        self,
        verb: Verb | None = None,
        key: str = "*",
        *,
        wait: Callable[[], object],
        at: int = 1,
        times: int | None = 1,
        done: bool = False,
    ) -> None:
        """Calls ``wait`` before such an operation (after it with ``done``), and then goes on.

        ``wait`` may sleep, wait for another thread, or act as another process would meanwhile; what
        its thread does in this bucket is neither failed nor listed in ``operations``.
        """
        self._add(_Rule(verb, key, at, times, done, wait=wait))

    def damage(
        self,
        key: str,
        change: Callable[[bytes], bytes],
        *,
        verb: Literal["get", "range"] | None = None,
        at: int = 1,
        times: int | None = None,
    ) -> None:
        """Makes reads of such keys return ``change`` of the object, ``times`` times (None: always).

        The stored object stays as it is.
        """
        self._add(_Rule(verb, key, at, times, change=change))

    def replace(
        self,
        verb: Verb,
        key: str = "*",
        *,
        answer: Callable[[Any], Any],
        at: int = 1,
        times: int | None = 1,
    ) -> None:
        """Makes such operations return ``answer`` of their result: None for an object that is not
        there, fewer entries of a listing. The operation takes place.
        """
        self._add(_Rule(verb, key, at, times, replace=answer))

    def postpone(
        self, verb: Verb | None = None, key: str = "*", *, at: int = 1, times: int | None = 1
    ) -> None:
        """Makes such requests arrive late: they get no answer now, and take place at `deliver`."""
        self._add(_Rule(verb, key, at, times, error=no_answer, postpone=True))

    def deliver(self) -> int:
        """Makes the requests that were postponed take place, in order; returns their number."""
        with self._lock:
            arrived = self._postponed[:]
            self._postponed.clear()
        for request in arrived:
            request()
        return len(arrived)

    def shuffle(self, *, seed: int) -> None:
        """Makes listings come in another order each time."""
        with self._lock:
            self._shuffled[:] = [random.Random(seed)]

    def hide(self, key: str) -> None:
        """Makes such keys invisible to every read and listing; the objects stay."""
        with self._lock:
            self._hidden.append(key)

    def heal(self) -> None:
        """Removes every rule; ``operations`` stays."""
        with self._lock:
            self._rules.clear()
            self._hidden.clear()
            self._shuffled.clear()

    def _add(self, rule: _Rule) -> None:
        with self._lock:
            self._rules.append(rule)

    def get(self, key: str, *, limit: int) -> bytes | None:
        """As `Bucket.get`."""
        data, applied = self._do("get", key, lambda: self.inner.get(key, limit=limit))
        if data is None or self._is_hidden(key):
            return None
        for rule in applied:
            if rule.change is not None:
                data = rule.change(data)
        return data

    def read_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> list[memoryview] | None:
        """As `Bucket.read_ranges`; damage applies to the whole object, of which ranges are cut."""
        found, applied = self._do("range", key, lambda: self.inner.read_ranges(key, ranges))
        if found is None or self._is_hidden(key):
            return None
        changes = [rule.change for rule in applied if rule.change is not None]
        if not changes:
            return found
        data = self.inner.get(key, limit=1 << 40) or b""
        for change in changes:
            data = change(data)
        if len(data) < max(start + length for start, length in ranges):
            raise CorruptError("an object ends within the range that was asked for", key=key)
        return [memoryview(data)[start : start + length] for start, length in ranges]

    def head(self, key: str) -> ObjectMeta | None:
        """As `Bucket.head`, on which `exists` and `size` rest."""
        found = super().head(key)
        return None if self._is_hidden(key) else found

    def list_objects(self, prefix: str, *, after: str | None = None) -> Sequence[ObjectMeta]:
        """As `Bucket.list_objects`, on which `list` rests."""
        found = super().list_objects(prefix, after=after)
        seen = [entry for entry in found if not self._is_hidden(entry.key)]
        with self._lock:
            for rng in self._shuffled:
                rng.shuffle(seen)
        return seen

    def is_listed(self, key: str) -> bool:
        """As `Bucket.is_listed`."""
        return super().is_listed(key) and not self._is_hidden(key)

    def list_prefixes(self, prefix: str) -> Sequence[str]:
        """As `Bucket.list_prefixes`; hidden objects make no prefix."""
        found = super().list_objects(prefix)
        below = (e.key.removeprefix(prefix).split("/") for e in found if not self._is_hidden(e.key))
        return sorted({parts[0] for parts in below if len(parts) > 1})

    def _call(self, verb: Verb, key: str, operation: Callable[[], T]) -> T:
        return self._do(verb, key, operation)[0]

    def _do(self, verb: Verb, key: str, operation: Callable[[], T]) -> tuple[T, Sequence[_Rule]]:
        """Returns the operation's result and the rules that applied to it."""
        if self._is_waiting():
            return operation(), []
        with self._lock:
            self.operations.append((verb, key))
            # Every rule counts the operations it selects, also those that another rule fails.
            applied = [rule for rule in self._rules if rule.applies(verb, key)]
            if any(rule.postpone for rule in applied):
                self._postponed.append(operation)
        self._apply(applied, verb, key, done=False)
        result: Any = operation()
        self._apply(applied, verb, key, done=True)
        for rule in applied:
            if rule.replace is not None:
                result = rule.replace(result)
        return result, applied

    def _apply(self, applied: Sequence[_Rule], verb: Verb, key: str, *, done: bool) -> None:
        for rule in applied:
            if rule.wait is not None and rule.done == done:
                self._waiting.add(threading.get_ident())
                try:
                    rule.wait()
                finally:
                    self._waiting.discard(threading.get_ident())
        for rule in applied:
            if rule.error is not None and rule.done == done:
                raise rule.error(verb, key)

    def _is_waiting(self) -> bool:
        return threading.get_ident() in self._waiting

    def _is_hidden(self, key: str) -> bool:
        with self._lock:
            return any(fnmatchcase(key, pattern) for pattern in self._hidden)
