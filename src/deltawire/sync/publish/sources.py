"""Opens publishers of models, given as mappings of arrays, CPU tensors, or tensors in files."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack

import msgspec

from deltawire import codec
from deltawire.builds import build_name
from deltawire.codec import Digest
from deltawire.errors import InputError
from deltawire.store import Bucket, open_bucket
from deltawire.sync.chain.objects import (
    another_model,
    create_run,
    find_run,
    newest_version,
    put_blob,
    read_manifest,
    read_run,
)
from deltawire.sync.chain.version_poller import newest_readable
from deltawire.sync.follow.load import load_mirror
from deltawire.sync.follow.mirror import empty_mirror
from deltawire.sync.publish.announcement import warn_of_uncommitted
from deltawire.sync.publish.given_tensors import MemoryKey, check_names, memory_key
from deltawire.sync.publish.lazy_tensor import LazyTensor
from deltawire.sync.publish.model_files import INDEX, other_files
from deltawire.sync.publish.offload import offloaded_mirror, require_room
from deltawire.sync.publish.options import PublisherOptions, check_options
from deltawire.sync.publish.publisher import Publisher
from deltawire.wire.manifest import Manifest
from deltawire.wire.run import ModelFile, Need, Run, TensorSpec, chunk_for, new_id
from deltawire.wire.seal import Signer

PART_ELEMENTS = 1 << 23
"""Elements of a lazy tensor that are read at a time."""


def table_of(
    tensors: Mapping[str, Any], *, stored: Collection[str] = ()
) -> tuple[list[TensorSpec], dict[str, str]]:
    """Returns the tensor table of a mapping, in name order, and the aliases of its tied tensors.

    Tensors are tied if they share contiguous memory and shape. One name is kept: the one in
    ``stored``, or else the first in the mapping's order, which in a module's ``state_dict()`` is
    the name in checkpoints. Raises `InputError` for a dtype that cannot be stored.
    """
    names: dict[MemoryKey, str] = {}
    for name in sorted(tensors, key=lambda name: name not in stored):
        memory = memory_key(tensors[name])
        if memory is not None:
            names.setdefault(memory, name)
    specs, aliases = [], {}
    for name in sorted(tensors):
        memory = memory_key(tensors[name])
        if memory is not None and names[memory] != name:
            aliases[name] = names[memory]
            continue
        shape = tuple(int(size) for size in tensors[name].shape)
        specs.append(TensorSpec(name, shape, codec.dtype_of(tensors[name])))
    return specs, aliases


def open_publisher(
    bucket: Bucket | str | os.PathLike[str],
    tensors: Mapping[str, Any],
    *,
    specs: list[TensorSpec] | None = None,
    name: str = "run",
    config: dict[str, Any] | None = None,
    needs: Sequence[Need] = (),
    chunk: int | None = None,
    model_files: list[ModelFile] | None = None,
    directory: Path | str | None = None,
    metadata: dict[str, Any] | None = None,
    signer: Signer | None = None,
    run_id: str = "",
    snapshot_dir: Path | str | None = None,
    **options: Unpack[PublisherOptions],
) -> Publisher:
    """Opens a publisher of models like ``tensors``: of the run in the bucket, or of a new one.

    ``bucket`` may be its location; a folder is made. ``tensors`` maps names to arrays or CPU
    tensors; ``deltawire.tensors_of(model)`` gives those of a module.

    A new run's version 0 is ``tensors``, committed when this returns. An existing run is continued
    from its newest version, with the next epoch; ``tensors`` then only describe the model.
    ``specs`` is the tensor table, needed if the arrays hold bits without their dtype, as those of
    `read_safetensors` do. ``directory`` is a model directory whose other files, such as its
    configuration and tokenizer, a new run carries, so that ``pull`` writes a directory that loads;
    ``model_files`` are such files that are already stored as blobs, and ``metadata`` is that of
    version 0. ``needs`` are the features of ``config`` that not every release has. ``run_id`` is a
    new run's id, random by default. With ``snapshot_dir`` the publisher's two copies of the model
    lie in files in that folder instead of memory; the files have no name and end with the process.
    Together with `LazyTensor` values, neither the weights nor the copies need to fit into memory.
    ``options`` go to `Publisher`; `PublisherOptions` lists them, with their types. Raises
    `InputError` if the bucket holds a run of another model, for tensors that no engine could load,
    and for a folder that is missing or too full.

    Example::

        publisher = open_publisher("s3://bucket/run", deltawire.tensors_of(model))
        publisher.publish(deltawire.tensors_of(model))
        publisher.close()
    """
    if specs is None:
        check_names(tensors)
    check_options(options)
    bucket = _opened(bucket)
    key = signer.public_key if signer else ""
    existing = find_run(bucket, public_key=key)
    stored = {spec.name for spec in existing.tensors} if existing else set[str]()
    table = table_of(tensors, stored=stored) if specs is None else (specs, dict[str, str]())
    if snapshot_dir is not None:  # Before a run is made.
        require_room(snapshot_dir, table[0])
    made = None
    if existing is None:
        files = [] if directory is None else stored_files(bucket, Path(directory))
        made = msgspec.structs.replace(
            _describe(tensors, *table, name=name, chunk=chunk),
            id=run_id or new_id(),
            public_key=key,
            model_files=[*(model_files or []), *files],
            config=config or {},
            needs=list(needs),
        )
        existing = create_run(bucket, made, signer=signer)
    newest = newest_readable(bucket, existing)
    _check_same_model(bucket, existing, newest, tensors, *table, made=made)
    publisher = _continued(bucket, existing, newest, signer, snapshot_dir, options)
    if publisher.version < 0:
        _publish_first(publisher, tensors, metadata)
    return publisher


def _opened(bucket: Bucket | str | os.PathLike[str]) -> Bucket:
    if isinstance(bucket, str | os.PathLike):
        bucket = open_bucket(bucket, create=True)
    return bucket


def _publish_first(
    publisher: Publisher, tensors: Mapping[str, Any], metadata: dict[str, Any] | None
) -> None:
    try:
        publisher.publish(tensors, metadata=metadata)
        publisher.flush()
    except BaseException:
        publisher.close()
        raise


def continue_publisher(
    bucket: Bucket,
    *,
    signer: Signer | None = None,
    snapshot_dir: Path | str | None = None,
    **options: Unpack[PublisherOptions],
) -> Publisher:
    """Opens a publisher of the run in the bucket, from its newest version, with the next epoch.

    ``snapshot_dir`` and ``options`` as for `open_publisher`. Raises `InputError` if there is no
    run.
    """
    run = read_run(bucket, public_key=signer.public_key if signer else "")
    return _continued(bucket, run, newest_readable(bucket, run), signer, snapshot_dir, options)


def _continued(
    bucket: Bucket,
    run: Run,
    newest: Manifest | None,
    signer: Signer | None,
    snapshot_dir: Path | str | None,
    options: PublisherOptions,
) -> Publisher:
    """Opens a publisher that continues a run from its newest version, if it has one."""
    empty = empty_mirror(run) if snapshot_dir is None else offloaded_mirror(run, snapshot_dir)
    mirror, held = empty, newest
    if newest is not None:
        mirror = load_mirror(bucket, run, known=newest, into=empty)
        if mirror.version != newest.version:
            held = read_manifest(bucket, run, mirror.version)
    epochs = [manifest.epoch for manifest in (newest, held) if manifest]
    head = -1 if newest is None else newest.version
    warn_of_uncommitted(bucket, run, head)
    return Publisher(
        bucket,
        run,
        mirror,
        epoch=max(epochs, default=-1) + 1,
        newest=head,
        signer=signer,
        announce=True,
        **options,
    )


def _describe(
    tensors: Mapping[str, Any],
    specs: list[TensorSpec],
    aliases: dict[str, str],
    *,
    name: str,
    chunk: int | None,
) -> Run:
    """Describes a new run of these tensors."""
    return Run(
        id=new_id(),
        name=name,
        created_at=time.time(),
        build=build_name(),
        tensors=specs,
        digest=_digest_of(tensors, specs).hex(),
        chunk=chunk or chunk_for(specs),
        aliases=aliases,
    )


def stored_files(bucket: Bucket, directory: Path) -> list[ModelFile]:
    """Stores the other files of a model directory; raises `InputError` if it has no config.json."""
    if not (directory / "config.json").is_file():
        raise InputError(
            f"{directory} has no config.json", hint="give a Hugging Face model directory"
        )
    weights = {path.name for path in directory.glob("*.safetensors")} | {INDEX}
    found = []
    for name, data in other_files(directory, weights)[0].items():
        ref = put_blob(bucket, data)
        found.append(ModelFile(name=name, blob=ref.hash, bytes=ref.bytes))
    return found


def _check_same_model(
    bucket: Bucket,
    run: Run,
    newest: Manifest | None,
    tensors: Mapping[str, Any],
    specs: list[TensorSpec],
    aliases: dict[str, str],
    *,
    made: Run | None,
) -> None:
    """Raises `InputError` unless a publisher of ``tensors`` can continue or start ``run``; ``made``
    describes them if it was made: computing their digest reads all of them."""
    same = run.tensors == specs and run.aliases == aliases
    if same and newest is None and newest_version(bucket) is None:
        same = run.digest == (made.digest if made else _digest_of(tensors, specs).hex())
    if not same:
        raise another_model(bucket, run.tensors, specs)


def _digest_of(tensors: Mapping[str, Any], specs: Sequence[TensorSpec]) -> Digest:
    """Computes the digest of a model, reading lazy tensors in parts."""
    total = codec.ZERO
    for spec in specs:
        value = tensors[spec.name]
        if not isinstance(value, LazyTensor):
            total += codec.digest_bits(spec.name, codec.bits_of(value, spec.dtype))
            continue
        for at in range(0, value.size, PART_ELEMENTS):
            bits = value.read(at, min(PART_ELEMENTS, value.size - at))
            total += codec.digest_bits(spec.name, bits, at)
    return total
