"""Publishes a trainer's model from rank 0, after all ranks have gathered each tensor."""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any, Literal

import torch

from deltawire.export.models import ADAPTER_CONFIG, save_settings
from deltawire.export.peft_directory import adapter_layout
from deltawire.export.tensors import (
    adapter_of,
    base_and_adapter_of,
    check_separable,
    is_sharded,
    tensors_of,
)
from deltawire.store import Bucket, open_bucket
from deltawire.sync import open_publisher
from deltawire.sync.chain.objects import put_blob
from deltawire.sync.publish.model_files import LAYOUT
from deltawire.sync.publish.outage import Outage
from deltawire.sync.publish.publisher import Publisher
from deltawire.sync.publish.sources import table_of
from deltawire.trl.ranks import on_rank_zero, rank_and_count
from deltawire.wire.run import ModelFile

AdapterForm = Literal["merged", "separate"]
"""How a LoRA is published: added to its base, or as tensors next to it."""


class GatheredWriter:
    """A `deltawire.trl.ranks.RunWriter` that publishes from rank 0.

    The run is continued, or made with these weights as version 0. If it is continued, the weights
    become its next version unless they are its newest. Replicas that hold whole tensors only take
    part in nothing; shards are gathered one tensor at a time, and only rank 0 keeps them.
    ``options`` go to `deltawire.open_publisher`.
    """

    def __init__(
        self,
        url: str,
        model: Any,
        *,
        tokenizer: Any,
        dtype: str | None,
        metadata: dict[str, Any],
        adapter: AdapterForm = "merged",
        **options: Any,
    ) -> None:
        self._dtype = dtype
        self._publisher: Publisher | None = None
        self._adapter = ""
        """The name of the adapter that is published apart from its base."""
        tensors = {} if adapter == "separate" else self._tensors(model)
        if adapter == "separate":
            self._adapter = check_separable(model)
            first = rank_and_count()[0] == 0
            base, own = base_and_adapter_of(model, dtype, keep=first)
            tensors = {**base, **own}
            options["frozen"] = base.keys()

        def open_run() -> None:
            with tempfile.TemporaryDirectory(prefix="deltawire-") as folder:
                base = model.get_base_model() if hasattr(model, "get_base_model") else model
                save_settings(base, tokenizer, Path(folder), dtype=dtype or _most_common(tensors))
                bucket: Bucket | str = url
                if self._adapter:
                    bucket = open_bucket(url, create=True)
                    options.update(adapter_options(bucket, model, self._adapter, folder, tensors))
                self._publisher = open_publisher(
                    bucket, tensors, directory=folder, metadata=metadata, **options
                )
            if not self._publisher.holds(tensors):
                self._publisher.publish(tensors, metadata=metadata)

        on_rank_zero(open_run)

    @property
    def version(self) -> int:
        """See `RunWriter.version`."""
        return -1 if self._publisher is None else self._publisher.version

    @property
    def outage(self) -> Outage | None:
        """See `RunWriter.outage`."""
        return None if self._publisher is None else self._publisher.outage

    def publish(self, model: Any, metadata: dict[str, Any], *, unless_held: bool = False) -> bool:
        """See `RunWriter.publish`."""
        tensors = self._tensors(model)
        if self._publisher is None or (unless_held and self._publisher.holds(tensors)):
            return True
        self._publisher.publish(tensors, metadata=metadata, partial=bool(self._adapter))
        return True

    def close(self) -> None:
        """See `RunWriter.close`."""
        if self._publisher is not None:
            self._publisher.close()

    def _tensors(self, model: Any) -> dict[str, torch.Tensor]:
        first = rank_and_count()[0] == 0
        if not first and not is_sharded(model):
            return {}
        if self._adapter:
            return adapter_of(model, self._adapter, self._dtype, keep=first)
        return tensors_of(model, self._dtype, keep=first)


def adapter_options(
    bucket: Bucket, model: Any, adapter: str, folder: str, tensors: dict[str, torch.Tensor]
) -> dict[str, Any]:
    """Writes the adapter's settings, as PEFT does, to ``folder``; returns the tensor table, and the
    layout that puts base and adapter into the files that PEFT reads."""
    settings = Path(folder) / ADAPTER_CONFIG
    model.peft_config[adapter].save_pretrained(folder)
    stated = {**json.loads(settings.read_text()), "inference_mode": True}
    settings.write_text(json.dumps(stated, indent=2) + "\n")
    specs = table_of(tensors)[0]
    blob = put_blob(bucket, adapter_layout(specs))
    return {"specs": specs, "model_files": [ModelFile(LAYOUT, blob.hash, blob.bytes)]}


def _most_common(tensors: dict[str, torch.Tensor]) -> str | None:
    """Returns the dtype of most elements, which the configuration states: a reader of the version
    would otherwise convert it when loading."""
    elements: Counter[torch.dtype] = Counter()
    for tensor in tensors.values():
        if tensor.is_floating_point():
            elements[tensor.dtype] += tensor.numel()
    return str(max(elements, key=elements.__getitem__)).removeprefix("torch.") if elements else None
