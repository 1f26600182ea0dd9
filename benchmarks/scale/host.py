"""Measures what the ranks of one host fetch together of a delta, over the delta's bytes.

Real readers follow a real delta of a small model, dense and with experts, each rank with the parts
that it would serve of the model (`benchmarks.scale.shards`), and with a cache that all of them use
(`deltawire.sync.follow.blob_cache`). The host then fetches each blob once, and each rank its part
of the manifest and of the table. Without a cache, ranks that serve columns of a row-major matrix
fetch all of it each: the details of ``shard_reader_excess`` have those bytes.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.scale.shards import RANKS, Shape, tensors, wanted
from benchmarks.training.keys import Measured, Options
from deltawire import codec
from deltawire.store import MeteredBucket, open_bucket
from deltawire.sync import Mirror, Publisher, Subscriber, create_run, load_mirror, read_manifest
from deltawire.sync.follow.blob_cache import BlobCache
from deltawire.wire.run import Run, TensorSpec, new_id

MODELS = {
    "dense": Shape(2, 1024, 16, 4, 64, 8192, 3072),
    "16 experts": Shape(1, 1024, 16, 4, 64, 8192, 512, 16),
}
CHUNK = 1 << 19
BLOB_BYTES = 64 << 10
CHANGED = 0.2
"""The share of weights that change: pieces then have as many bytes as those of a large model, whose
chunks are eight times larger and of which 2 % change. Tables and manifests weigh as much as there.
"""


def measure(options: Options) -> Measured:
    """Returns the largest excess over both models and all numbers of ranks."""
    details: dict[str, Any] = {}
    for name, shape in MODELS.items():
        details |= {
            f"{name}, {ranks} ranks": found for ranks, found in _model(shape, options.seed).items()
        }
    worst = max(one["excess"] for one in details.values())
    return Measured({"shard_host_excess": worst}, details)


def _model(shape: Shape, seed: int) -> dict[int, dict[str, float]]:
    """Returns the bytes of a host of 2, 4 and 8 ranks, each for a version of its own."""
    rng = np.random.default_rng(seed)
    bucket = MeteredBucket(open_bucket("memory://"))
    bucket.local = False
    specs = tensors(shape)
    weights = {one.name: rng.integers(0, 1 << 14, one.count, np.uint16) for one in specs}
    digest = codec.digest_model(weights).hex()
    start = Run(id=new_id(), name="host", created_at=0.0, tensors=specs, digest=digest, chunk=CHUNK)
    run = create_run(bucket, start)
    blank = Mirror({name: np.zeros_like(bits) for name, bits in weights.items()}, -1, codec.ZERO)
    found = {}
    publisher = Publisher(bucket, run, blank, epoch=0, blob_bytes=BLOB_BYTES)
    with closing(publisher), tempfile.TemporaryDirectory() as folder:
        _publish(publisher, weights, specs)
        for version, ranks in enumerate(RANKS, 1):
            parts = [wanted(run, shape, rank, ranks) for rank in range(ranks)]
            mirrors = [load_mirror(bucket, run, wanted=part, at=version - 1) for part in parts]
            for bits in weights.values():
                changed = rng.random(bits.size) < CHANGED
                bits[changed] += rng.integers(1, 3, int(changed.sum()), np.uint16)
            _publish(publisher, weights, specs)
            manifest = read_manifest(bucket, run, version)
            assert manifest is not None
            assert manifest.delta is not None
            whole = manifest.delta.bytes
            found[ranks] = {
                "delta_bytes": whole,
                "excess": _follow(bucket, run, mirrors, Path(folder)) / whole - 1,
            }
    return found


def _publish(
    publisher: Publisher, weights: Mapping[str, codec.Bits], specs: Sequence[TensorSpec]
) -> None:
    publisher.publish({one.name: weights[one.name].reshape(one.shape) for one in specs})
    publisher.flush()


def _follow(bucket: MeteredBucket, run: Run, mirrors: Sequence[Mirror | None], folder: Path) -> int:
    """Moves the ranks' mirrors to the newest version; returns the bytes that it took."""
    before = bucket.read_bytes

    def one(mirror: Mirror | None) -> bool:
        assert mirror is not None
        cache = BlobCache(bucket, folder)
        return Subscriber(bucket, run, mirror, threads=1, cache=cache).advance()

    with ThreadPoolExecutor(len(mirrors)) as pool:
        assert all(pool.map(one, mirrors))
    return bucket.read_bytes - before
