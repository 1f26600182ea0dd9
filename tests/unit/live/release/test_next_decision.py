"""Decisions that follow from a situation, step by step, and those of persons."""

import msgspec
import numpy as np
import pytest

from deltawire.config.release import ReleaseConfig
from deltawire.dashboard.release import candidates_of, release_of
from deltawire.errors import InputError
from deltawire.live.release.evidence import CanaryTests, planned_answers
from deltawire.live.release.next_decision import (
    Situation,
    decide_by_hand,
    decide_next,
    next_candidate,
)
from deltawire.live.release.outcomes import METRIC, SettledAnswer
from deltawire.live.release.paired_gate import SetScore
from deltawire.runtime.decision_log import DecisionLog
from deltawire.store import open_bucket
from deltawire.wire import keys
from deltawire.wire.decisions import CANDIDATE, ServedVersion, assign
from deltawire.wire.objects import encode_json
from deltawire.wire.receipts import SERVING

RUN = "1" * 32
OLD, NEW, NEXT = (ServedVersion(n, f"{n:032x}") for n in (3, 5, 6))
RELEASE = ReleaseConfig(
    stages=[0.25, 0.5], stage_outcomes=40, max_outcomes=4000, guardrails={"slow": 0.02}
)
EVEN = {
    3: {"accuracy": SetScore(0.5)},
    5: {"accuracy": SetScore(0.5)},
    6: {"accuracy": SetScore(0.5)},
}


def outcomes(count, *, share=0.5, mine=0.6, theirs=0.6, slow=0.0, seed=0, on=None):
    """Outcomes of users who were assigned by ``share`` (or ``on``, where assignment is broken)."""
    rng = np.random.default_rng(seed)
    found = []
    for number in range(count):
        arm = CANDIDATE if rng.random() < (share if on is None else on) else SERVING
        rate = mine if arm == CANDIDATE else theirs
        values = {METRIC: float(rng.random() < rate), "slow": 0.0}
        if arm == CANDIDATE:
            values["slow"] = float(rng.random() < slow)
        found.append(SettledAnswer(float(number), arm, share, True, values))
    return found


def series_of(bucket=None):
    series = DecisionLog(bucket or open_bucket("memory://", create=True), RUN)
    series.poll()
    return series


def evidence_from(outcomes, release):
    tests = CanaryTests(release)
    tests.add(outcomes)
    return tests.evidence()


def step(series, release=RELEASE, outcomes=(), **facts):
    facts = {"newest": NEW, "scores": EVEN, "now": 100.0 + series.next_number} | facts
    situation = Situation(evidence=evidence_from(outcomes, release), **facts)
    decision = decide_next(series, release, situation, by="g0")
    if decision is not None:
        assert series.append(decision)
    return decision


def in_canary(share=0.5):
    series = series_of()
    step(series, newest=OLD)
    step(series, candidate=NEW)
    step(series)
    while series.newest.share < share:
        step(series, outcomes=outcomes(400, share=series.newest.share))
    return series


def test_a_candidate_as_good_goes_from_the_gate_to_its_promotion():
    series = series_of()
    assert step(series, newest=OLD).verdict == "serve"
    assert step(series) is None
    assert step(series, candidate=NEW).verdict == "gate"
    first = step(series)
    assert (first.verdict, first.share, first.serving, first.candidate) == (
        "canary",
        0.25,
        OLD,
        NEW,
    )
    assert step(series) is None, "no data is no success"
    early = outcomes(400, share=0.25)
    assert step(series, outcomes=early).share == 0.5
    assert series.newest.salt == first.salt
    assert step(series, outcomes=early) is None
    last = step(series, outcomes=[*early, *outcomes(3000, mine=0.7)])
    assert (last.verdict, last.serving, last.candidate, last.share) == ("promote", NEW, None, 0.0)
    assert last.evidence["log_evidence_not_worse"] >= np.log(20)


@pytest.mark.parametrize(("change", "named"), [({"mine": 0.45}, METRIC), ({"slow": 0.3}, "slow")])
def test_harm_rolls_back(change, named):
    series = in_canary()
    decision = step(series, outcomes=outcomes(2000, **change))
    assert (decision.verdict, decision.serving, decision.candidate) == ("rollback", OLD, NEW)
    assert named in decision.reason
    assert series.rejected() == {5}
    assert next_candidate(series, RELEASE, newest=6, scores=EVEN, now=1e9) == 6
    assert next_candidate(series, RELEASE, newest=5, scores=EVEN, now=1e9) is None


def test_users_in_the_wrong_arms_are_looked_at_before_anything_else():
    series = in_canary()
    decision = step(series, outcomes=outcomes(2000, mine=0.9, on=0.4))
    assert (decision.verdict, decision.waits_for) == ("hold", "person")
    assert "sample-ratio" in decision.reason
    assert all(assign(decision, f"user{n}").version == OLD.version for n in range(50))
    assert decision.evidence["outcomes_candidate"] > 0
    assert step(series, outcomes=outcomes(4000, mine=0.9)) is None
    by_hand = decide_by_hand(series, "rollback", by="ann", now=0.0)
    assert series.append(by_hand)
    assert series.newest.serving == OLD


