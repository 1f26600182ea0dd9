"""What can be published: mappings of arrays or CPU tensors, and directories of safetensors."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from deltawire import codec
from deltawire.codec import Digest
from deltawire.errors import InputError
from deltawire.store import Bucket, RetryingBucket
from deltawire.sync.chain.objects import create_run, newest_version, read_manifest, read_run
from deltawire.sync.follow.load import load_mirror
from deltawire.sync.follow.mirror import Bits, empty_mirror
from deltawire.sync.publish.publisher import Publisher
from deltawire.sync.publish.tied_tensors import Place, place_of
from deltawire.wire.run import ModelFile, Run, TensorSpec, chunk_for
from deltawire.wire.seal import Signer

MAX_HEADER_BYTES = 100 << 20


def table_of(tensors: Mapping[str, Any]) -> tuple[list[TensorSpec], dict[str, str]]:
    """The tensor table of a mapping, in name order, and the aliases of its tied tensors.

    Tensors are tied if they are the same contiguous memory in the same shape; the first name in
    order is the one that is kept. Raises `InputError` for what has no place on the wire.
    """
    specs, aliases = [], {}
    seen: dict[Place, str] = {}
    for name in sorted(tensors):
        place = place_of(tensors[name])
        if place is not None and seen.setdefault(place, name) != name:
            aliases[name] = seen[place]
            continue
        shape = tuple(int(size) for size in tensors[name].shape)
        specs.append(TensorSpec(name, shape, codec.dtype_of(tensors[name])))
    return specs, aliases


def open_publisher(
    bucket: Bucket,
    tensors: Mapping[str, Any],
    *,
    specs: list[TensorSpec] | None = None,
    name: str = "run",
    config: dict[str, Any] | None = None,
    chunk: int | None = None,
    model_files: list[ModelFile] | None = None,
    metadata: dict[str, Any] | None = None,
    signer: Signer | None = None,
    **options: Any,
) -> Publisher:
    """A publisher of models like ``tensors``: of the run in the bucket, or of a new one.

    A new run's version 0 is ``tensors``, committed when this returns. A run that is there is
    continued from its newest version, with the next epoch; ``tensors`` then only say what the
    model looks like. ``specs`` is the tensor table, if the arrays carry bits whose dtype they do
    not tell, as those of `read_safetensors` do. ``model_files``, blobs that are there already, are
    the other files of the model's directory, and ``metadata`` is version 0's. ``options`` go to
    `Publisher`. Raises `InputError` if another model's run is there.
    """
    bucket = RetryingBucket.over(bucket)
    found, aliases = table_of(tensors)
    specs, aliases = (found, aliases) if specs is None else (specs, {})
    existing = read_run(bucket, public_key=signer.public_key if signer else "")
    if existing is None:
        existing = create_run(
            bucket,
            Run(
                name=name,
                created_at=time.time(),
                tensors=specs,
                digest=_digest_of(tensors, specs).hex(),
                chunk=chunk or chunk_for(specs),
                aliases=aliases,
                public_key=signer.public_key if signer else "",
                model_files=model_files or [],
                config=config or {},
            ),
            signer=signer,
        )
    _check_same_model(bucket, existing, tensors, specs, aliases)
    mirror = load_mirror(bucket, existing)
    head = None if mirror is None else read_manifest(bucket, existing, mirror.version)
    publisher = Publisher(
        bucket,
        existing,
        empty_mirror(existing) if mirror is None else mirror,
        epoch=0 if head is None else head.epoch + 1,
        signer=signer,
        **options,
    )
    if publisher.version < 0:
        try:
            publisher.publish(tensors, metadata=metadata)
            publisher.flush()
        except BaseException:
            publisher.close()
            raise
    return publisher


def _check_same_model(
    bucket: Bucket,
    run: Run,
    tensors: Mapping[str, Any],
    specs: list[TensorSpec],
    aliases: dict[str, str],
) -> None:
    """Raise `InputError` unless a publisher of ``tensors`` can continue or start ``run``."""
    if newest_version(bucket) is not None:
        fault = "a run with another model is already here"
        hint = "choose another bucket, or the model this run was started from"
        same = True
    else:
        fault = "run.json is there, of other weights, and version 0 was never committed"
        hint = "if no other process is starting this run, delete run.json and start again"
        same = run.tensors == specs and run.digest == _digest_of(tensors, specs).hex()
    if not same or run.tensors != specs or run.aliases != aliases:
        raise InputError(fault, hint=hint, run=bucket.url)


def _digest_of(tensors: Mapping[str, Any], specs: Sequence[TensorSpec]) -> Digest:
    return codec.digest_model(
        {spec.name: codec.bits_of(tensors[spec.name], spec.dtype) for spec in specs}
    )


def read_safetensors(directory: Path) -> dict[str, Bits]:
    """The tensors of a directory of ``*.safetensors`` files, mapped into memory, not read.

    They come as unsigned bits in their shapes; the dtypes are `safetensors_table`'s. Raises
    `InputError` for a directory that has none, a name in two files, or a damaged file.
    """
    found: dict[str, Bits] = {}
    for spec, bits in _tensors_in(directory):
        found[spec.name] = bits.reshape(spec.shape)
    return found


def safetensors_table(directory: Path) -> list[TensorSpec]:
    """The tensor table of a directory of ``*.safetensors`` files, in name order; raises as
    `read_safetensors` does."""
    return sorted((spec for spec, _ in _tensors_in(directory)), key=lambda spec: spec.name)


def _tensors_in(directory: Path) -> list[tuple[TensorSpec, Bits]]:
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise InputError(f"there are no safetensors files in {directory}")
    return safetensors_in(files)


def safetensors_in(files: Sequence[Path]) -> list[tuple[TensorSpec, Bits]]:
    """The tensors of some safetensors files of one directory, flat bits mapped into memory; raises
    as `read_safetensors` does."""
    found = [pair for path in files for pair in _tensors_of(path)]
    seen: set[str] = set()
    for spec, _ in found:
        if spec.name in seen:
            raise InputError(f"{files[0].parent} holds tensor {spec.name[:80]!r} twice")
        seen.add(spec.name)
    return found


def _tensors_of(path: Path) -> list[tuple[TensorSpec, Bits]]:
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > min(MAX_HEADER_BYTES, size - 8):
                raise ValueError("its header is longer than it may be")
            header = json.loads(file.read(length))
        data = np.memmap(path, np.uint8, "r", offset=8 + length) if size > 8 + length else None
        return [
            _tensor(name, entry, data) for name, entry in header.items() if name != "__metadata__"
        ]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InputError(f"{path} is no safetensors file: {error}") from error


def _tensor(name: str, entry: Any, data: Any) -> tuple[TensorSpec, Bits]:
    begin, end = (int(offset) for offset in entry["data_offsets"])
    if entry["dtype"] not in codec.ITEMSIZE:
        raise ValueError(f"tensor {name[:80]!r} has the unknown dtype {entry['dtype']!r:.40}")
    spec = TensorSpec(name, tuple(int(length) for length in entry["shape"]), entry["dtype"])
    dtype = codec.unsigned_of(spec.dtype)
    available = 0 if data is None else data.size
    if not 0 <= begin <= end <= available or end - begin != spec.count * dtype.itemsize:
        raise ValueError(f"tensor {name[:80]!r} does not lie where its header says")
    if begin == end:
        return spec, np.empty(0, dtype)
    part = data[begin:end]
    # A file need not align its tensors; only a view that is can be one of wider elements.
    aligned = part.ctypes.data % dtype.itemsize == 0
    return spec, (part if aligned else part.copy()).view(dtype)
