"""Generates pairs of any size: normal weights, and a step similar to an optimizer's.

Every old bf16 value has a float32 master, drawn within its rounding interval. The step adds a
normal number to every master. A small weight therefore changes its bits often and a large one
almost never, as in training. The standard deviation is chosen so that the requested share changes.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from benchmarks.pairs import Bf16Bits, Pair, PairTensor
from deltawire.errors import InputError
from deltawire.wire.run import TensorSpec

WEIGHT_SPREAD: Final = 0.02
"""Standard deviation of the weights, as of a transformer's initialisation."""

COLUMNS: Final = 4096
MAX_ELEMENTS: Final = (1 << 31) - COLUMNS
"""Some of the formats compared hold positions as int32."""

_CHUNK: Final = 1 << 22
_SAMPLE: Final = 1 << 20


def synthetic_pair(elements: int, density: float, *, seed: int = 0) -> Pair:
    """A pair of one tensor of ``elements``, rounded up to rows of 4096; ``density`` of it changes.

    The same arguments give the same bits. Raises InputError for a size or share out of range.
    """
    if not 0 < elements <= MAX_ELEMENTS:
        raise InputError(f"--synthetic takes 1 to {MAX_ELEMENTS} weights, not {elements}")
    if not 0 < density <= 0.5:
        raise InputError(f"--density takes shares above 0 and up to 0.5, not {density}")
    rows = -(-elements // COLUMNS)
    spread = _spread_for(density, seed)
    old = np.empty(rows * COLUMNS, np.uint16)
    new = np.empty_like(old)
    for number, start in enumerate(range(0, old.size, _CHUNK)):
        part = slice(start, min(start + _CHUNK, old.size))
        generator = np.random.Generator(np.random.SFC64((seed, 1, number)))
        bits, masters = _weights(generator, part.stop - part.start)
        old[part] = bits
        masters += generator.standard_normal(masters.size, np.float32) * np.float32(spread)
        new[part] = _round(masters)
    tensor = PairTensor(old.reshape(rows, COLUMNS), new.reshape(rows, COLUMNS))
    return Pair(f"synthetic-{100 * density:g}pct", {"weight": tensor})


class SyntheticSteps:
    """A model of ``elements`` bf16 weights of which each step changes a share ``density``.

    ``tensors`` holds the current bits in their shapes, in the same memory at every step: matrices
    of 4096 columns and at most ``rows`` rows, as a transformer has. Each weight also has a float32
    master, so memory is three times the model's.
    """

    def __init__(self, elements: int, density: float, *, rows: int = 4096, seed: int = 0) -> None:
        """Raises InputError for a size or share out of range."""
        if not 0 < elements <= MAX_ELEMENTS:
            raise InputError(f"a model of 1 to {MAX_ELEMENTS} weights, not {elements}")
        if not 0 < density <= 0.5:
            raise InputError(f"densities are above 0 and up to 0.5, not {density}")
        self._spread = np.float32(_spread_for(density, seed))
        self._seed = seed
        self._step = 0
        self._masters: dict[str, NDArray[np.float32]] = {}
        self.tensors: dict[str, Bf16Bits] = {}
        left = -(-elements // COLUMNS)
        for number in range(-(-left // rows)):
            count = min(rows, left - number * rows)
            generator = np.random.Generator(np.random.SFC64((seed, 2, number)))
            bits, masters = _weights(generator, count * COLUMNS)
            name = f"layers.{number}.weight"
            self.tensors[name] = bits.reshape(count, COLUMNS)
            self._masters[name] = masters
        self.specs = [TensorSpec(n, bits.shape, "BF16") for n, bits in self.tensors.items()]
        self.specs.sort(key=lambda spec: spec.name)

    @property
    def bytes(self) -> int:
        """How large the model is."""
        return sum(bits.nbytes for bits in self.tensors.values())

    def advance(self, density: float | None = None) -> None:
        """Takes one step of the optimizer, which changes ``density`` of the weights if given."""
        self._step += 1
        spread = self._spread if density is None else np.float32(_spread_for(density, self._seed))
        for number, (name, masters) in enumerate(self._masters.items()):
            bits = self.tensors[name].reshape(-1)
            for at in range(0, masters.size, _CHUNK):
                part = masters[at : at + _CHUNK]
                place = (self._seed, 3, self._step, number, at)
                generator = np.random.Generator(np.random.SFC64(place))
                part += generator.standard_normal(part.size, np.float32) * spread
                bits[at : at + _CHUNK] = _round(part)


def _spread_for(density: float, seed: int) -> float:
    """The step's standard deviation, by bisection on a sample."""
    generator = np.random.Generator(np.random.SFC64((seed, 0)))
    bits, masters = _weights(generator, _SAMPLE)
    step = generator.standard_normal(_SAMPLE, np.float32)
    low, high = -12.0, 0.0
    for _ in range(30):
        middle = (low + high) / 2
        changed = np.mean(_round(masters + step * np.float32(10.0**middle)) != bits)
        low, high = (low, middle) if changed > density else (middle, high)
    return float(10.0**low)


def _weights(generator: np.random.Generator, count: int) -> tuple[Bf16Bits, NDArray[np.float32]]:
    """Published bits, and masters that round to them: uint16[count], float32[count]."""
    masters = generator.standard_normal(count, np.float32) * np.float32(WEIGHT_SPREAD)
    return _round(masters), masters


def _round(values: NDArray[np.float32]) -> Bf16Bits:
    """To the nearest bf16, ties to even; for finite numbers."""
    bits = values.view(np.uint32)
    odd = (bits >> 16) & np.uint32(1)
    rounded: Bf16Bits = ((bits + odd + np.uint32(0x7FFF)) >> 16).astype(np.uint16)
    return rounded
