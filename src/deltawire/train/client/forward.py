"""Scores tokens with a model that is being sampled from, and checks token ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from deltawire.errors import InputError
from deltawire.train.policy import TrainedPolicy


def score_tokens(model: Any, tokens: Sequence[int]) -> Tensor:
    """Returns log π(token t | tokens before t) for t ≥ 1, float32[L − 1] on the CPU."""
    ids = torch.tensor(tokens)
    check_tokens(model, ids)
    if len(tokens) < 2:
        return torch.zeros(0)
    with TrainedPolicy(model).sequence_terms([ids[:-1]], [ids[1:]]) as terms:
        return terms[0].logprobs.cpu()


def check_tokens(model: Any, ids: Tensor) -> None:
    """Raises `InputError` unless all ids are tokens of the model."""
    count = int(model.get_input_embeddings().num_embeddings)
    if ids.numel() and (int(ids.min()) < 0 or int(ids.max()) >= count):
        raise InputError(f"a token id is not one of the model's {count}")
