"""Refuses SGLang servers whose weights could not be kept equal to the run's, before they serve."""

from __future__ import annotations

import torch

from deltawire.engines.following.parameter_sums import changes_after_loading
from deltawire.engines.following.refusals import (
    refuse_changed,
    refuse_derived,
    refuse_older,
    refuse_unreached,
)
from deltawire.placement.placement import Placement

LEAST = "0.5.21"
"""The first version that reports the spans of weight versions of an answer."""

ABSORBED = ("w_kc", "w_vc")
"""Tensors that latent attention derives from ``kv_b_proj`` after loading, outside of parameters."""

TESTED = {
    "pp_size": 1, "dp_size": 1, "enable_dp_attention": False, "moe_dp_size": 1, "dwdp_size": 1,
    "attn_cp_size": 1, "dcp_size": 1, "enable_eplb": False, "ep_num_redundant_experts": 0,
    "init_expert_location": "trivial", "elastic_ep_backend": None, "enable_paged_experts": False,
    "disaggregation_mode": "null", "enable_pdmux": False, "speculative_algorithm": None,
    "dllm_algorithm": None, "enable_hierarchical_cache": False, "enable_hisparse": False,
    "tokenizer_worker_num": 1, "cpu_offload_gb": 0, "offload_group_size": -1,
    "weight_cache_mode": "off",
}  # fmt: skip
"""The values of arguments with which swaps were tested. Others hold weights twice, move, share or
offload them, or leave the loop in which ranks agree."""


def refuse_version(found: str) -> None:
    """Raises `InputError` for a version of SGLang without spans of weight versions."""
    because = "does not report which weights made which token"
    refuse_older("SGLang", found, LEAST, because=because)


def refuse(model: torch.nn.Module, placement: Placement) -> None:
    """Raises `InputError` if SGLang could serve weights that are not the run's."""
    refuse_changed(changes_after_loading(model), engine="SGLang", hint="serve unquantized")
    refuse_derived("SGLang", model, ABSORBED)
    refuse_unreached(placement, model)
