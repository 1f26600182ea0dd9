"""One budget of margins down a lineage: bounds what many promotions lose together.

Each promotion shows that a candidate is not worse than the version before by more than the margin,
so n promotions may lose n margins. With `live.release.creep` all promotions since a person last
chose the serving version share that loss: each is tested with half of what is left, and with the
margin at most. Half of B, half of the rest and so on are never more than B. By the union bound, the
version that serves is worse than the first of its lineage by more than B only if one of the
promotions was false.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from deltawire.config.release import ReleaseConfig
from deltawire.runtime.decision_log import DecisionLog
from deltawire.wire.decisions import MARGIN_SPENT, RESTORES


@dataclass(frozen=True)
class PromotionLineage:
    """The promotions by tests since ``first`` served by a person's decision, the margins that they
    ``spent``, and the ``margin`` of the next one.

    Example::

        lineage_of(log, release).margin
    """

    first: int
    promotions: int
    spent: float
    margin: float


def next_margin(release: ReleaseConfig, spent: float) -> float:
    """Returns the margin of the next candidate, after so much of the budget was ``spent``."""
    if not release.creep:
        return release.margin
    return max(min(release.margin, (release.creep - spent) / 2), 0.0)


def lineage_of(log: DecisionLog, release: ReleaseConfig) -> PromotionLineage:
    """Returns the lineage of the version that serves now."""
    spent, promotions, first = 0.0, 0, 0
    for one in reversed(log.decisions):
        if MARGIN_SPENT in one.evidence:
            spent += one.evidence[MARGIN_SPENT]
            promotions += 1
        elif one.verdict == "serve" or (one.verdict == "promote" and RESTORES not in one.evidence):
            first = one.serving.version
            break
    return PromotionLineage(first, promotions, spent, next_margin(release, spent))


def with_lineage_margin(log: DecisionLog, release: ReleaseConfig) -> ReleaseConfig:
    """Returns the configuration with the margin that the lineage leaves for the next candidate."""
    return msgspec.structs.replace(release, margin=lineage_of(log, release).margin)
