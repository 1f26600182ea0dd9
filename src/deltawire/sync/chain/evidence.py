"""Evidence: tells an object that is sound from one that is absent, and both from what is unknown.

A read has three outcomes. An answer may be damaged (a flipped bit, a short body, a stale copy)
while the object in the store is whole, so a damaged answer says nothing about the object, and one
that says *not found* says little. Code that destroys, skips, seals or lowers anything for good acts
on evidence only:

- `Sound`: the object was read and checked. One read is enough, so sound reads cost nothing extra.
- `Absent`: the store said so twice, each time in answer to the read and in a listing.
- `Unknown`: neither, after `READS` reads, each on other connections and after a pause.

Two kinds of answers have no check of their own, so two answers must agree: those about objects
without a seal or a signature (`require_agreed`), and listings (`listed_twice`).

On `Unknown` nothing is done. A command ends with `UnreadableError`, which names the object; a
process that goes on says so in its status and tries again.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeAlias, TypeVar

from deltawire.errors import CorruptError, UnreadableError
from deltawire.store import Bucket

T = TypeVar("T")

READS = 3
"""The most reads of one object before its state counts as unknown."""


@dataclass(frozen=True)
class Sound(Generic[T]):
    """The object was read, and its bytes are what its name and format say."""

    value: T


@dataclass(frozen=True)
class Absent:
    """The store said twice that there is no such object, to the read and in a listing."""


@dataclass(frozen=True)
class Unknown:
    """No answer could be used; ``error`` says what was wrong with the last one."""

    error: CorruptError


Evidence: TypeAlias = Sound[T] | Absent | Unknown


def evidence_of(bucket: Bucket, key: str, read: Callable[[], T | None]) -> Evidence[T]:
    """Returns what is known of the object at ``key``, which ``read`` reads from ``bucket``.

    ``read`` returns None if the store says that there is no such object, and raises `CorruptError`
    if the answer is damaged; it may be called several times. Raises `RetryError` if the store does
    not answer.

    Example::

        match evidence_of(bucket, key, partial(read_manifest, bucket, run, 7)):
            case Sound(manifest): ...
            case Absent(): ...
            case Unknown(error): ...
    """
    absent, error = 0, None
    for attempt in range(READS):
        if attempt:
            time.sleep(bucket.poll_s * attempt)
            bucket.reconnect()
        try:
            found = read()
        except CorruptError as damage:
            error = damage  # Only the answer may be damaged: it is asked for again.
            continue
        if found is not None:
            return Sound(found)
        if bucket.is_listed(key):
            error = CorruptError(
                "a listing shows an object that a read does not find", run=bucket.url, key=key
            )
            continue
        absent += 1
        if absent == 2:
            return Absent()
    assert error is not None  # Two reads that found nothing have returned.
    return Unknown(error)


def read_again(bucket: Bucket, key: str, read: Callable[[], T | None]) -> T | None:
    """Returns what ``read`` returns, or, if its answer was damaged, what `evidence_of` finds.

    For callers that ask again for what they do not find. Raises `CorruptError` for an object that
    no connection delivers whole.

    Example::

        part = read_again(bucket, key, partial(read_part, bucket, key))
    """
    try:
        return read()
    except CorruptError:
        found = evidence_of(bucket, key, read)
    if isinstance(found, Unknown):
        raise found.error
    return found.value if isinstance(found, Sound) else None


def require_evidence(
    bucket: Bucket,
    key: str,
    read: Callable[[], T | None],
    *,
    so: str = "nothing was deleted",
) -> T | None:
    """Returns the object at ``key`` if it is sound, None if it is absent (see `evidence_of`).

    Raises `UnreadableError` if that is unknown; ``so`` tells what was not done.

    Example::

        manifest = require_evidence(bucket, key, partial(read_manifest, bucket, run, 7))
    """
    found = evidence_of(bucket, key, read)
    if isinstance(found, Unknown):
        raise unreadable(bucket, key, found.error, so=so)
    return found.value if isinstance(found, Sound) else None


def require_agreed(
    bucket: Bucket, key: str, *, limit: int, so: str = "nothing was deleted"
) -> bytes | None:
    """Returns the bytes of an object without a seal, None if it is absent: what two reads agree on.

    Raises `UnreadableError` as `require_evidence`.

    Example::

        data = require_agreed(bucket, key, limit=MAX_SEGMENT_BYTES)
    """

    def read() -> bytes | None:
        first, second = (bucket.get(key, limit=limit) for _ in range(2))
        if first != second:
            raise CorruptError("two answers to the same read differ", run=bucket.url, key=key)
        return first

    return require_evidence(bucket, key, read, so=so)


def listed_twice(bucket: Bucket, prefix: str, *, after: str | None = None) -> list[str]:
    """Lists the keys that one of two listings shows, sorted: one that came back short leaves
    nothing out."""
    return sorted({key for _ in range(2) for key in bucket.list(prefix, after=after)})


def unreadable(
    bucket: Bucket, key: str, error: CorruptError, *, so: str = "nothing was deleted"
) -> UnreadableError:
    """Makes the error of an act that is not done because an object's state is unknown."""
    return UnreadableError(
        f"an object cannot be read, so {so}: {error.message}",
        hint="run the command again; if fsck finds the object damaged too, repair or remove it",
        run=error.run or bucket.url,
        version=error.version,
        key=error.key or key,
    )
