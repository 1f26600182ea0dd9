"""The hold-back version: a decay of many promotions, each within its margin, ends in an alarm."""

import itertools

import msgspec
import numpy as np
import pytest
from live_answers import NOW, answer, config_of, report

from deltawire.config.release import ReleaseConfig
from deltawire.dashboard.release import release_of
from deltawire.live.release import next_decision
from deltawire.live.release.evidence import CanaryTests
from deltawire.live.release.hold_back import HoldBackTests, deposit, period_of
from deltawire.live.release.hold_back_outcomes import HoldBackOutcomes
from deltawire.live.release.next_decision import (
    Situation,
    decide_by_hand,
    decide_next,
    next_candidate,
)
from deltawire.live.release.outcomes import METRIC, SettledAnswer
from deltawire.runtime.decision_log import DecisionLog
from deltawire.store import open_bucket
from deltawire.wire import keys
from deltawire.wire.captures import NOT_STORED, encode_row, encode_segment
from deltawire.wire.decisions import (
    CANDIDATE,
    DECAYED,
    HOLD_BACK,
    Decision,
    ServedVersion,
    assign,
    fault_after,
)
from deltawire.wire.receipts import SERVING

RELEASE = ReleaseConfig(
    hold_back=0.2, margin=0.15, stages=[0.5], stage_outcomes=100, gate={}, guardrails={"slow": 0.05}
)
STEP = 0.02
USERS = 600


def served(number):
    return ServedVersion(number, f"{number:032x}")


def drawn(rng, count, share, arms, rates, slow=(0.0, 0.0)):
    """Outcomes of users who are in the first of two arms with the probability ``share``."""
    found = []
    for place in range(count):
        arm = int(rng.random() >= share)
        values = {METRIC: float(rng.random() < rates[arm])}
        values["slow"] = float(rng.random() < slow[arm])
        found.append(SettledAnswer(float(place), arms[arm], share, True, values))
    return found


class Lineage:
    """The decisions about versions that are each worse than the one before by ``step``."""

    def __init__(self, step, *, release=RELEASE, slower=0.0, seed=0):
        self.log = DecisionLog(open_bucket("memory://", create=True), "1" * 32)
        self.step, self.release, self.slower = step, release, slower
        self.rng = np.random.default_rng(seed)
        self.decide(served(0))

    def decide(self, newest, **facts):
        situation = Situation(newest=newest, now=100.0 + self.log.next_number, **facts)
        found = decide_next(self.log, self.release, situation, by="g0")
        if found is not None:
            assert self.log.append(found)
        return found

    def rates(self, *versions):
        return [0.8 - self.step * v for v in versions], [min(self.slower * v, 1) for v in versions]

    def compared(self):
        """Returns what users of the version that serves and of the hold-back version show."""
        period = period_of(self.log, self.release)
        if period is None:
            return None
        tests = HoldBackTests(self.release, period)
        arms = period.serving.version, period.held.version
        tests.add(drawn(self.rng, USERS, 0.8, (SERVING, HOLD_BACK), *self.rates(*arms)))
        return tests.evidence()

    def promote(self, version):
        """Shows a version to users; returns the decision that ends its canary."""
        now = self.log.newest.serving.version
        assert self.decide(served(version), candidate=served(version)).verdict == "gate"
        assert self.decide(served(version)).verdict == "canary"
        tests = CanaryTests(self.release)
        tests.add(drawn(self.rng, 1500, 0.5, (CANDIDATE, SERVING), *self.rates(version, now)))
        return self.decide(served(version), evidence=tests.evidence(), hold_back=self.compared())

    def run(self, count=36):
        """Promotes version after version; returns the decision that stopped this, or None."""
        for version in range(1, count + 1):
            found = self.promote(version)
            if found.verdict != "promote":
                return found
        return None


def test_without_a_hold_back_version_a_decline_is_seen_later_and_waits_for_a_person(monkeypatch):
    release = msgspec.structs.replace(RELEASE, hold_back=0.0)
    lineage = Lineage(STEP, release=release)
    ended = lineage.run()
    assert (ended.verdict, ended.waits_for, ended.share) == ("hold", "person", 0.0)
    assert "slow decline" in ended.reason
    assert ended.candidate.version > Lineage(STEP).run().candidate.version
    assert "slow decline" in release_of(lineage.log).words
    # Without that rule all of them are promoted, though each is worse.
    monkeypatch.setattr(next_decision, "decline_of", lambda *_: ("", 0.0))
    assert Lineage(STEP, release=release).run(20) is None


@pytest.mark.parametrize(("change", "named"), [({}, METRIC), ({"slower": 0.04}, "slow")])
def test_a_slow_decay_returns_all_users_to_the_hold_back_version(change, named):
    lineage = Lineage(0.0 if change else STEP, **change)
    ended = lineage.run()
    worst = ended.candidate.version
    assert (ended.verdict, ended.serving) == ("rollback", served(0))
    assert named in ended.reason
    assert ended.evidence[DECAYED] == 1.0
    assert worst <= 18, "noticed before half of the promotions"
    # It is over: no version up to then is tried again, and the comparison does not repeat itself.
    assert period_of(lineage.log, RELEASE) is None
    scores = {version: {} for version in range(60)}
    facts = {"scores": scores, "now": 1e9}
    assert next_candidate(lineage.log, RELEASE, newest=worst, **facts) is None
    assert next_candidate(lineage.log, RELEASE, newest=worst + 1, **facts) == worst + 1
    assert set(range(1, worst + 1)) <= lineage.log.rejected()
    state = release_of(lineage.log)
    assert (state.decayed, state.hold_back) == (worst, 0)


