"""Replaces vLLM's packing CPU kernels with kernels over unpacked parameters.

After loading, vLLM packs linear and expert weights for its CPU kernels and drops the original
parameters, so none are left to change in place. If deltawire is in use, these kernels read the
parameters as loaded. GPUs do not need this.

One more function is replaced because it has a bug. vLLM 0.32's rotary embedding for CPUs counts
heads and finds tokens as if queries and keys were [T, H·D]; latent attention passes slices [T, H,
D]. Of their T·H rows it rotates T, by other tokens' positions, so that answers depend on what else
is in the batch. `docs/LOG.md` has the figures.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial, wraps
from typing import Any

import torch

from deltawire.engines.vllm.settings import in_use_here


def install() -> None:
    """Replaces the packing functions in this process."""
    from vllm.model_executor.layers import utils
    from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method
    from vllm.model_executor.layers.fused_moe.experts import cpu_moe
    from vllm.model_executor.layers.fused_moe.oracle import unquantized
    from vllm.model_executor.layers.rotary_embedding import base as rotary_embedding

    utils.dispatch_cpu_unquantized_gemm = _unpacked_linear(utils.dispatch_cpu_unquantized_gemm)
    experts = cpu_moe.CPUUnquantizedExperts
    experts.process_weights_after_loading = _without_packing(experts.process_weights_after_loading)
    experts.apply = _unpacked_experts(experts.apply)
    select = _cpu_backend(unquantized.select_unquantized_moe_backend)
    unquantized.select_unquantized_moe_backend = select
    unquantized_fused_moe_method.select_unquantized_moe_backend = select
    rotation = rotary_embedding.RotaryEmbedding
    rotation.__init__ = _recording_use(rotation.__init__)
    rotation.forward_cpu = _rotation_by_shape(rotation.forward_cpu)


def _unpacked_linear(packing: Callable[..., None]) -> Callable[..., None]:
    def dispatch_cpu_unquantized_gemm(layer: torch.nn.Module, remove_weight: bool) -> None:
        weight: Any = layer.weight
        if weight.ndim == 2 and in_use_here():
            layer.__dict__["cpu_linear"] = torch.nn.functional.linear
        else:
            packing(layer, remove_weight)

    return dispatch_cpu_unquantized_gemm


def _without_packing(packing: Callable[..., None]) -> Callable[..., None]:
    def process_weights_after_loading(self: Any, layer: torch.nn.Module) -> None:
        self._unpacked = in_use_here()
        self._use_zentorch = False
        if not self._unpacked:
            packing(self, layer)

    return process_weights_after_loading


def _cpu_backend(original: Callable[..., Any]) -> Callable[..., Any]:
    """Chooses the CPU's experts also in an engine with adapter slots, where vLLM chooses Triton's.
    Those that vLLM wraps for adapters of experts still need Triton, and are refused by vLLM."""

    @wraps(original)
    def select_unquantized_moe_backend(moe_config: Any) -> Any:
        if moe_config.is_lora_enabled and in_use_here():
            moe_config = replace(moe_config, is_lora_enabled=False)
        return original(moe_config)

    return select_unquantized_moe_backend


def _recording_use(original: Callable[..., None]) -> Callable[..., None]:
    @wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        original(self, *args, **kwargs)
        self._unpacked = in_use_here()

    return __init__


def _rotation_by_shape(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps ``forward_cpu`` so that it also rotates queries [T, H, D], by vLLM's own operators."""

    @wraps(kernel)
    def forward_cpu(
        self: Any, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None
    ) -> Any:
        rotate = self.forward_native if self._unpacked and query.ndim > 2 else partial(kernel, self)
        return rotate(positions, query, key)

    return forward_cpu


def _unpacked_experts(packed: Callable[..., None]) -> Callable[..., None]:
    def apply(self: Any, *args: Any, **kwargs: Any) -> None:
        if getattr(self, "_unpacked", False):
            run_experts(self, *args, **kwargs)
        else:
            packed(self, *args, **kwargs)

    return apply


def run_experts(
    self: Any,
    output: torch.Tensor,
    hidden_states: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    activation: Any,
    global_num_experts: int,
    expert_map: torch.Tensor | None,
    a1q_scale: torch.Tensor | None,
    a2_scale: torch.Tensor | None,
    workspace13: torch.Tensor,
    workspace2: torch.Tensor,
    expert_tokens_meta: Any,
    apply_router_weight_on_input: bool,
) -> None:
    """Computes the experts of this rank, one after the other, into ``output``, [T, H].

    ``w1`` is [E, 2I, H], ``w2`` [E, H, I], ``topk_ids`` [T, K]; ``expert_map`` maps an expert's
    number in the model to its number on this rank, -1 if another rank has it.
    """
    del global_num_experts, a1q_scale, a2_scale, workspace13, workspace2, expert_tokens_meta
    local_TK = topk_ids if expert_map is None else expert_map[topk_ids.long()]
    summed_TH = torch.zeros(hidden_states.shape, dtype=torch.float32)
    for expert in torch.unique(local_TK[local_TK >= 0]).tolist():
        rows, places = (local_TK == expert).nonzero(as_tuple=True)
        gate_up = torch.nn.functional.linear(
            hidden_states[rows], w1[expert], None if self.w1_bias is None else self.w1_bias[expert]
        )
        inner = _activate(self, activation, gate_up)
        answer = torch.nn.functional.linear(
            inner, w2[expert], None if self.w2_bias is None else self.w2_bias[expert]
        ).float()
        if not apply_router_weight_on_input:
            answer *= topk_weights[rows, places].unsqueeze(1).float()
        summed_TH.index_add_(0, rows, answer)
    output.copy_(summed_TH)


def _activate(self: Any, activation: Any, gate_up: torch.Tensor) -> torch.Tensor:
    """Maps [N, 2I] to [N, I] as vLLM's operators do; the one for gpt-oss is not built for CPUs."""
    from vllm.model_executor.layers.fused_moe.activation import apply_moe_activation

    if activation.value == "swigluoai":
        config = self.moe_config
        limit = 7.0 if config.swiglu_limit is None else float(config.swiglu_limit)
        alpha = 1.702 if config.swiglu_alpha is None else float(config.swiglu_alpha)
        gate, up = gate_up[:, ::2].clamp(max=limit), gate_up[:, 1::2].clamp(-limit, limit)
        return (up + 1) * gate * torch.sigmoid(gate * alpha)
    inner = gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2)
    apply_moe_activation(activation, inner, gate_up)
    return inner
