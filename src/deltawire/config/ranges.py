"""Ranges of feedback: the worst and the best value of each kind.

A canary compares outcomes on a scale from 0, the worst, to 1, the best. So the direction is part of
a kind: fewer rejections are better. A kind whose values have no natural bounds needs a range in the
configuration before it may decide anything.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final

from deltawire.errors import InputError

Range = tuple[float, float]
JUDGED: Final = "judged_"
"""Before the name of a judge: the kind of its scores, from 0, the worst, to 1, the best."""
KNOWN_RANGES: Final[Mapping[str, Range]] = {
    "accept": (0.0, 1.0),
    "reject": (1.0, 0.0),
    "thumbs": (-1.0, 1.0),
    "kept_share": (0.0, 1.0),
    "edit": (1.0, 0.0),
    "detected_dissatisfaction": (1.0, 0.0),
    "detected_retry": (1.0, 0.0),
    "detected_rephrase": (1.0, 0.0),
    "detected_edit": (0.0, 1.0),
    "detected_latency": (1.0, 0.0),
    "answer_broken_calls": (1.0, 0.0),
    "answer_cut_off": (1.0, 0.0),
}
LOWER_IS_BETTER: Final = frozenset(
    {name for name, (worst, best) in KNOWN_RANGES.items() if best < worst}
    | {"edit_distance", "answer_tokens", "answer_first_s"}
)
HIGHER_IS_BETTER: Final = (KNOWN_RANGES.keys() | {"score"}) - LOWER_IS_BETTER


def range_fault(ranges: Mapping[str, Sequence[float]]) -> tuple[str, str] | None:
    """Finds a stated range that is none, or turns a kind around: the reason and what to do."""
    for kind, (worst, best) in ranges.items():
        if not (math.isfinite(worst) and math.isfinite(best)) or worst == best:
            return f"live.ranges.{kind} has no two different numbers", "the worst, then the best"
        if kind in (LOWER_IS_BETTER if best > worst else HIGHER_IS_BETTER):
            order = "lower" if kind in LOWER_IS_BETTER else "higher"
            reason = f"live.ranges.{kind} is from {worst:g}, the worst, to {best:g}, the best; "
            reason += f"of this kind {order} values are better"
            return reason, f"write [{best:g}, {worst:g}]"
    return None


def range_of(ranges: Mapping[str, Sequence[float]], kind: str) -> Range:
    """Returns the worst and the best value of a kind of feedback, or of a fact of an answer; raises
    `InputError` where neither the configuration nor the kind states them."""
    natural = (0.0, 1.0) if kind.startswith(JUDGED) else (0.0, 0.0)
    worst, best = ranges.get(kind) or KNOWN_RANGES.get(kind) or natural
    if worst == best:
        raise InputError(
            f"canaries cannot compare {kind!r}: its range is unknown",
            hint=f"state the worst and the best value, such as live.ranges.{kind} = [0, 10]",
        )
    return worst, best
