"""The base of buckets that wrap another bucket and change how its operations behave."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from typing import Literal, Self, TypeVar

from deltawire.errors import BugError
from deltawire.store.bucket import Bucket, ObjectMeta, require_bucket

Verb = Literal["get", "range", "put", "create", "head", "list", "delete"]
"""An operation's kind; ``list`` covers prefixes too."""

T = TypeVar("T")


class DelegatingBucket(Bucket):
    """Passes every operation on to ``inner``, each through `_call`.

    A subclass that treats all operations alike overrides `_call` only; one that looks at what an
    operation moved overrides that operation. One that is put around a bucket of
    `deltawire.store.open_bucket` overrides `with_inner` too.

    Example::

        class LoggingBucket(DelegatingBucket):
            def _call(self, verb, key, operation):
                print(verb, key)
                return operation()

            def with_inner(self, inner):
                return self._moved(inner)
    """

    def __init__(self, inner: Bucket) -> None:
        require_bucket(inner)
        super().__init__(inner.store, inner.url, local=inner.local)
        self.inner = inner

    def with_inner(self, inner: Bucket) -> Bucket:  # noqa: ARG002
        """Returns this layer over another connection to the same bucket, or over other retries.

        Raises `BugError` if the class does not override this. Leaving out the layer, or what is to
        change below it, would undo a layer that forbids, renames or records operations.
        """
        name = type(self).__name__
        raise BugError(
            f"the bucket class {name} has no with_inner, so the retries below it cannot change",
            hint="define with_inner, usually as `return self._moved(inner)`; or put the layer "
            "around open_bare_bucket(...), and RetryingBucket around the layer",
        )

    def _moved(self, inner: Bucket) -> Self:
        """Returns a shallow copy over ``inner``: objects that this layer holds, such as counters
        and locks, are shared, and plain numbers are not."""
        other = copy(self)
        other.store, other.inner = inner.store, inner
        return other

    def _call(self, verb: Verb, key: str, operation: Callable[[], T]) -> T:  # noqa: ARG002
        """Runs one operation on ``inner`` and returns its result."""
        return operation()

    @property
    def poll_s(self) -> float:
        """As `Bucket.poll_s`."""
        return self.inner.poll_s

    def get(self, key: str, *, limit: int) -> bytes | None:
        """As `Bucket.get`."""
        return self._call("get", key, lambda: self.inner.get(key, limit=limit))

    def read_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> list[memoryview] | None:
        """As `Bucket.read_ranges`."""
        return self._call("range", key, lambda: self.inner.read_ranges(key, ranges))

    def put(self, key: str, data: bytes) -> None:
        """As `Bucket.put`."""
        self._call("put", key, lambda: self.inner.put(key, data))

    def create(self, key: str, data: bytes) -> bool:
        """As `Bucket.create`."""
        return self._call("create", key, lambda: self.inner.create(key, data))

    def head(self, key: str) -> ObjectMeta | None:
        """As `Bucket.head`."""
        return self._call("head", key, lambda: self.inner.head(key))

    def list_objects(self, prefix: str, *, after: str | None = None) -> Sequence[ObjectMeta]:
        """As `Bucket.list_objects`."""
        return self._call("list", prefix, lambda: self.inner.list_objects(prefix, after=after))

    def is_listed(self, key: str) -> bool:
        """As `Bucket.is_listed`."""
        return self._call("list", key, lambda: self.inner.is_listed(key))

    def list_prefixes(self, prefix: str) -> Sequence[str]:
        """As `Bucket.list_prefixes`."""
        return self._call("list", prefix, lambda: self.inner.list_prefixes(prefix))

    def delete(self, key: str) -> None:
        """As `Bucket.delete`."""
        self._call("delete", key, lambda: self.inner.delete(key))

    def reconnect(self) -> None:
        """As `Bucket.reconnect`."""
        self.inner.reconnect()
