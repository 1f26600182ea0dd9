"""Derives the settings that serve a run which holds only weights, from the files that it carries.

Such a run was made by `open_publisher`, by ``deltawire publish``, or by a callback of another
trainer. It has no configuration of ``deltawire run``; its ``config.json`` and, with an adapter, its
``adapter_config.json`` say what the engine has to know.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgspec

from deltawire.config import AdapterConfig, RolloutConfig, RunConfig, TrainConfig
from deltawire.errors import CorruptError, InputError
from deltawire.export.models import ADAPTER_CONFIG
from deltawire.store import Bucket
from deltawire.sync.chain.objects import get_blob
from deltawire.wire.payload import BlobRef
from deltawire.wire.run import Run

CONTEXT = 4096
"""The most tokens of one sequence where the model states no length."""

MAX_SETTINGS_BYTES = 1 << 20

_LORA: Mapping[str, Any] = {
    "peft_type": "LORA",
    "bias": "none",
    "use_dora": False,
    "modules_to_save": None,
    "layers_to_transform": None,
    "target_parameters": None,
}
"""Members of ``adapter_config.json`` with the one value that is served; they may be absent."""


def settings_of_weights(bucket: Bucket, run: Run) -> RunConfig:
    """Returns the settings with which the embedded engine serves ``run``.

    An answer may fill the model's context. Raises `InputError` for a run without ``config.json``,
    and for an adapter with settings that this engine does not have.

    Example::

        config = settings_of_weights(bucket, read_run(bucket))
    """
    model = _settings(bucket, run, "config.json")
    if model is None:
        raise InputError(
            "this run has no config.json, so its model cannot be built",
            hint="give open_publisher directory=MODEL_DIR, or publish a model directory",
            run=bucket.url,
        )
    adapter = _settings(bucket, run, ADAPTER_CONFIG)
    context = _context_of(model)
    return RunConfig(
        name=run.name,
        rollout=RolloutConfig(context=context, max_tokens=context),
        train=TrainConfig(adapter=AdapterConfig() if adapter is None else _adapter_of(adapter)),
    )


def _context_of(model: Mapping[str, Any]) -> int:
    """Returns the length of a model's sequences, which its ``config.json`` states."""
    text = model.get("text_config")
    for settings in (model, text if isinstance(text, dict) else {}):
        stated = settings.get("max_position_embeddings")
        if isinstance(stated, int) and 0 < stated < 1 << 31:
            return stated
    return CONTEXT


def _adapter_of(settings: dict[str, Any]) -> AdapterConfig:
    """Returns the adapter that PEFT's settings describe."""
    for key, value in _LORA.items():
        if settings.get(key, value) not in (value, None, []):
            raise _refused(f"{key} = {str(settings[key])[:80]}")
    targets = settings.get("target_modules")
    if not isinstance(targets, list):
        raise _refused(f"target_modules = {str(targets)[:80]}, which is no list of names")
    stated = {
        "kind": "lora",
        "rank": settings.get("r"),
        "alpha": settings.get("lora_alpha"),
        "targets": sorted(map(str, targets)),
        "rank_pattern": settings.get("rank_pattern") or {},
        "alpha_pattern": settings.get("alpha_pattern") or {},
        "use_rslora": bool(settings.get("use_rslora")),
    }
    try:
        return msgspec.convert(stated, AdapterConfig)
    except msgspec.ValidationError as error:
        raise _refused(str(error)) from error


def _refused(reason: str) -> InputError:
    return InputError(
        f"the embedded engine cannot serve this adapter: {ADAPTER_CONFIG} has {reason}",
        hint="serve it in a slot of vLLM",
    )


def _settings(bucket: Bucket, run: Run, name: str) -> dict[str, Any] | None:
    """Returns the JSON object in a file of the run; None if it has no such file."""
    file = next((one for one in run.model_files if one.name == name), None)
    if file is None:
        return None
    if file.bytes > MAX_SETTINGS_BYTES:
        raise InputError(f"{name} has {file.bytes} bytes", run=bucket.url)
    data = get_blob(bucket, BlobRef(hash=file.blob, bytes=file.bytes))
    try:
        found = json.loads(bytes(data))
    except (ValueError, RecursionError) as error:
        raise CorruptError(f"{name} is not JSON", run=bucket.url) from error
    if not isinstance(found, dict):
        raise CorruptError(f"{name} is not a JSON object", run=bucket.url)
    return found
