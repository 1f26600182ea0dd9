"""Reading and starting a run's chain of versions."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import blake3

from deltawire.codec import ITEMSIZE
from deltawire.errors import BugError, CorruptError, InputError, RetryError
from deltawire.store import Bucket
from deltawire.wire import keys
from deltawire.wire.manifest import MAX_MANIFEST_BYTES, BlobRef, Manifest, decode_manifest
from deltawire.wire.objects import encode_json
from deltawire.wire.run import MAX_RUN_BYTES, Run, decode_run

T = TypeVar("T")

RETRIES = 5
FIRST_PAUSE_S = 0.1


def with_retries(action: Callable[[], T], *, pause: Callable[[float], None] = time.sleep) -> T:
    """Run ``action``; on `RetryError` again, at most `RETRIES` times, pausing longer each time."""
    for attempt in range(RETRIES + 1):
        try:
            return action()
        except RetryError:
            if attempt == RETRIES:
                raise
            pause(FIRST_PAUSE_S * 2**attempt)
    raise BugError("the retry loop ended without a result")


def read_run(bucket: Bucket) -> Run | None:
    """The run in this bucket, None if there is none; raises `CorruptError`."""
    data = bucket.get(keys.RUN, limit=MAX_RUN_BYTES)
    if data is None:
        return None
    run = decode_run(data, run=bucket.url, key=keys.RUN)
    for tensor in run.tensors:
        if tensor.dtype not in ITEMSIZE:
            raise CorruptError(
                f"tensor {tensor.name[:80]!r} has the unknown dtype {tensor.dtype!r}",
                run=bucket.url,
                key=keys.RUN,
            )
    return run


def create_run(bucket: Bucket, run: Run) -> Run:
    """Write ``run.json``, or take up the run that is already there.

    Raises `InputError` if that one is of another model: other tensors, or another version 0.
    """
    existing = read_run(bucket)
    if existing is None and bucket.create(keys.RUN, encode_json(run)):
        return run
    existing = existing or read_run(bucket)
    if existing is None:
        raise RetryError("run.json was there and is gone", run=bucket.url, key=keys.RUN)
    if existing.tensors != run.tensors or existing.digest != run.digest:
        raise InputError(
            "a run with another model is already here",
            hint="choose another --out or bucket, or the model this run was started from",
            run=bucket.url,
        )
    return existing


def read_manifest(bucket: Bucket, run: Run, version: int) -> Manifest | None:
    """The manifest of ``version``, None if it is not committed; raises `CorruptError`."""
    key = keys.manifest(version)
    data = bucket.get(key, limit=MAX_MANIFEST_BYTES)
    if data is None:
        return None
    return decode_manifest(data, version=version, tensors=run.tensors, run=bucket.url, key=key)


def newest_version(bucket: Bucket) -> int | None:
    """The newest committed version by listing, None if there is none."""
    numbers = [(keys.trailing_number(key), key) for key in bucket.list(keys.MANIFESTS)]
    # Only what `read_manifest` would find again counts: not a stray copy beside the manifests.
    return max(
        (number for number, key in numbers if number is not None and key == keys.manifest(number)),
        default=None,
    )


def put_blob(bucket: Bucket, data: bytes) -> BlobRef:
    """Store an immutable blob under the BLAKE3 of its content."""
    digest = blake3.blake3(data).hexdigest()
    key = keys.blob(digest)
    with_retries(lambda: bucket.create(key, data))
    return BlobRef(hash=digest, bytes=len(data))


def get_blob(bucket: Bucket, ref: BlobRef, *, version: int | None = None) -> bytes:
    """Fetch a blob and verify it against its name; raises `CorruptError` if it is not there,
    or not what its name says."""
    key = keys.blob(ref.hash)
    data = bucket.get(key, limit=ref.bytes)
    if data is None:
        raise CorruptError("a blob is missing", run=bucket.url, version=version, key=key)
    if len(data) != ref.bytes or blake3.blake3(data).hexdigest() != ref.hash:
        raise CorruptError(
            "a blob's content does not match its name", run=bucket.url, version=version, key=key
        )
    return data
