"""Registers the formats that weights are packed in, with all facts that others ask about them.

A new format is one module in `deltawire.quantization` and one entry in `PACKED`. The configuration,
`deltawire pack`, readers and writers of checkpoints, exporters and the memory model ask this table,
which needs no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from deltawire.errors import InputError


class PackedEntry(NamedTuple):
    """A registered format.

    ``place`` is ``module:object``, a `deltawire.quantization.formats.PackedFormat`. ``planned_as``
    is its name in plans, and ``bits`` are those of a weight there, scales included.

    ``weights`` is how compressed-tensors describes the weights, ``layout`` that library's name of
    how they are stored, ``codes`` the dtype of their codes there, and ``also_stored`` what it
    stores next to codes and scales: the shape, or a factor for the whole weight.

    ``keeps_merges`` says that most of an adapter's change survives a merge into the format.

    Example::

        PACKED["int4-g32"].bits  # 4.5
    """

    place: str
    planned_as: str
    bits: float
    weights: Mapping[str, Any]
    layout: str
    codes: Literal["uint8", "int8", "int32", "float8_e4m3fn"] = "uint8"
    also_stored: tuple[Literal["shape", "global_scale"], ...] = ()
    keeps_merges: bool = False

    @property
    def scheme(self) -> tuple[str, int, str, int | None]:
        """Returns type, bits, strategy and group size, which tell the formats apart."""
        weights = self.weights
        group: int | None = weights.get("group_size")
        return str(weights["type"]), int(weights["num_bits"]), str(weights["strategy"]), group


PACKED = {
    "int4-g32": PackedEntry(
        "deltawire.quantization.integers:INT4_G32",
        planned_as="int4",
        bits=4 + 16 / 32,  # a bf16 scale for 32 weights, as Kimi has them
        weights={"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32},
        layout="pack-quantized",
        codes="int32",
        also_stored=("shape",),
    ),
    "int8-row": PackedEntry(
        "deltawire.quantization.integers:INT8_ROW",
        planned_as="int8",
        bits=8,  # A row's bf16 scale is nothing next to its weights.
        weights={"num_bits": 8, "type": "int", "strategy": "channel"},
        layout="naive-quantized",
        codes="int8",
        keeps_merges=True,
    ),
    "mxfp4": PackedEntry(
        "deltawire.quantization.fp4:MXFP4",
        planned_as="mxfp4",
        bits=4 + 8 / 32,  # an 8-bit exponent for 32 weights, as gpt-oss has them
        weights={"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32},
        layout="mxfp4-pack-quantized",
    ),
    "nvfp4": PackedEntry(
        "deltawire.quantization.fp4:NVFP4",
        planned_as="nvfp4",
        bits=4 + 8 / 16,  # an fp8 scale for 16 weights
        weights={"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
        layout="nvfp4-pack-quantized",
        also_stored=("global_scale",),
    ),
    "fp8-block": PackedEntry(
        "deltawire.quantization.fp8:FP8_BLOCK",
        planned_as="fp8",
        bits=8 + 32 / (128 * 128),  # a float32 scale for 128 by 128 weights, as DeepSeek-V3's
        weights={
            "num_bits": 8,
            "type": "float",
            "strategy": "block",
            "block_structure": [128, 128],
        },
        layout="naive-quantized",
        codes="float8_e4m3fn",
        keeps_merges=True,
    ),
}
"""Formats by the name that ``train.adapter.packed`` and ``deltawire pack --format`` give."""


def packings() -> tuple[str, ...]:
    """Returns what plans call the formats, and ``none``."""
    return ("none", *(one.planned_as for one in PACKED.values()))


def packed_format(planned_as: str) -> str:
    """Returns the configuration's name of a format, ``none`` for none; raises `InputError` for an
    unknown one."""
    for name, one in PACKED.items():
        if one.planned_as == planned_as:
            return name
    if planned_as == "none":
        return planned_as
    raise InputError(
        f"there is no packing {planned_as[:80]!r}", hint=f"use one of {', '.join(packings())}"
    )


def require_packed(name: str) -> PackedEntry:
    """Returns the format of that name; raises `InputError` for an unknown one."""
    if name not in PACKED:
        raise InputError(
            f"there is no packed format {name[:80]!r}", hint=f"use one of {', '.join(PACKED)}"
        )
    return PACKED[name]


def planned_bits(planned_as: str) -> float:
    """Returns the bits that a frozen expert's weight takes in a plan; ``none`` is bf16."""
    name = packed_format(planned_as)
    return 16.0 if name == "none" else PACKED[name].bits
