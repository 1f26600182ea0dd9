"""Copies blobs of a run to the bucket of another region, and checks each against its name."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

from deltawire.errors import CorruptError
from deltawire.store import REQUESTS, Bucket, in_parallel
from deltawire.sync.chain.objects import files_of, get_blob
from deltawire.sync.chain.payloads import read_blobs, table_blobs
from deltawire.wire import keys
from deltawire.wire.manifest import Manifest
from deltawire.wire.payload import BlobRef, PayloadRef
from deltawire.wire.run import Run

COPIED_BYTES = 256 << 20
"""The most bytes of blobs that are copied at once, except for one blob that is larger."""


class BlobCopies:
    """Copies blobs from ``source`` to ``destination``, many at once; usable by several threads.

    ``crossed`` counts the bytes that were read from the source.
    """

    def __init__(self, source: Bucket, destination: Bucket, run: Run) -> None:
        self.source = source
        self.destination = destination
        self.run = run
        self.crossed = 0
        self._counting = threading.Lock()

    def count(self, size: int) -> None:
        """Counts bytes that were read from the source."""
        with self._counting:
            self.crossed += size

    def copy_missing(self, refs: Sequence[BlobRef], version: int | None = None) -> int:
        """Copies the blobs that the destination lacks. Returns their bytes.

        Raises `CorruptError` if the source lost or damaged one of them.
        """

        def copy(ref: BlobRef) -> int:
            if self.destination.size(keys.blob(ref.hash)) == ref.bytes:
                return 0
            self._copy(ref, version)
            return ref.bytes

        return sum(in_parallel(self._far, copy, refs, at_once=_at_once(refs)))

    def copy_all(self, refs: Sequence[BlobRef], version: int, *, except_for: set[str]) -> None:
        """Copies blobs even if the destination has objects of their names and sizes: one that was
        damaged there is repaired, and retention counts its age from now. ``except_for`` names those
        that were just copied; each is added.
        """

        def copy(ref: BlobRef) -> None:
            if ref.hash not in except_for:
                self._copy(ref, version)
                except_for.add(ref.hash)

        in_parallel(self._far, copy, refs, at_once=_at_once(refs))

    def copy_files(self, manifest: Manifest) -> None:
        """Copies the other files of a version's directory."""
        self.copy_missing([BlobRef(f.blob, f.bytes) for f in files_of(self.run, manifest)])

    def blobs(self, ref: PayloadRef, version: int) -> list[BlobRef]:
        """Lists a payload's blobs, from its piece table at the destination, copied there first."""
        tables = table_blobs([ref])
        self.copy_missing(tables, version)
        try:
            return read_blobs(self.destination, self.run, ref)
        except CorruptError:
            # Only the size of an existing table was checked: copy it again.
            for table in tables:
                self._copy(table, version)
            return read_blobs(self.destination, self.run, ref)

    def blobs_of(self, refs: Iterable[PayloadRef], version: int) -> list[BlobRef]:
        """Lists the blobs of payloads, their piece tables included."""
        found: list[BlobRef] = []
        for ref in refs:
            found += [*table_blobs([ref]), *self.blobs(ref, version)]
        return found

    @property
    def _far(self) -> Bucket:
        return self.destination if self.source.local else self.source

    def _copy(self, ref: BlobRef, version: int | None) -> None:
        data = get_blob(self.source, ref, version=version)
        self.count(len(data))
        self.destination.put(keys.blob(ref.hash), bytes(data))


def copies_at_once(largest: float) -> int:
    """Returns how many blobs of at most ``largest`` bytes are copied together."""
    return max(1, min(REQUESTS, int(COPIED_BYTES / max(largest, 1.0))))


def _at_once(refs: Sequence[BlobRef]) -> int:
    return copies_at_once(max((ref.bytes for ref in refs), default=0))
