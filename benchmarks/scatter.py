"""Measures a swap over a placement without an engine, compared with a reload and a memcpy."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable, Iterable
from functools import partial

import msgspec
import numpy as np
import torch
from torch import Tensor

from deltawire import codec
from deltawire.codec import Patch
from deltawire.errors import InputError
from deltawire.placement.placed import PlacedWeights, Prepared
from deltawire.placement.placement import probe
from deltawire.sync.follow.mirror import Mirror
from deltawire.wire.run import TensorSpec

WIDTH = 1024
"""The hidden size of the generated layers."""

_FUSED = {"qkv": ("q", "k", "v"), "gate_up": ("gate", "up"), "out": ("out",), "down": ("down",)}
_ROWS = {"q": 1, "k": 1, "v": 1, "gate": 2, "up": 2, "out": 1, "down": 2}
LAYER_ELEMENTS = sum(_ROWS.values()) * WIDTH * WIDTH


class ScatterTimes(msgspec.Struct, frozen=True, kw_only=True):
    """One size: ``parameters`` of bf16 on ``device``, of which ``changes`` change.

    Times are the best of several rounds. ``reload_ms`` is the model's own loader over tensors in
    host memory, ``copy_ms`` one copy of the whole model from there, ``probe_ms`` the probe,
    ``attest_ms`` a digest of all live bits. ``staged_bytes`` is what was allocated before the swap,
    ``swap_bytes`` what the swap itself allocates at its peak.

    ``bandwidth`` is that of the device's memory, bytes read and written a second in a plain copy,
    in the same run. At it, ``swap_limit_ms`` is what reading the staged bytes once, and reading
    and writing once the memory lines that changes lie in, would take; ``attest_limit_ms`` what
    reading all weights would.
    """

    device: str
    parameters: int
    changes: int
    prepare_ms: float
    swap_ms: float
    reload_ms: float
    copy_ms: float
    attest_ms: float
    probe_ms: float
    staged_bytes: int
    swap_bytes: int
    bandwidth: float
    swap_limit_ms: float
    attest_limit_ms: float


class _Engine:
    """Layers with fused weights, and the loader that fuses them."""

    def __init__(self, layers: int, device: str) -> None:
        self.live: dict[str, Tensor] = {}
        self.places: dict[str, Tensor] = {}
        self.tensors: list[TensorSpec] = []
        for layer in range(layers):
            for fused, parts in _FUSED.items():
                rows = sum(_ROWS[part] for part in parts) * WIDTH
                weight = torch.zeros(rows, WIDTH, dtype=torch.bfloat16, device=device)
                self.live[f"{layer}.{fused}"] = weight
                first = 0
                for part in parts:
                    size = _ROWS[part] * WIDTH
                    self.places[f"{layer}.{part}"] = weight.narrow(0, first, size)
                    self.tensors.append(TensorSpec(f"{layer}.{part}", (size, WIDTH), "BF16"))
                    first += size

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Loads as serving engines do."""
        for name, weight in weights:
            self.places[name].copy_(weight)


def time_scatter(
    parameters: int,
    changes: int,
    *,
    rounds: int = 5,
    device: str = "cpu",
    seed: int = 0,
    clock: Callable[[], float] = time.perf_counter,
) -> ScatterTimes:
    """Swaps ``rounds`` times there and back on ``device``, ``changes`` of about ``parameters``
    weights each time, and verify the digest.

    Takes 4 bytes of host memory a parameter. Raises `InputError` if there is no such device.
    """
    if device != "cpu" and not (device.startswith("cuda") and torch.cuda.is_available()):
        raise InputError(f"unknown device {device[:40]}", hint="use cpu, or cuda on a GPU machine")
    engine = _Engine(max(1, round(parameters / LAYER_ELEMENTS)), device)
    rng = np.random.default_rng(seed)
    bits = {
        spec.name: rng.integers(0, 1 << 16, spec.count, dtype=np.uint16) for spec in engine.tensors
    }
    mirror = Mirror(bits, 0, codec.digest_model(bits))
    probing = _Timer(clock, device)
    with probing:
        placement = probe(engine.load_weights, engine.tensors, engine.live)
    weights = PlacedWeights(placement, engine.live)
    reload, copy = _time_reload(engine, mirror, rounds, _Timer(clock, device))
    weights.adopt(mirror)
    there = _random_patches(engine.tensors, changes, rng)
    preparing, swapping, attesting = (_Timer(clock, device) for _ in range(3))
    staged, peak, touched = 0, 0, 0
    for number in range(2 * rounds):
        back = {name: Patch(p.positions, bits[name][p.positions]) for name, p in there.items()}
        with preparing:
            prepared = weights.prepare(there, mirror, mirror.version + 1)
        staged = prepared.bytes
        if number == 0:
            touched = staged + 2 * _lines(prepared, device)
            peak = _allocated(partial(weights.swap, prepared), device)
        else:
            with swapping:
                weights.swap(prepared)
        for name, patch in there.items():
            bits[name][patch.positions] = patch.bits
        mirror.version, mirror.digest, there = prepared.version, prepared.share, back
    for _ in range(rounds):
        with attesting:
            found = weights.attest()
        assert found == weights.share
    assert weights.share == codec.digest_model(bits)
    parameters = sum(spec.count for spec in engine.tensors)
    bandwidth = _bandwidth(device, clock)
    return ScatterTimes(
        device=_name_of(device),
        parameters=parameters,
        changes=sum(len(patch) for patch in there.values()),
        prepare_ms=preparing.best_ms,
        swap_ms=swapping.best_ms,
        reload_ms=reload,
        copy_ms=copy,
        attest_ms=attesting.best_ms,
        probe_ms=probing.best_ms,
        staged_bytes=staged,
        swap_bytes=peak,
        bandwidth=bandwidth,
        swap_limit_ms=touched / bandwidth * 1e3,
        attest_limit_ms=2 * parameters / bandwidth * 1e3,
    )


