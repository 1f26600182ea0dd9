"""Defines `Bucket`: a prefix on any object store that obstore supports.

deltawire needs atomic whole-object puts, create-if-absent, and reads that see every finished put. A
folder, memory, S3, GCS and Azure provide these; nothing else is assumed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import PurePath
from typing import Any, TypeVar

import obstore
from obstore import exceptions
from obstore.store import ObjectStore

from deltawire.errors import CorruptError, InputError, RetryError
from deltawire.store.lanes import current_lane, in_lane
from deltawire.store.ranges import AT_ONCE, RangeRequest, range_requests
from deltawire.store.repeats import Repeats, opened_again, repeat
from deltawire.store.request_limit import limit_of
from deltawire.store.traffic import count
from deltawire.store.translation import (
    is_panic,
    means_conflict,
    means_no_bucket,
    outcome_of,
    translate,
)
from deltawire.store.worker_threads import WorkerThreads

T = TypeVar("T")

MULTIPART_BYTES = 64 << 20
"""Larger objects are uploaded in parts: stores accept at most 5 GiB in one request."""

PART_BYTES = 16 << 20
MAX_PARTS = 9000

PAGE = 1000
"""The keys of one page of a listing: stores return at most so many."""
CONFLICTS = 8
"""How many times a create is repeated while another conditional write to the key is in progress."""


@dataclass(frozen=True)
class ObjectMeta:
    """Key, size and age of an object.

    ``modified`` is by the store's clock. S3 gives whole seconds from `head` and sometimes fractions
    from `list_objects`, so the two may differ by up to a second for one object. ``version`` is the
    store's id of what it keeps when the object is replaced or deleted; empty if the store states
    none.

    Example::

        found = bucket.head("run.json")
        print(found.key, found.bytes, found.modified)
    """

    key: str
    bytes: int
    modified: datetime
    version: str = ""


class Bucket:
    """A prefix in an object store.

    Methods raise `RetryError` when the store does not answer, `InputError` when it refuses
    (permissions, credentials, a full disk, an invalid key), and never an error of the store's
    library.

    Example::

        bucket = open_bucket("s3://bucket/run")
        bucket.create("a/1", b"data")
        bucket.get("a/1", limit=100)
    """

    def __init__(self, store: ObjectStore, url: str, *, local: bool) -> None:
        self.store = store
        self.url = url
        self.local = local
        self._plain: tuple[ObjectStore, ObjectStore, Repeats] | None = None

    @property
    def poll_s(self) -> float:
        """Seconds to sleep between two polls for a new object; short for a local store, which
        answers at once.
        """
        return 0.02 if self.local else 0.5

    def get(self, key: str, *, limit: int) -> bytes | None:
        """Returns an object's bytes, or None if there is no such object.

        Raises `CorruptError` if the object is larger than ``limit`` bytes, before reading it.
        """
        with self._errors("read", key):
            try:
                data = self._read(key, lambda store: self._get(store, key, limit))
            except (exceptions.NotFoundError, FileNotFoundError) as error:
                self._check_bucket_exists(error, key)
                return None
        count("read_bytes", len(data))
        return data

    def _get(self, store: ObjectStore, key: str, limit: int) -> bytes:
        result = obstore.get(store, key)
        self._check_size(int(result.meta["size"]), limit, key)
        return bytes(result.bytes())

    def read_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> list[memoryview] | None:
        """Returns the bytes of each ``(start, length)``, or None if there is no such object.

        Neighboring ranges are read by one request, up to `deltawire.store.ranges.AT_ONCE` requests
        in parallel; none may be empty. Raises `CorruptError` if the object ends within a range,
        `RetryError` if a response does.
        """
        with self._errors("read", key):
            requests = range_requests(ranges)
            try:
                answers = self._answers(key, requests)
            except (exceptions.NotFoundError, FileNotFoundError) as error:
                self._check_bucket_exists(error, key)
                return None
            except BaseException as error:
                # obstore panics on some responses that are too short.
                if not is_panic(error) and not isinstance(error, exceptions.BaseError):
                    raise
                self._check_covers(key, ranges)
                raise
        if any(len(data) != one.length for one, data in zip(requests, answers, strict=True)):
            self._check_covers(key, ranges)
            raise RetryError("cannot read: the response was cut short", run=self.url, key=key)
        count("read_bytes", sum(len(data) for data in answers))
        parts = [memoryview(b"")] * len(ranges)
        for one, data in zip(requests, answers, strict=True):
            for number in one.ranges:
                start, length = ranges[number]
                parts[number] = data[start - one.start : start - one.start + length]
        return parts

    def _answers(self, key: str, requests: Sequence[RangeRequest]) -> list[memoryview]:
        """Returns the bytes of each request. obstore's own ``get_ranges`` would join ranges that
        touch, and read a large blob over one connection."""

        lane = current_lane()

        def read(one: RangeRequest) -> memoryview:
            with in_lane(lane):
                data = self._read(
                    key,
                    lambda store: obstore.get_range(store, key, start=one.start, length=one.length),
                )
            return memoryview(data)

        if self.local or len(requests) < 2:
            return [read(one) for one in requests]
        with WorkerThreads(min(AT_ONCE, len(requests)), "ranges") as pool:
            return list(pool.map(read, requests))

    def put(self, key: str, data: bytes) -> None:
        """Stores or replaces an object, all of it or nothing."""
        with self._errors("write", key):
            if len(data) <= MULTIPART_BYTES:
                self._write(key, lambda store: obstore.put(store, key, data, use_multipart=False))
                count("written_bytes", len(data))
                return
            # Of an upload in parts, the store's library repeats the part that failed.
            part = max(PART_BYTES, len(data) // MAX_PARTS)
            obstore.put(self.store, key, data, use_multipart=True, chunk_size=part)
            count("requests", 2 - (-len(data) // part))  # One to begin, one to end.
            count("written_bytes", len(data))

    def create(self, key: str, data: bytes) -> bool:
        """Stores an object unless its key exists; returns whether it was stored.

        S3 answers 409 while another conditional write to the key is in progress; that decides
        nothing, so the write is tried again. So is one that got no answer, which may find the
        object that it stored itself: a caller that must know reads it back.
        """
        pause_s = 0.02
        with self._errors("write", key):
            for attempt in range(CONFLICTS + 1):
                try:
                    self._write(
                        key,
                        lambda store: obstore.put(
                            store, key, data, mode="create", use_multipart=False
                        ),
                    )
                except (exceptions.AlreadyExistsError, FileExistsError) as error:
                    if not means_conflict(error):
                        return False
                    if attempt == CONFLICTS:
                        break
                    time.sleep(pause_s * 2**attempt)
                else:
                    count("written_bytes", len(data))
                    return True
        raise RetryError("cannot write: another write is in progress", run=self.url, key=key)

    def exists(self, key: str) -> bool:
        """Returns whether there is such an object."""
        return self.head(key) is not None

    def size(self, key: str) -> int | None:
        """Returns an object's size in bytes, or None if there is no such object."""
        found = self.head(key)
        return None if found is None else found.bytes

    def head(self, key: str) -> ObjectMeta | None:
        """Returns size and age of an object, or None if there is no such object."""
        with self._errors("read", key):
            try:
                return _meta(self._read(key, lambda store: obstore.head(store, key)))
            except (exceptions.NotFoundError, FileNotFoundError):
                return None

    def list(self, prefix: str, *, after: str | None = None) -> list[str]:
        """Lists all keys under ``prefix``, sorted; with ``after``, only those that sort after
        it.
        """
        return [found.key for found in self.list_objects(prefix, after=after)]

    def list_objects(self, prefix: str, *, after: str | None = None) -> Sequence[ObjectMeta]:
        """Lists as `list` does, with the size and age of each object.

        An object that another program stored under a key with an empty segment (``a//b``) is
        skipped; the store's library fails on the listing page that holds it.
        """
        with self._errors("list", prefix):
            try:
                found = [*self._page_through(prefix, after)]
            except exceptions.InvalidPathError:
                found = [
                    one for one in self._list_around(prefix) if after is None or one.key > after
                ]
        return sorted(found, key=lambda meta: meta.key)

    def _page_through(self, prefix: str | None, after: str | None) -> Iterator[ObjectMeta]:
        for page in self._pages(prefix, after):
            yield from page

    def _pages(self, prefix: str | None, after: str | None) -> Iterator[Sequence[ObjectMeta]]:
        """Yields the pages of a listing, each one request. After one that failed, a remote listing
        goes on where it was: its keys are in order."""
        pages: Iterator[Any] | None = None

        def page(store: ObjectStore) -> Sequence[ObjectMeta] | None:
            nonlocal pages
            try:
                if pages is None:
                    pages = iter(obstore.list(store, prefix, offset=after, chunk_size=PAGE))
                found = next(pages, None)
            except BaseException:
                pages = None
                raise
            return None if found is None else [_meta(one) for one in found]

        while (found := self._read(prefix or "", page)) is not None:
            yield found
            if not self.local and len(found) < PAGE:
                return  # Only the last one is shorter.
            after = after if self.local else max(one.key for one in found)

    def _list_around(self, prefix: str) -> Iterator[ObjectMeta]:
        """Lists folder by folder. An empty segment deeper down then belongs to one folder only.

        Directly below a folder, a key with an empty segment sorts before all keys of deltawire,
        which begin with a letter or a digit, so the listing starts after it.
        """
        try:
            level = self._level(prefix)
        except exceptions.InvalidPathError:
            folder = prefix.rstrip("/")
            yield from self._page_through(prefix, f"{folder}/0" if folder else "0")
            return
        yield from map(_meta, level["objects"])
        for below in level["common_prefixes"]:
            try:
                found = [*self._page_through(f"{str(below).rstrip('/')}/", None)]
            except exceptions.InvalidPathError:
                found = [*self._list_around(f"{str(below).rstrip('/')}/")]
            yield from found

    def is_listed(self, key: str) -> bool:
        """Returns whether a listing shows an object; one page of the listing is read."""
        folder = f"{key.rpartition('/')[0]}/" if "/" in key else None
        with self._errors("list", key):
            for page in self._pages(folder, key[:-1]):
                names = [one.key for one in page]
                if key in names:
                    return True
                if not self.local and names and max(names) > key:
                    return False  # Remote stores list in order; folders and memory do not.
        return False

    def list_prefixes(self, prefix: str) -> Sequence[str]:
        """Lists the names directly under ``prefix``, which ends with a slash, that have keys below.

        They are sorted; a folder lists emptied ones too. The keys below are not listed, however
        many there are.
        """
        with self._errors("list", prefix):
            try:
                found = self._level(prefix)["common_prefixes"]
            except exceptions.InvalidPathError:
                below = [one.key.removeprefix(prefix) for one in self._list_around(prefix)]
                return sorted({key.partition("/")[0] for key in below if "/" in key})
        return sorted(str(path).rstrip("/").rsplit("/", 1)[-1] for path in found)

    def _level(self, prefix: str) -> Any:
        return self._read(prefix, lambda store: obstore.list_with_delimiter(store, prefix))

    def delete(self, key: str) -> None:
        """Removes an object by one request; it is no error if there is none.

        The request is not repeated here after no answer: a repeated one may be answered while the
        first is still under way, and the caller, who could not know, would take it for settled.
        """
        with self._errors("delete", key):
            try:
                self._write(key, lambda store: obstore.delete(store, key), once=True)
            except (exceptions.NotFoundError, FileNotFoundError) as error:
                self._check_bucket_exists(error, key)
            except TypeError as error:  # The other operations raise ValueError for such a key.
                raise ValueError(key) from error

    def reconnect(self) -> None:
        """Makes later requests use new connections, for a caller that doubts an answer."""
        if not self.local:
            self.store = opened_again(self.store)

    def _check_size(self, size: int, limit: int, key: str) -> None:
        if size > limit:
            raise CorruptError(
                f"an object of {size} bytes exceeds the limit of {limit}", run=self.url, key=key
            )

    def _check_covers(self, key: str, ranges: Sequence[tuple[int, int]]) -> None:
        """Raises `CorruptError` if the object is there and ends within one of ``ranges``."""
        size = self.size(key)
        if size is not None and size < max(start + length for start, length in ranges):
            raise CorruptError("the object ends within the requested range", run=self.url, key=key)

    def _check_bucket_exists(self, error: Exception, key: str) -> None:
        """Raises if the whole bucket is missing, as opposed to the object only.

        Otherwise a reader of a misspelled bucket would wait forever for its first version.
        """
        if means_no_bucket(error):
            raise translate(error, "read", self.url, key) from error

    def _read(self, key: str, request: Callable[[ObjectStore], T]) -> T:
        """Makes a read. Each attempt waits until this process may send one more (see
        `deltawire.store.request_limit`)."""
        if self.local:
            count("requests")
            return request(self.store)
        store, repeats = self._repeated()
        lane = current_lane()
        limit = limit_of(self.url, first=lane == "first")

        def attempt() -> T:
            with limit.request(outcome_of, bulk=lane == "bulk") as asked:
                count("requests")
                answer = request(store)
                if isinstance(answer, bytes | obstore.Bytes):
                    asked.size = len(answer)
                return answer

        return repeat(attempt, repeats, url=self.url, key=key)

    def _write(self, key: str, request: Callable[[ObjectStore], T], *, once: bool = False) -> T:
        """Makes a write, which waits for no window: writes are few, and readers wait for them."""
        if self.local:
            count("requests")
            return request(self.store)
        store, repeats = self._repeated()

        def attempt() -> T:
            count("requests")
            return request(store)

        return repeat(attempt, repeats, url=self.url, key=key, once=once)

    def _repeated(self) -> tuple[ObjectStore, Repeats]:
        """Returns a store whose library repeats nothing, and how its requests are repeated here, as
        the library was told to: only so does the window see each refusal."""
        if self._plain is None or self._plain[0] is not self.store:
            self._plain = self.store, opened_again(self.store, retries=0), Repeats.of(self.store)
        return self._plain[1:]

    @contextmanager
    def _errors(self, verb: str, key: str) -> Iterator[None]:
        try:
            yield
        except (exceptions.BaseError, OSError) as error:
            raise translate(error, verb, self.url, key) from error
        except ValueError as error:  # obstore raises this for "..", "a//b" and control characters.
            raise InputError(f"cannot {verb}: not a key", run=self.url, key=key) from error
        except BaseException as error:
            if not is_panic(error):
                raise
            raise translate(error, verb, self.url, key) from error


def _meta(meta: Any) -> ObjectMeta:
    return ObjectMeta(
        str(meta["path"]), int(meta["size"]), meta["last_modified"], meta.get("version") or ""
    )


def require_bucket(given: Any) -> None:
    """Raises `InputError` unless ``given`` is a bucket; passing its location is an easy mistake."""
    if isinstance(given, Bucket):
        return
    if isinstance(given, str | PurePath):
        raise InputError(
            f"expected a bucket, got the location {str(given)!r}",
            hint=f"pass open_bucket({str(given)!r}), with create=True for a new folder",
        )
    raise InputError(
        f"expected a bucket, got a {type(given).__name__}", hint='pass open_bucket("s3://…")'
    )
