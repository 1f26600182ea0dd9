"""Adds up what ranks hold of a model.

The tables of the ranks are compared by a hash, and exchanged only if they differ, as with pipeline
stages; then one all-reduce of 48 bytes a tensor adds up the digests. No rank gathers elements of
another one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

import msgspec
import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from deltawire import codec
from deltawire.attest.statement import Digests, TensorDigest
from deltawire.builds import build_name
from deltawire.codec import Digest
from deltawire.errors import InputError
from deltawire.wire.run import TensorSpec

_WORD = 1 << 64
MAX_FAILURE = 500
"""Characters of an error that other ranks are told."""


class HeldPart(NamedTuple):
    """The part of a tensor that this rank holds: its digest, and how many elements it has.

    ``counts`` says whether this rank's copy is the one that counts; None leaves that to the first
    rank that holds the tensor.
    """

    spec: TensorSpec
    digest: Digest
    elements: int
    counts: bool | None = None


class Ranks(Protocol):
    """The processes that hold the model together; all call each method together."""

    number: int
    count: int

    def gather(self, data: bytes) -> list[bytes]:
        """Returns the bytes of every rank, in rank order."""

    def add_up(self, words: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the sum over the ranks, which wraps around."""


def total_of(
    found: Iterable[TensorDigest],
    *,
    aliases: Mapping[str, str] | None = None,
    copies_disagree: Sequence[str] = (),
) -> Digests:
    """Returns the digests of a model with these tensors; aliases of others are left out."""
    tensors = sorted(found, key=lambda one: one.name)
    total = sum((Digest.from_hex(one.digest) for one in tensors), codec.ZERO)
    names = {one.name for one in tensors}
    return Digests(
        digest=total.hex(),
        tensors=tensors,
        aliases={name: one for name, one in (aliases or {}).items() if one in names},
        copies_disagree=sorted(copies_disagree),
        build=build_name(),
    )


def combined(
    held: Sequence[HeldPart] | Exception,
    ranks: Ranks | None,
    *,
    aliases: Mapping[str, str] | None = None,
) -> Digests:
    """Returns the digests of the model that ``ranks`` hold together, on each of them.

    ``held`` is an error on a rank that could not digest its part. That rank raises it, and the
    others, which would wait for its digests, `InputError` with its text.

    Copies on several ranks are compared: the sum over all copies must be as many times the sum of
    those that count. Raises `InputError` if the ranks describe a tensor differently, or hold some
    elements not at all or twice.
    """
    if ranks is None or ranks.count == 1:
        if isinstance(held, Exception):
            raise held
        return total_of((described(part.spec, part.digest) for part in held), aliases=aliases)
    held, table, holders = _union(held, ranks)
    places = {spec.name: number for number, spec in enumerate(table)}
    words = np.zeros((len(table), 6), np.uint64)
    for part in held:
        row = words[places[part.spec.name]]
        first = holders.get(part.spec.name, 0) == ranks.number
        lanes = np.array([part.digest.lane0, part.digest.lane1], np.uint64)
        row[2:4] += lanes
        row[5] += np.uint64(part.elements)
        if first if part.counts is None else part.counts:
            row[0:2] += lanes
            row[4] += np.uint64(part.elements)
    sums = ranks.add_up(words.view(np.int64)).view(np.uint64)
    found, disagree = [], []
    for spec, row in zip(table, sums.tolist(), strict=True):
        once, every = Digest(row[0], row[1]), Digest(row[2], row[3])
        if row[4] != spec.count:
            raise InputError(
                f"the ranks together hold {row[4]} of the {spec.count} elements of {spec.name}",
                hint="pass the group of the ranks that hold one model together",
            )
        copies, rest = divmod(row[5], spec.count) if spec.count else (1, 0)
        if not rest and every != _times(once, copies):
            disagree.append(spec.name)
        found.append(described(spec, once))
    return total_of(found, aliases=aliases, copies_disagree=disagree)


def described(spec: TensorSpec, digest: Digest) -> TensorDigest:
    """Returns the entry of a tensor."""
    return TensorDigest(spec.name, tuple(spec.shape), spec.dtype, digest.hex())


def _union(
    held: Sequence[HeldPart] | Exception, ranks: Ranks
) -> tuple[Sequence[HeldPart], list[TensorSpec], dict[str, int]]:
    """Returns the parts that this rank holds, the tensors of all ranks in name order, and the first
    rank that has each; no ranks are named if all have the same tensors. Raises on all ranks if one
    of them has an error."""
    failure = ""
    own: list[TensorSpec] = []
    if isinstance(held, Exception):
        failure = f"{type(held).__name__}: {str(held)[:MAX_FAILURE]}"
    else:
        own = sorted((part.spec for part in held), key=lambda spec: spec.name)
    data = msgspec.msgpack.encode(own)
    stated = ranks.gather(msgspec.msgpack.encode((failure, blake3(data).digest())))
    states = [msgspec.msgpack.decode(one, type=tuple[str, bytes]) for one in stated]
    if isinstance(held, Exception):
        raise held
    failed = [f"rank {rank}: {text}" for rank, (text, _) in enumerate(states) if text]
    if failed:
        raise InputError(f"another rank cannot digest what it holds; {failed[0]}")
    if len(set(states)) == 1:
        return held, own, {}
    found: dict[str, TensorSpec] = {}
    holders: dict[str, int] = {}
    for rank, table in enumerate(ranks.gather(data)):
        for spec in msgspec.msgpack.decode(table, type=list[TensorSpec]):
            if found.setdefault(spec.name, spec) != spec:
                raise InputError(
                    f"ranks {holders[spec.name]} and {rank} have different shapes or dtypes of "
                    f"{spec.name}"
                )
            holders.setdefault(spec.name, rank)
    return held, [found[name] for name in sorted(found)], holders


def _times(digest: Digest, copies: int) -> Digest:
    return Digest(digest.lane0 * copies % _WORD, digest.lane1 * copies % _WORD)
