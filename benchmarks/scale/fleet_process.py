"""One process of a small real fleet: a trainer that publishes, or a reader that follows.

``python -m benchmarks.scale.fleet_process SETTINGS`` takes JSON. A trainer makes a step for each
line of the standard input, which is the share of values that changes; both write JSON lines with
times of the machine's monotonic clock, which all processes share.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from typing import Any, Literal

import msgspec
import numpy as np

from benchmarks.hops.rates import TILE, ClockedBucket
from benchmarks.synthetic import COLUMNS, SyntheticSteps
from deltawire.store import Bucket, MeteredBucket, open_bucket
from deltawire.store.delegating import DelegatingBucket
from deltawire.sync import CommitStats, Subscriber, load_mirror, open_publisher, read_run
from deltawire.wire.run import TensorSpec


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Arguments of a process: ``tensors`` of `TILE` values each make the model."""

    role: Literal["trainer", "reader"]
    url: str
    options: dict[str, Any] = {}
    tensors: int = 1
    poll_s: float = 0.1
    seed: int = 0


class Stepped(msgspec.Struct, frozen=True, kw_only=True):
    """A trainer's answer to a step."""

    version: int
    started: float
    committed: float
    blocked_s: float
    changed: float
    written: int


class Reached(msgspec.Struct, frozen=True, kw_only=True):
    """A reader's line for each version that its mirror reached."""

    version: int
    at: float
    read: int


class PolledBucket(DelegatingBucket):
    """A bucket that readers poll every ``seconds``.

    Example::

        bucket = PolledBucket(open_bucket("runs/demo"), 0.1)
    """

    def __init__(self, inner: Bucket, seconds: float) -> None:
        super().__init__(inner)
        self._seconds = seconds

    def with_inner(self, inner: Bucket) -> PolledBucket:
        """As `DelegatingBucket.with_inner`."""
        return self._moved(inner)

    @property
    def poll_s(self) -> float:
        """As `Bucket.poll_s`."""
        return self._seconds


def train(settings: Settings) -> None:
    """Publishes version 0, then a version for each share that the standard input names."""
    bucket = MeteredBucket(open_bucket(settings.url, create=True, **settings.options))
    clocked = ClockedBucket(bucket)
    tile = SyntheticSteps(TILE, 0.01, rows=TILE // COLUMNS, seed=settings.seed)
    (bits,) = tile.tensors.values()
    names = [f"layers.{number:03d}.weight" for number in range(settings.tensors)]
    weights = {name: bits.copy() for name in names}
    specs = [TensorSpec(name, bits.shape, "BF16") for name in names]
    commits: list[CommitStats] = []
    publisher = open_publisher(
        clocked, weights, specs=specs, anchor_every=0, compaction_strides=(),
        on_commit=commits.append,
    )  # fmt: skip
    _write({"version": 0})
    for line in sys.stdin:
        tile.advance(float(line))
        for held in weights.values():
            np.copyto(held, bits)
        before = bucket.written_bytes
        started = time.monotonic()
        version = publisher.publish(weights)
        blocked_s = time.monotonic() - started
        publisher.flush()
        stats = commits[-1]
        _write(
            Stepped(
                version=version,
                started=started,
                committed=clocked.created_at,
                blocked_s=blocked_s,
                changed=stats.changed / stats.elements,
                written=bucket.written_bytes - before,
            )
        )
    publisher.close()


def read(settings: Settings) -> None:
    """Follows the run, and writes a line for each version reached; ends with its standard input."""
    threading.Thread(target=_end_with_owner, daemon=True).start()
    bucket = MeteredBucket(open_bucket(settings.url, **settings.options))
    polled = PolledBucket(bucket, settings.poll_s)
    run = read_run(polled)
    mirror = load_mirror(polled, run)
    subscriber = Subscriber(polled, run, mirror)
    subscriber.advance()
    _write(Reached(version=mirror.version, at=time.monotonic(), read=bucket.read_bytes))
    for version in subscriber.follow():
        _write(Reached(version=version, at=time.monotonic(), read=bucket.read_bytes))


def _end_with_owner() -> None:
    """Exits once the owner, which never writes to a reader, has closed the other end."""
    os.read(sys.stdin.fileno(), 1)
    os._exit(0)


def _write(answer: Any) -> None:
    sys.stdout.write(msgspec.json.encode(answer).decode() + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    given = msgspec.json.decode(sys.argv[1], type=Settings)
    (train if given.role == "trainer" else read)(given)
