"""The shadow: after the gate, on copies of requests, before any user sees the candidate."""

import msgspec
import numpy as np
import pytest

from deltawire.config.release import ReleaseConfig
from deltawire.dashboard.release import release_of
from deltawire.live.release.evidence import error_budget
from deltawire.live.release.next_decision import Situation, decide_by_hand, decide_next
from deltawire.live.release.paired_gate import SetScore
from deltawire.live.release.sequential_tests import ArmDifference, log_evidence_path, log_threshold
from deltawire.live.release.shadow_evidence import read_shadow, shadow_evidence
from deltawire.runtime.decision_log import DecisionLog
from deltawire.store import open_bucket
from deltawire.wire import keys
from deltawire.wire.captures import GatewayState, ShadowCounts
from deltawire.wire.decisions import Decision, ServedVersion, fault_after
from deltawire.wire.objects import encode_json

RUN = "1" * 32
OLD, NEW = (ServedVersion(n, f"{n:032x}") for n in (3, 5))
RELEASE = ReleaseConfig(
    stages=[0.25, 0.5],
    guardrails={"broken_call": 0.01, "error": 0.01, "silent": 0.05},
    shadow=200,
    shadow_share=0.5,
    gate_wait_s=1000.0,
)
EVEN = {3: {"accuracy": SetScore(0.5)}, 5: {"accuracy": SetScore(0.5)}}


def counts(copies=200, **changes):
    return ShadowCounts(shadow="s", copies=copies, **changes)


def step(log, *found, now=10.0, **facts):
    situation = Situation(
        newest=NEW, candidate=NEW, scores=EVEN, now=now,
        shadow=shadow_evidence(found, RELEASE) if found else None, **facts,
    )  # fmt: skip
    decision = decide_next(log, RELEASE, situation, by="g0")
    if decision is not None:
        assert log.append(decision)
    return decision


def in_shadow():
    log = DecisionLog(open_bucket("memory://", create=True), RUN)
    log.append(Decision(number=0, run=RUN, verdict="serve", serving=OLD, at=0.0, by="ann"))
    assert step(log).verdict == "gate"
    decision = step(log)
    assert (decision.verdict, decision.copies, decision.share) == ("shadow", 0.5, 0.0)
    assert decision.evidence["candidate_accuracy"] == 0.5
    return log


def test_enough_copies_without_harm_begin_the_canary():
    log = in_shadow()
    name = log.newest.salt
    assert step(log) is None, "no data is no success"
    assert step(log, counts(120), counts(79)) is None
    assert release_of(log).words.startswith("version 3 serves, candidate 5 on copies of 50%")
    decision = step(log, counts(120, dropped={"busy": 3}), counts(80))
    assert (decision.verdict, decision.share, decision.copies) == ("canary", 0.25, 0.0)
    assert decision.salt == name
    assert decision.evidence["shadow_copies"] == 200
    assert decision.evidence["shadow_dropped"] == 3
    assert log.canary_since() == decision.at


@pytest.mark.parametrize("rail", ["broken_call", "error"])
def test_harm_on_copies_rolls_back_before_any_user_sees_it(rail):
    log = in_shadow()
    decision = step(log, counts(60, rose={rail: 20}, fell={rail: 1}))
    assert decision.verdict == "rollback"
    assert decision.reason == f"worse than version 3 on copies: {rail}"
    assert decision.evidence[f"shadow_difference_{rail}"] == pytest.approx(19 / 60)
    assert log.canary_since() is None
    assert not any(one.share for one in log.decisions)


def test_too_few_copies_are_held_for_data_and_go_on():
    log = in_shadow()
    assert step(log, counts(20), now=1009.0) is None
    decision = step(log, counts(20), now=1010.0)
    assert (decision.verdict, decision.waits_for, decision.copies) == ("hold", "data", 0.5)
    assert decision.reason == "only 20 of 200 copies were compared"
    assert step(log, counts(30), now=1020.0) is None
    assert step(log, counts(200), now=1030.0).verdict == "canary"


@pytest.mark.parametrize("verdict", ["hold", "promote", "rollback"])
def test_a_person_may_decide_about_a_shadow(verdict):
    log = in_shadow()
    assert log.append(decide_by_hand(log, verdict, by="ann", now=20.0))
    if verdict == "hold":
        assert step(log, counts(500)) is None, "it waits for a person"
    else:
        assert not log.newest.copies


def test_the_error_rate_is_spent_once():
    """Each guardrail has a test on copies and one in the canary: half of α in all."""
    budget = error_budget(RELEASE)
    assert budget.shadow == budget.guardrail
    spent = budget.gate + budget.rollback + 3 * (budget.shadow + budget.guardrail)
    assert spent == pytest.approx(0.05)
    without = error_budget(msgspec.structs.replace(RELEASE, shadow=0))
    assert without.shadow == 0
    assert without.guardrail == pytest.approx(2 * budget.guardrail)


