"""Probes whether a store honors create-if-absent, on which every commit depends."""

from __future__ import annotations

import secrets
from contextlib import suppress

from deltawire.errors import CorruptError, DeltawireError, InputError, UnreadableError
from deltawire.store.bucket import Bucket

PROBES = "store-probes/"
"""Keys with which writers probe the store; they are deleted immediately."""

ATTEMPTS = 3
"""The most probes before the store's answers count as contradictory."""


def overwrites_on_create(bucket: Bucket, key: str) -> bool:
    """Returns whether a create of an existing object overwrites it.

    Leaves the object unchanged, because it is overwritten with its own bytes; use it on immutable
    objects only. Also False if the caller may not write there, or the object is missing.
    """
    if bucket.local:
        return False
    size = bucket.size(key)
    # Read twice: a damaged answer would be written over the object.
    first, second = (None if size is None else bucket.get(key, limit=size) for _ in range(2))
    try:
        return (
            first is not None
            and first == second
            and bucket.create(key, first)
            and bucket.create(key, first)
        )
    except InputError:
        return False


def check_create_if_absent(bucket: Bucket) -> None:
    """Raises `InputError` if a second create of one key overwrites the first.

    Stores that ignore ``If-None-Match: *`` do: two publishers would both believe that they
    committed a version, and readers would follow either one. Costs four requests; local buckets
    honor it and are not probed. Answers that contradict each other are asked for again, with
    another key; `UnreadableError` if all do.
    """
    if bucket.local:
        return
    mine, other = b"first\n", b"second\n"
    claims = 0
    for _ in range(ATTEMPTS):
        key = PROBES + secrets.token_hex(16)
        found: bytes | None = None
        try:
            bucket.create(key, mine)
            made = bucket.create(key, other)
            with suppress(CorruptError):  # An answer that is too long says nothing.
                found = bucket.get(key, limit=64)
        finally:
            with suppress(DeltawireError):
                bucket.delete(key)
        if not made and found == mine:
            return
        claims += made
        if found == other or claims == ATTEMPTS:
            raise InputError(
                "the store overwrites objects that must be created only once (it ignores "
                "If-None-Match)",
                hint="use a store that supports conditional writes; docs/STORES.md lists some",
                run=bucket.url,
            )
    raise UnreadableError(
        "the store's answers about an object that was created twice contradict each other, so "
        "nothing was published",
        hint="start again; deltawire doctor examines the store",
        run=bucket.url,
    )
