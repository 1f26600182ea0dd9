"""Refuses SGLang servers whose weights could not be kept equal to the run's, before they serve."""

from __future__ import annotations

from typing import Any

import torch

from deltawire.engines.following.parameter_sums import changes_after_loading
from deltawire.engines.following.refusals import (
    refuse_changed,
    refuse_flags,
    refuse_older,
    refuse_unreached,
)
from deltawire.errors import InputError
from deltawire.placement.placement import Placement

LEAST = "0.5.21"
"""The first version that reports the spans of weight versions of an answer."""

ABSORBED = ("w_kc", "w_vc")
"""Tensors that latent attention derives from ``kv_b_proj`` after loading, outside of parameters."""


TESTED = {
    "pp_size": 1, "dp_size": 1, "enable_eplb": False, "disaggregation_mode": "null",
    "speculative_algorithm": None, "enable_hierarchical_cache": False, "tokenizer_worker_num": 1,
}  # fmt: skip
"""The values of arguments with which swaps were tested."""


def refuse_version(found: str) -> None:
    """Raises `InputError` for a version of SGLang without spans of weight versions."""
    because = "does not report which weights made which token"
    refuse_older("SGLang", found, LEAST, because=because)


def refuse_arguments(server_args: Any) -> None:
    """Raises `InputError` for settings under which a swap was not tested."""
    refuse_flags(
        "SGLang",
        {
            f"--{name.replace('_', '-')}": getattr(server_args, name, tested) != tested
            for name, tested in TESTED.items()
        },
    )


def refuse(model: torch.nn.Module, placement: Placement) -> None:
    """Raises `InputError` if SGLang could serve weights that are not the run's."""
    refuse_changed(changes_after_loading(model), engine="SGLang", hint="serve unquantized")
    for name, module in model.named_modules():
        if any(getattr(module, derived, None) is not None for derived in ABSORBED):
            raise InputError(
                f"SGLang derived weights of latent attention from others in {name}, as copies that "
                "deltawire does not update",
                hint="serve this model with vLLM",
            )
    refuse_unreached(placement, model)
