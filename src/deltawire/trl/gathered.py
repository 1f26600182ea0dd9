"""Publishes a trainer's model from rank 0, after all ranks have gathered each tensor."""

from __future__ import annotations

import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from deltawire.export.models import save_settings
from deltawire.export.tensors import is_sharded, tensors_of
from deltawire.sync import open_publisher
from deltawire.sync.publish.outage import Outage
from deltawire.sync.publish.publisher import Publisher
from deltawire.trl.ranks import on_rank_zero, rank_and_count


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
        **options: Any,
    ) -> None:
        self._dtype = dtype
        self._publisher: Publisher | None = None
        tensors = self._tensors(model)

        def open_run() -> None:
            with tempfile.TemporaryDirectory(prefix="deltawire-") as folder:
                base = model.get_base_model() if hasattr(model, "get_base_model") else model
                save_settings(base, tokenizer, Path(folder), dtype=dtype or _most_common(tensors))
                self._publisher = open_publisher(
                    url, tensors, directory=folder, metadata=metadata, **options
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
        self._publisher.publish(tensors, metadata=metadata)
        return True

    def close(self) -> None:
        """See `RunWriter.close`."""
        if self._publisher is not None:
            self._publisher.close()

    def _tensors(self, model: Any) -> dict[str, torch.Tensor]:
        first = rank_and_count()[0] == 0
        if not first and not is_sharded(model):
            return {}
        return tensors_of(model, self._dtype, keep=first)


def _most_common(tensors: dict[str, torch.Tensor]) -> str | None:
    """Returns the dtype of most elements, which the configuration states: a reader of the version
    would otherwise convert it when loading."""
    elements: Counter[torch.dtype] = Counter()
    for tensor in tensors.values():
        if tensor.is_floating_point():
            elements[tensor.dtype] += tensor.numel()
    return str(max(elements, key=elements.__getitem__)).removeprefix("torch.") if elements else None
