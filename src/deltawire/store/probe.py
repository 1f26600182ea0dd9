"""Probes whether a store honors create-if-absent, on which every commit depends."""

from __future__ import annotations

import secrets
from contextlib import suppress

from deltawire.errors import DeltawireError, InputError
from deltawire.store.bucket import Bucket

PROBES = "store-probes/"
"""Keys with which writers probe the store; they are deleted immediately."""


def overwrites_on_create(bucket: Bucket, key: str) -> bool:
    """Returns whether a create of an existing object overwrites it.

    Leaves the object unchanged, because it is overwritten with its own bytes; use it on immutable
    objects only. Also False if the caller may not write there, or the object is missing.
    """
    if bucket.local:
        return False
    size = bucket.size(key)
    data = None if size is None else bucket.get(key, limit=size)
    try:
        return data is not None and bucket.create(key, data)
    except InputError:
        return False


def check_create_if_absent(bucket: Bucket) -> None:
    """Raises `InputError` if a second create of one key overwrites the first.

    Stores that ignore ``If-None-Match: *`` do: two publishers would both believe that they
    committed a version, and readers would follow either one. Costs four requests; local buckets
    honor it and are not probed.
    """
    if bucket.local:
        return
    key = PROBES + secrets.token_hex(16)
    mine, other = b"first\n", b"second\n"
    try:
        bucket.create(key, mine)
        if not bucket.create(key, other) and bucket.get(key, limit=64) == mine:
            return
    finally:
        with suppress(DeltawireError):
            bucket.delete(key)
    raise InputError(
        "the store overwrites objects that must be created only once (it ignores If-None-Match)",
        hint="use a store that supports conditional writes; docs/STORES.md lists some",
        run=bucket.url,
    )
