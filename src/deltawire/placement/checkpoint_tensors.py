"""Gives a transformers module's tensors the names and shapes of its checkpoints.

Recent transformers versions stack experts and fuse other weights, while checkpoints, and so runs,
name them one by one. The library's own conversion rules lead from one to the other.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from deltawire.errors import InputError


@torch.no_grad()
def checkpoint_tensors(model: Any, state: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Returns the module's saved tensors under its checkpoints' names, tied ones once.

    ``state`` gives other values by the module's own names. Raises `InputError` for a version of
    transformers that converts checkpoints in an unknown way.
    """
    if state is None:
        own = {name for name, _ in model.named_parameters()}
        tied = {name for name, _ in model.named_parameters(remove_duplicate=False)} - own
        state = {name: t.detach() for name, t in model.state_dict().items() if name not in tied}
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError as error:
        raise InputError(
            f"this version of transformers converts checkpoints in an unknown way: {error}",
            hint="install transformers 5.23, which is known to work",
        ) from error
    found: dict[str, Tensor] = revert_weight_conversion(model, state)
    return found
