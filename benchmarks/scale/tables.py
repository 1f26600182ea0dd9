"""Measures manifests and piece tables of models with a trillion parameters, without weights.

The keys are of 2^18 pieces in 64 layers; a reader of a sixteenth of each layer is a rank of 16 that
holds an equal share of the experts. The details add the tensor table of Kimi K2 (61 layers, 384
experts in three matrices each), whose names sort by text: experts 0 to 23 are then not neighbors.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

from benchmarks.training.keys import Measured, Options
from deltawire.store import MeteredBucket, open_bucket
from deltawire.sync.chain.payloads import read_payload, store_payload
from deltawire.wire.manifest import Manifest, encode_manifest
from deltawire.wire.payload import BlobRef, Payload, Piece, add_sums
from deltawire.wire.run import Run, TensorSpec, chunk_for

SHARDS = 16
LARGEST_LAYERS, OF_A_LAYER = 64, 1 << 10
LAYERS, DENSE_LAYERS, EXPERTS = 61, 1, 384
HIDDEN, EXPERT, DENSE = 7168, 2048, 18432
CHANGED_BYTES = 0.003
BLOB_BYTES = 32 << 20


def measure(options: Options) -> Measured:
    """Returns the bytes of the whole, and those that a reader of a sixteenth fetches."""
    del options
    specs = [
        TensorSpec(f"model.layers.{layer}.experts.{n}.weight", (1 << 24,), "U8")
        for layer in range(LARGEST_LAYERS)
        for n in range(OF_A_LAYER)
    ]
    largest = Table(specs, chunk=1 << 22)
    # A layer's first expert of a rank is not at the border of a segment.
    share = {
        layer * OF_A_LAYER + 11 * layer + n: (0, 1 << 24)
        for layer in range(LARGEST_LAYERS)
        for n in range(OF_A_LAYER // SHARDS)
    }
    specs = kimi_tensors()
    kimi = Table(specs, chunk=chunk_for(specs))
    listed = sorted(map(str, range(EXPERTS)))[: EXPERTS // SHARDS]
    return Measured(
        {
            "manifest_bytes_1t": largest.bytes,
            "manifest_bytes_shard16": largest.read_by(share),
        },
        {
            "largest": largest.facts,
            "kimi": {
                **kimi.facts,
                "first_experts_by_number": kimi.read_by(_experts(specs, map(str, range(24)))),
                "first_experts_by_name": kimi.read_by(_experts(specs, listed)),
            },
        },
    )


class Table:
    """A run, one version's delta of ``changed_bytes`` an element, and the bucket that holds its
    table."""

    def __init__(
        self, specs: list[TensorSpec], *, chunk: int, changed_bytes: float = CHANGED_BYTES
    ) -> None:
        self.run = Run(
            id="1" * 32, name="1t", created_at=0.0, tensors=specs, digest="0" * 32, chunk=chunk
        )
        self.payload = payload = _payload(self.run, changed_bytes)
        self._bucket = MeteredBucket(open_bucket("memory://"))
        self._ref = store_payload(self._bucket, self.run, payload, version=1)
        self._manifest = Manifest(
            run=self.run.id, version=1, base=0, base_digest="0" * 32, delta=self._ref, epoch=0,
            nonce="0" * 32, digest=add_sums(piece.sum for piece in payload.pieces), created_at=0.0,
        )  # fmt: skip
        self._stated = len(encode_manifest(self._manifest))
        self.bytes = self._stated + self._ref.table.bytes
        self.facts: dict[str, Any] = {
            "parameters": sum(spec.count for spec in specs),
            "tensors": len(specs),
            "pieces": len(payload.pieces),
            "blobs": len(payload.blobs),
            "manifest_bytes": self._stated,
            "table_bytes": self._ref.table.bytes,
        }

    def read_by(self, ranges: Mapping[int, tuple[int, int]]) -> int:
        """Returns the bytes that a reader of ``ranges`` fetches before any blob."""
        before = self._bucket.read_bytes
        read_payload(self._bucket, self.run, self._manifest, self._ref, ranges)
        return self._stated + self._bucket.read_bytes - before


def _experts(specs: list[TensorSpec], owned: Iterable[str]) -> dict[int, tuple[int, int]]:
    """Returns what a rank holds that owns these experts of each layer, and all other tensors."""
    mine = set(owned)
    return {
        number: (0, spec.count)
        for number, spec in enumerate(specs)
        if ".experts." not in spec.name or spec.name.split(".")[5] in mine
    }


def kimi_tensors() -> list[TensorSpec]:
    """Returns the large tensors of a mixture of experts with 1.03T parameters."""
    found = [TensorSpec("model.embed_tokens.weight", (163840, HIDDEN), "F8_E4M3")]
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        for name, shape in (
            ("self_attn.q_a_proj", (1536, HIDDEN)),
            ("self_attn.q_b_proj", (12288, 1536)),
            ("self_attn.kv_a_proj_with_mqa", (576, HIDDEN)),
            ("self_attn.kv_b_proj", (16384, 512)),
            ("self_attn.o_proj", (HIDDEN, 8192)),
        ):
            found.append(TensorSpec(f"{at}{name}.weight", shape, "F8_E4M3"))
        if layer < DENSE_LAYERS:
            groups = [("mlp", DENSE)]
        else:
            groups = [(f"mlp.experts.{expert}", EXPERT) for expert in range(EXPERTS)]
            groups.append(("mlp.shared_experts", EXPERT))
        for group, width in groups:
            for name, shape in (
                ("gate_proj", (width, HIDDEN)),
                ("up_proj", (width, HIDDEN)),
                ("down_proj", (HIDDEN, width)),
            ):
                found.append(TensorSpec(f"{at}{group}.{name}.weight", shape, "F8_E4M3"))
    found.append(TensorSpec("lm_head.weight", (163840, HIDDEN), "F8_E4M3"))
    return sorted(found, key=lambda spec: spec.name)


def _payload(run: Run, changed_bytes: float) -> Payload:
    pieces: list[Piece] = []
    sizes: list[int] = [0]
    for number, spec in enumerate(run.tensors):
        for start in range(0, spec.count, run.chunk):
            count = min(run.chunk, spec.count - start)
            length = int(count * changed_bytes) + 20 + len(pieces) % 97
            if sizes[-1] >= BLOB_BYTES:
                sizes.append(0)
            found = hashlib.blake2b(f"{number}.{start}".encode(), digest_size=32).hexdigest()
            pieces.append(
                Piece(
                    number, start, count, len(sizes) - 1, sizes[-1], length, found[:32], found[32:]
                )
            )
            sizes[-1] += length
    blobs = [BlobRef(hashlib.blake2b(b"%d" % n, digest_size=32).hexdigest(), size)
             for n, size in enumerate(sizes)]  # fmt: skip
    return Payload(blobs, pieces)