def test_equal_versions_raise_no_alarm():
    lineage = Lineage(0.0)
    assert lineage.run(12) is None
    state = release_of(lineage.log)
    assert (state.decayed, state.hold_back, state.hold_back_share) == (None, 0, 0.2)
    assert state.hold_back_low < 0 < state.hold_back_high


def test_the_hold_back_version_moves_once_users_gain():
    lineage = Lineage(-0.01)
    assert lineage.run(20) is None
    held = lineage.log.newest.hold_back.version
    assert 0 < held < 20, "users who keep it do not miss all progress"


def test_the_wealth_goes_on_from_the_log_and_each_version_adds_a_deposit():
    lineage = Lineage(0.0)
    lineage.promote(1)
    assert period_of(lineage.log, RELEASE).place == 0
    before = lineage.compared()
    lineage.rng = np.random.default_rng(5)
    lineage.promote(2)
    lineage.rng = np.random.default_rng(5)
    reread = DecisionLog(lineage.log._bucket, lineage.log.run)
    reread.poll()
    period = period_of(reread, RELEASE)
    assert (period.place, period.held) == (1, served(0))
    found = lineage.log.newest.evidence
    wealth = [found[f"hold_back_wealth_{METRIC}_{n}"] for n in range(12)]
    assert period.log_wealth[METRIC] == pytest.approx(wealth)
    assert (period.log_wealth[METRIC] > np.log(deposit(1))).all()
    assert before.place == 0
    assert sum(deposit(place) for place in range(10_000)) == pytest.approx(1, abs=1e-3)


def test_a_person_who_promotes_begins_another_comparison():
    lineage = Lineage(STEP)
    assert lineage.run(3) is None
    assert lineage.log.append(decide_by_hand(lineage.log, "promote", by="ann", now=1.0,
                                             target=served(9)))  # fmt: skip
    assert lineage.log.newest.hold_back is None
    assert lineage.decide(served(10), candidate=served(10)).hold_back == served(9)
    assert lineage.decide(served(10)).verdict == "canary"
    assert lineage.log.append(decide_by_hand(lineage.log, "rollback", by="ann", now=1.0))
    assert lineage.log.newest.hold_back == served(9)


def decision(serving=4, share=0.0, held=0, kept=0.2):
    candidate = served(6) if share else None
    return Decision(
        number=3, run="1" * 32, verdict="canary" if share else "promote", serving=served(serving),
        candidate=candidate, share=share, salt="s" if share else "", at=1.0, by="ann",
        hold_back=served(held), hold_back_share=kept,
    )  # fmt: skip


def test_users_are_drawn_for_each_version_and_compared_at_one_share():
    users = [f"{number:032x}" for number in range(4000)]
    arms = [assign(decision(share=0.5), user) for user in users]
    held = [one for one in arms if one.arm == HOLD_BACK]
    compared = [one for one in arms if one.kept]
    assert len(held) / len(users) == pytest.approx(0.2, abs=0.03)
    assert {one.version for one in held} == {0}
    # Half of those who keep the version would have been shown the candidate: they do not count.
    serving = [one for one in compared if one.arm == SERVING]
    assert len(serving) / len(compared) == pytest.approx(0.8, abs=0.03)
    assert {one.propensity for one in arms if one.arm != HOLD_BACK} == {0.5}
    first, later = (
        {user for user in users if assign(decision(serving=v), user).arm == HOLD_BACK}
        for v in (4, 5)
    )
    assert len(first & later) / len(first) == pytest.approx(0.2, abs=0.06)
    assert assign(decision(), "").arm == SERVING
    assert {assign(decision(serving=0), user).arm for user in users} == {SERVING}


def test_a_share_without_a_version_is_void():
    odd = msgspec.structs.replace(decision(), hold_back=None)
    assert "hold-back" in fault_after(decision(), odd)


def test_answers_of_both_arms_are_compared_stored_or_not():
    bucket = open_bucket("memory://", create=True)
    live = config_of(
        release={"hold_back": 0.2, "outcome_after_s": 55.0, "horizon_s": 10.0, "metric": "accept"}
    ).live
    log, numbers = DecisionLog(bucket, "1" * 32), itertools.count()
    for verdict, version, at in (("serve", 0, NOW - 200), ("promote", 4, NOW - 100)):
        one = Decision(
            number=log.next_number, run="1" * 32, verdict=verdict, serving=served(version), at=at,
            by="g0", hold_back=served(0), hold_back_share=0.2,
        )  # fmt: skip
        assert log.append(one)
    outcomes = HoldBackOutcomes(bucket, live)

    def put(*rows):
        captures = [row for row in rows if hasattr(row, "propensity")]
        reports = [row for row in rows if row not in captures]
        for kind, some in ((keys.live_captures, captures), (keys.live_feedback, reports)):
            number = next(numbers)
            data = encode_segment("g0", number, [encode_row(row) for row in some])
            bucket.create(kind("g0", number), data)

    put(
        answer(1, arm=SERVING, kept=0.2, spans=[(4, 4)]),
        answer(2, arm=HOLD_BACK, propensity=0.2, kept=0.2, tokens=0, unusable=NOT_STORED,
               spans=[(0, 1)]),
        answer(3, arm=HOLD_BACK, propensity=0.2),  # The canary would have shown it the candidate.
        answer(4, arm=SERVING),  # No replica held the hold-back version then.
        answer(5, arm=CANDIDATE, propensity=0.5),
        answer(6, arm=SERVING, kept=0.2, at=NOW - 150),  # Of the version before.
        report(2),
    )  # fmt: skip
    found = outcomes.compare(log, NOW + 100)
    assert found.counts == (1, 1)
    assert found.difference == -1.0
    assert outcomes.compare(log, NOW + 200).counts == (1, 1)
