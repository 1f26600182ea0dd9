"""Refuses SGLang servers whose weights could not be kept equal to the run's, before they serve."""

from __future__ import annotations

from typing import Any

import torch

from deltawire.engines.following.parameter_sums import changes_after_loading
from deltawire.engines.following.refusals import refuse_changed, refuse_unreached
from deltawire.errors import InputError
from deltawire.placement.placement import Placement

LEAST = (0, 5, 21)
"""The first version that reports the spans of weight versions of an answer."""

ABSORBED = ("w_kc", "w_vc")
"""Tensors that latent attention derives from ``kv_b_proj`` after loading, outside of parameters."""


def refuse_version(found: str) -> None:
    """Raises `InputError` for a version of SGLang without spans of weight versions."""
    numbers = tuple(int(part) for part in found.split(".")[:3] if part.isdecimal())
    if numbers < LEAST:
        raise InputError(
            f"SGLang {found} does not report which weights made which token",
            hint=f"use {'.'.join(map(str, LEAST))} or a later version",
        )


def refuse_arguments(server_args: Any) -> None:
    """Raises `InputError` for settings under which a swap was not tested."""
    refused = {
        "--pp-size": server_args.pp_size > 1,
        "--dp-size": server_args.dp_size > 1,
        "--enable-eplb": bool(getattr(server_args, "enable_eplb", False)),
        "--disaggregation-mode": getattr(server_args, "disaggregation_mode", "null") != "null",
        "--speculative-algorithm": bool(server_args.speculative_algorithm),
        "--enable-hierarchical-cache": bool(
            getattr(server_args, "enable_hierarchical_cache", False)
        ),
        "--tokenizer-worker-num": getattr(server_args, "tokenizer_worker_num", 1) > 1,
    }
    for flag, used in refused.items():
        if used:
            raise InputError(
                f"deltawire does not follow a run under SGLang's {flag}",
                hint=f"serve without {flag}",
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
