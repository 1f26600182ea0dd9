"""``adapter_bytes_growth``: bytes of a version for each change, of adapters of up to 16 GB.

The adapters have the shapes of Kimi K2's: 384 experts of a layer, rank 16, matrices of 7168 and
2048. Weights lie in files that are mapped, so that the largest size needs its own bytes of memory
three times: mapped, held by the publisher, and as its copy of a step; and 1.9 times on the disk
at TMPDIR. ``--cases`` is the largest size in GB.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.training.keys import Measured, Options
from deltawire.errors import InputError
from deltawire.store import MeteredBucket, open_bucket
from deltawire.sync import CommitStats, Subscriber, load_mirror, open_publisher
from deltawire.wire.run import TensorSpec

GIGABYTE = 10**9
SMALLEST_GB = 0.25
SHARES = (0.01, 0.1)
"""Shares of the elements that a version changes."""
EXPERTS, RANK, HIDDEN, INNER = 384, 16, 7168, 2048
SHAPES = {"lora_A": (EXPERTS * RANK, HIDDEN), "lora_B": (EXPERTS * INNER, RANK)}
"""Factors of a layer's stack of experts, its experts one below the other."""
IN_MEMORY = 3.3
"""Bytes of memory for each byte of the adapters."""
ON_DISK = 1.9
"""Bytes on the disk for each byte of the adapters: the mapped file, version 0, and deltas."""


def measure(options: Options) -> Measured:
    """Publishes versions of a small and of the largest adapters; returns the ratio of their bytes
    a change, the worse of both shares.

    Raises `InputError` if the disk or the memory has no room for ``--cases`` GB.
    """
    sizes = [SMALLEST_GB, float(max(1, options.cases))]
    _check_room(sizes[-1])
    rows = [row for size in sizes for row in _publish(size, options.seed)]
    each = len(SHARES)
    growth = max(
        large["bytes_per_change"] / small["bytes_per_change"]
        for small, large in zip(rows[:each], rows[-each:], strict=True)
    )
    return Measured({"adapter_bytes_growth": growth}, {"rows": rows})


def _check_room(size_gb: float) -> None:
    free = shutil.disk_usage(tempfile.gettempdir()).free
    if free < ON_DISK * size_gb * GIGABYTE:
        raise InputError(
            f"{size_gb:g} GB of adapters need {ON_DISK * size_gb:.0f} GB on the disk; "
            f"{free / GIGABYTE:.0f} are free",
            hint="set TMPDIR to a larger disk, or choose fewer by --cases",
        )
    line = next(one for one in Path("/proc/meminfo").read_text().splitlines() if "Avail" in one)
    held = int(line.split()[1]) * 1024
    if held < IN_MEMORY * size_gb * GIGABYTE:
        raise InputError(
            f"{size_gb:g} GB of adapters need {IN_MEMORY * size_gb:.0f} GB of memory; "
            f"{held / GIGABYTE:.0f} are free",
            hint="choose fewer by --cases",
        )


def _publish(size_gb: float, seed: int) -> list[dict[str, Any]]:
    """Publishes a version for each share, and follows the last one; returns a row for each."""
    generator = np.random.Generator(np.random.SFC64((seed, 7)))
    commits: list[CommitStats] = []
    with tempfile.TemporaryDirectory(prefix="deltawire-adapters-") as name:
        folder = Path(name)
        weights = _mapped(folder, size_gb, generator)
        specs = [TensorSpec(one, bits.shape, "BF16") for one, bits in weights.items()]
        bucket = MeteredBucket(open_bucket(str(folder / "run"), create=True))
        publisher = open_publisher(
            bucket, weights, specs=specs, anchor_every=0, compaction_strides=(),
            on_commit=commits.append,
        )  # fmt: skip
        rows = []
        for share in SHARES:
            changed = sum(_step(bits, share, generator) for bits in weights.values())
            before, began = bucket.written_bytes, time.perf_counter()
            publisher.publish(weights)
            publisher.flush()
            written = bucket.written_bytes - before
            rows.append(
                {
                    "adapter_bytes": sum(bits.nbytes for bits in weights.values()),
                    "share": commits[-1].changed / commits[-1].elements,
                    "changed": changed,
                    "bytes": written,
                    "bytes_per_change": written / changed,
                    "seconds": time.perf_counter() - began,
                }
            )
        publisher.close()
        if size_gb == SMALLEST_GB:  # A reader has the bits; the largest would need twice as much.
            _check_reader(bucket, weights)
    return rows


def _mapped(
    folder: Path, size_gb: float, generator: np.random.Generator
) -> dict[str, NDArray[np.uint16]]:
    """Returns arrays in one mapped file each, as many layers as fit into the size."""
    tile = generator.standard_normal(1 << 24, np.float32) * np.float32(0.02)
    bits = (tile.view(np.uint32) >> 16).astype(np.uint16)
    found: dict[str, NDArray[np.uint16]] = {}
    left, layer = size_gb * GIGABYTE, 0
    while left > 0:
        for name, (most, columns) in SHAPES.items():
            rows = min(most, max(1, int(left) // (2 * columns)))
            path = folder / f"{layer}.{name}"
            held = np.memmap(path, np.uint16, "w+", shape=(rows, columns))
            flat = held.reshape(-1)
            for at in range(0, flat.size, bits.size):
                flat[at : at + bits.size] = bits[: flat.size - at]
            found[f"layers.{layer:02d}.experts.{name}.weight"] = held
            left -= held.nbytes
            if left <= 0:
                break
        layer += 1
    return found


def _step(bits: NDArray[np.uint16], share: float, generator: np.random.Generator) -> int:
    """Moves ``share`` of the elements to a neighbor in bf16; returns how many."""
    flat = bits.reshape(-1)
    places = np.unique(generator.integers(0, flat.size, int(share * flat.size)))
    flat[places] ^= np.uint16(1)
    return int(places.size)


def _check_reader(bucket: Any, weights: dict[str, NDArray[np.uint16]]) -> None:
    from deltawire.sync import require_run

    run = require_run(bucket)
    mirror = load_mirror(bucket, run)
    assert mirror is not None
    Subscriber(bucket, run, mirror).advance()
    for name, bits in weights.items():
        assert np.array_equal(mirror.tensors[name].reshape(-1), bits.reshape(-1)), name
