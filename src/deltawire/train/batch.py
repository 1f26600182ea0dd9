"""Groups as padded tensors, every prompt once.

Shapes: G groups, N trajectories, P prompt tokens (padded on the left), C tokens behind the prompt
(padded on the right).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from deltawire.wire.rollouts import Group


@dataclass(frozen=True)
class TokenBatch:
    """What one forward pass needs. ``groups_N`` is each trajectory's row in ``prompts_GP``;
    ``versions_NC`` int64, -1 where the model drew nothing."""

    prompts_GP: Tensor
    prompt_mask_GP: Tensor
    groups_N: Tensor
    tokens_NC: Tensor
    token_mask_NC: Tensor
    loss_mask_NC: Tensor
    sampler_logprobs_NC: Tensor
    rewards_N: Tensor
    temperature: float
    versions_NC: Tensor


def collate(groups: Sequence[Group]) -> TokenBatch:
    """Pad groups of one temperature into a batch; the arrays are copied."""
    trajectories = [t for group in groups for t in group.trajectories]
    width = max(len(group.prompt) for group in groups)
    length = max(len(t.tokens_T) for t in trajectories)
    prompts = torch.zeros(len(groups), width, dtype=torch.long)
    prompt_mask = torch.zeros(len(groups), width, dtype=torch.long)
    for row, group in enumerate(groups):
        prompts[row, width - len(group.prompt) :] = torch.from_numpy(group.prompt.copy())
        prompt_mask[row, width - len(group.prompt) :] = 1
    tokens = torch.zeros(len(trajectories), length, dtype=torch.long)
    token_mask = torch.zeros(len(trajectories), length, dtype=torch.long)
    loss_mask = torch.zeros(len(trajectories), length)
    logprobs = torch.zeros(len(trajectories), length)
    versions = torch.full((len(trajectories), length), -1)
    for row, t in enumerate(trajectories):
        count = len(t.tokens_T)
        tokens[row, :count] = torch.from_numpy(t.tokens_T.copy())
        token_mask[row, :count] = 1
        loss_mask[row, :count] = torch.from_numpy(t.mask_T.copy())
        # Where the environment wrote, anything may stand; NaN would survive the mask's zero.
        logprobs[row, :count] = torch.from_numpy(np.where(t.mask_T == 1, t.logprobs_T, 0))
        versions[row, :count] = torch.from_numpy(np.where(t.mask_T == 1, t.versions_T, -1))
    sizes = torch.tensor([len(group.trajectories) for group in groups])
    return TokenBatch(
        prompts,
        prompt_mask,
        torch.arange(len(groups)).repeat_interleave(sizes),
        tokens,
        token_mask,
        loss_mask,
        logprobs,
        torch.tensor([t.reward for t in trajectories], dtype=torch.float32),
        groups[0].temperature,
        versions,
    )
