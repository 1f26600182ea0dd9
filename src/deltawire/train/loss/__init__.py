"""Policy losses from small pure functions, each under its name in the field; usable by themselves.

Four choices make a policy loss: the log-probabilities that the ratio divides by (its base), the
surrogate, the correction for the part that the base leaves out, and the aggregation over tokens.
The advantage and a penalty for moving away from a reference complete it.

A new surrogate is one module in this folder with one function of `LossInputs`, and one line in
`deltawire.config.SURROGATES`.

Shapes: N trajectories, C tokens after the prompt, E episodes, S sequences. Masks are 1 where the
model drew the token. Log-probabilities are in nats. A sequence is an episode: all its segments.
"""

from deltawire.train.loss.advantages import ADVANTAGES, group_mean, group_std, leave_one_out
from deltawire.train.loss.aggregation import (
    AGGREGATIONS,
    Totals,
    dr_grpo,
    seq_mean_token_mean,
    token_mean,
)
from deltawire.train.loss.correction import correction_weights
from deltawire.train.loss.inputs import ClipBounds, LossInputs, Surrogate, TokenLosses
from deltawire.train.loss.penalty import PENALTIES, k1, k2, k3
from deltawire.train.loss.policy import PolicyLoss, policy_loss, surrogate_named

__all__ = [
    "ADVANTAGES",
    "AGGREGATIONS",
    "PENALTIES",
    "ClipBounds",
    "LossInputs",
    "PolicyLoss",
    "Surrogate",
    "TokenLosses",
    "Totals",
    "correction_weights",
    "dr_grpo",
    "group_mean",
    "group_std",
    "k1",
    "k2",
    "k3",
    "leave_one_out",
    "policy_loss",
    "seq_mean_token_mean",
    "surrogate_named",
    "token_mean",
]
