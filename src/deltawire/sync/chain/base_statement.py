"""States the frozen base of an adapter run, and compares it with what a process holds.

A run's directory has a file ``base-<digest>.json``: the digest of the frozen tensors together, and
of each. run.json lists the file's name and hash, so both are stated there. Trainer, reference and
sampler compare the bits that they compute with, when they start::

    run.json ── names ──▶ base-<digest>.json ◀── compares ── trainer, reference, sampler
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated

import msgspec
from msgspec import Meta

from deltawire import codec
from deltawire.codec import Digest
from deltawire.errors import CorruptError, InputError
from deltawire.store import Bucket
from deltawire.sync.chain.objects import get_blob
from deltawire.wire.objects import prepared
from deltawire.wire.payload import BlobRef, Sum
from deltawire.wire.run import Name, Run, TensorSpec

PREFIX, SUFFIX = "base-", ".json"
MAX_BYTES = 64 << 20


class BaseTensor(msgspec.Struct, frozen=True):
    """A frozen tensor, and the digest of its elements."""

    name: Name
    shape: tuple[int, ...]
    dtype: str
    digest: Sum


class BaseStatement(msgspec.Struct, frozen=True, omit_defaults=True):
    """The frozen tensors of a run in the order of its table, and how they were packed.

    ``packed`` names the format of the packed ones. ``native`` counts those that were packed in the
    directory already and kept their codes; ``errors`` is the relative error (Frobenius) of each
    layer that was packed on load.
    """

    digest: Sum
    tensors: Annotated[list[BaseTensor], Meta(max_length=1 << 18)]
    packed: str = "none"
    native: int = 0
    errors: dict[str, float] = {}

    @property
    def file_name(self) -> str:
        """The name of the file that holds the statement."""
        return f"{PREFIX}{self.digest}{SUFFIX}"

    def encode(self) -> bytes:
        """Encodes the file."""
        return msgspec.json.encode(self) + b"\n"

    def check(self, found: Mapping[str, BaseTensor], *, who: str, run: str = "") -> None:
        """Raises `InputError` that names the first tensor in which ``who`` holds another base."""
        for stated in self.tensors:
            held = found.get(stated.name)
            if held == stated:
                continue
            if held is None:
                why = "is missing"
            elif (held.shape, held.dtype) != (stated.shape, stated.dtype):
                why = (
                    f"is {held.dtype}{list(held.shape)} instead of "
                    f"{stated.dtype}{list(stated.shape)}"
                )
            else:
                why = "has other bits"
            raise InputError(
                f"the {who} holds another frozen base than the run: {stated.name[:200]} {why}",
                hint="load the base from the run's bucket; trainer and sampler must share one",
                run=run,
            )


def state_base(
    specs: Iterable[TensorSpec],
    digests: Mapping[str, Digest],
    *,
    packed: str = "none",
    native: int = 0,
    errors: Mapping[str, float] | None = None,
) -> BaseStatement:
    """States the tensors that have a digest in ``digests``."""
    tensors = [
        BaseTensor(spec.name, spec.shape, spec.dtype, digests[spec.name].hex())
        for spec in specs
        if spec.name in digests
    ]
    total = sum(digests.values(), codec.ZERO)
    return BaseStatement(total.hex(), tensors, packed, native, dict(errors or {}))


def states_base(name: str) -> bool:
    """Returns whether a model file of that name states a base."""
    return name.startswith(PREFIX) and name.endswith(SUFFIX)


def read_base(bucket: Bucket, run: Run) -> BaseStatement | None:
    """Reads a run's statement, None if it has none; raises `CorruptError`."""
    for file in run.model_files:
        if not states_base(file.name):
            continue
        if file.bytes > MAX_BYTES:
            raise CorruptError(f"{file.name} has {file.bytes} bytes", run=bucket.url)
        data = get_blob(bucket, BlobRef(file.blob, file.bytes))
        try:
            found = msgspec.json.decode(data, type=prepared(BaseStatement))
        except (msgspec.MsgspecError, RecursionError) as error:
            raise CorruptError(f"{file.name} is no statement of a base", run=bucket.url) from error
        lanes = sum((Digest.from_hex(one.digest) for one in found.tensors), codec.ZERO)
        if found.file_name != file.name or lanes.hex() != found.digest:
            raise CorruptError(f"{file.name} states another digest than its name", run=bucket.url)
        return found
    return None


def held_tensors(
    specs: Iterable[TensorSpec], digests: Mapping[str, Digest]
) -> dict[str, BaseTensor]:
    """Describes tensors that a process holds, by name."""
    return {one.name: one for one in state_base(specs, digests).tensors}
