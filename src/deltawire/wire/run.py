"""Defines ``run.json``: the run's identity and its tensor table, written once and never changed."""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from deltawire.builds import MAX_BUILD
from deltawire.errors import CorruptError
from deltawire.wire import keys
from deltawire.wire.objects import FORMAT, check_raw, decode_json
from deltawire.wire.seal import Signer, check_seal, seal, unseal

MAX_RUN_BYTES = 64 << 20
MAX_CONFIG_BYTES = 1 << 20
MAX_TENSORS = 1 << 18
MAX_ELEMENTS = 1 << 48
MAX_CHUNKS = 1 << 20
MAX_MODEL_FILES = 64
MAX_NEEDS = 256
CHUNK_ELEMENTS = 1 << 22
"""The default number of elements of a chunk: 8 MiB of bf16."""
LARGEST_CHUNK = 1 << 26
MANY_CHUNKS = 1 << 16
"""Models with more chunks than this get larger chunks, up to `LARGEST_CHUNK`: every chunk is a
piece of a version's delta and of its anchor, and readers fetch both tables.
"""

Hash = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
Key = Annotated[str, Meta(pattern=r"^([0-9a-f]{64})?\Z")]
PublicKey = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
Identity = Annotated[str, Meta(pattern=r"^[0-9a-f]{32}\Z")]
Size = Annotated[int, Meta(ge=0, le=1 << 50)]
Build = Annotated[str, Meta(max_length=MAX_BUILD)]
Name = Annotated[str, Meta(min_length=1, max_length=1024)]


_PRIME = 2**255 - 19
_SMALL_ORDER = frozenset(
    {
        0,
        1,
        _PRIME - 1,
        int("05fc536d880238b13933c6d305acdfd5f098eff289f4c345b027b2c28f95e826", 16),
        int("7a03ac9277fdc74ec6cc392cfa53202a0f67100d760b3cba4fd84d3d706a17c7", 16),
    }
)
"""The y coordinates of the eight points of Ed25519 whose order divides 8."""


def key_fault(public_key: str) -> str:
    """Explains why an Ed25519 key, 64 hexadecimal digits, proves nothing; empty if it may.

    A key of small order has signatures that fit many messages, and libraries differ in whether they
    accept a key in a second form.
    """
    y = int.from_bytes(bytes.fromhex(public_key), "little") & (1 << 255) - 1
    if y >= _PRIME or y in _SMALL_ORDER:
        return "public_key is a weak Ed25519 key, which proves nothing"
    return ""


class TensorSpec(msgspec.Struct, frozen=True):
    """One tensor of the model; ``dtype`` is named as in safetensors."""

    name: Name
    shape: Annotated[tuple[Annotated[int, Meta(ge=0, le=MAX_ELEMENTS)], ...], Meta(max_length=16)]
    dtype: Annotated[str, Meta(max_length=16)]

    @property
    def count(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def columns(self) -> int:
        """The number of elements of a row, 0 if there are no rows."""
        return self.shape[-1] if len(self.shape) > 1 else 0


class ModelFile(msgspec.Struct, frozen=True):
    """A file of the model's directory other than its weights, stored as a blob."""

    name: Annotated[str, Meta(max_length=128)]
    blob: Hash
    bytes: Size


class Need(msgspec.Struct, frozen=True, kw_only=True):
    """A feature that processes of a run must have: the trainer, and those of ``roles``.

    ``since`` is the release that has it first. Processes of other roles may join without it, and
    ignore the settings under its name.
    """

    feature: Annotated[str, Meta(min_length=1, max_length=128)]
    since: Annotated[str, Meta(max_length=16)]
    roles: Annotated[list[Annotated[str, Meta(max_length=32)]], Meta(max_length=16)] = []


class Run(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="format", tag=FORMAT
):
    """A run's identity. ``config`` is the configuration of the training loop, opaque at this layer.

    ``chunk`` divides every tensor into chunks of that many elements, the last one shorter; no piece
    crosses from one chunk into another, so a reader that holds whole chunks can use every version.
    ``aliases`` maps names of tied tensors to the one name under which the tensor is stored.
    ``public_key`` is the owner's Ed25519 key, empty if the run is not signed.
    """

    id: Identity
    name: Annotated[str, Meta(max_length=64)]
    created_at: float
    tensors: Annotated[list[TensorSpec], Meta(max_length=MAX_TENSORS)]
    digest: Annotated[str, Meta(pattern=r"^[0-9a-f]{32}\Z")]
    """The digest of version 0."""
    chunk: Annotated[int, Meta(ge=1, le=1 << 30)] = CHUNK_ELEMENTS
    aliases: Annotated[dict[Name, Name], Meta(max_length=MAX_TENSORS)] = {}
    public_key: Key = ""
    model_files: Annotated[list[ModelFile], Meta(max_length=MAX_MODEL_FILES)] = []
    config: dict[str, Any] = {}
    needs: Annotated[list[Need], Meta(max_length=MAX_NEEDS)] = []
    build: Build = ""
    """The build that created the run; empty before builds had names."""


def new_id() -> str:
    """Draws the id of a new run."""
    return secrets.token_hex(16)


def chunk_for(tensors: Sequence[TensorSpec]) -> int:
    """Chooses the number of elements per chunk for a model."""
    chunk = CHUNK_ELEMENTS
    while chunk < LARGEST_CHUNK and count_chunks(tensors, chunk) > MANY_CHUNKS:
        chunk *= 2
    return chunk


def count_chunks(tensors: Sequence[TensorSpec], chunk: int) -> int:
    """Counts the chunks of a model."""
    return sum(-(-tensor.count // chunk) for tensor in tensors)


class _Outline(msgspec.Struct):
    config: msgspec.Raw = msgspec.Raw(b"{}")


def encode_run(run: Run, *, signer: Signer | None = None) -> bytes:
    """Encodes ``run.json``."""
    return seal(run, key=keys.RUN, signer=signer)


def decode_run(data: bytes, *, run: str, key: str) -> Run:
    """Parses and checks ``run.json``; raises `CorruptError`."""
    check_seal(data, "run", run=run, key=key)
    outline = decode_json(data, _Outline, run=run, key=key, what="run")
    check_raw(outline.config, MAX_CONFIG_BYTES, "config", run=run, key=key)
    value = unseal(data, Run, run=run, key=key)
    if fault := _fault(value):
        raise CorruptError(fault, run=run, key=key)
    return value


def _fault(run: Run) -> str:
    names = {tensor.name for tensor in run.tensors}
    if len(names) != len(run.tensors):
        return "a tensor is listed twice"
    if sum(tensor.count for tensor in run.tensors) > MAX_ELEMENTS:
        return "the tensor table exceeds the largest model"
    if count_chunks(run.tensors, run.chunk) > MAX_CHUNKS:
        return f"chunks of {run.chunk} elements are more than {MAX_CHUNKS}"
    if any(name in names or stored not in names for name, stored in run.aliases.items()):
        return "an alias names a missing tensor, or has the name of a tensor"
    return key_fault(run.public_key) if run.public_key else ""
