"""Ranges of feedback: which values are the worst and the best, and what is unknown is refused."""

import numpy as np
import pytest
from live_answers import NOW, config_of, report
from live_canary import Canary, shown

from deltawire.errors import InputError
from deltawire.live.release.outcomes import METRIC, OutcomeRules, scale_of
from deltawire.wire.captures import NOT_STORED
from deltawire.wire.decisions import CANDIDATE
from deltawire.wire.receipts import SERVING


def value_of(reports=(), **live):
    return OutcomeRules(config_of(**live).live).values(shown(1), reports)[METRIC]


def test_by_default_each_kind_has_its_place():
    up, none = value_of([report(1, "thumbs", 1.0)]), value_of()
    reject, down = value_of([report(1, "reject")]), value_of([report(1, "thumbs", -1.0)])
    assert up == 1.0 > none > reject > down == 0.0


@pytest.mark.parametrize("kind", ["reject", "detected_retry"])
def test_more_rejections_are_worse(kind):
    release = {"metric": kind}
    assert value_of([report(1, kind, 1.0)], release=release) == 0.0
    assert value_of(release=release) == 1.0


def test_a_candidate_that_users_reject_twice_as_often_is_rolled_back():
    canary = Canary(metric="reject", guardrails={}).begin()
    rng = np.random.default_rng(8)
    for number in range(800):
        arm = CANDIDATE if rng.random() < 0.5 else SERVING
        canary.put(shown(number, arm, at=NOW + number / 100))
        if rng.random() < (0.4 if arm == CANDIDATE else 0.2):
            canary.put(report(number, "reject", at=NOW + number / 100))
    evidence = canary.poll(NOW + 1000)
    assert not evidence.metric.rejects, "promoted by a metric that was taken for better"
    assert evidence.harmful() == [METRIC]


def test_a_fall_of_scores_is_seen_on_their_range():
    live = {"rewards": {"score": 0.1}, "ranges": {"score": [0, 10]}}
    high, low = (value_of([report(1, "score", score)], **live) for score in (8.0, 5.0))
    assert (high, low) == (pytest.approx(0.8), pytest.approx(0.5))


@pytest.mark.parametrize(
    "live",
    [
        {"rewards": {"score": 0.1}},
        {"rewards": {"accept": 1.0, "event_purchase": 0.5}},
        {"release": {"metric": "edit_distance"}},
        {"rewards": {"accept": 1.0, "answer_tokens": -0.001}},
    ],
)
def test_an_unknown_range_is_refused(live):
    with pytest.raises(InputError, match="its range is unknown") as found:
        OutcomeRules(config_of(**live).live)
    assert "live.ranges." in found.value.hint


def test_stated_bounds_of_the_metric_need_no_range():
    live = {"release": {"metric": "edit_distance", "low": 0, "high": 100}}
    assert value_of([report(1, "edit_distance", 100.0)], **live) == 0.0
    assert value_of([report(1, "edit_distance", 25.0)], **live) == 0.75


@pytest.mark.parametrize(
    ("ranges", "message"),
    [
        ({"reject": [0, 1]}, "of this kind lower values are better"),
        ({"edit_distance": [0, 200]}, "of this kind lower values are better"),
        ({"score": [10, 1]}, "of this kind higher values are better"),
        ({"event_refund": [1, 1]}, "has no two different numbers"),
    ],
)
def test_a_range_that_turns_its_kind_around_is_refused(ranges, message):
    with pytest.raises(InputError, match=message):
        config_of(ranges=ranges)


def test_the_direction_of_an_event_is_the_products():
    live = {"release": {"metric": "event_refund"}, "ranges": {"event_refund": [1, 0]}}
    assert value_of([report(1, "event_refund")], **live) == 0.0


@pytest.mark.parametrize(("outside", "warned"), [(1, False), (2, True)])
def test_more_than_a_twentieth_outside_the_range_is_a_warning(outside, warned):
    rules = OutcomeRules(config_of(rewards={"score": 0.1}, ranges={"score": [0, 10]}).live)
    for number in range(20):
        score = 95.0 if number < outside else 5.0
        rules.values(shown(number), [report(number, "score", score)])
    assert bool(rules.warning) == warned
    assert "10% of score" in rules.warning or not warned


def test_silence_is_not_counted_as_clipped():
    rules = OutcomeRules(config_of(release={"metric": "accept", "low": 0.5, "high": 1}).live)
    for number in range(20):
        rules.values(shown(number), [])
    assert not rules.warning


def test_the_reward_has_the_bounds_of_its_sum():
    live = config_of(rewards={"accept": 0.5, "answer_cut_off": -0.25}, silent=-0.125).live
    scale = scale_of(live)
    assert (scale.worst, scale.best) == (-0.375, 0.5)


def test_an_answer_whose_tokens_are_not_stored_is_long_by_their_number():
    rules = OutcomeRules(Canary(long_tokens=8).config.live)
    redacted = {"tokens": 0, "unusable": "redacted"}
    assert rules.values(shown(1, drawn=9, **redacted), [])["long"] == 1.0
    assert rules.values(shown(1, drawn=8, **redacted), [])["long"] == 0.0
    assert rules.values(shown(1, **redacted), [])["long"] == 1.0, "unknown is not short"
    assert "long" not in rules.values(shown(1, tokens=0, unusable=NOT_STORED), [])