def test_an_undecided_canary_is_held_and_goes_on_with_more_data():
    series = in_canary()
    held = step(series, outcomes=outcomes(4000, mine=0.58, theirs=0.6, seed=3))
    assert (held.verdict, held.waits_for, held.share) == ("hold", "data", 0.5)
    assert step(series, outcomes=outcomes(4100, mine=0.58, theirs=0.6, seed=3)) is None
    more = outcomes(6000, mine=0.7, seed=4)
    assert step(series, outcomes=more).verdict == "promote"


def test_a_canary_that_stays_undecided_ends_and_a_newer_version_is_tested():
    series = in_canary()
    undecided = outcomes(8000, mine=0.585, theirs=0.6, seed=3)
    assert step(series, outcomes=undecided[:4000]).share == 0.5
    ended = step(series, outcomes=undecided)
    assert (ended.verdict, ended.waits_for, ended.share, ended.salt) == ("hold", "data", 0.0, "")
    assert assign(ended, "ann").version == OLD.version
    assert step(series) is None, "the same candidate is not tested again"
    assert next_candidate(series, RELEASE, newest=5, scores=EVEN, now=1e9) is None
    assert next_candidate(series, RELEASE, newest=6, scores=EVEN, now=1e9) == 6
    assert step(series, candidate=NEXT).candidate == NEXT
    assert step(series).verdict == "canary"
    assert not series.rejected()


def test_learning_pauses_after_three_failures_at_the_gate_and_twice_as_long_after_the_next():
    release = msgspec.structs.replace(RELEASE, pause_s=60.0)
    series = series_of()
    step(series, newest=OLD)
    now, pauses = 1000.0, []
    for number in range(5, 10):
        version = ServedVersion(number, f"{number:032x}")
        scores = {3: {"accuracy": SetScore(0.5)}, number: {"accuracy": SetScore(0.1)}}
        about = {"newest": number, "scores": scores}
        if pauses:
            assert next_candidate(series, release, now=now - 1, **about) is None
        assert next_candidate(series, release, now=now, **about) == number
        step(series, release, candidate=version, now=now)
        assert series.paused_until() == 0.0
        failed = step(series, release, scores=scores, now=now)
        assert failed.evidence["gate_failures"] == number - 4 == series.gate_failures()
        if series.paused_until():
            pauses.append(series.paused_until() - now)
            now = series.paused_until()
            assert release_of(series).paused_until == now
        # The trainer restores the serving version by a new number: the failures still count.
        forward = ServedVersion(number + 100, series.newest.serving.digest)
        about = {"restored": forward, "newest": forward}
        assert decide_next(series, release, Situation(now=now, **about), by="g0") is not None
    assert pauses == [60.0, 120.0, 240.0]
    step(series, release, candidate=ServedVersion(20, "a" * 32))
    assert step(series, release, scores={3: EVEN[3], 20: EVEN[5]}).verdict == "canary"
    assert (series.gate_failures(), series.paused_until()) == (0, 0.0)


def test_the_gate_compares_every_suite_and_waits_for_missing_ones():
    release = msgspec.structs.replace(RELEASE, gate={"accuracy": 0.02, "hard": 0.05})
    scores = {
        3: {"accuracy": SetScore(0.5), "hard": SetScore(0.5)},
        5: {"accuracy": SetScore(0.6), "hard": SetScore(0.44)},
    }
    series = series_of()
    step(series, newest=OLD)
    assert next_candidate(series, release, newest=5, scores=EVEN, now=1e9) is None
    assert next_candidate(series, release, newest=5, scores=scores, now=1e9) == 5
    step(series, release, candidate=NEW)
    assert step(series, release, scores={}) is None
    held = step(series, release, scores={}, now=1e9)
    assert (held.verdict, held.waits_for) == ("hold", "data")
    failed = step(series, release, scores=scores)
    assert (failed.verdict, failed.serving) == ("rollback", OLD)
    assert "hard is 0.440" in failed.reason
    assert failed.evidence["candidate_hard"] == 0.44


def test_two_that_decide_at_once_agree_on_one_decision():
    bucket = open_bucket("memory://", create=True)
    one, other = series_of(bucket), series_of(bucket)
    step(one, newest=OLD)
    other.poll()
    step(one, candidate=NEW)
    mine = decide_next(other, RELEASE, Situation(newest=NEXT, candidate=NEXT, now=5.0), by="other")
    assert mine.candidate == NEXT
    assert not other.append(mine)
    assert one.decisions == other.decisions
    assert other.newest.candidate == NEW
    with pytest.raises(InputError, match="number 2"):
        other.append(mine)


def test_a_decision_that_was_stored_before_its_answer_was_lost_counts():
    bucket = open_bucket("memory://", create=True)
    series = series_of(bucket)
    decision = decide_next(series, RELEASE, Situation(newest=OLD, now=1.0), by="g0")
    bucket.create(keys.live_decision(0), encode_json(decision))
    assert series.append(decision)
    assert series.decisions == [decision]


