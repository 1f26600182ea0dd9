"""The loss as small pure functions, each by its name in the field; usable without the rest.

Four choices make a policy loss: which log-probabilities the ratio is anchored on, the surrogate,
the correction for what the anchor leaves out, and the aggregation over tokens. Beside them stand
the advantage and a penalty for leaving a reference.

Shapes: N trajectories, C tokens behind the prompt, E episodes, S sequences. Masks are 1 where the
model drew the token. Log-probabilities are in nats. A sequence is an episode: all its segments.
"""

from deltawire.train.loss.advantages import ADVANTAGES, group_mean, group_std, leave_one_out
from deltawire.train.loss.aggregation import AGGREGATIONS, dr_grpo, seq_mean_token_mean, token_mean
from deltawire.train.loss.correction import correction_weights
from deltawire.train.loss.penalty import PENALTIES, k1, k2, k3
from deltawire.train.loss.policy import PolicyLoss, Totals, policy_loss
from deltawire.train.loss.surrogates import (
    Surrogate,
    cispo,
    dppo,
    gspo,
    importance_sampling,
    ppo,
    reinforce,
)

__all__ = [
    "ADVANTAGES",
    "AGGREGATIONS",
    "PENALTIES",
    "PolicyLoss",
    "Surrogate",
    "Totals",
    "cispo",
    "correction_weights",
    "dppo",
    "dr_grpo",
    "group_mean",
    "group_std",
    "gspo",
    "importance_sampling",
    "k1",
    "k2",
    "k3",
    "leave_one_out",
    "policy_loss",
    "ppo",
    "reinforce",
    "seq_mean_token_mean",
    "token_mean",
]
