"""Activation checkpointing: decoder layers whose activations are computed again in the backward
pass.

It wraps a layer's forward and not its call, so that hooks such as FSDP2's stay outside and run
once. It does not depend on the model's training mode, since the trainer computes without dropout
in evaluation mode.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from deltawire.engines.routers import replaced_forward
from deltawire.errors import InputError

Checkpointing = Literal["none", "selective", "full", "offloaded"]

_PRODUCTS: Final = frozenset(
    (
        "aten::mm",
        "aten::addmm",
        "aten::bmm",
        "aten::_grouped_mm",
        "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_efficient_attention",
        "aten::_scaled_dot_product_cudnn_attention",
        "torch_attn::_varlen_attn",
    )
)
"""Operations whose results ``selective`` keeps: products and attention, which cost the most."""


@contextmanager
def checkpointed(model: Any, policy: Checkpointing) -> Iterator[None]:
    """Applies a policy to the model's decoder layers; forward and backward pass lie inside.

    ``full`` keeps each layer's input and computes the layer again; ``selective`` also keeps the
    results of matrix products and attention; ``offloaded`` is ``full`` with the inputs in host
    memory. The gradients' bits are those of ``none``.

    Raises `InputError` if the model does not expose its layers.
    """
    with ExitStack() as stack:
        if policy != "none" and torch.is_grad_enabled():
            # Experts with a bias add it to their product in place: what was kept would change.
            biased = any(name.endswith("proj_bias") for name, _ in model.named_parameters())
            kept = _PRODUCTS - {"aten::_grouped_mm"} if biased else _PRODUCTS
            for layer in _layers(model):
                again = _again(layer.forward, policy, kept)
                stack.enter_context(replaced_forward(layer, again))
        yield


def _layers(model: Any) -> list[nn.Module]:
    found = getattr(model.get_decoder(), "layers", None)
    if not isinstance(found, nn.ModuleList) or not len(found):
        raise InputError(
            f"{type(model).__name__} does not expose its decoder layers",
            hint='set train.activation_checkpointing = "none"',
        )
    return list(found)


def _again(
    forward: Callable[..., Any], policy: Checkpointing, kept: frozenset[str]
) -> Callable[..., Any]:
    """Returns a layer's forward that keeps only what the policy says."""

    def choose(_context: Any, operation: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
        if operation.name().partition(".")[0] in kept:
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    def full(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    def selective(*args: Any, **kwargs: Any) -> Any:
        contexts = functools.partial(create_selective_checkpoint_contexts, choose)
        return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)

    def offloaded(*args: Any, **kwargs: Any) -> Any:
        on_device = any(isinstance(one, Tensor) and one.is_cuda for one in args)
        with save_on_cpu(pin_memory=on_device):
            return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    return {"full": full, "selective": selective, "offloaded": offloaded}[policy]
