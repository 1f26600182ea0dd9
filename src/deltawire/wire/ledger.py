"""Ledger: which groups are settled, and the commit metadata by which a manifest settles them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, Literal

import msgspec
from blake3 import blake3
from msgspec import Meta

from deltawire.errors import CorruptError
from deltawire.wire import keys
from deltawire.wire.objects import prepared
from deltawire.wire.payload import Index

GROUP_HASH_DIGITS = 32
STEP_RECORD = "deltawire.step"
"""The member of a manifest's metadata that holds `CommitMetadata`. Each kind of record has its own
member, so that more can be added.
"""

FORK_RECORD = "deltawire.fork"
"""The member of the metadata of a fork's first version that holds `ForkRecord`."""

Sequence = Annotated[int, Meta(ge=0, le=10**10 - 1)]
CLIENT_RECORD = "deltawire.client"
"""The member that marks a version as published by a training client; its step is not recorded."""

DroppedRange = tuple[str, Sequence, Annotated[int, Meta(ge=1, le=1 << 20)]]
"""Consecutive groups of one worker: its name, the first sequence number, and how many."""


class ForkRecord(msgspec.Struct, frozen=True, kw_only=True):
    """States where a fork began: the parent's id, and its version."""

    parent: Annotated[str, Meta(max_length=64)]
    version: Index


def fork_id(record: ForkRecord, name: str, config: Mapping[str, Any], url: str = "") -> str:
    """Returns the id of a fork, which follows from its origin, its name and its configuration, and
    in another bucket than its parent's, from its ``url``."""
    seed = [record.parent, record.version, name, config, *([url] if url else [])]
    return blake3(msgspec.json.encode(seed, order="deterministic")).hexdigest()[:32]


class PromptRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One decision of allocation: what became of the prompt at ``position`` (-1: not known).

    ``task`` are the digits of `deltawire.rl.allocation.posterior.task_key`. The first ``pilot`` of
    its ``completions`` were the pilot; ``finished`` of them did not fail, and ``successes`` of
    those succeeded. It was deferred ``defers`` times before. ``partial`` is trained on before all
    of its completions came, and ``pass`` was not drawn.
    """

    position: Annotated[int, Meta(ge=-1, lt=1 << 62)]
    task: Annotated[str, Meta(max_length=16)]
    verdict: Literal["train", "partial", "skip", "defer", "pass"]
    pilot: Index = 0
    completions: Index = 0
    finished: Index = 0
    successes: Index = 0
    defers: Index = 0


class Ledger(msgspec.Struct):
    """Which groups are settled: every group below ``below[worker]``, and those in ``above``."""

    below: dict[str, Sequence] = {}
    above: dict[str, list[Sequence]] = {}

    def settle(self, worker: str, sequence: int) -> None:
        """Counts a group as consumed or dropped; a repeated call changes nothing."""
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
        """Returns whether a group is settled."""
        return sequence < self.below.get(worker, 0) or sequence in self.above.get(worker, [])

    def count(self, worker: str) -> int:
        """Returns how many of a worker's groups are settled."""
        return self.below.get(worker, 0) + len(self.above.get(worker, []))

    def copy(self) -> Ledger:
        """Returns an independent copy."""
        return Ledger(
            dict(self.below), {worker: list(above) for worker, above in self.above.items()}
        )


class CommitMetadata(msgspec.Struct, frozen=True, kw_only=True):
    """The groups that a version consumed and dropped.

    The version's manifest carries it, so a group is consumed exactly if the version exists.
    ``consumed`` names groups as (worker, sequence), in the order of training. ``hashes`` are the
    first `GROUP_HASH_DIGITS` hexadecimal digits of the BLAKE3 of each consumed group's bytes, so
    that a recomputed step can be compared with the original. ``threads`` is the number of threads
    of the tensor library, and ``ranks`` that of the trainer's processes (0 in versions that do not
    say), because sums depend on both; ``arithmetic`` names the library and its kernels, which they
    depend on too (empty in versions that do not say). ``settings`` are the values, by dotted key,
    that differed from the configuration in ``run.json`` when the step was made. ``position`` is
    that of the data after a step of mid-training; in reinforcement learning, the number of draws
    that were given out. With allocation, ``parts`` are the numbers of consecutive consumed groups
    that are one prompt's, and advantages are relative to all of them; empty, each group is one.
    ``prompts`` records what was decided since the previous step. ``state`` is the hash of masters
    and optimizer after the step (`deltawire.train.masters.MasterWeights.state_hash`), in versions
    whose number is a multiple of ``train.checkpoint_every``.
    """

    step: Index = 0
    consumed: list[tuple[str, Sequence]] = []
    dropped: list[DroppedRange] = []
    hashes: list[Annotated[str, Meta(max_length=64)]] = []
    threads: Annotated[int, Meta(ge=0, le=1024)] = 0
    settings: Annotated[dict[str, Any], Meta(max_length=1024)] = {}
    position: Index = 0
    ranks: Annotated[int, Meta(ge=0, le=65536)] = 0
    arithmetic: Annotated[str, Meta(max_length=256)] = ""
    parts: Annotated[list[Annotated[int, Meta(ge=1, le=1 << 16)]], Meta(max_length=1 << 20)] = []
    prompts: Annotated[list[PromptRecord], Meta(max_length=1 << 20)] = []
    state: Annotated[str, Meta(pattern=r"^([0-9a-f]{64})?\Z")] = ""

    def dropped_groups(self) -> Iterator[tuple[str, int]]:
        """Returns the dropped groups, each as (worker, sequence)."""
        for worker, first, count in self.dropped:
            for sequence in range(first, first + count):
                yield worker, sequence

    def settled_groups(self) -> Iterator[tuple[str, int]]:
        """Returns the consumed groups, then the dropped ones."""
        yield from self.consumed
        yield from self.dropped_groups()

    @classmethod
    def of(cls, values: Mapping[str, Any], *, run: str, version: int) -> CommitMetadata:
        """Checks the record `STEP_RECORD` of a manifest's metadata; raises `CorruptError`. A
        version without the record consumed nothing.
        """
        key = keys.manifest(version)
        try:
            metadata = msgspec.convert(values.get(STEP_RECORD, {}), prepared(cls))
        except msgspec.ValidationError as error:
            raise CorruptError(f"metadata: {error}", run=run, version=version, key=key) from error
        names = [name for name, _ in metadata.consumed]
        names += [name for name, _, _ in metadata.dropped]
        odd = [name for name in names if not keys.valid_name(name)]
        uneven = bool(metadata.hashes) and len(metadata.hashes) != len(metadata.consumed)
        parted = bool(metadata.parts) and sum(metadata.parts) != len(metadata.consumed)
        if odd or uneven or parted:
            fault = "the number of hashes is not that of the groups"
            if odd:
                fault = f"{odd[0][:40]!r} is not the name of a worker"
            elif parted:
                fault = "the parts of prompts do not add up to the groups"
            raise CorruptError(f"metadata: {fault}", run=run, version=version, key=key)
        return metadata

    def to_dict(self) -> dict[str, Any]:
        """Returns the manifest's metadata with this record only."""
        return {STEP_RECORD: msgspec.to_builtins(self)}


def ranges_of(groups: Iterable[tuple[str, int]]) -> list[DroppedRange]:
    """Joins groups, each named as (worker, sequence), to ranges of consecutive numbers."""
    ordered = sorted(groups)
    runs = itertools.groupby(
        enumerate(ordered), key=lambda item: (item[1][0], item[1][1] - item[0])
    )
    found = [[name for _, name in run] for _, run in runs]
    return [(run[0][0], run[0][1], len(run)) for run in found]
