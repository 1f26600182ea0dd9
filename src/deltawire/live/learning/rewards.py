"""Rewards: turns the reports about an answer into a number, by the run's configuration.

Only the newest report of each kind counts, so a user who votes twice has one vote.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from blake3 import blake3

from deltawire.config.live import DEFAULT_REWARDS
from deltawire.config.own_code import load_code
from deltawire.errors import InputError
from deltawire.wire.captures import Capture, Feedback

OwnReward = Callable[[Mapping[str, float], Capture], float]
"""Returns the reward of an answer; its first argument are the values by kind of feedback."""

TERMS: dict[str, Callable[[Capture], float]] = {
    "answer_broken_calls": lambda capture: float(capture.broken_calls),
    "answer_tokens": lambda capture: float(len(capture.tokens) // 4),
    "answer_cut_off": lambda capture: float(capture.finish == "length"),
    "answer_first_s": lambda capture: capture.first_s,
}
"""Facts of an answer that a reward may weigh next to its feedback."""
LARGEST = 1e4


def values_of(reports: Iterable[Feedback]) -> dict[str, float]:
    """Returns the newest value of each kind; of equally new ones the largest id's, so that the
    order of reading does not matter."""
    newest: dict[str, Feedback] = {}
    for report in reports:
        known = newest.get(report.kind)
        if known is None or (report.at, report.received, report.id) > (
            known.at,
            known.received,
            known.id,
        ):
            newest[report.kind] = report
    return {kind: report.value for kind, report in sorted(newest.items())}


@dataclass(frozen=True)
class RewardRules:
    """The reward of an answer: the sum of ``weights[kind] · value`` over kinds of feedback and
    `TERMS`, limited to ``bounds``.

    ``silent`` is the reward of an answer without any report; None leaves such answers out.
    ``function`` names a function ``module:function`` instead of weights; it is called with the
    values and the capture, and every machine that reads rewards must trust its module.

    Example::

        RewardRules({"accept": 0.75, "reject": -0.25}, silent=0.0)
    """

    weights: Mapping[str, float] = field(default_factory=lambda: DEFAULT_REWARDS)
    silent: float | None = None
    bounds: tuple[float, float] = (-1.0, 1.0)
    function: str = ""

    @property
    def digest(self) -> str:
        """The BLAKE3 of the rules, which lineages record."""
        content = [sorted(self.weights.items()), self.silent, self.bounds, self.function]
        return blake3(json.dumps(content).encode()).hexdigest()

    @property
    def kinds(self) -> frozenset[str]:
        """The kinds of feedback that count as a report."""
        return frozenset(self.weights) - TERMS.keys()

    def load(self) -> OwnReward | None:
        """Imports the ``function``; raises `InputError`, also for a module that this machine does
        not trust."""
        if not self.function:
            return None
        own: OwnReward = load_code("live.reward_function", self.function)
        return own

    def reward(
        self, values: Mapping[str, float], capture: Capture, own: OwnReward | None = None
    ) -> float | None:
        """Returns the reward of an answer with these values; None if silence has none.

        Raises `InputError` if the function returns something that is not a finite number.
        """
        if own is not None:
            value = float(own(values, capture))
        elif any(kind in values for kind in self.kinds):
            value = math.fsum(w * values[k] for k, w in self.weights.items() if k in values)
        elif self.silent is None:
            return None
        else:
            value = self.silent
        if own is None:
            value += math.fsum(w * TERMS[k](capture) for k, w in self.weights.items() if k in TERMS)
        if not math.isfinite(value):
            raise InputError(f"the reward of an answer is {value}", hint="repair its function")
        low, high = self.bounds
        return min(max(value, low), high)
