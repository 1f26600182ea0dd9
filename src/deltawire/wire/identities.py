"""Identities of versions, in segments: an index for publishers of directories.

It repeats what manifests state, so it may be deleted: it is then written again from them.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from blake3 import blake3
from msgspec import Meta

from deltawire.errors import CorruptError
from deltawire.wire.objects import FORMAT
from deltawire.wire.payload import Index, Sum
from deltawire.wire.run import Identity, ModelFile, Run
from deltawire.wire.seal import unseal

SEGMENT_VERSIONS = 1 << 10
"""Segment n is about the versions from n times this number on."""

MAX_SEGMENT_BYTES = 1 << 21
MAX_NAME = 255


class VersionIdentity(msgspec.Struct, frozen=True, array_like=True):
    """A version's digest, its files as `files_key` gives them (empty: not known), and the name of
    the directory that it was made from, empty without one.
    """

    version: Index
    digest: Sum
    files: Annotated[str, Meta(pattern=r"^([0-9a-f]{32})?\Z")] = ""
    name: Annotated[str, Meta(max_length=MAX_NAME)] = ""


class IdentitySegment(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="format", tag=FORMAT
):
    """The identities of versions of one segment, ascending."""

    run: Identity
    segment: Index
    versions: Annotated[list[VersionIdentity], Meta(max_length=SEGMENT_VERSIONS)]


def files_key(files: list[ModelFile]) -> str:
    """Returns 32 hexadecimal digits that are equal for equal files, in any order."""
    names = sorted(f"{file.name}\0{file.blob}" for file in files)
    return blake3("\n".join(names).encode()).hexdigest(16)


def decode_identities(
    data: bytes, *, segment: int, table: Run, run: str, key: str
) -> IdentitySegment:
    """Parses a segment; raises `CorruptError`."""
    found = unseal(data, IdentitySegment, run=run, key=key, what="segment of identities")
    numbers = [one.version for one in found.versions]
    if (found.run, found.segment) != (table.id, segment):
        raise CorruptError("a segment of identities of another run or place", run=run, key=key)
    if numbers != sorted(set(numbers)) or any(n // SEGMENT_VERSIONS != segment for n in numbers):
        raise CorruptError("a segment of identities lists other versions", run=run, key=key)
    return found
