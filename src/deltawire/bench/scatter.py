"""What a swap over a placement costs by itself, without an engine: beside a reload, and memcpy."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from deltawire import codec
from deltawire.codec import Patch
from deltawire.engines.placed import PlacedWeights
from deltawire.engines.placement import probe
from deltawire.sync.mirror import Mirror
from deltawire.wire.run import TensorSpec

WIDTH = 1024
"""The hidden size of the layers that weights are made up in."""

_FUSED = {"qkv": ("q", "k", "v"), "gate_up": ("gate", "up"), "out": ("out",), "down": ("down",)}
_ROWS = {"q": 1, "k": 1, "v": 1, "gate": 2, "up": 2, "out": 1, "down": 2}
LAYER_ELEMENTS = sum(_ROWS.values()) * WIDTH * WIDTH


class ScatterTimes(NamedTuple):
    """One size: ``parameters`` of bf16, of which ``changes`` change.

    Times are the best of several rounds. ``reload_ms`` is the model's own loader over tensors in
    memory, ``copy_ms`` one memcpy of the whole model, ``probe_ms`` the probe. ``staged_bytes`` is
    what was allocated before the swap, ``swap_bytes`` what the swap itself allocates at its peak.
    """

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
        """As serving engines do it."""
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
    """Swap ``rounds`` times there and back, ``changes`` of about ``parameters`` weights each time,
    and check by the digest that it happened. Takes 4 bytes of host memory a parameter."""
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
    staged, peak = 0, 0
    for number in range(2 * rounds):
        back = {name: Patch(p.positions, bits[name][p.positions]) for name, p in there.items()}
        with preparing:
            prepared = weights.prepare(there, mirror, mirror.version + 1)
        staged = prepared.bytes
        if number == 0:
            tracemalloc.start()
            weights.swap(prepared)
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        else:
            with swapping:
                weights.swap(prepared)
        for name, patch in there.items():
            bits[name][patch.positions] = patch.bits
        mirror.version, mirror.digest, there = prepared.version, prepared.share, back
    with attesting:
        found = weights.attest()
    assert found == codec.digest_model(bits)
    return ScatterTimes(
        parameters=sum(spec.count for spec in engine.tensors),
        changes=sum(len(patch) for patch in there.values()),
        prepare_ms=preparing.best_ms,
        swap_ms=swapping.best_ms,
        reload_ms=reload,
        copy_ms=copy,
        attest_ms=attesting.best_ms,
        probe_ms=probing.best_ms,
        staged_bytes=staged,
        swap_bytes=peak,
    )


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
    """The best of several times, of the device too."""

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
