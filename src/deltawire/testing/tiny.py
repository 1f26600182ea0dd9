"""Publishes and audits a run that is small enough for a thousand versions in one test.

The weights of a version are a function of seed and version, so that any process can compute what a
version must hold.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deltawire import codec
from deltawire.store import Bucket, RetryingBucket
from deltawire.sync import (
    Mirror,
    Publisher,
    create_run,
    load_mirror,
    newest_readable,
    newest_version,
    read_manifest,
    read_run,
)
from deltawire.sync.publish.offload import offloaded_mirror
from deltawire.wire.run import Run, TensorSpec, new_id

TENSORS = [
    TensorSpec("embed.weight", (24, 8), "BF16"),
    TensorSpec("nothing", (0, 4), "BF16"),
    TensorSpec("layers.0.weight", (5, 7, 3), "BF16"),
    TensorSpec("norm", (16,), "F32"),
    TensorSpec("scale", (), "F32"),
    TensorSpec("steps", (2,), "I64"),
    TensorSpec("mask", (9,), "BOOL"),
]

CHUNK = 50
"""Elements of a chunk: some tensors have several."""

Weights = Mapping[str, NDArray[Any]]


def weights(version: int, *, seed: int = 0) -> dict[str, NDArray[Any]]:
    """Computes the tensors of a version, as unsigned bits in their shapes.

    About a tenth of the elements change from each version to the next, to random bits.
    """
    tensors: dict[str, NDArray[Any]] = {}
    for number, spec in enumerate(TENSORS):
        rng = np.random.default_rng((seed, number))
        dtype = codec.unsigned_of(spec.dtype)
        flat = np.frombuffer(rng.bytes(spec.count * dtype.itemsize), dtype).copy()
        for _ in range(version):
            changed = rng.random(spec.count) < 0.1
            fresh = np.frombuffer(rng.bytes(spec.count * dtype.itemsize), dtype)
            flat[changed] = fresh[changed]
        tensors[spec.name] = flat.reshape(spec.shape)
    return tensors


def start_run(bucket: Bucket, *, seed: int = 0, chunk: int = CHUNK) -> Run:
    """Creates the run, or returns the one that is there; no version is published."""
    flat = {name: array.reshape(-1) for name, array in weights(0, seed=seed).items()}
    digest = codec.digest_model(flat).hex()
    run = Run(
        id=new_id(),
        name="tiny",
        created_at=time.time(),
        tensors=TENSORS,
        digest=digest,
        chunk=chunk,
    )
    return create_run(bucket, run)


class SteadyPublisher(Publisher):
    """Finishes the anchor of a version before the next version begins, so that a drill makes its
    requests in one order.

    Example::

        publisher = start_publisher(bucket)
        publisher.publish(weights(0))
        publisher.flush()
    """

    def flush(self) -> None:
        """Waits for the version in progress and then for its anchor."""
        super().flush()
        self._anchors.wait()

    def _supersede(self) -> bool:
        superseding = super()._supersede()
        self._anchors.wait()
        return superseding


def start_publisher(
    bucket: Bucket,
    *,
    seed: int = 0,
    anchor_every: int = 3,
    compaction_strides: Sequence[int] = (),
    snapshot_dir: Path | None = None,
    **options: Any,
) -> SteadyPublisher:
    """Opens a publisher that continues from what is committed, with the next epoch. Its requests
    are repeated, as those of an opened bucket are.

    ``snapshot_dir`` as for `open_publisher`; ``options`` go to `Publisher`.
    """
    if not isinstance(bucket, RetryingBucket):
        bucket = RetryingBucket(bucket)
    run = start_run(bucket, seed=seed)
    empty = None if snapshot_dir is None else offloaded_mirror(run, snapshot_dir)
    mirror: Mirror | None = empty
    if newest_readable(bucket, run) is not None:
        mirror = load_mirror(bucket, run, into=empty)
    elif mirror is None:
        blank = {spec.name: np.zeros(spec.count, codec.unsigned_of(spec.dtype)) for spec in TENSORS}
        mirror = Mirror(blank, -1, codec.ZERO)
    head = read_manifest(bucket, run, mirror.version) if mirror.version >= 0 else None
    epoch = 0 if head is None else head.epoch + 1
    return SteadyPublisher(
        bucket,
        run,
        mirror,
        epoch=epoch,
        anchor_every=anchor_every,
        compaction_strides=compaction_strides,
        **options,
    )


def same_bits(left: Weights, right: Weights) -> bool:
    """Returns whether two models hold the same bits under the same names, in any shapes."""
    return left.keys() == right.keys() and all(
        left[name].dtype == right[name].dtype
        and left[name].reshape(-1).tobytes() == right[name].reshape(-1).tobytes()
        for name in left
    )


def audit(bucket: Bucket, expected: Callable[[int], Weights]) -> int:
    """Loads every committed version and compares it, bit for bit, with ``expected(version)``.

    Returns the newest version, -1 if there is none. Raises `AssertionError` for a gap or for
    other bits, and whatever loading raises.
    """
    newest = newest_version(bucket)
    if newest is None:
        return -1
    run = read_run(bucket)
    for version in range(newest + 1):
        mirror = load_mirror(bucket, run, at=version)
        assert mirror.version == version, f"asked for {version}, loaded {mirror.version}"
        assert same_bits(mirror.tensors, expected(version)), f"version {version} has other bits"
        assert mirror.digest == codec.digest_model(mirror.tensors), f"digest of {version}"
    return newest
