"""Stops a live run whose importance ratios explode.

A live run trains on answers of older versions. If the policy has moved so far from them that a few
tokens have almost all of the weight, a step adds noise instead of what users said. One such batch
may be chance; `STEPS` within `WINDOW` steps are not. They need not follow each other: in simulated
runs that lost all known answers, such batches came one by one, with ordinary ones between them.
"""

from __future__ import annotations

from deltawire.config import RunConfig
from deltawire.errors import StoppedError
from deltawire.parity.divergence import Divergence

STEPS = 3
WINDOW = 32
"""So many steps with a small effective sample, of so many, stop the run."""


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
        self._count = 0
        self._low: list[int] = []
        """The numbers of the steps in the window whose effective sample was too small."""

    def step(self, drift: Divergence, *, run: str, version: int) -> None:
        """Adds the step that makes ``version``; raises `StoppedError` at the `STEPS`-th that is
        below. NaN is below."""
        if not self._least or drift.tokens < self._min_tokens:
            return
        share = drift.effective_share
        self._count += 1
        self._low = [number for number in self._low if number > self._count - WINDOW]
        if not share >= self._least:
            self._low.append(self._count)
        if len(self._low) >= STEPS:
            raise StoppedError(
                f"importance ratios explode: the effective sample was below {self._least:g} of the "
                f"tokens in {STEPS} of {WINDOW} steps (now {share:.3g}, largest ratio "
                f"{drift.ratio_max:.3g})",
                hint="bound whole answers (train.loss.surrogate = gspo), shorten the stages of "
                "[live.release], or lower live.stop_effective_share",
                run=run,
                version=version,
            )
