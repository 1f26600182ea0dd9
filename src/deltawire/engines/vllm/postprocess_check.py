"""Records which weights vLLM reorders or repacks after loading, for `refusals`."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from deltawire.engines.following.parameter_sums import differences, parameter_sums
from deltawire.engines.vllm.settings import in_use_here

_CHANGES = "_deltawire_changes"
"""The attribute of a model that holds its changes after loading."""


def install() -> None:
    """Wraps vLLM's post-processing in this process, to record what it changes."""
    from vllm.model_executor.model_loader import base_loader, utils

    recording = _recording(utils.process_weights_after_loading)
    utils.process_weights_after_loading = recording
    base_loader.process_weights_after_loading = recording


def changes_after_loading(model: torch.nn.Module) -> dict[str, str] | None:
    """Returns the parameters of more than one element that vLLM changed after loading, and how;
    None if post-processing was not observed."""
    found: dict[str, str] | None = model.__dict__.get(_CHANGES)
    return found


def _recording(original: Callable[..., None]) -> Callable[..., None]:
    @wraps(original)
    def process_weights_after_loading(model: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        if not in_use_here():
            original(model, *args, **kwargs)
            return
        before = parameter_sums(model)
        original(model, *args, **kwargs)
        model.__dict__[_CHANGES] = differences(before, parameter_sums(model))

    return process_weights_after_loading
