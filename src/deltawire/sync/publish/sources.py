"""Opens publishers of models: mappings of arrays or CPU tensors, or of tensors in files."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from deltawire import codec
from deltawire.codec import Digest
from deltawire.store import Bucket, RetryingBucket
from deltawire.sync.chain.objects import (
    another_model,
    create_run,
    newest_version,
    read_manifest,
    read_run,
)
from deltawire.sync.chain.version_poller import newest_readable
from deltawire.sync.follow.load import load_mirror
from deltawire.sync.follow.mirror import Mirror, empty_mirror
from deltawire.sync.publish.publisher import Publisher
from deltawire.sync.publish.safetensors_files import StoredTensor
from deltawire.sync.publish.tied_tensors import MemoryKey, memory_key
from deltawire.wire.manifest import Manifest
from deltawire.wire.run import ModelFile, Run, TensorSpec, chunk_for
from deltawire.wire.seal import Signer


def table_of(tensors: Mapping[str, Any]) -> tuple[list[TensorSpec], dict[str, str]]:
    """Return the tensor table of a mapping, in name order, and the aliases of its tied tensors.

    Tensors are tied if they are the same contiguous memory in the same shape; the first name in
    order is the one that is kept. Raises `InputError` for what has no memory on the wire.
    """
    specs, aliases = [], {}
    seen: dict[MemoryKey, str] = {}
    for name in sorted(tensors):
        memory = memory_key(tensors[name])
        if memory is not None and seen.setdefault(memory, name) != name:
            aliases[name] = seen[memory]
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
    """Open a publisher of models like ``tensors``: of the run in the bucket, or of a new one.

    A new run's version 0 is ``tensors``, committed when this returns. A run that is there is
    continued from its newest version, with the next epoch; ``tensors`` then only describe the
    model. ``specs`` is the tensor table, if the arrays carry bits that do not tell their dtype, as
    those of `read_safetensors` do. ``model_files``, blobs that are there already, are the other
    files of the model's directory, and ``metadata`` is version 0's. ``options`` go to `Publisher`.
    Raises `InputError` if another model's run is there.

    Example::

        publisher = open_publisher(open_bucket("s3://bucket/run"), model.state_dict())
        publisher.publish(model.state_dict())
        publisher.close()
    """
    bucket = RetryingBucket.over(bucket)
    specs, aliases = table_of(tensors) if specs is None else (specs, {})
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
    newest = newest_readable(bucket, existing)
    mirror = load_mirror(bucket, existing)
    epochs = [manifest.epoch for manifest in (newest, _head(bucket, existing, mirror)) if manifest]
    publisher = Publisher(
        bucket,
        existing,
        empty_mirror(existing) if mirror is None else mirror,
        epoch=max(epochs, default=-1) + 1,
        newest=-1 if newest is None else newest.version,
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
    same = run.tensors == specs and run.aliases == aliases
    if same and newest_version(bucket) is None:
        same = run.digest == _digest_of(tensors, specs).hex()
    if not same:
        raise another_model(bucket)


def _digest_of(tensors: Mapping[str, Any], specs: Sequence[TensorSpec]) -> Digest:
    """Compute the digest of a model, reading tensors that lie in files one at a time."""
    total = codec.ZERO
    for spec in specs:
        value = tensors[spec.name]
        bits = value.read() if isinstance(value, StoredTensor) else codec.bits_of(value, spec.dtype)
        total += codec.digest_bits(spec.name, bits)
    return total


def _head(bucket: Bucket, run: Run, mirror: Mirror | None) -> Manifest | None:
    return None if mirror is None else read_manifest(bucket, run, mirror.version)
