"""Measures the leader's commit of many ranks' parts, through a store that answers in 20 ms.

The other ranks' parts are stored before the clock starts, as they are when all ranks end together:
2,000 processes do not fit a machine, and the leader's work after the last part is what all wait
for.
"""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import numpy as np

from benchmarks.scale.rows import median_row
from benchmarks.training.keys import Measured, Options
from deltawire import codec
from deltawire.store import Bucket, RetryingBucket, open_bare_bucket
from deltawire.sync import Mirror, ShardPublisher, open_publisher
from deltawire.sync.publish.anchor_schedule import AnchorSchedule
from deltawire.sync.publish.commit import VersionWriter
from deltawire.testing.simulated import SimulatedBucket
from deltawire.wire import keys
from deltawire.wire.run import Run, TensorSpec
from deltawire.wire.seal import seal

RANKS = 2000
TENSORS = 8
"""Tensors of each rank, each a piece."""
ELEMENTS = 256
SESSION = "bench"


def measure(options: Options) -> Measured:
    """Times commits of 8, 96 and 2,000 ranks."""
    found = {
        ranks: median_row([commit(ranks, seed=options.seed) for _ in range(options.repeats)])
        for ranks in (8, 96, RANKS)
    }
    return Measured(
        {"commit_s_2000_ranks": found[RANKS]["seconds"]},
        {str(ranks): row for ranks, row in found.items()},
    )


def commit(ranks: int, *, seed: int = 0) -> dict[str, Any]:
    """Returns seconds and requests of the leader for one version of ``ranks`` ranks."""
    inner = open_bare_bucket("memory://")
    rng = np.random.default_rng(seed)
    names = [[f"{rank:05d}.{n}" for n in range(TENSORS)] for rank in range(ranks)]
    weights = {name: _bits(rng) for mine in names for name in mine}
    specs = [TensorSpec(name, (ELEMENTS,), "BF16") for name in sorted(weights)]
    publisher = open_publisher(inner, weights, specs=specs, compaction_strides=())
    run, digest = publisher.run, publisher.digest
    publisher.close()
    for rank in range(1, ranks):
        _store_part(inner, run, _mirror(weights, names[rank], digest), rank, ranks)
    bucket = SimulatedBucket(inner)
    leader = ShardPublisher(
        RetryingBucket(bucket), run, _mirror(weights, names[0], digest), rank=0, ranks=ranks,
        epoch=1, session=SESSION, anchor_every=0, timeout_s=600,
    )  # fmt: skip
    bucket.requests = Counter()
    started = time.perf_counter()
    leader.publish({name: weights[name] ^ np.uint16(1) for name in names[0]})
    leader.flush()
    seconds = time.perf_counter() - started
    leader.close()
    return {
        "seconds": seconds,
        "requests": dict(bucket.requests),
        "refused": bucket.refused,
        "most_at_once": bucket.most_at_once,
        "pieces": ranks * TENSORS,
    }


def _bits(rng: np.random.Generator) -> codec.Bits:
    return rng.integers(0, 1 << 16, ELEMENTS, np.uint16)


def _mirror(weights: dict[str, codec.Bits], names: list[str], digest: codec.Digest) -> Mirror:
    return Mirror({name: weights[name].copy() for name in names}, 0, digest, {})


def _store_part(bucket: Bucket, run: Run, mirror: Mirror, rank: int, ranks: int) -> None:
    """Encodes and stores what ``rank`` contributes to version 1."""
    writer = VersionWriter(bucket, run, mirror, epoch=1, schedule=AnchorSchedule(0), threads=1)
    for name, bits in writer.staging.tensors.items():
        bits[:] = mirror.tensors[name] ^ np.uint16(1)
    writer.differing.update(mirror.tensors)
    part = writer.part(writer.encode(), rank=rank, ranks=ranks)
    key = keys.part(1, SESSION, rank)
    bucket.create(key, seal(part, key=key))
