"""Measures what a rank fetches of a delta, over the bytes of the chunks that it serves.

No weights are made: a delta's table is, with the shapes of Qwen3-32B (dense) and Qwen3-235B-A22B
(128 experts in each of 94 layers), and the reader's own code plans each rank's requests. The excess
is what lies between the pieces that a rank needs (joined requests, whole blobs), and its part of
the table. It is stated for the worst rank of 2, 4 and 8.

The details add the same bytes over an even share of the delta. A rank that serves columns of a
row-major tensor reads all of its chunks, so a dense model's ranks read much more than that.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from benchmarks.scale.tables import Table
from benchmarks.training.keys import Measured, Options
from deltawire.codec import ZERO
from deltawire.sync.follow.fetch import fetched_bytes, wanted_pieces
from deltawire.sync.follow.mirror import Mirror, select
from deltawire.wire.run import Run, TensorSpec, chunk_for

RANKS = (2, 4, 8)
WHOLE = ("o_proj", "down_proj", "mlp.gate.")
"""Matrices whose chunks a rank needs all: it serves columns of two, and all of the router."""

CHANGED_BYTES = 0.025
"""Bytes of a delta for each bf16 element, of which 3 % change."""


class Shape(NamedTuple):
    """The numbers of a model's config.json."""

    layers: int
    hidden: int
    heads: int
    key_value_heads: int
    head: int
    vocabulary: int
    width: int
    experts: int = 0


MODELS = {
    "qwen3-32b": Shape(64, 5120, 64, 8, 128, 151936, 25600),
    "qwen3-235b-a22b": Shape(94, 4096, 64, 4, 128, 151936, 1536, 128),
}


def measure(options: Options) -> Measured:
    """Returns the largest excess over both models and all ranks."""
    del options
    details: dict[str, Any] = {}
    for name, shape in MODELS.items():
        specs = tensors(shape)
        table = Table(specs, chunk=chunk_for(specs), changed_bytes=CHANGED_BYTES)
        for ranks in RANKS:
            found = [_read(table, wanted(table.run, shape, rank, ranks)) for rank in range(ranks)]
            fetched, served = max(found, key=lambda one: one[0] / one[1])
            whole = sum(piece.length for piece in table.payload.pieces)
            details[f"{name}, {ranks} ranks"] = {
                "fetched_bytes": fetched,
                "served_bytes": served,
                "excess": fetched / served - 1,
                "over_even_share": fetched / (whole / ranks) - 1,
            }
    worst = max(one["excess"] for one in details.values())
    return Measured({"shard_reader_excess": worst}, details)


def tensors(shape: Shape) -> list[TensorSpec]:
    """Returns a model's tensors, in name order."""
    hidden = shape.hidden
    found = [TensorSpec("model.embed_tokens.weight", (shape.vocabulary, hidden), "BF16")]
    for layer in range(shape.layers):
        at = f"model.layers.{layer}."
        queries, values = shape.heads * shape.head, shape.key_value_heads * shape.head
        matrices = {
            "self_attn.q_proj": (queries, hidden),
            "self_attn.k_proj": (values, hidden),
            "self_attn.v_proj": (values, hidden),
            "self_attn.o_proj": (hidden, queries),
        }
        groups = [f"mlp.experts.{n}" for n in range(shape.experts)] or ["mlp"]
        for group in groups:
            matrices[f"{group}.gate_proj"] = matrices[f"{group}.up_proj"] = (shape.width, hidden)
            matrices[f"{group}.down_proj"] = (hidden, shape.width)
        if shape.experts:
            matrices["mlp.gate"] = (shape.experts, hidden)
        found += [TensorSpec(f"{at}{name}.weight", size, "BF16") for name, size in matrices.items()]
        for norm in ("input_layernorm", "post_attention_layernorm"):
            found.append(TensorSpec(f"{at}{norm}.weight", (hidden,), "BF16"))
    found.append(TensorSpec("lm_head.weight", (shape.vocabulary, hidden), "BF16"))
    return sorted(found, key=lambda spec: spec.name)


def wanted(run: Run, shape: Shape, rank: int, ranks: int) -> dict[str, tuple[int, int] | None]:
    """Returns the rows that a rank serves of each tensor: its experts whole, its rows of other
    matrices, and whole tensors where it serves columns or everything."""
    found: dict[str, tuple[int, int] | None] = {}
    for spec in run.tensors:
        expert = re.search(r"experts\.(\d+)\.", spec.name)
        if expert:
            if int(expert[1]) * ranks // shape.experts == rank:
                found[spec.name] = None
        elif len(spec.shape) == 1 or any(name in spec.name for name in WHOLE):
            found[spec.name] = None
        else:
            rows = spec.shape[0]
            found[spec.name] = (rows * rank // ranks, rows * (rank + 1) // ranks)
    return found


def _read(table: Table, rows: Mapping[str, tuple[int, int] | None]) -> tuple[int, int]:
    """Returns the bytes that a reader fetches, and those of the pieces that it needs."""
    spans = select(table.run, rows)
    # The bits are one element each, repeated: a reader's plan needs their number only.
    bits = {
        name: np.broadcast_to(np.uint16(0), span.stop - span.start) for name, span in spans.items()
    }
    mirror = Mirror(bits, 0, ZERO, {name: span.start for name, span in spans.items()}, ZERO)
    pieces = wanted_pieces(table.run, table.payload, mirror)
    numbers = {spec.name: number for number, spec in enumerate(table.run.tensors)}
    ranges = {numbers[name]: (span.start, span.stop) for name, span in spans.items()}
    fetched = fetched_bytes(table.payload, pieces) + table.read_by(ranges)
    return fetched, sum(piece.length for piece in pieces)
