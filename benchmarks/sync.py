"""Measures publisher, bucket, mirror and relay in one process, on generated weights.

For comparison, the same client moves the whole model as safetensors, and the deltas of other
systems (`benchmarks.peers`), through the same bucket. Every method ends with a comparison of the
reader's weights with the trainer's, and none receives the positions that changed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median

import msgspec
import numpy as np

from benchmarks.limits import copy_one
from benchmarks.memory import measure_peak
from benchmarks.pairs import Bf16Bits
from benchmarks.peers import Format, open_peer
from benchmarks.peers.container import Buffer, Entry, pack, unpack
from benchmarks.runner import Machine, this_machine
from benchmarks.synthetic import SyntheticSteps
from deltawire.errors import BugError
from deltawire.store import Bucket, MeteredBucket
from deltawire.sync import (
    CommitStats,
    Publisher,
    Relay,
    Subscriber,
    load_mirror,
    open_publisher,
    read_manifest,
)
from deltawire.sync.chain.payloads import read_blobs
from deltawire.sync.chain.route_finder import RouteFinder
from deltawire.wire.run import Run

WINDOW = 50
ANCHOR_EVERY = 25
LAG = 60

FULL = "full-safetensors"


class Rival(msgspec.Struct, frozen=True, kw_only=True):
    """Times of another format through the same bucket, from weights to weights: median seconds."""

    name: str
    used_by: str
    seconds: float
    bytes: int


class SyncFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The figures that docs/BENCHMARKS.md defines by key. Times are medians, in seconds."""

    trainer_blocked_vs_memcpy: float
    end_to_end_speedup_vs_full: float
    region_share_first_50: float
    region_share_next_50: float
    extra_memory_bytes: int
    extra_memory_limit: int
    objects_at_lag_60: int
    model_bytes: int
    region_model_bytes: int
    density: float
    changed: float
    delta_bytes: int
    memcpy_s: float
    blocked_s: float
    end_to_end_s: float
    rivals: list[Rival]
    repeats: int
    threads: int | None
    bucket: str
    machine: Machine