def test_void_decisions_are_skipped_by_everyone():
    series = in_canary()
    bucket = series._bucket
    before = list(series.decisions)
    replayed = before[1]
    promoted = msgspec.structs.replace(
        before[-1], verdict="canary", serving=NEXT, number=series.next_number + 1
    )
    foreign = msgspec.structs.replace(before[-1], run="2" * 32, number=series.next_number + 2)
    for place, data in enumerate(
        [encode_json(replayed), encode_json(promoted), encode_json(foreign), b"{"],
        start=series.next_number,
    ):
        bucket.create(keys.live_decision(place), data)
    assert series.poll() == 0
    assert len(series.void) == 4
    assert step(series, outcomes=outcomes(2000, mine=0.4)).verdict == "rollback"
    again = series_of(bucket)
    assert again.decisions == series.decisions
    assert again.void == series.void


def test_a_person_decides():
    series = series_of()
    with pytest.raises(InputError, match="no version serves"):
        decide_by_hand(series, "rollback", by="ann", now=0.0)
    series.append(decide_by_hand(series, "promote", by="ann", now=0.0, target=OLD))
    with pytest.raises(InputError, match="no candidate to promote"):
        decide_by_hand(series, "promote", by="ann", now=0.0)
    with pytest.raises(InputError, match=f"version {OLD.version} serves already"):
        decide_by_hand(series, "promote", by="ann", now=0.0, target=OLD)
    with pytest.raises(InputError, match="no candidate to hold"):
        decide_by_hand(series, "hold", by="ann", now=0.0)
    with pytest.raises(InputError, match="no version with other weights"):
        decide_by_hand(series, "rollback", by="ann", now=0.0)
    series.append(decide_by_hand(series, "promote", by="ann", now=1.0, target=NEW))
    back = decide_by_hand(series, "rollback", by="ann", now=2.0, reason="complaints")
    assert (back.serving, back.candidate, back.by, back.reason) == (OLD, NEW, "ann", "complaints")
    series.append(back)
    step(series, candidate=NEXT)
    series.append(decide_by_hand(series, "hold", by="ann", now=3.0))
    assert step(series) is None
    series.append(decide_by_hand(series, "promote", by="ann", now=3.0))
    assert series.newest.serving == NEXT


def test_plans_name_the_answers_of_each_stage():
    plan = planned_answers(RELEASE)
    assert plan[0] == 160
    assert 3000 < plan[1] < 5000
    assert planned_answers(RELEASE, effect=0.2)[1] < plan[1] / 5


def test_a_restored_version_serves_by_its_new_number():
    series = in_canary()
    step(series, outcomes=outcomes(2000, mine=0.45))
    other, same = ServedVersion(7, f"{7:032x}"), ServedVersion(7, OLD.digest)
    assert step(series, restored=other) is None, "other weights are no restored version"
    forward = step(series, restored=same)
    assert (forward.verdict, forward.serving, forward.share) == ("promote", same, 0.0)
    assert series.restores() == {7: 3}
    assert next_candidate(series, RELEASE, newest=7, scores=EVEN, now=1e9) is None
    with pytest.raises(InputError, match="no version with other weights served before"):
        decide_by_hand(series, "rollback", by="ann", now=0.0)


def test_decisions_about_a_candidate_record_its_estimate_and_do_not_depend_on_it():
    estimate = {"estimate_snips": 0.0, "estimate_doubly_robust": 0.0, "estimate_snips_error": 0.1}
    series = series_of()
    step(series, newest=OLD, estimate=estimate)
    step(series, candidate=NEW, estimate=estimate)
    assert not any(one.evidence for one in series.decisions), "nothing is estimated yet"
    for share in (0.5, 0.25, 0.5):
        step(series, outcomes=outcomes(1000, share=share, mine=0.9), estimate=estimate)
        assert estimate.items() <= series.newest.evidence.items()
    assert series.newest.evidence["live_candidate"] > 0.8
    (found,) = candidates_of(series)
    assert (found.version, found.verdict, found.number) == (5, "promote", series.newest.number)
    assert (found.snips, found.live_candidate) == (0.0, series.newest.evidence["live_candidate"])
    assert "estimated 0.000 ± 0.100 (SNIPS)" in found.words
    assert "users showed 0.8" in found.words
    status = release_of(series)
    assert status.figures == found
    assert "users showed" in status.words


def test_figures_of_a_candidate_outlive_a_decision_by_hand():
    series = series_of()
    step(series, newest=OLD)
    step(series, candidate=NEW)
    step(series, estimate={"estimate_snips": 0.25, "estimate_doubly_robust": 0.25})
    assert series.append(decide_by_hand(series, "rollback", by="ann", now=200.0))
    (found,) = candidates_of(series)
    assert (found.verdict, found.snips, found.live_candidate) == ("rollback", 0.25, None)
    assert release_of(DecisionLog(open_bucket("memory://", create=True), RUN)) is None
