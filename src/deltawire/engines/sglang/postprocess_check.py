"""Records which weights SGLang reorders or repacks after loading, for `refusals`.

Its loader of checkpoints and its loader of random weights are observed; others are refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from deltawire.engines.following.parameter_sums import parameter_sums, record_changes

_BEFORE = "_deltawire_before"
"""The attribute of a model that holds its sums before post-processing."""


def around_postprocess(original: Callable[..., None], model: torch.nn.Module, *args: Any) -> None:
    """Observes ``DefaultModelLoader.postprocess_weights``."""
    before = parameter_sums(model)
    original(model, *args)
    record_changes(model, before)


def after_random_weights(_result: None, model: torch.nn.Module, *_args: Any) -> None:
    """Sums the weights that ``initialize_dummy_weights`` wrote."""
    model.__dict__[_BEFORE] = parameter_sums(model)


def after_random_load(model: torch.nn.Module, *_args: Any, **_kwargs: Any) -> None:
    """Compares them when ``DummyModelLoader.load_model`` has post-processed them."""
    record_changes(model, model.__dict__.pop(_BEFORE))
