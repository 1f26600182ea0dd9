"""Loads a run's reference model: version 0, or a model directory such as a teacher's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from deltawire.codec import Digest
from deltawire.config import RunConfig
from deltawire.errors import InputError
from deltawire.export.adapter import open_model
from deltawire.export.models import fetch_model_files, load_model, serve_as
from deltawire.export.source import digest_of, open_source
from deltawire.placement.base_check import check_module
from deltawire.store import Bucket
from deltawire.sync import load_mirror
from deltawire.sync.chain.base_statement import read_base
from deltawire.wire.run import Run


def load_reference_model(bucket: Bucket, run: Run, config: RunConfig) -> tuple[Any, Digest]:
    """The frozen model of ``[reference]`` on the CPU, and the digest of its weights.

    Its parameters have the dtype of ``train.compute``, and the values that are published in either.

    Raises `CorruptError` if version 0 was pruned, `InputError` if a teacher cannot be loaded or has
    another vocabulary than the policy.
    """
    with fetch_model_files(bucket, run) as folder:
        policy = open_model(Path(folder), config.train.served_adapter)
    if config.reference.model:
        model = load_model(Path(config.reference.model))
        serve_as(serve_as(model, "bfloat16"), config.train.compute)
        ours, theirs = (m.get_input_embeddings().num_embeddings for m in (policy, model))
        if ours != theirs:
            raise InputError(
                f"reference.model {config.reference.model} has a vocabulary of {theirs}, the "
                f"policy one of {ours}",
                hint="a reference must have the policy's tokens",
                run=bucket.url,
            )
        digest = digest_of(open_source("bf16", model))
        return model.eval().requires_grad_(requires_grad=False), digest
    origin = load_mirror(bucket, run, at=0)
    open_source(config.train.exporter, policy).restore(origin)
    check_module(read_base(bucket, run), policy, who="reference", run=bucket.url)
    serve_as(policy, config.train.compute)
    return policy.eval().requires_grad_(requires_grad=False), origin.digest