def _lines(prepared: Prepared, device: str) -> int:
    """Bytes of the memory lines that changes lie in; positions ascend but for a few places."""
    line = 64 if device == "cpu" else 32
    return line * sum(
        int(torch.unique_consecutive(index // (line // live.element_size())).numel())
        for move in prepared.moves
        for live, index in (
            (extent.live, move.index[extent.first : extent.last]) for extent in move.ranges
        )
    )


def _allocated(work: Callable[[], None], device: str) -> int:
    """Returns the peak memory of ``work`` above the memory held before."""
    if device == "cpu":
        tracemalloc.start()
        work()
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return peak
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    work()
    return int(torch.cuda.max_memory_allocated(device) - before)


def _bandwidth(device: str, clock: Callable[[], float]) -> float:
    """Bytes read and written a second when memory of the device is copied within it."""
    size = (1 << 28) if device == "cpu" else (1 << 31)
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    timer = _Timer(clock, device)
    for _ in range(10):
        with timer:
            target.copy_(source)
    return 2 * size / (timer.best_ms / 1e3)


def _name_of(device: str) -> str:
    return torch.cuda.get_device_name(device) if device.startswith("cuda") else device


def _random_patches(
    tensors: Iterable[TensorSpec], changes: int, rng: np.random.Generator
) -> dict[str, Patch]:
    """New bits at random places, as many in all as are asked for, in proportion to the sizes."""
    tensors = list(tensors)
    total = sum(spec.count for spec in tensors)
    patches = {}
    for spec in tensors:
        count = changes * spec.count // total
        places = np.unique(rng.integers(0, spec.count, count, dtype=np.int64))
        patches[spec.name] = Patch(places, rng.integers(0, 1 << 16, places.size, dtype=np.uint16))
    return patches


def _time_reload(
    engine: _Engine, mirror: Mirror, rounds: int, timer: _Timer
) -> tuple[float, float]:
    """Milliseconds for the loader over all tensors, and for copying as many bytes in one go."""
    checkpoint = {
        spec.name: torch.from_numpy(mirror.tensors[spec.name].view(np.int16))
        .view(torch.bfloat16)
        .view(spec.shape)
        for spec in engine.tensors
    }
    for _ in range(rounds):
        with timer:
            engine.load_weights(checkpoint.items())
    copying = _Timer(timer.clock, timer.device)
    for _ in range(rounds):
        with copying:
            for name, tensor in checkpoint.items():
                engine.places[name].view(torch.int16).copy_(tensor.view(torch.int16))
    return timer.best_ms, copying.best_ms


class _Timer:
    """Return the best of several times, including the device's work."""

    def __init__(self, clock: Callable[[], float], device: str) -> None:
        self.clock = clock
        self.device = device
        self.best_ms = float("inf")

    def __enter__(self) -> None:
        self._wait()
        self._started = self.clock()

    def __exit__(self, *_: object) -> None:
        self._wait()
        self.best_ms = min(self.best_ms, (self.clock() - self._started) * 1e3)

    def _wait(self) -> None:
        if self.device.startswith("cuda"):
            torch.cuda.synchronize()
