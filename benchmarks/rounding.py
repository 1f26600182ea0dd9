"""Which part of an update of float32 masters reaches weights that are published in 16, 8 or 4 bits.

The weights are a checkpoint's own. The update is AdamW's on gradients of noise, without decay. No
batch is computed, and the update scales with the rate, so it is computed once. For each format the
figures are those of a run: the served share, ⟨served − served₀, master − master₀⟩ / |master −
master₀|², and the share of elements that differ from version 0; and the cosine of the two changes,
which says how much of the served change is rounding.

Masters start at the published values, or dithered in the intervals that round to them
(`deltawire.train.dither`), those of float16 for a run that publishes it. The quantized lines are
made from bf16 weights, with scales that stay (`deltawire.quantization.sticky`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import torch
from safetensors import safe_open
from torch import Tensor

from deltawire.errors import InputError
from deltawire.quantization.dequantize import dequantize_with_torch
from deltawire.quantization.formats import open_format
from deltawire.quantization.sticky import quantize_sticky
from deltawire.train.dither import dither

ROWS, COLUMNS = 128, 256
"""The part of a matrix that is looked at: whole blocks of every format."""
DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16}
QUANTIZED = ("fp8-block", "int4-g32", "mxfp4")
BETA1, BETA2 = 0.9, 0.99


class Arrived(msgspec.Struct, frozen=True, kw_only=True):
    """The change that one format shows after ``step`` steps at ``rate``. ``moved`` is the standard
    deviation of the masters' change."""

    rate: float
    step: int
    masters: str
    format: str
    moved: float
    served: float
    cosine: float
    changed: float


def measure(
    model: Path, *, rates: Sequence[float], steps: Sequence[int], matrices: int, seed: int
) -> list[Arrived]:
    """Measures every rate, step and format over ``matrices`` evenly spread ones of a model."""
    sums: dict[tuple[float, int, str, str], Tensor] = {}
    generator = torch.Generator().manual_seed(seed)
    for name, weight in read_matrices(model, matrices):
        moves = adam_moves(tuple(weight.shape), steps, generator)
        for start in ("published", "dithered"):
            masters = {}
            for dtype in DTYPES.values():
                masters[dtype] = weight.clone()
                if start == "dithered":
                    dither(masters[dtype], dtype, seed=seed, name=name)
            for rate in rates:
                for step, move in moves.items():
                    for form, found in _arrived(weight, masters, rate * move):
                        key = (rate, step, start, form)
                        sums[key] = sums.get(key, torch.zeros(5, dtype=torch.float64)) + found
    return [
        Arrived(
            rate=rate,
            step=step,
            masters=start,
            format=form,
            moved=float((total[1] / total[3]).sqrt()),
            served=float(total[0] / total[1]),
            cosine=float(total[0] / (total[1] * total[4]).sqrt()) if total[4] else 0.0,
            changed=float(total[2] / total[3]),
        )
        for (rate, step, start, form), total in sums.items()
    ]


def read_matrices(model: Path, count: int) -> Iterator[tuple[str, Tensor]]:
    """Yields the corners of evenly spread matrices of a model's bf16 checkpoint, as float32.

    Raises `InputError` if it has none.
    """
    files = sorted(model.glob("*.safetensors"))
    found = []
    for path in files:
        with safe_open(path, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - not a mapping
                part = tensors.get_slice(name)
                shape = part.get_shape()
                fits = len(shape) == 2 and shape[0] >= ROWS and shape[1] >= COLUMNS
                if fits and part.get_dtype() == "BF16":
                    found.append((name, path))
    if not found:
        raise InputError(
            f"{model} has no bf16 matrix of {ROWS} x {COLUMNS} or more",
            hint="give a model directory in the Hugging Face layout; make real-model writes one",
        )
    for name, path in found[:: max(1, len(found) // count)][:count]:
        with safe_open(path, framework="pt") as tensors:
            yield name, tensors.get_slice(name)[:ROWS, :COLUMNS].float().contiguous()


def adam_moves(
    shape: tuple[int, ...], steps: Sequence[int], generator: torch.Generator
) -> dict[int, Tensor]:
    """Returns by how much AdamW at rate 1 has moved each weight after some steps, on gradients that
    are noise."""
    moved, first, second = (torch.zeros(shape) for _ in range(3))
    found = {}
    for step in range(1, max(steps) + 1):
        gradient = torch.randn(shape, generator=generator)
        first.lerp_(gradient, 1 - BETA1)
        second.lerp_(gradient.square(), 1 - BETA2)
        root = (second / (1 - BETA2**step)).sqrt_()
        moved -= first / (1 - BETA1**step) / root.clamp_(min=1e-8)
        if step in steps:
            found[step] = moved.clone()
    return found


def _arrived(
    weight: Tensor, masters: dict[torch.dtype, Tensor], move: Tensor
) -> Iterator[tuple[str, Tensor]]:
    """Yields each format with five sums: along the move, of its square, of changed elements, of
    all, and of the change's square. ``masters`` begin differently for each published dtype."""
    for name, dtype in DTYPES.items():
        moved = masters[dtype] + move
        # The move that float32 masters have made, which is not quite the one that was asked.
        exact = moved.double() - masters[dtype].double()
        yield name, _sums(moved.to(dtype).double() - weight.to(dtype).double(), exact)
    master = masters[torch.bfloat16]
    served, exact = (master + move).to(torch.bfloat16), (master + move).double() - master.double()
    for name in QUANTIZED:
        form, scaled = open_format(name), name == "fp8-block"
        before = quantize_sticky(form, weight, None, power_of_two=scaled)
        after = quantize_sticky(form, served, before["scales"], power_of_two=scaled)
        values = [dequantize_with_torch(form, one).double() for one in (before, after)]
        yield name, _sums(values[1] - values[0], exact)


def _sums(change: Tensor, move: Tensor) -> Tensor:
    return torch.stack(
        [
            (change * move).sum(),
            move.square().sum(),
            (change != 0).sum().double(),
            torch.tensor(float(move.numel()), dtype=torch.float64),
            change.square().sum(),
        ]
    )