def bench_sync(
    make_bucket: Callable[[str], Bucket],
    *,
    model_bytes: int,
    region_bytes: int,
    density: float,
    repeats: int,
    rivals: Sequence[str],
    threads: int | None,
    tell: Callable[[str], None],
) -> SyncFigures:
    """Measures everything; ``make_bucket`` gives an empty bucket for each name."""
    bucket = make_bucket("latency")
    tell(f"making {model_bytes / 1e9:.2f} GB of weights")
    steps = SyntheticSteps(model_bytes // 2, density)
    latency = _Latency(bucket, steps, threads)
    others = _Rivals([FULL, *rivals], make_bucket, steps)
    for number in range(repeats):
        tell(f"step {number + 1} of {repeats}, each way in turn")
        others.remember()
        steps.advance()
        latency.measure()
        others.measure()
    tell(
        f"memcpy {median(latency.copies):.3f} s, blocked {median(latency.blocked):.3f} s, "
        f"end to end {median(latency.end_to_end):.3f} s"
    )
    memory = latency.measure_memory()
    tell(f"a reader takes {memory[0] / 1e6:.1f} MB beyond its mirror, of {memory[1] / 1e6:.1f}")
    latency.close()
    found = others.found()
    for rival in found:
        tell(f"{rival.name}: {rival.seconds:.3f} s, {rival.bytes / 1e6:.1f} MB")
    ratios = [
        full / ours for full, ours in zip(others.seconds[FULL], latency.end_to_end, strict=True)
    ]
    del steps, others, latency.mirror
    tell(f"{2 * WINDOW} versions of {region_bytes / 1e6:.0f} MB to a region")
    shares, objects = _region(make_bucket, region_bytes, density, threads, tell)
    return SyncFigures(
        trainer_blocked_vs_memcpy=median(
            blocked / copy for blocked, copy in zip(latency.blocked, latency.copies, strict=True)
        ),
        end_to_end_speedup_vs_full=median(ratios),
        region_share_first_50=shares[0],
        region_share_next_50=shares[1],
        extra_memory_bytes=memory[0],
        extra_memory_limit=memory[1],
        objects_at_lag_60=objects,
        model_bytes=latency.model_bytes,
        region_model_bytes=region_bytes,
        density=density,
        changed=median(latency.changed),
        delta_bytes=int(median(latency.delta_bytes)),
        memcpy_s=median(latency.copies),
        blocked_s=median(latency.blocked),
        end_to_end_s=median(latency.end_to_end),
        rivals=found,
        repeats=repeats,
        threads=threads,
        bucket=bucket.url.partition(":")[0],
        machine=this_machine(),
    )


class _Latency:
    """One publisher and one reader, from weights in the trainer to a verified mirror."""

    def __init__(self, bucket: Bucket, steps: SyntheticSteps, threads: int | None) -> None:
        self._steps = steps
        self._receipts: list[CommitStats] = []
        self.blocked: list[float] = []
        self.copies: list[float] = []
        self.end_to_end: list[float] = []
        self.changed: list[float] = []
        self.delta_bytes: list[int] = []
        self.model_bytes = steps.bytes
        self._publisher: Publisher = open_publisher(
            bucket, steps.tensors, specs=steps.specs, anchor_every=0, compaction_strides=(),
            threads=threads, on_commit=self._receipts.append,
        )  # fmt: skip
        self._bucket, self._run = bucket, self._publisher.run
        mirror = load_mirror(bucket, self._run, threads=threads)
        self.mirror = mirror
        self._subscriber = Subscriber(bucket, self._run, mirror, threads=threads)
        self._spare = {name: np.zeros_like(bits) for name, bits in steps.tensors.items()}

    def measure(self) -> None:
        """Publishes and follows the step that was just taken.

        The copy that the trainer's wait is compared with is measured right before, into memory
        that was written to before.
        """
        copy_one(self._steps.tensors, self._spare)
        started = time.perf_counter()
        copy_one(self._steps.tensors, self._spare)
        self.copies.append(time.perf_counter() - started)
        started = time.perf_counter()
        version = self._publisher.publish(self._steps.tensors)
        self.blocked.append(time.perf_counter() - started)
        self._subscriber.wait_for(version, timeout_s=600)
        self.end_to_end.append(time.perf_counter() - started)
        self._publisher.flush()
        receipt = self._receipts[-1]
        self.changed.append(receipt.changed / receipt.elements)
        self.delta_bytes.append(receipt.bytes_delta)
        _check_same(self._steps.tensors, self.mirror.tensors)

    def measure_memory(self) -> tuple[int, int]:
        """The reader's peak memory for a step beyond its mirror, and the limit for it.

        The limit is two of the largest blobs and a twentieth of the mirror.
        """
        self._steps.advance()
        version = self._publisher.publish(self._steps.tensors)
        self._publisher.flush()
        _, peak = measure_peak(self._subscriber.advance)
        _check_same(self._steps.tensors, self.mirror.tensors)
        manifest = read_manifest(self._bucket, self._run, version)
        assert manifest is not None
        assert manifest.delta is not None
        largest = max(
            (blob.bytes for blob in read_blobs(self._bucket, self._run, manifest.delta)), default=0
        )
        return peak.extra_bytes, 2 * largest + self.model_bytes // 20

    def close(self) -> None:
        self._publisher.close()


class _Whole:
    """Every tensor unchanged in one safetensors file, read into allocated memory."""

    name, used_by = FULL, "checkpoints"

    def encode(self, old: Mapping[str, Bf16Bits], new: Mapping[str, Bf16Bits]) -> list[Buffer]:
        del old
        return pack({name: Entry("BF16", bits) for name, bits in new.items()})

    def decode(self, payload: Buffer, weights: dict[str, Bf16Bits]) -> None:
        for name, bits in unpack(payload)[0].items():
            np.copyto(weights[name].reshape(-1), np.asarray(bits).reshape(-1))


class _Rivals:
    """Other formats for the same step, one after the other, each in a separate bucket."""

    def __init__(
        self, names: Sequence[str], make_bucket: Callable[[str], Bucket], steps: SyntheticSteps
    ) -> None:
        self._steps = steps
        self._buckets = {name: make_bucket(name) for name in names}
        self._codings: dict[str, Format] = {
            name: _Whole() if name == FULL else open_peer(name) for name in names
        }
        self._old = {name: bits.copy() for name, bits in steps.tensors.items()}
        self._reader = {name: bits.copy() for name, bits in steps.tensors.items()}
        self.seconds: dict[str, list[float]] = {name: [] for name in names}
        self._bytes: dict[str, int] = {}

    def remember(self) -> None:
        """Records the weights before the next step."""
        copy_one(self._steps.tensors, self._old)

    def measure(self) -> None:
        """Times each format from weights in the trainer to weights in the reader."""
        for name, coding in self._codings.items():
            copy_one(self._old, self._reader)
            bucket = self._buckets[name]
            started = time.perf_counter()
            data = b"".join(coding.encode(self._old, self._steps.tensors))
            bucket.put("step", data)
            self._bytes[name] = len(data)
            del data
            found = bucket.get("step", limit=1 << 40)
            assert found is not None
            coding.decode(found, self._reader)
            self.seconds[name].append(time.perf_counter() - started)
            _check_same(self._steps.tensors, self._reader)
            for key, bits in self._reader.items():  # Some formats replace the arrays.
                if not bits.flags.writeable:
                    self._reader[key] = bits.copy()

    def found(self) -> list[Rival]:
        """The medians."""
        return [
            Rival(
                name=name,
                used_by=coding.used_by,
                seconds=median(self.seconds[name]),
                bytes=self._bytes[name],
            )
            for name, coding in self._codings.items()
        ]


def _region(
    make_bucket: Callable[[str], Bucket],
    size: int,
    density: float,
    threads: int | None,
    tell: Callable[[str], None],
) -> tuple[tuple[float, float], int]:
    """Measures a relay: bytes per window of 50 versions, and objects for a lag of 60 versions.

    Bytes are shares of 50 full models.
    """
    source, destination = MeteredBucket(make_bucket("source")), make_bucket("destination")
    steps = SyntheticSteps(size // 2, density)
    publisher = open_publisher(
        source, steps.tensors, specs=steps.specs, anchor_every=ANCHOR_EVERY, compaction_strides=(),
        threads=threads,
    )  # fmt: skip
    relay = Relay(source, destination, threads=threads)
    relay.advance()
    shares, before = [], 0
    for last in (WINDOW, 2 * WINDOW):
        while publisher.version < last - 1:
            steps.advance()
            publisher.publish(steps.tensors)
            publisher.flush()
            relay.advance()
        tell(f"{relay.crossed / 1e6:.1f} MB crossed for versions up to {last - 1}")
        shares.append((relay.crossed - before) / (WINDOW * steps.bytes))
        before = relay.crossed
    publisher.close()
    relay.close()
    mirror = load_mirror(destination, relay.run)
    _check_same(steps.tensors, mirror.tensors)
    return (shares[0], shares[1]), _objects(destination, publisher.run, publisher.version)


def _objects(bucket: Bucket, run: Run, newest: int) -> int:
    """The most deltas, compacted deltas and anchors that a reader fetches for a lag of 60 versions.

    Covers the readers that end at one of the last 40 versions.
    """
    counts = []
    for goal in range(max(LAG, newest - 39), newest + 1):
        route = RouteFinder(bucket, run, held=goal - LAG, goal=goal).find()
        if route is None:
            raise BugError("no route leads over 60 versions", run=bucket.url, version=goal)
        counts.append(route.objects)
    return max(counts)


def _check_same(left: Mapping[str, Bf16Bits], right: Mapping[str, Bf16Bits]) -> None:
    for name, bits in left.items():
        if not np.array_equal(bits.reshape(-1), right[name].reshape(-1)):
            raise BugError(f"tensor {name} did not arrive as it was sent")
