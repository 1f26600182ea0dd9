"""Losses of pairs: a served answer, and a better one to the same prompt that the model did not
draw, such as a user's edit. They take the answers of any policy: nothing divides by the sampler's
probability.

With x the sum of log π − log reference over an answer's tokens, and x̄ their mean, of the better
answer w and the served answer l:

- ``dpo``: −log σ(β(x_w − x_l)). Source: Rafailov et al. 2023, eq. 7.
- ``dpo_norm``: −log σ(β(x̄_w − x̄_l)), its length-normalized form. Source: Lambert et al. 2024
  (Tülu 3), eq. 6.
- ``ipo``: (x̄_w − x̄_l − 1 / (2β))². Source: Azar et al. 2024, eq. 17, with means as in TRL.
- ``simpo``: −log σ(β(mean log π_w − mean log π_l) − margin). Source: Meng et al. 2024, eq. 6.
- ``supervised``: −mean log π_w; the served answer does not count.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from deltawire.config import PreferenceConfig
from deltawire.errors import InputError
from deltawire.train.loss.aggregation import Totals
from deltawire.train.loss.inputs import sequence_sums
from deltawire.wire.rollouts import BetterAnswer, Group, Trajectory


@dataclass(frozen=True)
class PairInputs:
    """One micro-batch as the losses of pairs see it.

    ``served_NC`` is 1 for the tokens of served answers, ``better_NC`` for those of better ones; a
    pair is a sequence that has both. ``weights_N`` is a pair's weight in the row of its better
    answer, 0 in other rows. The other members are those of `LossInputs`.

    Example::

        loss = preference_loss(PreferenceConfig(kind="dpo"), pairs, totals)
    """

    logprobs_NC: Tensor
    served_NC: Tensor
    better_NC: Tensor
    weights_N: Tensor
    sequences_N: Tensor
    reference_NC: Tensor | None = None


def preference_loss(config: PreferenceConfig, pairs: PairInputs, totals: Totals) -> Tensor:
    """``coefficient`` · Σ over pairs of weight · loss / sequences of the step: [].

    So a pair moves the policy as far whatever number of other answers have one. Where all have one,
    it is the mean over pairs. Raises `InputError` if the loss needs a reference's log-probabilities
    that ``pairs`` does not hold.
    """
    if config.needs_reference and pairs.reference_NC is None:
        kind = f"train.loss.preference.kind = {config.kind}"
        raise InputError(
            f"{kind} needs the log-probabilities of a reference",
            hint="pass reference_NC, or choose simpo or supervised",
        )
    weights_S = pairs.weights_N.new_zeros(int(pairs.sequences_N.max()) + 1)
    weights_S = weights_S.index_add(0, pairs.sequences_N, pairs.weights_N)
    return config.coefficient * (weights_S * _losses(config, pairs)).sum() / totals.sequences


def _losses(config: PreferenceConfig, pairs: PairInputs) -> Tensor:
    """The loss of each sequence, whether or not it is a pair: [S]."""
    scores_NC = pairs.logprobs_NC
    if config.needs_reference and pairs.reference_NC is not None:
        scores_NC = scores_NC - pairs.reference_NC
    better_S = sequence_sums(scores_NC, pairs.better_NC, pairs.sequences_N)
    served_S = sequence_sums(scores_NC, pairs.served_NC, pairs.sequences_N)
    if config.kind != "dpo":
        ones_NC = pairs.better_NC.new_ones(pairs.better_NC.shape)
        lengths_S = sequence_sums(ones_NC, pairs.better_NC, pairs.sequences_N)
        better_S = better_S / lengths_S.clamp(min=1)
        lengths_S = sequence_sums(ones_NC, pairs.served_NC, pairs.sequences_N)
        served_S = served_S / lengths_S.clamp(min=1)
    margins_S = better_S - served_S
    match config.kind:
        case "supervised":
            return -better_S
        case "ipo":
            return (margins_S - 1 / (2 * config.beta)) ** 2
        case "simpo":
            return -F.logsigmoid(config.beta * margins_S - config.margin)
        case _:
            return -F.logsigmoid(config.beta * margins_S)


def with_better_answers(groups: Sequence[Group]) -> list[Group]:
    """Returns the groups with each better answer as a further trajectory of its episode, after all
    others. None of its tokens was drawn, so whatever counts drawn tokens leaves it out."""
    return [
        replace(
            group,
            trajectories=[
                *group.trajectories,
                *(
                    _better_trajectory(t, t.better)
                    for t in group.trajectories
                    if t.better is not None and not t.cause
                ),
            ],
        )
        for group in groups
    ]


def _better_trajectory(t: Trajectory, better: BetterAnswer) -> Trajectory:
    count = len(better.tokens_T)
    return replace(
        t,
        tokens_T=better.tokens_T,
        logprobs_T=np.zeros(count, np.float32),
        versions_T=np.zeros(count, np.int32),
        mask_T=np.zeros(count, np.uint8),
        finish="stop",
        routes=b"",
        thinking=None,
    )
