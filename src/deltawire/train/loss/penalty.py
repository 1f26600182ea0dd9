"""Penalties for moving away from a reference policy: estimators of KL(π ‖ reference) per token.

x = log π − log reference. Source: Schulman, "Approximating KL divergence", 2020. As losses they
differ in their gradient: that of k2 is the gradient of the divergence, that of k3 the gradient of
the divergence in the other direction, and that of k1 is zero in expectation, so that it only adds
noise on samples of π itself.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from deltawire.train.loss.inputs import log_ratio


def k1(logprobs_NC: Tensor, reference_NC: Tensor) -> Tensor:
    """x: unbiased, of either sign. [N, C]."""
    return log_ratio(logprobs_NC, reference_NC)


def k2(logprobs_NC: Tensor, reference_NC: Tensor) -> Tensor:
    """x² / 2: biased and low in variance. [N, C]."""
    return log_ratio(logprobs_NC, reference_NC).square() / 2


def k3(logprobs_NC: Tensor, reference_NC: Tensor) -> Tensor:
    """exp(−x) − 1 + x: unbiased and never negative. [N, C]. As in GRPO, Shao et al. 2024, eq. 4."""
    x = log_ratio(logprobs_NC, reference_NC)
    return (-x).expm1() + x


PENALTIES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}
"""The penalties, by their names in ``train.loss.kl``."""
