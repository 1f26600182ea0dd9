"""``adapter_bytes_growth``: bytes of a version for each change, of adapters of up to 20 GB.

The adapters have the shapes of Kimi K2's: 384 experts of a layer, rank 16, matrices of 7168 and
2048. Their values are computed from the seed when they are read, and the publisher's copies are
offloaded, so that memory does not bound the size; the disk at TMPDIR does. ``--cases`` is the
largest size in GB. The versions are those of training:

| version | what changed since the one before |
|---|---|
| 0 | everything is new; second factors are zero |
| 1 | second factors only, all of their elements, by the learning rate's sign |
| 2 | the last bit of 1 % of all elements |
"""

from __future__ import annotations

import resource
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.training.keys import Measured, Options
from deltawire.codec import Bits
from deltawire.errors import InputError
from deltawire.store import MeteredBucket, open_bucket
from deltawire.sync import CommitStats, load_mirror, open_publisher, read_run
from deltawire.sync.publish.lazy_tensor import LazyTensor
from deltawire.wire.run import TensorSpec

GIGABYTE = 10**9
SMALLEST_GB = 0.25
SHARE = 0.01
"""The share of the elements that version 2 changes."""
EXPERTS, RANK, HIDDEN, INNER = 384, 16, 7168, 2048
SHAPES = {"lora_A": (EXPERTS * RANK, HIDDEN), "lora_B": (EXPERTS * INNER, RANK)}
"""Factors of a layer's stack of experts, its experts one below the other."""
LAYER_BYTES = 2 * sum(rows * columns for rows, columns in SHAPES.values())
ON_DISK = 2.9
"""Bytes on the disk for each byte of the adapters: the publisher's copies, version 0, deltas."""

FIRST_STEP = 0x3727
"""1e-5 in bf16, the size of an Adam step from zero at that learning rate."""
SIGN = 0x8000
TILE = 1 << 24
"""Elements after which first factors repeat, which no payload spans."""
BLOCK = 1 << 20
"""Elements whose changes are drawn together."""


def measure(options: Options) -> Measured:
    """Publishes versions of a small and of the largest adapters; returns the ratio of their bytes
    a change, the worst of all versions.

    Raises `InputError` if the disk has no room for ``--cases`` GB.
    """
    sizes = [SMALLEST_GB, float(max(1, options.cases))]
    _check_room(sizes[-1])
    small, large = [_publish(size, options.seed) for size in sizes]
    growth = max(
        many["bytes_per_change"] / few["bytes_per_change"]
        for few, many in zip(small, large, strict=True)
        if few["changed"]
    )
    return Measured({"adapter_bytes_growth": growth}, {"rows": small + large})


def _check_room(size_gb: float) -> None:
    free = shutil.disk_usage(tempfile.gettempdir()).free
    if free < ON_DISK * size_gb * GIGABYTE:
        raise InputError(
            f"{size_gb:g} GB of adapters need {ON_DISK * size_gb:.0f} GB on the disk; "
            f"{free / GIGABYTE:.0f} are free",
            hint="set TMPDIR to a larger disk, or choose fewer by --cases",
        )


def _publish(size_gb: float, seed: int) -> list[dict[str, Any]]:
    """Publishes the versions of adapters; returns a row for each."""
    commits: list[CommitStats] = []
    rows: list[dict[str, Any]] = []
    tile = _tile(seed)
    weights = {
        f"layers.{layer:03d}.experts.{name}.weight": Factor(
            TensorSpec(f"layers.{layer:03d}.experts.{name}.weight", shape, "BF16"),
            tile if name == "lora_A" else None,
            (seed, layer, order),
        )
        for layer in range(max(1, round(size_gb * GIGABYTE / LAYER_BYTES)))
        for order, (name, shape) in enumerate(SHAPES.items())
    }
    second = {name: one for name, one in weights.items() if one.tile is None}
    with tempfile.TemporaryDirectory(prefix="deltawire-adapters-") as folder:
        bucket = MeteredBucket(open_bucket(str(Path(folder) / "run"), create=True))
        began = time.perf_counter()
        publisher = open_publisher(
            bucket, weights, specs=[one.spec for one in weights.values()], snapshot_dir=folder,
            anchor_every=0, compaction_strides=(), on_commit=commits.append,
        )  # fmt: skip
        written = 0
        for version in range(3):
            if version:
                began = time.perf_counter()
                for one in weights.values():
                    one.version = version
                publisher.publish(second if version == 1 else weights, partial=version == 1)
                publisher.flush()
            before, written = written, bucket.written_bytes
            changed = commits[-1].changed
            rows.append(
                {
                    "adapter_bytes": commits[-1].bytes_full,
                    "version": version,
                    "changed": changed,
                    "bytes": written - before,
                    "bytes_per_change": (written - before) / changed if changed else None,
                    "blocked_s": commits[-1].blocked_ms / 1e3,
                    "seconds": time.perf_counter() - began,
                    "peak_resident_bytes": 1024
                    * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
                }
            )
        publisher.close()
        if size_gb == SMALLEST_GB:  # A reader has the bits; the largest would need its own memory.
            _check_reader(bucket, weights)
    return rows


def _tile(seed: int) -> NDArray[np.uint16]:
    """Returns values of a first factor in bf16, rounded toward zero."""
    generator = np.random.Generator(np.random.SFC64((seed, 7)))
    values = generator.standard_normal(TILE, np.float32) * np.float32(0.02)
    return (values.view(np.uint32) >> 16).astype(np.uint16)


class Factor(LazyTensor):
    """A factor of an adapter at one of the versions, computed when it is read.

    ``tile`` holds a first factor's values, which repeat; None makes a second factor. ``key`` seeds
    the changes.
    """

    def __init__(
        self, spec: TensorSpec, tile: NDArray[np.uint16] | None, key: tuple[int, ...]
    ) -> None:
        self.spec = spec
        self.tile = tile
        self.version = 0
        self._key = key

    def read_into(self, target: Bits, start: int = 0) -> None:
        """Fills ``target`` with the elements from ``start`` on at the version."""
        at = 0
        while at < target.size:
            block, offset = divmod(start + at, BLOCK)
            part = target[at : at + BLOCK - offset]
            part[:] = self._block(block)[offset : offset + part.size]
            at += part.size

    def _block(self, block: int) -> NDArray[np.uint16]:
        if self.tile is None:
            bits = np.zeros(BLOCK, np.uint16)
            if self.version:
                bits |= np.uint16(FIRST_STEP)
                bits[self._draw(block, 1) < SIGN] |= np.uint16(SIGN)
        else:
            at = block * BLOCK % TILE
            bits = self.tile[at : at + BLOCK].copy()
        if self.version == 2:
            bits ^= self._draw(block, 2) < int(SHARE * (1 << 16))
        return bits

    def _draw(self, block: int, version: int) -> NDArray[np.uint16]:
        """Draws a number for each element of a block, uniform below 2^16."""
        source = np.random.SFC64((*self._key, block, version))
        return source.random_raw(BLOCK // 4).view(np.uint16)


def _check_reader(bucket: Any, weights: dict[str, Factor]) -> None:
    mirror = load_mirror(bucket, read_run(bucket))
    for name, one in weights.items():
        assert np.array_equal(mirror.tensors[name], one.read()), name
