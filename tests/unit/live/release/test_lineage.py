"""Margins spend one budget down a lineage, so that many promotions lose no more than it."""

import math

import numpy as np
import pytest

from benchmarks.live import creep
from deltawire.config.release import ReleaseConfig
from deltawire.live.release.lineage import (
    lineage_of,
    log_evidence_of_decline,
    next_margin,
    with_lineage_margin,
)
from deltawire.live.release.next_decision import decide_by_hand
from deltawire.runtime.decision_log import DecisionLog
from deltawire.store import open_bucket
from deltawire.wire.decisions import MARGIN_SPENT, RESTORES, Decision, ServedVersion

BOUNDED = ReleaseConfig(creep=0.03)


def served(number):
    return ServedVersion(number, f"{number:032x}")


def promotions(*evidence):
    """A log whose versions 1, 2 and so on were promoted with these figures."""
    log = DecisionLog(open_bucket("memory://", create=True), "1" * 32)
    for number, figures in enumerate([{}, *evidence]):
        verdict = "promote" if number else "serve"
        one = Decision(
            number=number, run=log.run, verdict=verdict, serving=served(number), at=1.0, by="g0",
            evidence=figures,
        )  # fmt: skip
        assert log.append(one)
    return log


def test_each_promotion_gets_half_of_what_is_left():
    spent, margins = 0.0, []
    for _ in range(50):
        margins.append(next_margin(BOUNDED, spent))
        spent += margins[-1]
    assert margins[:3] == pytest.approx([0.015, 0.0075, 0.00375])
    assert spent <= 0.03
    assert next_margin(ReleaseConfig(creep=0.5), 0.0) == 0.02, "never more than the margin"
    assert next_margin(BOUNDED, 0.04) == 0.0
    assert next_margin(ReleaseConfig(), 1.0) == 0.02, "without a bound"


def test_a_lineage_begins_where_a_person_chose_and_a_restore_spends_nothing():
    log = promotions({MARGIN_SPENT: 0.015}, {RESTORES: 1.0}, {MARGIN_SPENT: 0.0075})
    found = lineage_of(log, BOUNDED)
    assert (found.first, found.promotions, found.spent) == (0, 2, 0.0225)
    assert with_lineage_margin(log, BOUNDED).margin == pytest.approx(0.00375)
    assert log.append(decide_by_hand(log, "promote", by="ann", now=2.0, target=served(9)))
    again = lineage_of(log, BOUNDED)
    assert (again.first, again.promotions, again.margin) == (9, 0, 0.015)


def test_a_hundred_candidates_lose_no_more_than_the_budget():
    bounded, _ = creep.lineages(-creep.STEP, seed=3, creep=creep.CREEP, count=4)
    assert -bounded.mean() <= creep.CREEP
    unbounded, _ = creep.lineages(-creep.STEP, seed=3, creep=0.0, count=4)
    assert -unbounded.mean() > 5 * creep.CREEP


def test_a_decline_is_shown_by_promotions_that_are_measured_worse_in_a_row():
    assert log_evidence_of_decline([]) == 0.0
    assert log_evidence_of_decline([-0.01] * 6) < math.log(20)
    assert log_evidence_of_decline([-0.01] * 7) >= math.log(20)
    late = [0.01, -0.01] * 7 + [-0.01] * 20  # Versions 15 to 34 are each a little worse.
    assert log_evidence_of_decline(late) >= math.log(20)
    assert log_evidence_of_decline([0.01] * 30) < 0


def test_equal_versions_hardly_ever_show_a_decline():
    rng = np.random.default_rng(4)
    shown = 0
    for _ in range(60):
        changes = rng.normal(0, 0.02, 30).tolist()
        evidence = [log_evidence_of_decline(changes[:count]) for count in range(1, 31)]
        shown += max(evidence) >= math.log(20)
    assert shown <= 3
