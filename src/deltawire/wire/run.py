"""``run.json``: what a run is, written once and never changed."""

from __future__ import annotations

import math
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from deltawire.errors import CorruptError
from deltawire.wire.objects import FORMAT, decode_json

MAX_RUN_BYTES = 64 << 20
MAX_TENSORS = 1 << 20
MAX_ELEMENTS = 1 << 48

Hash = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
Size = Annotated[int, Meta(ge=0, le=1 << 50)]


class TensorSpec(msgspec.Struct, frozen=True):
    """One tensor of the model, its dtype as safetensors names it."""

    name: Annotated[str, Meta(min_length=1, max_length=1024)]
    shape: Annotated[tuple[Annotated[int, Meta(ge=0, le=MAX_ELEMENTS)], ...], Meta(max_length=16)]
    dtype: Annotated[str, Meta(max_length=16)]

    @property
    def count(self) -> int:
        """How many elements it has."""
        return math.prod(self.shape)


class ModelFile(msgspec.Struct, frozen=True):
    """A file of the model's directory other than its weights, stored as a blob."""

    name: Annotated[str, Meta(max_length=128)]
    blob: Hash
    bytes: Size


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """A run's identity. ``config`` is the loop's own configuration, opaque at this layer."""

    format: int = FORMAT
    name: Annotated[str, Meta(max_length=64)]
    created_at: float
    tensors: Annotated[list[TensorSpec], Meta(max_length=MAX_TENSORS)]
    digest: Annotated[str, Meta(pattern=r"^[0-9a-f]{32}\Z")]
    """The digest of version 0."""
    model_files: Annotated[list[ModelFile], Meta(max_length=64)] = []
    config: dict[str, Any] = {}


def decode_run(data: bytes, *, run: str, key: str) -> Run:
    """Parse and check ``run.json``; raises `CorruptError`."""
    value = decode_json(data, Run, run=run, key=key)
    if value.format != FORMAT:
        raise CorruptError(
            f"format {value.format}; this deltawire reads format {FORMAT}", run=run, key=key
        )
    names = {tensor.name for tensor in value.tensors}
    if len(names) != len(value.tensors):
        raise CorruptError("a tensor is listed twice", run=run, key=key)
    if sum(tensor.count for tensor in value.tensors) > MAX_ELEMENTS:
        raise CorruptError("the tensor table exceeds the largest model", run=run, key=key)
    return value
