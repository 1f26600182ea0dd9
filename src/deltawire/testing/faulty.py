"""A bucket that fails on command, around one that works.

bucket = FaultyBucket(open_bucket("memory://"))
bucket.fail(at=3)                                  # the third operation from now, not done
bucket.fail(at=3, done=True)                       # done, but the answer is lost
bucket.fail("create", "weights/blobs/*", times=None, error=disk_full)   # from now on, for ever
bucket.damage("weights/blobs/*", lambda data: flip_bit(data, 17))
bucket.hide("weights/manifests/0000000002.json")
bucket.heal()
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal, TypeVar

from deltawire.errors import CorruptError, DeltawireError, InputError, RetryError
from deltawire.store import Bucket, Entry

Verb = Literal["get", "range", "put", "create", "exists", "list", "delete"]

T = TypeVar("T")


def no_answer(verb: str, key: str) -> DeltawireError:
    """The store did not answer: whether the operation was done is not known."""
    return RetryError(f"cannot {verb}: injected timeout", key=key)


def disk_full(verb: str, key: str) -> DeltawireError:
    """The store refused for want of space."""
    return InputError(f"cannot {verb}: injected lack of space", key=key)


def flip_bit(data: bytes, number: int) -> bytes:
    """``data`` with one bit turned over: bit ``number``, counted round and round."""
    if not data:
        return data
    place, bit = divmod(number % (8 * len(data)), 8)
    return data[:place] + bytes([data[place] ^ 1 << bit]) + data[place + 1 :]


@dataclass
class _Failure:
    verb: Verb | None
    key: str
    at: int
    times: int | None
    done: bool
    error: Callable[[str, str], DeltawireError]
    seen: int = 0

    def strikes(self, verb: Verb, key: str) -> bool:
        """Count an operation if it is one of these, and say whether it fails."""
        if self.verb not in (None, verb) or not fnmatchcase(key, self.key):
            return False
        self.seen += 1
        return self.seen >= self.at and (self.times is None or self.seen < self.at + self.times)


class FaultyBucket(Bucket):
    """Passes everything on to ``inner``, save what it was told to fail, damage or hide.

    ``operations`` lists every (verb, key) that was asked for, in order, failed ones too. Safe for
    use by several threads.
    """

    def __init__(self, inner: Bucket) -> None:
        super().__init__(inner.store, inner.url, local=inner.local)
        self.inner = inner
        self.operations: list[tuple[Verb, str]] = []
        self._failures: list[_Failure] = []
        self._damages: list[tuple[str, Callable[[bytes], bytes]]] = []
        self._hidden: list[str] = []
        self._lock = threading.Lock()

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
        """Fail the ``at``-th operation from now of this verb (None is any) on such a key (a
        pattern as in a shell), and those behind it, ``times`` in all (None is for ever).

        With ``done`` the operation takes place before ``error`` is raised.
        """
        with self._lock:
            self._failures.append(_Failure(verb, key, at, times, done, error))

    def damage(self, key: str, change: Callable[[bytes], bytes]) -> None:
        """Let `get` return ``change`` of what lies at such a key."""
        with self._lock:
            self._damages.append((key, change))

    def hide(self, key: str) -> None:
        """Let `get`, `exists` and `list` not see such keys. What lies there stays."""
        with self._lock:
            self._hidden.append(key)

    def heal(self) -> None:
        """Work again, in every way; ``operations`` stays."""
        with self._lock:
            self._failures.clear()
            self._damages.clear()
            self._hidden.clear()

    def get(self, key: str, *, limit: int) -> bytes | None:
        """As `Bucket.get`."""
        data = self._do("get", key, lambda: self.inner.get(key, limit=limit))
        if data is None or self._is_hidden(key):
            return None
        with self._lock:
            damages = [change for pattern, change in self._damages if fnmatchcase(key, pattern)]
        for change in damages:
            data = change(data)
        return data

    def read_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> list[memoryview] | None:
        """As `Bucket.read_ranges`; damage is done to the whole object, then the ranges are cut."""
        found = self._do("range", key, lambda: self.inner.read_ranges(key, ranges))
        if found is None or self._is_hidden(key):
            return None
        with self._lock:
            damages = [change for pattern, change in self._damages if fnmatchcase(key, pattern)]
        if not damages:
            return found
        data = self.inner.get(key, limit=1 << 40) or b""
        for change in damages:
            data = change(data)
        if len(data) < max(start + length for start, length in ranges):
            raise CorruptError("an object ends within the range that was asked for", key=key)
        return [memoryview(data)[start : start + length] for start, length in ranges]

    def put(self, key: str, data: bytes) -> None:
        """As `Bucket.put`."""
        self._do("put", key, lambda: self.inner.put(key, data))

    def create(self, key: str, data: bytes) -> bool:
        """As `Bucket.create`."""
        return self._do("create", key, lambda: self.inner.create(key, data))

    def look(self, key: str) -> Entry | None:
        """As `Bucket.look`; counted as ``exists``, which rests on it."""
        found = self._do("exists", key, lambda: self.inner.look(key))
        return None if self._is_hidden(key) else found

    def entries(self, prefix: str, *, after: str | None = None) -> Sequence[Entry]:
        """As `Bucket.entries`; counted as ``list``, which rests on it."""
        found = self._do("list", prefix, lambda: self.inner.entries(prefix, after=after))
        return [entry for entry in found if not self._is_hidden(entry.key)]

    def delete(self, key: str) -> None:
        """As `Bucket.delete`."""
        self._do("delete", key, lambda: self.inner.delete(key))

    def _do(self, verb: Verb, key: str, operation: Callable[[], T]) -> T:
        with self._lock:
            self.operations.append((verb, key))
            # Every failure counts every operation of its own, whichever of them strikes first.
            struck = [failure for failure in self._failures if failure.strikes(verb, key)]
        if struck and not struck[0].done:
            raise struck[0].error(verb, key)
        result = operation()
        if struck:
            raise struck[0].error(verb, key)
        return result

    def _is_hidden(self, key: str) -> bool:
        with self._lock:
            return any(fnmatchcase(key, pattern) for pattern in self._hidden)
