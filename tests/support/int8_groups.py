"""A packed format that the package does not have: int8 in groups of 64 inputs."""

import torch

from deltawire.packed_formats import PackedEntry
from deltawire.quantization.integers import IntegerFormat

INT8_G64 = IntegerFormat(
    "int8-g64",
    bits=8,
    block=(1, 64),
    scale_dtype=torch.bfloat16,
    code_values=tuple(float(code - 256 if code >= 128 else code) for code in range(256)),
    limit=127,
    offset=0,
)

ENTRY = PackedEntry(
    "int8_groups:INT8_G64",
    planned_as="int8-groups",
    bits=8 + 16 / 64,
    weights={"num_bits": 8, "type": "int", "strategy": "group", "group_size": 64},
    layout="naive-quantized",
    codes="int8",
    keeps_merges=True,
)
