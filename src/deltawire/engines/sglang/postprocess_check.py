"""Records which weights SGLang reorders or repacks after loading, for `refusals`.

Its loader of checkpoints and its loader of random weights are observed; others are refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from deltawire.engines.following.parameter_sums import (
    ParameterSum,
    differences,
    parameter_sums,
)

_BEFORE = "_deltawire_before"
_CHANGES = "_deltawire_changes"
"""The attributes of a model that hold its sums before, and its changes after, post-processing."""


def around_postprocess(original: Callable[..., None], model: torch.nn.Module, *args: Any) -> None:
    """Observes ``DefaultModelLoader.postprocess_weights``."""
    before = parameter_sums(model)
    original(model, *args)
    model.__dict__[_CHANGES] = differences(before, parameter_sums(model))


def after_random_weights(_result: None, model: torch.nn.Module, *_args: Any) -> None:
    """Sums the weights that ``initialize_dummy_weights`` wrote."""
    model.__dict__[_BEFORE] = parameter_sums(model)


def after_random_load(model: torch.nn.Module, *_args: Any, **_kwargs: Any) -> None:
    """Compares them when ``DummyModelLoader.load_model`` has post-processed them."""
    before: dict[str, ParameterSum] = model.__dict__.pop(_BEFORE)
    model.__dict__[_CHANGES] = differences(before, parameter_sums(model))


def changes_after_loading(model: torch.nn.Module) -> dict[str, str] | None:
    """Returns the parameters of more than one element that SGLang changed after loading, and how;
    None if post-processing was not observed."""
    found: dict[str, str] | None = model.__dict__.get(_CHANGES)
    return found
