"""Stops a live run whose importance ratios explode.

A live run trains on answers of older versions. If the policy has moved so far from them that a few
tokens have almost all of the weight, each step adds noise instead of what users said, and no later
step repairs that. One such batch may be chance; `STEPS` in a row are not.
"""

from __future__ import annotations

from deltawire.config import RunConfig
from deltawire.errors import StoppedError
from deltawire.parity.divergence import Divergence

STEPS = 3
"""Steps in a row after which the run is stopped."""


class RatioStop:
    """Counts steps whose effective sample is below ``live.stop_effective_share``.

    It judges runs whose advantages are given, as those of live groups are, and whose loss is of
    sampled answers.

    Example::

        stop = RatioStop(config)
        stop.step(parity.drift, run=bucket.url, version=version)
    """

    def __init__(self, config: RunConfig) -> None:
        loss = config.train.loss
        judged = loss.advantage == "given" and loss.policy_coefficient > 0
        self._least = config.live.stop_effective_share if judged else 0.0
        self._min_tokens = config.parity.min_tokens
        self._in_row = 0

    def step(self, drift: Divergence, *, run: str, version: int) -> None:
        """Adds the step that makes ``version``; raises `StoppedError` at the `STEPS`-th in a row.
        NaN counts as below."""
        if not self._least or drift.tokens < self._min_tokens:
            return
        share = drift.effective_share
        self._in_row = 0 if share >= self._least else self._in_row + 1
        if self._in_row >= STEPS:
            raise StoppedError(
                f"importance ratios explode: the effective sample was below {self._least:g} of the "
                f"tokens in {STEPS} steps in a row (now {share:.3g}, largest ratio "
                f"{drift.ratio_max:.3g})",
                hint="bound whole answers (train.loss.surrogate = gspo), shorten the stages of "
                "[live.release], or lower live.stop_effective_share",
                run=run,
                version=version,
            )
