"""Refuses engines whose weights could not be kept equal to the run's, before they serve."""

from __future__ import annotations

from typing import Any

import torch

from deltawire.engines.following.parameter_sums import changes_after_loading
from deltawire.engines.following.refusals import refuse_changed, refuse_unreached
from deltawire.errors import InputError
from deltawire.placement.placement import Placement

ABSORBED = frozenset({"W_UK_T", "W_UV", "W_UK_T_dcp_qrep", "W_K", "W_K_scale", "W_V", "W_V_scale"})
"""Tensors that vLLM's latent attention derives from ``kv_b_proj`` after loading: views of it, or
copies under some settings."""

UNCHANGED = "serve without quantization, and experts with --moe-backend triton"
"""How to have vLLM leave weights as they are loaded."""


def refuse_configuration(vllm_config: Any) -> None:
    """Raises `InputError` for parallelism that places weights where no rank could follow them."""
    parallel = vllm_config.parallel_config
    if parallel.data_parallel_size > 1 and vllm_config.model_config.is_moe:
        raise InputError(
            "deltawire cannot update data-parallel replicas of a mixture of experts: the experts "
            "are spread over all replicas",
            hint="use tensor or pipeline parallelism, or start each replica by itself",
        )
    if parallel.enable_eplb:
        raise InputError(
            "deltawire cannot follow experts that vLLM moves between ranks while it serves",
            hint="serve without --enable-eplb",
        )


def refuse(model: torch.nn.Module, placement: Placement) -> None:
    """Raises `InputError` if vLLM could serve weights that are not the run's."""
    refuse_changed(changes_after_loading(model), engine="vLLM", hint=UNCHANGED)
    refuse_stale_products(placement)
    refuse_unreached(placement, model)


def refuse_stale_products(placement: Placement) -> None:
    """Raises `InputError` for copies that vLLM derived from other weights at loading: no swap would
    reach them, and no digest would show it."""
    stale = sorted(name for name in placement.uncovered if name.rpartition(".")[2] in ABSORBED)
    if stale:
        raise InputError(
            f"vLLM derived {stale[0]} and {len(stale) - 1} more from other weights, as copies that "
            "deltawire does not update",
            hint="serve latent attention's kv_b_proj unquantized, without replicated queries",
        )
