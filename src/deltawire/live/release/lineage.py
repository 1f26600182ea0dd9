"""One budget of margins down a lineage: bounds what many promotions lose together.

Each promotion shows that a candidate is not worse than the version before by more than the margin,
so n promotions may lose n margins. With `live.release.creep` all promotions since a person last
chose the serving version share that loss: each is tested with half of what is left, and with the
margin at most. Half of B, half of the rest and so on are never more than B. By the union bound, the
version that serves is worse than the first of its lineage by more than B only if one of the
promotions was false.

Promotions that are measured a little worse, one after another, are no chance either: with equal
versions at most half of them are. `log_evidence_of_decline` bets on that, and a candidate that
would be one more is held for a person.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from deltawire.config.release import ReleaseConfig
from deltawire.runtime.decision_log import DecisionLog
from deltawire.wire.decisions import MARGIN_SPENT, RESTORES

SIGN_BETS = np.array([0.2, 0.4, 0.6, 0.8, 0.95])


@dataclass(frozen=True)
class PromotionLineage:
    """The promotions by tests since ``first`` served by a person's decision, the margins that they
    ``spent``, and the ``margin`` of the next one. ``changes`` are the differences of the metric
    that users showed in the canary of each, the first one first.

    Example::

        lineage_of(log, release).margin
    """

    first: int
    promotions: int
    spent: float
    margin: float
    changes: tuple[float, ...] = ()


def next_margin(release: ReleaseConfig, spent: float) -> float:
    """Returns the margin of the next candidate, after so much of the budget was ``spent``."""
    if not release.creep:
        return release.margin
    return max(min(release.margin, (release.creep - spent) / 2), 0.0)


def lineage_of(log: DecisionLog, release: ReleaseConfig) -> PromotionLineage:
    """Returns the lineage of the version that serves now."""
    spent, promotions, first = 0.0, 0, 0
    changes: list[float] = []
    for one in reversed(log.decisions):
        if MARGIN_SPENT in one.evidence:
            spent += one.evidence[MARGIN_SPENT]
            promotions += 1
            changes.append(one.evidence.get("difference", 0.0))
        elif one.verdict == "serve" or (one.verdict == "promote" and RESTORES not in one.evidence):
            first = one.serving.version
            break
    margin = next_margin(release, spent)
    return PromotionLineage(first, promotions, spent, margin, tuple(reversed(changes)))


def log_evidence_of_decline(changes: Sequence[float]) -> float:
    """Returns the log of the evidence that promoted candidates are worse than those before them.

    If a candidate is not worse, it is measured worse in half of the cases at most, and less often
    once it is promoted. A bettor on "measured worse" at even odds then has an expected wealth of at
    most 1, so it reaches 1/α with probability α at most (Ville's inequality). It begins again with
    1 / ((j + 1) (j + 2)) of its capital at the j-th promotion, as a decline may begin late.
    """
    wealth = np.full(len(SIGN_BETS), -np.inf)
    for place, change in enumerate(changes):
        wealth = np.logaddexp(wealth, -math.log((place + 1) * (place + 2)))
        wealth = wealth + np.log1p(SIGN_BETS if change < 0 else -SIGN_BETS)
    if not len(changes):
        return 0.0
    return float(np.logaddexp.reduce(wealth)) - math.log(len(SIGN_BETS))


def decline_of(
    log: DecisionLog, release: ReleaseConfig, figures: Mapping[str, float]
) -> tuple[str, float]:
    """Returns why a candidate with these figures may not be promoted, and the evidence; no words if
    promotions of the lineage do not decline."""
    lineage = lineage_of(log, release)
    changes = [*lineage.changes, figures["difference"]]
    evidence = log_evidence_of_decline(changes)
    if evidence < math.log(1 / release.error_rate):
        return "", evidence
    worse = sum(change < 0 for change in changes)
    words = (
        f"a slow decline: {worse} of {len(changes)} candidates since version {lineage.first} were "
        f"measured worse than the version before, {math.fsum(changes):+.3f} together"
    )
    return words, evidence


def with_lineage_margin(log: DecisionLog, release: ReleaseConfig) -> ReleaseConfig:
    """Returns the configuration with the margin that the lineage leaves for the next candidate."""
    return msgspec.structs.replace(release, margin=lineage_of(log, release).margin)
