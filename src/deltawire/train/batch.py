"""Collates groups into padded tensors, with every distinct prompt once.

Shapes: G distinct prompts of P tokens (padded on the left), N trajectories of C tokens after their
prompts (padded on the right), E episodes.

Trajectories of a failed episode are left out: they enter neither the loss nor the group's
statistics.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deltawire.errors import BugError
from deltawire.wire.rollouts import Group, Trajectory


@dataclass(frozen=True)
class TokenBatch:
    """The inputs of one forward pass and of the loss.

    ``prompts_N`` is each trajectory's row in ``prompts_GP``, which holds each distinct prompt once.
    ``episodes_N`` is each trajectory's episode; an episode has one reward in ``rewards_E`` and one
    group in ``groups_E``, whatever its number of segments. ``versions_NC`` is int64, -1 where the
    model drew nothing. ``members_N`` is the origin of each row: (index of its group among those
    collated, index of the trajectory in that group). ``routes_N`` are the sampler's packed expert
    choices, empty where none were recorded. ``episodes_E`` is each episode's origin: (index of its
    group, its number in that group). ``overlong_N`` is 1 for rows of an episode that was cut off.
    ``better_mask_NC`` is 1 for the tokens of a better answer, which nobody drew, and
    ``pair_weights_N`` is the weight of its pair, 0 in rows of other answers.
    """

    prompts_GP: Tensor
    prompt_mask_GP: Tensor
    prompts_N: Tensor
    tokens_NC: Tensor
    token_mask_NC: Tensor
    loss_mask_NC: Tensor
    sampler_logprobs_NC: Tensor
    versions_NC: Tensor
    episodes_N: Tensor
    rewards_E: Tensor
    groups_E: Tensor
    temperature: float
    members_N: list[tuple[int, int]]
    routes_N: list[bytes]
    episodes_E: list[tuple[int, int]]
    overlong_N: Tensor
    better_mask_NC: Tensor
    pair_weights_N: Tensor

    @property
    def wanted(self) -> Tensor:
        """1 for the tokens whose log-probabilities a loss takes: drawn, or of a better answer."""
        return self.loss_mask_NC + self.better_mask_NC

    def to(self, device: torch.device) -> TokenBatch:
        """Returns the batch with its tensors on ``device``."""
        moved: dict[str, Any] = {
            field.name: value.to(device)
            for field in fields(self)
            if isinstance(value := getattr(self, field.name), Tensor)
        }
        return replace(self, **moved)


def collate(groups: Sequence[Group], chosen: Sequence[tuple[int, int]] | None = None) -> TokenBatch:
    """Pads groups of one temperature into a batch; the arrays are copied.

    ``chosen`` are the (group, trajectory) to take, in ``members_N``'s terms and in the groups'
    order; all without it. Raises `BugError` if no episode is to be trained on.
    """
    wanted = None if chosen is None else set(chosen)
    prompts: dict[bytes, int] = {}
    shared: list[NDArray[np.int32]] = []
    episodes: dict[tuple[int, int], int] = {}
    rewards: list[float] = []
    members: list[tuple[int, int]] = []
    trajectories: list[Trajectory] = []
    prompts_N: list[int] = []
    episodes_N: list[int] = []
    overlong_N: list[bool] = []
    for number, group in enumerate(groups):
        overlong = group.overlong_episodes
        for place, episode, trajectory in group.trained():
            if wanted is not None and (number, place) not in wanted:
                continue
            prompt = group.prompt_of(trajectory)
            row = prompts.setdefault(prompt.tobytes(), len(prompts))
            if row == len(shared):
                shared.append(prompt)
            entry = episodes.setdefault((number, episode), len(episodes))
            if entry == len(rewards):
                rewards.append(trajectory.reward)
            members.append((number, place))
            trajectories.append(trajectory)
            prompts_N.append(row)
            episodes_N.append(entry)
            overlong_N.append(episode in overlong)
    if not trajectories:
        raise BugError("a batch was made of groups without an episode to train on")
    prompts_GP, prompt_mask_GP = _pad_prompts(shared)
    tokens = _pad_tokens(trajectories)
    weights = [t.better.weight if t.better and t.is_better else 0.0 for t in trajectories]
    better = torch.tensor([t.is_better for t in trajectories], dtype=torch.float32)
    return TokenBatch(
        prompts_GP,
        prompt_mask_GP,
        torch.tensor(prompts_N),
        *tokens,
        torch.tensor(episodes_N),
        torch.tensor(rewards, dtype=torch.float32),
        torch.tensor([number for number, _ in episodes]),
        groups[0].temperature,
        members,
        [t.routes for t in trajectories],
        list(episodes),
        torch.tensor(overlong_N, dtype=torch.float32),
        tokens[1].float() * better[:, None],
        torch.tensor(weights, dtype=torch.float32),
    )


def _pad_prompts(prompts: Sequence[NDArray[np.int32]]) -> tuple[Tensor, Tensor]:
    """Token ids and mask, int64[G, P]."""
    width = max(map(len, prompts))
    ids = torch.zeros(len(prompts), width, dtype=torch.long)
    mask = torch.zeros(len(prompts), width, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.from_numpy(prompt.copy())
        mask[row, width - len(prompt) :] = 1
    return ids, mask


def _pad_tokens(
    trajectories: Sequence[Trajectory],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Pads tokens, their mask, the loss mask, the sampler's log-probabilities and the versions to
    [N, C] each.
    """
    length = max(len(t.tokens_T) for t in trajectories)
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
        # The environment's tokens may have any value here; NaN would survive the mask's zero.
        drawn = t.mask_T == 1
        logprobs[row, :count] = torch.from_numpy(np.where(drawn, t.logprobs_T, 0))
        versions[row, :count] = torch.from_numpy(np.where(drawn, t.versions_T, -1))
    return tokens, token_mask, loss_mask, logprobs, versions
