"""``archive/`` holds the events of processes that have ended, many streams in one object."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from deltawire.wire.objects import FORMAT
from deltawire.wire.payload import Index

MAX_ARCHIVE_BYTES = 128 << 20


class ArchivedSegment(msgspec.Struct, frozen=True, array_like=True):
    """One segment of an event stream: its original bytes."""

    stream: Annotated[str, Meta(max_length=64)]
    number: Index
    data: bytes


class EventArchive(msgspec.Struct, frozen=True, kw_only=True):
    """Whole streams, the segments of each in order. A stream may be archived twice, if the process
    that archived it died before it deleted the stream."""

    format: int = FORMAT
    segments: list[ArchivedSegment]
