"""Computes the digests of a model: a module, a mapping of tensors, or a folder of files."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from deltawire import codec
from deltawire.attest.combining import HeldPart, Ranks, combined, described, total_of
from deltawire.attest.statement import Digests, TensorDigest
from deltawire.codec import Digest
from deltawire.errors import InputError
from deltawire.sync.publish.given_tensors import check_mapping
from deltawire.sync.publish.lazy_tensor import LazyTensor
from deltawire.sync.publish.safetensors_files import safetensors_of
from deltawire.sync.publish.sources import table_of

PART_ELEMENTS = 1 << 22
"""Elements of a lazy tensor that are read at a time."""


def digests(
    model: Any,
    *,
    dtype: str | None = None,
    merged: bool = False,
    group: Any = None,
    bridge: Any = None,
) -> Digests:
    """Returns the digest of each tensor of ``model``, under the names of its checkpoints.

    ``model`` is a module, a mapping of names to arrays or tensors, such as a ``state_dict()``, or a
    folder of safetensors files. ``dtype``, such as "bfloat16", rounds floating-point parameters
    first, because float32 masters are served rounded; None keeps each dtype. A model wrapped by
    PEFT gives its frozen base and its adapter under the names of PEFT's files; ``merged`` gives
    the base with the adapter added.

    Parts of distributed tensors (FSDP version 2, tensor parallelism) are digested where they lie.
    All ranks of ``group`` (default: all) must then call this together, and each gets the digests of
    the whole model. Raises `InputError` for a model that no plain checkpoint can hold, if the ranks
    together do not hold each element, and if another rank fails: all ranks end with an error.

    ``bridge`` is that of a Megatron model, such as ``AutoBridge`` of Megatron Bridge. Its export
    names the tensors as a checkpoint does, and gathers one after the other on every rank. It does
    not say what is a buffer, so ``dtype`` rounds all of them.

    Example::

        deltawire.attest.digests(model, dtype="bfloat16").write("checkpoints/7")
    """
    if bridge is not None:
        if merged:
            raise InputError("a bridge exports a model as it is: merged=True has no effect")
        return _exported(model, dtype, group, bridge)
    if isinstance(model, str | os.PathLike):
        if dtype or merged:
            raise InputError("a folder's tensors are digested as they are stored")
        return total_of(digest_lazy(one) for one in safetensors_of(Path(model)))
    arrays = isinstance(model, Mapping) and not any(
        hasattr(one, "detach") for one in model.values()
    )
    # A rank that holds nothing, such as a filtered stage of a pipeline, takes part all the same.
    if arrays and (model or _ranks_of(group) is None):
        return _of_arrays(model, dtype)
    held: Sequence[HeldPart] | Exception
    aliases: dict[str, str] = {}
    try:
        if not hasattr(model, "named_parameters"):
            check_mapping(model)
        # Only now: the caller has tensors of torch.
        from deltawire.attest.torch_tensors import held_parts

        held, aliases = held_parts(model, dtype=dtype, merged=merged)
    except Exception as error:
        held = error  # The other ranks wait for what this one holds: they are told.
    return combined(held, _ranks_of(group), aliases=aliases)


def _exported(model: Any, dtype: str | None, group: Any, bridge: Any) -> Digests:
    """Digests on each rank what the ranks export together, and compares what they found."""
    from deltawire.attest.torch_tensors import stream_digests, torch_ranks

    export = getattr(bridge, "export_hf_weights", None)
    if export is None:
        raise InputError(f"{type(bridge).__name__} has no export_hf_weights")
    held: Sequence[HeldPart] | Exception
    aliases: dict[str, str] = {}
    stream: Iterator[Any] = iter(())
    try:
        stream = iter(export(model if isinstance(model, list) else [model], show_progress=False))
        found, aliases = stream_digests(((one[0], one[1]) for one in stream), dtype)
        held = [HeldPart(one.spec, Digest.from_hex(one.digest), one.spec.count) for one in found]
    except Exception as error:
        held = error
        with suppress(Exception):
            for _ in stream:  # The other ranks wait for this one in the rest of it.
                pass
    return combined(held, torch_ranks(group), aliases=aliases)


def digests_of_stream(stream: Iterable[tuple[str, Any]], *, dtype: str | None = None) -> Digests:
    """Returns the digests of whole tensors that are given one after the other with their names, as
    trainers export them for an engine; none is kept. ``dtype`` as in `digests`. A matrix with the
    bits of an earlier one is an alias of it, as tied tensors are.

    Example::

        found = digests_of_stream(model.state_dict().items(), dtype="bfloat16")
    """
    from deltawire.attest.torch_tensors import stream_digests

    found, aliases = stream_digests(stream, dtype)
    return total_of(found, aliases=aliases)


def _ranks_of(group: Any) -> Ranks | None:
    """Returns the ranks of torch that this process is one of; None without others. Does not import
    torch."""
    if "torch" not in sys.modules:
        return None
    from deltawire.attest.torch_tensors import torch_ranks

    ranks = torch_ranks(group)
    return ranks if ranks is not None and ranks.count > 1 else None


def _of_arrays(tensors: Mapping[str, Any], dtype: str | None) -> Digests:
    if dtype:
        raise InputError("dtype rounds tensors of torch", hint="round the arrays first")
    specs, aliases = table_of(tensors)
    found = []
    for spec in specs:
        held = tensors[spec.name]
        if isinstance(held, LazyTensor):
            found.append(digest_lazy(held))
        else:
            bits = codec.bits_of(np.ascontiguousarray(held))
            found.append(described(spec, codec.digest_bits(spec.name, bits)))
    return total_of(found, aliases=aliases)


def digest_lazy(held: LazyTensor) -> TensorDigest:
    """Digests a tensor that is read in parts."""
    total = codec.ZERO
    for first in range(0, held.size, PART_ELEMENTS):
        part = held.read(first, min(PART_ELEMENTS, held.size - first))
        total += codec.digest_bits(held.spec.name, part, first)
    return described(held.spec, total)
