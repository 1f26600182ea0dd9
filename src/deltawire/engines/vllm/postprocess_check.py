"""Records which weights vLLM reorders or repacks after loading, for `refusals`."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from deltawire.engines.following.parameter_sums import observed
from deltawire.engines.vllm.settings import in_use_here


def install() -> None:
    """Wraps vLLM's post-processing in this process, to record what it changes."""
    from vllm.model_executor.model_loader import base_loader, utils

    recording = _recording(utils.process_weights_after_loading)
    utils.process_weights_after_loading = recording
    base_loader.process_weights_after_loading = recording


def _recording(original: Callable[..., None]) -> Callable[..., None]:
    @wraps(original)
    def process_weights_after_loading(model: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        if in_use_here():
            observed(original, model, *args, **kwargs)
        else:
            original(model, *args, **kwargs)

    return process_weights_after_loading
