"""Engines whose weights could not be kept as the run has them: refused before they serve."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from deltawire.errors import InputError
from deltawire.placement.placement import Placement

ABSORBED = frozenset({"W_UK_T", "W_UV", "W_UK_T_dcp_qrep", "W_K", "W_K_scale", "W_V", "W_V_scale"})
"""What vLLM's latent attention makes of ``kv_b_proj`` once that is loaded: views of it, or under
some settings copies."""


def refuse_configuration(vllm_config: Any) -> None:
    """Raises `InputError` for parallelism under which weights lie where no rank can follow them."""
    parallel = vllm_config.parallel_config
    if parallel.data_parallel_size > 1 and vllm_config.model_config.is_moe:
        raise InputError(
            "deltawire cannot lead the data-parallel replicas of a mixture of experts, whose "
            "experts lie on all of them",
            hint="use tensor or pipeline parallelism, or start the replicas apart",
        )
    if parallel.enable_eplb:
        raise InputError(
            "deltawire cannot follow experts that vLLM moves about while it serves",
            hint="serve without --enable-eplb",
        )


def refuse_remade(remade: Mapping[str, str] | None) -> None:
    """Raises `InputError` if weights did not stay where and as the model's loader put them, by what
    `remade.remade` says of the model."""
    if remade is None:
        raise InputError(
            "what vLLM made of the model's weights when it loaded them was not seen",
            hint="load_format must be one that loads a checkpoint itself",
        )
    if remade:
        name, how = next(iter(sorted(remade.items())))
        others = f", and {len(remade) - 1} more" if len(remade) > 1 else ""
        raise InputError(
            f"vLLM has changed weights for its kernels once they were loaded: {name} {how}{others}",
            hint="serve without quantization, and experts with --moe-backend triton",
        )


def refuse_unreached(placement: Placement, model: torch.nn.Module) -> None:
    """Raises `InputError` for parameters that no tensor of the run is loaded into: nobody could say
    whose they are. Where the loader computes some, nothing is known of what it reaches."""
    if placement.unplaced:
        return
    sizes = {n: held.numel() for n, held in model.named_parameters(remove_duplicate=False)}
    unreached = sorted(
        name for name, count in placement.uncovered.items() if sizes.get(name, 0) == count > 1
    )
    if unreached:
        others = f" and {len(unreached) - 1} more" if len(unreached) > 1 else ""
        raise InputError(
            f"no tensor of the run is loaded into the parameter {unreached[0]}{others}",
            hint="publish those tensors too (what never changes costs nothing), and serve without "
            "quantization",
        )


def refuse_stale_products(placement: Placement) -> None:
    """Raises `InputError` for weights that vLLM has made of others at loading and that are copies:
    no swap would reach them, and no digest would say so."""
    stale = sorted(name for name in placement.uncovered if name.rpartition(".")[2] in ABSORBED)
    if stale:
        raise InputError(
            f"vLLM has made {stale[0]} and {len(stale) - 1} more of other weights, as copies that "
            "deltawire does not renew",
            hint="serve latent attention's kv_b_proj unquantised, without replicated queries",
        )
