"""Refuses runs with an adapter: SGLang's adapter slots are not written to."""

from __future__ import annotations

from collections.abc import Iterable

from deltawire.errors import InputError
from deltawire.wire.run import TensorSpec

_PART = ".lora_"


def refuse_adapter_tensors(tensors: Iterable[TensorSpec]) -> None:
    """Raises `InputError` that names the first tensor of an adapter, if there is one."""
    for spec in tensors:
        if _PART in spec.name:
            raise InputError(
                f"the run holds an adapter ({spec.name}), which deltawire does not put into "
                "SGLang's slots",
                hint="serve the adapter with vLLM or the embedded engine",
            )
