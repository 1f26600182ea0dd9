"""Small objects by which the writers of a run coordinate: retention floors, tags, deletion intents,
parts and refusals.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from deltawire.errors import CorruptError
from deltawire.wire.manifest import Line
from deltawire.wire.objects import FORMAT
from deltawire.wire.payload import Index, PayloadRef, Sum
from deltawire.wire.run import Hash, Identity, Run
from deltawire.wire.seal import unseal

MAX_FLOOR_BYTES = 1 << 16
MAX_TAG_BYTES = 1 << 12
MAX_CHILD_BYTES = 1 << 14
MAX_ANNOUNCEMENT_BYTES = 1 << 14
MAX_INTENT_BLOBS = 1 << 12
MAX_INTENT_BYTES = 1 << 19
MAX_REASON = 1024
MAX_REFUSAL_BYTES = 1 << 14


class RetentionFloor(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="format", tag=FORMAT
):
    """Closes every version below ``version``: no publisher may commit one, and retention may delete
    them. Floors are only ever created, and the highest one counts.
    """

    run: Identity
    version: Index
    line: Line = "main"


class Tag(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="format", tag=FORMAT
):
    """Gives a version a name, which is in the key, and keeps it from retention. ``digest`` is that
    of the version's weights.
    """

    run: Identity
    version: Index
    line: Line = "main"
    digest: Sum


class ForkNote(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="format", tag=FORMAT
):
    """Notes a fork that lies in another bucket: its run's id ``child``, the ``version`` that it
    began with, and where it was made, for people to read: nothing opens ``url``."""

    run: Identity
    child: Identity
    version: Index
    url: Annotated[str, Meta(max_length=2048)]
    at: float


class DeletionIntent(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="format", tag=FORMAT
):
    """Announces the blobs that retention is about to delete, by hash. In a signed run it is signed,
    except by a relay, which has no key. It gives no permission; it makes writers check their blobs
    once more.
    """

    run: Identity
    blobs: Annotated[list[Hash], Meta(max_length=MAX_INTENT_BLOBS)]


class Part(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="format", tag=FORMAT
):
    """The contribution of one of ``ranks`` ranks to a version: its pieces, uploaded and waiting for
    the leader's manifest. ``base_digest`` is that of the whole model at the base, ``digest`` that
    of the rank's share of the version; the shares of all ranks add up to the version's digest.
    ``changed`` counts the elements that its delta changes.
    """

    run: Identity
    version: Index
    line: Line = "main"
    rank: Annotated[int, Meta(ge=0, lt=1 << 16)]
    ranks: Annotated[int, Meta(ge=1, le=1 << 16)]
    epoch: Index
    base_digest: Sum
    digest: Sum
    delta: PayloadRef | None = None
    anchor: PayloadRef | None = None
    changed: Index = 0

    @property
    def payloads(self) -> list[PayloadRef]:
        """The delta and the anchor, as far as the part has them."""
        return [ref for ref in (self.delta, self.anchor) if ref is not None]


class Refusal(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="format", tag=FORMAT
):
    """States why ``rank`` cannot take part in a version, so that no other rank waits for it or for
    the manifest.
    """

    run: Identity
    version: Index
    line: Line = "main"
    rank: Annotated[int, Meta(ge=0, lt=1 << 16)]
    reason: Annotated[str, Meta(max_length=MAX_REASON)]


class Announcement(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="format", tag=FORMAT
):
    """Names the version that a publisher was given last, before it is committed, so that the next
    publisher can say that it is missing. ``step`` is the trainer's. No reader depends on it.
    """

    run: Identity
    version: Index
    line: Line = "main"
    epoch: Index
    step: Index | None = None


def decode_announcement(data: bytes, *, table: Run, run: str, key: str) -> Announcement:
    """Parses an announcement; raises `CorruptError`."""
    found = unseal(data, Announcement, run=run, key=key, what="announcement")
    if found.run != table.id:
        raise CorruptError("an announcement of another run", run=run, key=key)
    return found


def decode_intent(data: bytes, *, table: Run, run: str, key: str) -> DeletionIntent:
    """Parses a deletion intent; raises `CorruptError`."""
    intent = unseal(data, DeletionIntent, run=run, key=key, what="deletion intent")
    if intent.run != table.id:
        raise CorruptError("a deletion intent of another run", run=run, key=key)
    return intent


def decode_tag(data: bytes, *, table: Run, run: str, key: str) -> Tag:
    """Parses a tag; raises `CorruptError`."""
    tag = unseal(data, Tag, run=run, key=key)
    if tag.run != table.id:
        raise CorruptError("a tag of another run", run=run, key=key)
    return tag


def decode_refusal(data: bytes, *, version: int, table: Run, run: str, key: str) -> Refusal:
    """Parses a rank's refusal; raises `CorruptError`."""
    refusal = unseal(data, Refusal, run=run, key=key)
    if (refusal.run, refusal.version) != (table.id, version):
        raise CorruptError("a refusal of another run or version", run=run, key=key)
    return refusal


def decode_part(data: bytes, *, version: int, rank: int, table: Run, run: str, key: str) -> Part:
    """Parses a part; raises `CorruptError`. Its pieces are checked when the manifest is built from
    them.
    """
    part = unseal(data, Part, run=run, key=key)
    if (part.run, part.version, part.rank) != (table.id, version, rank):
        raise CorruptError("a part of another run, version or rank", run=run, key=key)
    return part
