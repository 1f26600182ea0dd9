"""Boundaries, sweeps and parts: small objects by which writers of a run know of each other."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from deltawire.errors import CorruptError
from deltawire.wire.manifest import Index, Payload, Sum
from deltawire.wire.objects import FORMAT
from deltawire.wire.run import Hash, Identity, Run
from deltawire.wire.seal import unseal

MAX_FLOOR_BYTES = 1 << 16
MAX_INTENT_BLOBS = 1 << 12
MAX_INTENT_BYTES = 1 << 19


class RetentionFloor(msgspec.Struct, frozen=True, kw_only=True):
    """Every version below ``version`` is closed: no publisher may commit it, and retention may
    take it. Boundaries are only ever created, and the highest one counts."""

    format: int = FORMAT
    run: Identity
    version: Index


class DeletionIntent(msgspec.Struct, frozen=True, kw_only=True):
    """The blobs that retention is about to delete, by hash. Never signed: it orders nothing, it
    makes writers look once more."""

    format: int = FORMAT
    run: Identity
    blobs: Annotated[list[Hash], Meta(max_length=MAX_INTENT_BLOBS)]


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """What one of ``ranks`` ranks adds to a version: its pieces, uploaded and waiting for the
    leader's manifest. ``base_digest`` is that of the whole model at the base, ``digest`` that of
    what the rank holds of the version: those of all ranks add up to the version's digest."""

    format: int = FORMAT
    run: Identity
    version: Index
    rank: Annotated[int, Meta(ge=0, lt=1 << 16)]
    ranks: Annotated[int, Meta(ge=1, le=1 << 16)]
    epoch: Index
    base_digest: Sum
    digest: Sum
    delta: Payload | None = None
    anchor: Payload | None = None


def decode_intent(data: bytes, *, table: Run, run: str, key: str) -> DeletionIntent:
    """Parse a sweep; raises `CorruptError`."""
    sweep = unseal(data, DeletionIntent, run=run, key=key)
    if sweep.format != FORMAT or sweep.run != table.id:
        raise CorruptError("a sweep of something else", run=run, key=key)
    return sweep


def decode_part(data: bytes, *, version: int, rank: int, table: Run, run: str, key: str) -> Part:
    """Parse a part; its pieces are checked when the manifest is made of them."""
    part = unseal(data, Part, run=run, key=key)
    if part.format != FORMAT or (part.run, part.version, part.rank) != (table.id, version, rank):
        raise CorruptError("a part of something else", run=run, version=version, key=key)
    return part
