"""One bucket prefix behind a few verbs, on any store that obstore speaks.

Of a store, deltawire needs whole-object puts that are atomic, create-if-absent, and reads that
see a finished put. A folder, memory, S3, GCS and Azure all give these; nothing else is assumed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import obstore
from obstore import exceptions
from obstore.store import LocalStore, MemoryStore, ObjectStore, from_url

from deltawire.errors import CorruptError, DeltawireError, InputError, RetryError

REMOTE_SCHEMES = ("s3", "s3a", "gs", "az", "azure", "abfs", "abfss", "adl")


@dataclass(frozen=True)
class ObjectMeta:
    """What a store says of an object without reading it.

    ``modified`` is by the store's clock; of S3, whole seconds from `head` and perhaps finer ones
    from `list_objects`, so that two may differ by up to a second for one object.
    """

    key: str
    bytes: int
    modified: datetime


class Bucket:
    """A prefix in an object store.

    Methods raise `RetryError` when the store does not answer, `InputError` when it refuses
    (permissions, credentials, a full disk, a key that is none), and never any error of the
    store's own library.
    """

    def __init__(self, store: ObjectStore, url: str, *, local: bool) -> None:
        self.store = store
        self.url = url
        self.local = local

    @property
    def poll_s(self) -> float:
        """How long to sleep between two looks for a new object: a folder answers at once."""
        return 0.02 if self.local else 0.5

    def get(self, key: str, *, limit: int) -> bytes | None:
        """The object's bytes, or None if there is no such object.

        Raises `CorruptError` if the object is larger than ``limit`` bytes, before reading it.
        """
        with self._errors("read", key):
            try:
                result = obstore.get(self.store, key)
            except (exceptions.NotFoundError, FileNotFoundError) as error:
                self._only_object_missing(error, key)
                return None
            size = int(result.meta["size"])
            if size > limit:
                raise CorruptError(
                    f"an object of {size} bytes exceeds the limit of {limit}",
                    run=self.url,
                    key=key,
                )
            return bytes(result.bytes())

    def read_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> list[memoryview] | None:
        """The bytes of each ``(start, length)`` of an object, None if there is no such object.

        Ranges are read in parallel, and neighbouring ones together; none may be empty. Raises
        `CorruptError` if the object ends before one of them does.
        """
        starts = [start for start, _ in ranges]
        lengths = [length for _, length in ranges]
        with self._errors("read", key):
            try:
                found = obstore.get_ranges(self.store, key, starts=starts, lengths=lengths)
            except (exceptions.NotFoundError, FileNotFoundError) as error:
                self._only_object_missing(error, key)
                return None
            except exceptions.BaseError:
                size = self.size(key)
                if size is None or size >= max(s + n for s, n in ranges):
                    raise
                found = []
        views = [memoryview(part) for part in found]
        if [len(view) for view in views] != lengths:
            raise CorruptError(
                "an object ends within the range that was asked for", run=self.url, key=key
            )
        return views

    def put(self, key: str, data: bytes) -> None:
        """Store or replace an object, all of it or nothing."""
        with self._errors("write", key):
            obstore.put(self.store, key, data, use_multipart=False)

    def create(self, key: str, data: bytes) -> bool:
        """Store an object if there is none of that name; False if there is."""
        with self._errors("write", key):
            try:
                obstore.put(self.store, key, data, mode="create", use_multipart=False)
            except (exceptions.AlreadyExistsError, FileExistsError):
                return False
            return True

    def exists(self, key: str) -> bool:
        """Whether there is such an object."""
        return self.head(key) is not None

    def size(self, key: str) -> int | None:
        """How many bytes an object has, None if there is no such object."""
        entry = self.head(key)
        return None if entry is None else entry.bytes

    def head(self, key: str) -> ObjectMeta | None:
        """Size and age of an object, None if there is no such object."""
        with self._errors("read", key):
            try:
                return _entry(obstore.head(self.store, key))
            except (exceptions.NotFoundError, FileNotFoundError):
                return None

    def list(self, prefix: str, *, after: str | None = None) -> list[str]:
        """All keys under ``prefix``, sorted; with ``after``, only those that sort behind it."""
        return [entry.key for entry in self.list_objects(prefix, after=after)]

    def list_objects(self, prefix: str, *, after: str | None = None) -> Sequence[ObjectMeta]:
        """As `list`, with size and age of each."""
        with self._errors("list", prefix):
            found = [
                _entry(meta)
                for chunk in obstore.list(self.store, prefix, offset=after)
                for meta in chunk
            ]
        return sorted(found, key=lambda entry: entry.key)

    def list_prefixes(self, prefix: str) -> Sequence[str]:
        """The names directly under ``prefix`` (which ends with a slash) that have keys under them,
        sorted; of a folder, emptied ones too. A store tells them without telling those keys,
        however many there are."""
        with self._errors("list", prefix):
            found = obstore.list_with_delimiter(self.store, prefix)["common_prefixes"]
        return sorted(str(path).rstrip("/").rsplit("/", 1)[-1] for path in found)

    def delete(self, key: str) -> None:
        """Remove an object; one that is not there is no error."""
        with self._errors("delete", key):
            try:
                obstore.delete(self.store, key)
            except (exceptions.NotFoundError, FileNotFoundError) as error:
                self._only_object_missing(error, key)
            except TypeError as error:  # Where the other verbs raise ValueError for such a key.
                raise ValueError(key) from error

    def _only_object_missing(self, error: Exception, key: str) -> None:
        """An object that is not there is an answer; a whole bucket that is not there, an error.

        Else a reader of a misspelt bucket would wait for its first version for ever.
        """
        if _NO_BUCKET.search(str(error)):
            raise _translate(error, "read", self.url, key) from error

    @contextmanager
    def _errors(self, verb: str, key: str) -> Iterator[None]:
        try:
            yield
        except (exceptions.BaseError, OSError) as error:
            raise _translate(error, verb, self.url, key) from error
        except ValueError as error:  # obstore's answer to "..", "a//b" and control characters.
            raise InputError(f"cannot {verb}: not a key", run=self.url, key=key) from error


def _entry(meta: Any) -> ObjectMeta:
    return ObjectMeta(str(meta["path"]), int(meta["size"]), meta["last_modified"])


_REFUSALS = {
    "No space left on device": "free some space; nothing already stored was harmed",
    "Disk quota exceeded": "free some space; nothing already stored was harmed",
    "Permission denied": "check who may write there",
    "Read-only file system": "choose a bucket that can be written",
    "Not a directory": "choose a folder, not a file",
}


# In the answer of S3 and its kin, GCS, Azure. No key of deltawire's can hold a "<".
_NO_BUCKET = re.compile(r"<Code>(NoSuchBucket|ContainerNotFound)</Code>")

# Of a listing that is not allowed, obstore makes an error like any other.
_REFUSED = re.compile(r"Server returned non-2xx status code: 40[13]\b")

# Where S3's credentials are asked for when the environment holds none.
_NO_CREDENTIALS = re.compile(r"latest/(api/token|meta-data/iam)|security-credentials")


def _translate(error: Exception, verb: str, url: str, key: str) -> DeltawireError:
    text = str(error)
    if _NO_BUCKET.search(text):
        return InputError(
            f"cannot {verb}: there is no such bucket",
            hint="check the bucket's name and the endpoint; deltawire makes no buckets",
            run=url,
            key=key,
        )
    for sign, hint in _REFUSALS.items():
        if sign.lower() in text.lower():
            return InputError(f"cannot {verb}: {sign.lower()}", hint=hint, run=url, key=key)
    refused = exceptions.PermissionDeniedError | exceptions.UnauthenticatedError
    if isinstance(error, refused) or _REFUSED.search(text):
        return InputError(
            f"the store refused to {verb}",
            hint="check the credentials and the bucket's name",
            run=url,
            key=key,
        )
    cause = text.strip().splitlines()[0][:300] if text.strip() else type(error).__name__
    hint = "is the bucket reachable?"
    if _NO_CREDENTIALS.search(text):
        hint = "no credentials were found: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
    return RetryError(f"cannot {verb}: {cause}", hint=hint, run=url, key=key)


def open_bucket(location: str, *, create: bool = False, **options: Any) -> Bucket:
    """Open ``location``: a folder, or a ``file://``, ``memory://``, ``s3://``, ``gs://`` or
    ``az://`` URL.

    ``create`` makes a missing folder. Remote stores take their credentials and endpoint from
    the environment, as obstore documents: for S3 and its kin ``AWS_ACCESS_KEY_ID``,
    ``AWS_SECRET_ACCESS_KEY``, ``AWS_REGION`` and ``AWS_ENDPOINT_URL``, which may be plain http.
    ``options`` go to the store as they are and come before the environment, save for
    ``AWS_ENDPOINT_URL_S3``, which obstore puts first. A memory bucket lives in this process alone.

    Raises `InputError` for an empty name (a folder's would be the one of whoever asks), a scheme
    that is not known or a folder that is not there.
    """
    if not location.strip():
        raise InputError(
            "the bucket's name is empty", hint="is the variable set that it is taken from?"
        )
    scheme = urlsplit(location).scheme
    if scheme in ("", "file") or len(scheme) == 1:
        return _open_folder(location, create=create)
    if scheme == "memory":
        return Bucket(MemoryStore(), location, local=True)
    if scheme not in REMOTE_SCHEMES:
        raise InputError(
            f"cannot open the bucket {location}: unknown scheme {scheme}://",
            hint="use a folder, file://, memory://, s3://, gs:// or az://",
        )
    try:
        store = from_url(location, **_remote_options(scheme, options))
    except (exceptions.BaseError, ValueError, TypeError) as error:
        cause = str(error).strip().splitlines()[0][:300]
        raise InputError(f"cannot open the bucket {location}: {cause}") from error
    return Bucket(store, location, local=False)


def _remote_options(scheme: str, options: dict[str, Any]) -> dict[str, Any]:
    """``options``, and what deltawire sets where they say nothing."""
    chosen = dict(options)
    chosen.setdefault("retry_config", {"max_retries": 4, "retry_timeout": timedelta(seconds=20)})
    client: dict[str, Any] = {
        "connect_timeout": timedelta(seconds=5),
        "timeout": timedelta(seconds=60),
        **options.get("client_options", {}),
    }
    chosen["client_options"] = client
    if scheme.startswith("s3"):
        # The order of the AWS tools: the service's own variable before the one for all of them.
        names = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
        found = [value for name in names if (value := os.environ.get(name))]
        if found:
            chosen.setdefault("endpoint", found[0])
        if str(chosen.get("endpoint", "")).startswith("http:"):
            client.setdefault("allow_http", True)
    return chosen


def _open_folder(location: str, *, create: bool) -> Bucket:
    if location.startswith("file:"):
        parts = urlsplit(location)
        if parts.netloc not in ("", "localhost"):
            raise InputError(f"{location} names a host", hint="write file:///absolute/path")
        from urllib.request import url2pathname

        folder = Path(url2pathname(parts.path))
    else:
        folder = Path(location)
    folder = folder.absolute()
    url = "file://" + quote(str(folder))
    try:
        if create:
            folder.mkdir(parents=True, exist_ok=True)
        elif not folder.is_dir():
            raise InputError(f"there is no bucket at {location}", hint="is the path right?")
        store = LocalStore(folder)
    except (OSError, exceptions.BaseError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InputError(
            f"cannot use {folder} as a bucket: {reason}",
            hint="choose a folder that can be written",
        ) from error
    return Bucket(store, url, local=True)
