"""The training client's forward pass: log-probabilities of a datum's targets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from deltawire.errors import InputError


def target_logprobs(
    model: Any, inputs: Sequence[Tensor], targets: Sequence[Tensor]
) -> list[Tensor]:
    """Returns log π(target | input up to its row) for each sequence, float32 of the targets' shape.

    ``inputs`` are int64[L], ``targets`` int64[L] or int64[L, K]. Sequences are padded on the right
    into one batch, which changes nothing for a causal model.
    """
    width = max(map(len, inputs))
    device = next(model.parameters()).device
    ids_BT = torch.zeros(len(inputs), width, dtype=torch.long, device=device)
    mask_BT = torch.zeros_like(ids_BT)
    for row, tokens in enumerate(inputs):
        ids_BT[row, : len(tokens)] = tokens.to(device)
        mask_BT[row, : len(tokens)] = 1
    positions = torch.arange(width, device=device).expand_as(ids_BT)
    logits_BTV = model(input_ids=ids_BT, attention_mask=mask_BT, position_ids=positions).logits
    found = []
    for row, wanted in enumerate(targets):
        logprobs_LV = torch.log_softmax(logits_BTV[row, : len(wanted)].float(), dim=-1)
        columns = wanted.to(device).reshape(len(wanted), -1)
        found.append(logprobs_LV.gather(1, columns).reshape(wanted.shape))
    return found


def score_tokens(model: Any, tokens: Sequence[int]) -> Tensor:
    """Returns log π(token t | tokens before t) for t ≥ 1, float32[L − 1] on the CPU."""
    ids = torch.tensor(tokens)
    check_tokens(model, ids)
    if len(tokens) < 2:
        return torch.zeros(0)
    return target_logprobs(model, [ids[:-1]], [ids[1:]])[0].cpu()


def check_tokens(model: Any, ids: Tensor) -> None:
    """Raises `InputError` unless all ids are tokens of the model."""
    count = int(model.get_input_embeddings().num_embeddings)
    if ids.numel() and (int(ids.min()) < 0 or int(ids.max()) >= count):
        raise InputError(f"a token is none of the model's {count}")
