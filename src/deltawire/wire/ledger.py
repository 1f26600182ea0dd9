"""Which groups are settled, and the metadata by which a manifest settles them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from deltawire.errors import CorruptError
from deltawire.wire import keys
from deltawire.wire.manifest import Index

GROUP_HASH_DIGITS = 32

Sequence = Annotated[int, Meta(ge=0, le=10**10 - 1)]


class Ledger(msgspec.Struct):
    """Which groups are settled: every one below ``below[worker]``, and those in ``above``."""

    below: dict[str, Sequence] = {}
    above: dict[str, list[Sequence]] = {}

    def settle(self, worker: str, sequence: int) -> None:
        """Count a group as consumed or dropped; a second time changes nothing."""
        if self.settled(worker, sequence):
            return
        above = {*self.above.get(worker, []), sequence}
        low = self.below.get(worker, 0)
        while low in above:
            above.remove(low)
            low += 1
        self.below[worker] = low
        self.above[worker] = sorted(above)

    def settled(self, worker: str, sequence: int) -> bool:
        """Whether a group is settled."""
        return sequence < self.below.get(worker, 0) or sequence in self.above.get(worker, [])

    def count(self, worker: str) -> int:
        """How many of a worker's groups are settled."""
        return self.below.get(worker, 0) + len(self.above.get(worker, []))

    def copy(self) -> Ledger:
        """A ledger of its own."""
        return Ledger(
            dict(self.below), {worker: list(above) for worker, above in self.above.items()}
        )


class CommitMetadata(msgspec.Struct, frozen=True, kw_only=True):
    """What a version's manifest says of the loop: the groups it consumed and dropped, each as
    (worker, sequence), in the order of training. Committed by the manifest itself, so that a
    group is consumed exactly if the version exists.

    ``hashes`` are the first `GROUP_HASH_DIGITS` hexadecimal digits of the BLAKE3 of each consumed
    group's bytes, so that whoever does the step over knows that it is the same step; ``threads``
    is how many the tensor library had, because sums depend on it. Empty and 0 in older manifests.
    """

    step: Index = 0
    consumed: list[tuple[str, Sequence]] = []
    dropped: list[tuple[str, Sequence]] = []
    hashes: list[Annotated[str, Meta(max_length=64)]] = []
    threads: Annotated[int, Meta(ge=0, le=1024)] = 0

    @classmethod
    def of(cls, plain: Mapping[str, Any], *, run: str, version: int) -> CommitMetadata:
        """A manifest's metadata, checked; raises `CorruptError`."""
        key = keys.manifest(version)
        try:
            metadata = msgspec.convert(plain, cls)
        except msgspec.ValidationError as error:
            raise CorruptError(f"metadata: {error}", run=run, version=version, key=key) from error
        odd = [
            name for name, _ in (*metadata.consumed, *metadata.dropped) if not keys.valid_name(name)
        ]
        if odd or (metadata.hashes and len(metadata.hashes) != len(metadata.consumed)):
            fault = f"{odd[0][:40]!r} names no worker" if odd else "not one hash a group"
            raise CorruptError(f"metadata: {fault}", run=run, version=version, key=key)
        return metadata

    def plain(self) -> dict[str, Any]:
        """As the manifest carries it."""
        value: dict[str, Any] = msgspec.to_builtins(self)
        return value
