"""Measures the rates of every hop on this machine: copy, quantise, encode, decode, stage, swap.

Each figure is a median of rounds in turns, so that a load that changes meanwhile falls on all of
them alike, or the fastest of them. The codec is timed on one core in chunks of the size that
publishers use, over arrays that are larger than most caches; speeds of threads are those of the
same encoding.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from functools import partial
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.runner import this_machine
from benchmarks.synthetic import SyntheticSteps
from deltawire import codec
from deltawire.codec.delta import cores
from deltawire.plan.fleet.rates import (
    CodecRates,
    CodedSize,
    CoreCost,
    Precision,
    Rates,
    StoreRates,
    ThreadSpeed,
    fit_cost,
)
from deltawire.store import Bucket, open_bucket
from deltawire.store.delegating import DelegatingBucket
from deltawire.sync import Subscriber, load_mirror, open_publisher
from deltawire.sync.publish.parallel_copy import Copier
from deltawire.wire.run import CHUNK_ELEMENTS, TensorSpec

DTYPES: dict[Precision, str] = {"bf16": "BF16", "fp8": "F8_E4M3"}
SHARES: dict[Precision, tuple[float, ...]] = {
    "bf16": (0.001, 0.003, 0.01, 0.03, 0.1),
    "fp8": (0.001, 0.003, 0.01),
}
"""Shares of changed values that sizes are measured at."""
TIMED: dict[Precision, tuple[float, float]] = {"bf16": (0.001, 0.03), "fp8": (0.001, 0.01)}
"""The two shares that costs are fitted to."""

TILE = 1 << 24
"""Values that are generated; arrays repeat them."""
REPEATS = 4
BRIEF = 1 << 19
"""Values of a chunk where the fastest counts: it should end before other work interrupts it."""
THREADS_PER_CORE = (1, 2, 4, 8)
"""Threads that speed-ups are measured at, for each core: readers on one host have many."""
COLUMNS = 4096
SMALL = 4 << 10
LARGE = 8 << 20
AT_ONCE = 4
Codes = NDArray[np.unsignedinteger[Any]]


class _Sample:
    """Values before and after a step, of which ``share`` changed: `TILE`, ``repeats`` times."""

    def __init__(
        self,
        precision: Precision,
        share: float,
        *,
        seed: int,
        repeats: int = REPEATS,
        chunk: int = 0,
    ) -> None:
        self._chunk = chunk or CHUNK_ELEMENTS
        self.dtype = DTYPES[precision]
        before, after = (bf16_tile if precision == "bf16" else fp8_tile)(share, seed=seed)
        self.changed = float(np.mean(before != after))
        self.before = np.tile(before, repeats)
        self.after = np.tile(after, repeats)
        self.mirror = self.before.copy()
        self.changes = self.changed * self.before.size
        self.payloads = [
            codec.encode_named(
                "tile", self.before[one], self.after[one], start=one.start, dtype=self.dtype,
                columns=COLUMNS, threads=1,
            ).payload
            for one in self.chunks
        ]  # fmt: skip

    @property
    def chunks(self) -> list[slice]:
        starts = range(0, self.before.size, self._chunk)
        return [slice(start, start + self._chunk) for start in starts]

    @property
    def bits_per_change(self) -> float:
        return 8 * sum(map(len, self.payloads)) / self.changes

    def encode(self, one: slice) -> None:
        codec.encode_named(
            "tile", self.before[one], self.after[one], start=one.start, dtype=self.dtype,
            columns=COLUMNS, threads=1,
        )  # fmt: skip

    def timed_encode(self, one: slice) -> float:
        return _seconds(partial(self.encode, one))

    def decode(self, number: int) -> tuple[slice, NDArray[np.uint32], Codes]:
        one = self.chunks[number]
        coded = memoryview(self.payloads[number])
        patch, _ = codec.decode_named(coded, "tile", self.before[one], start=one.start, threads=1)
        return one, patch.positions.astype(np.uint32), patch.bits


def bf16_tile(share: float, *, seed: int) -> tuple[Codes, Codes]:
    """Generates `TILE` bf16 values before and after a step that changes about ``share``."""
    steps = SyntheticSteps(TILE, share, seed=seed)
    (bits,) = steps.tensors.values()
    before = bits.reshape(-1).copy()
    steps.advance()
    return before, bits.reshape(-1)


def fp8_tile(share: float, *, seed: int) -> tuple[Codes, Codes]:
    """Generates `TILE` codes of e4m3 in blocks of 128 × 128, with the same scales before and after
    a step that changes about ``share`` of them."""
    generator = np.random.Generator(np.random.SFC64((seed, 5)))
    shape = (TILE // COLUMNS, COLUMNS)
    masters = generator.standard_normal(shape, np.float32) * np.float32(0.02)
    step = generator.standard_normal(shape, np.float32)
    scales = _block_scales(masters)
    before = _e4m3(masters, scales)
    rows = slice(0, 256)
    low, high = -12.0, 0.0
    for _ in range(30):
        middle = (low + high) / 2
        moved = _e4m3(masters[rows] + step[rows] * np.float32(10.0**middle), scales[rows])
        low, high = (low, middle) if np.mean(moved != before[rows]) > share else (middle, high)
    after = _e4m3(masters + step * np.float32(10.0**low), scales)
    return before.reshape(-1), after.reshape(-1)


def _block_scales(masters: NDArray[np.float32]) -> NDArray[np.float32]:
    """Returns a power of two for each value: the least that keeps its block below 448."""
    rows, columns = masters.shape
    peaks = np.abs(masters.reshape(rows // 128, 128, columns // 128, 128)).max(axis=(1, 3))
    scales = np.exp2(np.ceil(np.log2(peaks / 448.0))).astype(np.float32)
    return np.repeat(np.repeat(scales, 128, axis=0), 128, axis=1)


def _e4m3(values: NDArray[np.float32], scales: NDArray[np.float32]) -> Codes:
    import torch

    ratio = torch.from_numpy(values / scales).clamp(-448, 448)
    return ratio.to(torch.float8_e4m3fn).view(torch.uint8).numpy()


class RateMeter:
    """Measures rates again and again over the same generated values.

    With ``fastest``, the fastest round and chunk count instead of the median: the rates of a
    machine that does nothing else, if it does nothing else for some milliseconds.

    Example::

        meter = RateMeter(("bf16", "fp8"))
        rates = meter.measure(rounds=5)
    """

    def __init__(
        self, precisions: Sequence[Precision], *, seed: int = 0, fastest: bool = False
    ) -> None:
        self._pick: Callable[[list[float]], float] = min if fastest else median
        self._samples = {
            precision: {
                share: _Sample(precision, share, seed=seed, chunk=BRIEF if fastest else 0)
                for share in TIMED[precision]
            }
            for precision in precisions
        }
        self._sizes = {
            precision: tuple(
                CodedSize(one.changed, one.bits_per_change)
                for share in SHARES[precision]
                for one in [
                    (None if fastest else timed.get(share))
                    or _Sample(precision, share, seed=seed, repeats=1)
                ]
            )
            for precision, timed in self._samples.items()
        }
        self._once: tuple[float, float, float] | None = None

    def measure(self, rounds: int, *, engine: bool = True) -> Rates:
        """Returns the rates of this machine, without stores. Quantising, staging and swapping,
        which need torch, are measured once, or are 0 without ``engine``."""
        load = os.getloadavg()[0]  # Of others: this measurement adds its own.
        found = {one: self._codec(one, rounds) for one in self._samples}
        copied, digested = _memory_rates(rounds, self._pick)
        publish_s, follow_s = fixed_costs(open_bucket("memory://"), rounds=max(rounds, 5))
        if self._once is None:
            self._once = (_quantise_cost(rounds), *_swap_costs()) if engine else (0.0, 0.0, 0.0)
        machine = this_machine()
        return Rates(
            machine=f"{machine.processor}, {machine.processors} processors, load {load:.1f}",
            measured=datetime.now(UTC).isoformat(timespec="seconds"),
            cores=cores(),
            speeds=self._speeds(rounds),
            copy_bytes_s=copied,
            digest_bytes_s=digested,
            quantise_value_s=self._once[0],
            stage_change_s=self._once[1],
            swap_change_s=self._once[2],
            mirror_change_s=median(one[1] for one in found.values()),
            publish_s=publish_s,
            follow_s=follow_s,
            codecs={one: rates[0] for one, rates in found.items()},
        )

    def _total(self, taken: Iterable[float]) -> float:
        """Adds up the seconds of chunks; with ``fastest``, as if each took the shortest."""
        listed = list(taken)
        return min(listed) * len(listed) if self._pick is min else sum(listed)

    def _speeds(self, rounds: int) -> tuple[ThreadSpeed, ...]:
        """Times the same encoding on one thread and on more, in turns."""
        sample = next(iter(next(iter(self._samples.values())).values()))
        counts = [1, *(cores() * factor for factor in THREADS_PER_CORE)]
        taken: dict[int, list[float]] = {count: [] for count in counts}
        for _ in range(rounds):
            for count in counts:
                with ThreadPoolExecutor(count) as threads:
                    taken[count].append(
                        _seconds(partial(_each_on, threads, sample.encode, sample.chunks))
                    )
        single = self._pick(taken.pop(1))
        return tuple(ThreadSpeed(count, single / self._pick(one)) for count, one in taken.items())

    def _codec(self, precision: Precision, rounds: int) -> tuple[CodecRates, float]:
        """Returns the codec's rates and the seconds of a mirror's move for each change."""
        samples = self._samples[precision]
        encodes: dict[float, list[float]] = {share: [] for share in samples}
        decodes: dict[float, list[float]] = {share: [] for share in samples}
        moves: list[float] = []
        for _ in range(rounds):
            for share, sample in samples.items():
                encodes[share].append(self._total(map(sample.timed_encode, sample.chunks)))
                taken, patches = [], []
                for number in range(len(sample.chunks)):
                    started = time.perf_counter()
                    patches.append(sample.decode(number))
                    taken.append(time.perf_counter() - started)
                decodes[share].append(self._total(taken))
                # Patches of a low share cost more for each change: memory lines are rare.
                moves.append(_seconds(partial(_move, sample, patches)) / sample.changes)
        values = float(TILE * REPEATS)

        def fit(times: dict[float, list[float]]) -> CoreCost:
            rows = [(values, samples[s].changes, self._pick(one)) for s, one in times.items()]
            return fit_cost(rows)

        rates = CodecRates(encode=fit(encodes), decode=fit(decodes), sizes=self._sizes[precision])
        return rates, self._pick(moves)


def _each_on(
    threads: ThreadPoolExecutor, work: Callable[[slice], None], chunks: Sequence[slice]
) -> None:
    for _ in threads.map(work, chunks):
        pass


def _move(sample: _Sample, patches: Sequence[tuple[slice, NDArray[np.uint32], Codes]]) -> None:
    """Writes patches as a mirror's move does."""
    for one, positions, bits in patches:
        sample.mirror[one][positions] = bits


