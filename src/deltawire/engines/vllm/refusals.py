"""Refuses engines whose weights could not be kept equal to the run's, before they serve."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from deltawire.errors import InputError
from deltawire.placement.placement import Placement

ABSORBED = frozenset({"W_UK_T", "W_UV", "W_UK_T_dcp_qrep", "W_K", "W_K_scale", "W_V", "W_V_scale"})
"""Tensors that vLLM's latent attention derives from ``kv_b_proj`` after loading: views of it, or
copies under some settings."""


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


def refuse_changed(changes: Mapping[str, str] | None) -> None:
    """Raises `InputError` if weights changed or moved after the loader wrote them, according to
    `postprocess_check.changes_after_loading`.
    """
    if changes is None:
        raise InputError(
            "vLLM's post-processing of the loaded weights was not observed",
            hint="choose a load_format that loads a checkpoint itself",
        )
    if changes:
        name, how = next(iter(sorted(changes.items())))
        others = f", and {len(changes) - 1} more" if len(changes) > 1 else ""
        raise InputError(
            f"vLLM changed weights for its kernels after loading: {name} {how}{others}",
            hint="serve without quantization, and experts with --moe-backend triton",
        )


def refuse_unreached(placement: Placement, model: torch.nn.Module) -> None:
    """Raises `InputError` for parameters that no tensor of the run is loaded into, since they would
    stay at unknown values. Not checked where the loader computes tensors: what those reach is
    unknown."""
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
            hint="publish those tensors too (unchanged tensors cost nothing), and serve without "
            "quantization",
        )


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
