"""The trainer's forward pass: log-probabilities of the tokens that were drawn.

The completions of a group share their prompt, so it is computed once per group and its keys and
values are repeated, gradients included. With short answers after long prompts this saves most of
the work; the arithmetic is that of the sampler's prefill.

Rows are repeated with `torch.index_select`, because its backward pass adds the gradients of equal
rows in order. That of ``tensor[rows]`` adds them atomically: with several threads the sum depends
on which thread comes first.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from deltawire.parity.router_replay import RouteReplay
from deltawire.train.batch import TokenBatch


def token_logprobs(model: Any, batch: TokenBatch, replay: RouteReplay | None = None) -> Tensor:
    """log π(token | everything before it) at the batch's temperature: float32[N, C].

    Entries where ``token_mask_NC`` is 0 are meaningless. ``replay`` compares the sampler's expert
    choices with the model's own, and uses them if it is configured to. The backward pass does not
    need it as long as no activation is recomputed.
    """
    prompts, rows = batch.prompts_GP, batch.prompts_N
    over_prompts, over_tokens = _passes(batch, replay)
    cache = DynamicCache()
    with over_prompts:
        first = model(
            input_ids=prompts,
            attention_mask=batch.prompt_mask_GP,
            position_ids=(batch.prompt_mask_GP.cumsum(1) - 1).clamp(min=0),
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits
    first = torch.index_select(first, 0, rows)
    logits = first
    length = batch.tokens_NC.shape[1]
    if length > 1:
        layers: list[Any] = cache.layers
        for layer in layers:
            layer.keys = torch.index_select(layer.keys, 0, rows)
            layer.values = torch.index_select(layer.values, 0, rows)
        starts = batch.prompt_mask_GP.sum(1)[rows]
        with over_tokens:
            rest = model(
                input_ids=batch.tokens_NC[:, :-1],
                attention_mask=torch.cat(
                    [batch.prompt_mask_GP[rows], batch.token_mask_NC[:, :-1]], dim=1
                ),
                position_ids=starts[:, None] + torch.arange(length - 1, device=starts.device),
                past_key_values=cache,
                use_cache=True,
            ).logits
        logits = torch.cat([first, rest], dim=1)
    logprobs_NCV = torch.log_softmax(logits.float() / batch.temperature, dim=-1)
    return logprobs_NCV.gather(2, batch.tokens_NC[:, :, None])[:, :, 0]


def _passes(
    batch: TokenBatch, replay: RouteReplay | None
) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Contexts for the two forward passes: over the prompts, and over the tokens."""
    if replay is None:
        return nullcontext(), nullcontext()
    prompts, tokens = replay.padded(
        batch.routes_N, batch.prompts_N, batch.prompt_mask_GP, batch.token_mask_NC
    )
    return replay.over(prompts), replay.over(tokens[:, :-1])