def _seconds(work: Callable[[], Any]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _memory_rates(rounds: int, pick: Callable[[list[float]], float]) -> tuple[float, float]:
    """Returns bytes a second of the trainer's copy with all cores, and of a digest on one."""
    source = np.ones(TILE * REPEATS, np.uint16)
    target = np.zeros_like(source)
    copier = Copier()
    copies, digests = [], []
    for _ in range(rounds):
        copies.append(_seconds(lambda: copier.copy([(target, source)])))
        digests.append(_seconds(lambda: codec.digest_bits("tile", source)))
    copier.close()
    return source.nbytes / pick(copies), source.nbytes / pick(digests)


def _quantise_cost(rounds: int) -> float:
    """Returns seconds of one core to make one e4m3 code in blocks, with the trainer's code."""
    import torch

    from deltawire.quantization.fp8 import FP8_BLOCK

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        weight = torch.randn(4096, 1024) * 0.02
        taken = [_seconds(lambda: FP8_BLOCK.quantize(weight)) for _ in range(max(rounds, 3))]
    finally:
        torch.set_num_threads(before)
    return median(taken) / weight.numel()


def _swap_costs() -> tuple[float, float]:
    """Returns seconds to stage a change, and to swap it, in an engine in host memory."""
    from benchmarks.scatter import time_scatter

    found = time_scatter(10_000_000, 200_000, rounds=3)
    return found.prepare_ms / 1e3 / found.changes, found.swap_ms / 1e3 / found.changes


class ClockedBucket(DelegatingBucket):
    """Notes when the newest object was created: for a publisher, its commit.

    Example::

        bucket = ClockedBucket(open_bare_bucket("memory://"))
    """

    def __init__(self, inner: Bucket) -> None:
        super().__init__(inner)
        self._created_at = [0.0]

    @property
    def created_at(self) -> float:
        """When the newest object was created, by the machine's monotonic clock; 0 before."""
        return self._created_at[0]

    def with_inner(self, inner: Bucket) -> ClockedBucket:
        """As `DelegatingBucket.with_inner`; both note to one place."""
        return self._moved(inner)

    def create(self, key: str, data: bytes) -> bool:
        """As `Bucket.create`."""
        made = super().create(key, data)
        self._created_at[0] = time.monotonic()
        return made


def fixed_costs(bucket: Bucket, *, rounds: int) -> tuple[float, float]:
    """Returns seconds from `publish` to the commit, and from there to a moved mirror, of a model
    that is so small that only the cost of a version counts."""
    clocked = ClockedBucket(bucket)
    bits = np.arange(1 << 12, dtype=np.uint16)
    specs = [TensorSpec("tile", (bits.size,), "BF16")]
    publisher = open_publisher(
        clocked, {"tile": bits}, specs=specs, anchor_every=0, compaction_strides=()
    )
    mirror = load_mirror(clocked, publisher.run)
    subscriber = Subscriber(clocked, publisher.run, mirror)
    published, followed = [], []
    for number in range(rounds + 1):
        bits[number] ^= np.uint16(1)
        started = time.monotonic()
        publisher.publish({"tile": bits})
        publisher.flush()
        published.append(clocked.created_at - started)
        followed.append(_seconds(subscriber.advance))
    publisher.close()
    return median(published[1:]), median(followed[1:])


def store_rates(bucket: Bucket, *, rounds: int) -> StoreRates:
    """Measures one store with objects of 4 KiB and 8 MiB, which it leaves there."""
    small, large = bytes(SMALL), np.random.default_rng(0).bytes(LARGE)
    small_puts, small_gets, puts, gets, totals = [], [], [], [], []

    def get_large(_: int = 0) -> None:
        bucket.get("rates/large", limit=LARGE)

    with ThreadPoolExecutor(AT_ONCE) as threads:
        for number in range(rounds):
            for each in range(4):
                key = f"rates/{number}-{each}"
                small_puts.append(_seconds(lambda: bucket.put(key, small)))  # noqa: B023
                small_gets.append(_seconds(lambda: bucket.get(key, limit=SMALL)))  # noqa: B023
            puts.append(_seconds(lambda: bucket.put("rates/large", large)))
            gets.append(_seconds(get_large))
            totals.append(_seconds(lambda: list(threads.map(get_large, range(AT_ONCE)))))
    get_s, put_s = median(small_gets), median(small_puts)
    return StoreRates(
        get_s=get_s,
        put_s=put_s,
        get_bytes_s=LARGE / max(median(gets) - get_s, 1e-6),
        put_bytes_s=LARGE / max(median(puts) - put_s, 1e-6),
        total_get_bytes_s=AT_ONCE * LARGE / max(median(totals) - get_s, 1e-6),
    )