def test_a_harmless_candidate_is_seldom_rolled_back_though_it_is_looked_at_after_each_copy():
    """500 shadows of 200 pairs, both arms at the guardrail's limit: tolerance 0.02 apart."""
    rng = np.random.default_rng(0)
    mine, theirs = rng.random((2, 500, 200)) < np.array([0.05, 0.03])[:, None, None]
    path = log_evidence_path(mine.astype(float) - theirs.astype(float), tolerance=0.02)
    rejected = (path.max(axis=-1) >= log_threshold(0.0125)).mean()
    assert rejected <= 0.0125 + 3 * np.sqrt(0.0125 / 500)


def test_counts_of_gateways_are_the_tests_of_their_pairs():
    """The slow twin adds each pair."""
    rng = np.random.default_rng(1)
    differences = rng.choice([1.0, 0.0, -1.0], 300, p=[0.06, 0.9, 0.04])
    test = ArmDifference(tolerance=0.01)
    for one in differences:
        test.add(np.array([one]))
    parts = [
        counts(
            len(part),
            rose={"broken_call": int((part > 0).sum())},
            fell={"broken_call": int((part < 0).sum())},
            first_s=(0.5 * len(part), 0.25 * len(part)),
        )
        for part in np.split(differences, [50, 180])
    ]
    found = shadow_evidence(parts, RELEASE)
    assert found.copies == 300
    assert found.guardrails["broken_call"].log_evidence == pytest.approx(test.log_evidence)
    assert found.guardrails["broken_call"].difference == pytest.approx(differences.mean())
    assert found.first_s == pytest.approx((0.5, 0.25))
    assert set(found.guardrails) == {"broken_call", "error"}, "silence needs users"


def test_only_counts_of_this_shadow_and_this_run_are_read():
    bucket = open_bucket("memory://", create=True)
    decision = in_shadow().newest

    def put(name, *, run=RUN, key=None, shadow=decision.salt, **changes):
        state = GatewayState(
            gateway=name, run=run, public_key="0" * 64, started=0.0, at=0.0,
            shadow=ShadowCounts(shadow=shadow, copies=5, **changes),
        )  # fmt: skip
        bucket.put(keys.live_gateway(key or name), encode_json(state))

    put("g0")
    put("g1", run="2" * 32)
    put("g2", key="other")
    put("g3", shadow="another shadow")
    put("g4", rose={"error": 6})
    put("g5", first_s=(-1.0, 0.0))
    put("g6", rose={"error": 3}, fell={"error": 3})
    bucket.put(keys.live_gateway("g7"), b"{")
    bucket.put(keys.live_gateway("g8"), encode_json({"shadow": {"shadow": "s", "copies": -1}}))
    assert [one.copies for one in read_shadow(bucket, decision)] == [5]


def follows(before, verdict, **facts):
    facts = {"serving": OLD, "candidate": NEW} | facts
    decision = Decision(
        number=before.number + 1, run=RUN, verdict=verdict, at=1.0, by="ann", **facts
    )
    return fault_after(before, decision)


def test_decisions_that_cannot_follow_are_void():
    log = in_shadow()
    shadow, gate = log.newest, log.decisions[1]
    name = shadow.salt
    assert not follows(gate, "shadow", copies=0.5, salt="s")
    assert not follows(gate, "canary", share=0.5, salt="s")
    for facts in ({}, {"copies": 0.5}, {"salt": "s"}, {"copies": 0.5, "share": 0.1, "salt": "s"}):
        assert follows(gate, "shadow", **facts)
    assert follows(gate, "gate", copies=0.5)
    assert follows(gate, "canary", copies=0.5, share=0.5, salt="s")
    assert follows(gate, "hold", copies=0.5, salt="s", waits_for="data")
    assert "does not follow the gate" in follows(shadow, "shadow", copies=1.0, salt=name)
    assert "assigns users again" in follows(shadow, "canary", share=0.5, salt="another")
    assert follows(shadow, "hold", copies=0.7, salt=name, waits_for="data")
    assert not follows(shadow, "hold", waits_for="person"), (
        "a hold may show the candidate to nobody"
    )
    assert follows(shadow, "hold", copies=0.5, waits_for="data")
    assert follows(shadow, "hold")
    assert not follows(shadow, "hold", copies=0.5, salt=name, waits_for="data")
    assert not follows(shadow, "canary", share=0.5, salt=name)
    assert follows(shadow, "rollback", copies=0.5)
    assert follows(shadow, "promote", copies=0.5, serving=NEW, candidate=None)
    assert not follows(shadow, "rollback")
    log.append(
        Decision(
            number=3,
            run=RUN,
            verdict="canary",
            serving=OLD,
            candidate=NEW,
            share=0.25,
            salt=name,
            at=1.0,
            by="ann",
        )
    )
    assert follows(log.newest, "shadow", copies=0.5, salt=name), "users saw it already"


def test_a_shadow_without_guardrails_is_refused():
    release = ReleaseConfig(shadow=10, guardrails={"silent": 0.1})
    reason, hint = release.contradiction()
    assert "shadow judges guardrails" in reason
    assert "shadow to 0" in hint
