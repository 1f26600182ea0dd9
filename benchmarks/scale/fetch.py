"""Measures a reader's step over a delta of many blobs, through a store that answers in 20 ms."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import numpy as np

from benchmarks.scale.rows import median_row
from benchmarks.training.keys import Measured, Options
from deltawire.errors import BugError
from deltawire.store import RetryingBucket, open_bare_bucket
from deltawire.sync import load_mirror, open_publisher
from deltawire.testing.simulated import SimulatedBucket
from deltawire.wire.run import TensorSpec

BLOBS = 2000
ELEMENTS = 1 << 12


def measure(options: Options) -> Measured:
    """Times steps over 200 and 2,000 blobs."""
    found = {
        blobs: median_row([fetch(blobs, seed=options.seed) for _ in range(options.repeats)])
        for blobs in (200, BLOBS)
    }
    return Measured(
        {"fetch_s_2000_blobs": found[BLOBS]["seconds"]},
        {str(blobs): row for blobs, row in found.items()},
    )


def fetch(blobs: int, *, seed: int = 0) -> dict[str, Any]:
    """Returns seconds and requests of one step whose delta has ``blobs`` blobs."""
    inner = open_bare_bucket("memory://")
    rng = np.random.default_rng(seed)
    weights = {f"{n:05d}": rng.integers(0, 1 << 16, ELEMENTS, np.uint16) for n in range(blobs)}
    specs = [TensorSpec(name, (ELEMENTS,), "BF16") for name in weights]
    publisher = open_publisher(
        inner, weights, specs=specs, compaction_strides=(), anchor_every=0, blob_bytes=1
    )
    mirror = load_mirror(inner, publisher.run)
    for bits in weights.values():
        bits[rng.integers(0, ELEMENTS, 64)] ^= np.uint16(1)
    publisher.publish(weights)
    publisher.close()
    bucket = SimulatedBucket(inner)
    bucket.requests = Counter()
    started = time.perf_counter()
    load_mirror(RetryingBucket(bucket), publisher.run, into=mirror)
    seconds = time.perf_counter() - started
    if any((mirror.tensors[n] != bits).any() for n, bits in weights.items()):
        raise BugError("the reader does not hold what was published")
    return {
        "seconds": seconds,
        "requests": dict(bucket.requests),
        "refused": bucket.refused,
        "most_at_once": bucket.most_at_once,
    }
