"""Decides which versions are stored whole."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

from deltawire.errors import CorruptError
from deltawire.store import Bucket
from deltawire.sync.chain.objects import later_anchors, read_compacted_delta, read_manifest
from deltawire.sync.publish.anchors import NEAR
from deltawire.wire.manifest import Manifest
from deltawire.wire.run import Run


@dataclass
class AnchorSchedule:
    """Decides which versions are stored whole.

    An anchor is due once a multiple of ``every`` was passed since the version of the newest one,
    and once the deltas since then exceed ``share`` times its bytes. 0 turns a rule off. Ranks that
    commit together must decide alike whatever became of the anchor before: with ``exact``, an
    anchor is due at each multiple and nowhere else.
    """

    every: int = 50
    share: float = 0.0
    exact: bool = False
    _newest: int = -1
    """The newest version that has an anchor, or of which one is being made."""
    _since: int = 0
    _anchor_bytes: int = 0
    _before: tuple[int, int] = (-1, 0)

    def due(self, version: int) -> bool:
        """Returns whether ``version`` should be an anchor."""
        if self.exact:
            return bool(self.every) and version % self.every == 0
        if self.every and version // self.every > self._newest // self.every:
            return True
        return bool(self.share and self._anchor_bytes) and (
            self._since > self.share * self._anchor_bytes
        )

    def count(self, manifest: Manifest) -> None:
        """Counts a committed version."""
        if manifest.anchor is not None:
            self._count_anchor(manifest.version, manifest.anchor.bytes)
        elif manifest.delta is not None:
            self._since += manifest.delta.bytes

    def begin(self, version: int) -> None:
        """Counts the anchor of ``version``, which is being made."""
        self._before = self._newest, self._since
        self._newest, self._since = version, 0

    def end(self, size: int | None) -> None:
        """Counts the bytes of the anchor that was being made, None if it could not be made."""
        if size is not None:
            self._anchor_bytes = size
        else:
            newest, since = self._before
            self._newest, self._since = newest, self._since + since

    def resume(self, bucket: Bucket, run: Run, head: Manifest) -> None:
        """Counts what earlier publishers committed, from the newest anchor up to ``head``."""
        if self.exact:
            return
        first = head.version // self.every * self.every if self.every else head.version
        newest = self._count_later(bucket, run, head.version, since=min(first, head.version - NEAR))
        chain = [head]
        while self.share and chain[-1].anchor is None and (chain[-1].base or 0) > newest:
            before = _manifest(bucket, run, chain[-1].base or 0)
            if before is None or before.pruned:
                break  # Pruned or damaged: the other rule decides when the next anchor is due.
            chain.append(before)
        if not self.share and head.anchor is None and newest < first < head.version:
            multiple = _manifest(bucket, run, first)
            chain += [] if multiple is None else [multiple]
        for manifest in reversed(chain):
            if manifest.version > newest:
                self.count(manifest)

    def _count_later(self, bucket: Bucket, run: Run, head: int, *, since: int) -> int:
        """Counts the newest anchor up to ``head`` that was made later than its version; returns
        that version, -1 if there is none.
        """
        listed = later_anchors(bucket, newer_than=max(since - 1, -1))
        newest = max((version for version in listed if version <= head), default=-1)
        if newest >= 0:
            with suppress(CorruptError):
                made = read_compacted_delta(bucket, run, None, newest)
                if made is not None:
                    self._count_anchor(newest, made.payload.bytes)
                    return newest
        return -1

    def _count_anchor(self, version: int, size: int) -> None:
        self._newest, self._since, self._anchor_bytes = version, 0, size


def _manifest(bucket: Bucket, run: Run, version: int) -> Manifest | None:
    with suppress(CorruptError):
        return read_manifest(bucket, run, version)
    return None
