"""Outcomes of a canary: each answer once, when it has settled, in bounded memory."""

import msgspec
import numpy as np
import pytest
from live_answers import NOW, answer, report
from live_canary import NEW, Canary, counts, shown

from deltawire.config.release import DEFAULT_GUARDRAILS
from deltawire.live.capture.guardrails import OF_EVERY_ANSWER
from deltawire.live.release.canary_outcomes import LATE_S
from deltawire.live.release.outcomes import METRIC, OutcomeRules
from deltawire.wire.captures import (
    FAILED,
    LEFT,
    NOT_STORED,
    TIMED_OUT,
    WITHHELD,
)
from deltawire.wire.decisions import CANDIDATE
from deltawire.wire.receipts import SERVING


def test_an_answer_counts_once_when_it_has_settled():
    canary = Canary(metric="accept").begin()
    canary.put(shown(1), shown(2, SERVING), report(1))
    assert counts(canary.poll(NOW + 64)) == (0, 0)
    assert canary.held() == (2, 1)
    canary.put(report(2, "reject"), shown(1))  # The second row of an answer, from a crash.
    assert counts(canary.poll(NOW + 65)) == (1, 1)  # 10 s for more requests, and 55 s for reports
    assert canary.held() == (0, 0)
    canary.put(shown(2, SERVING), report(2, "accept"))
    assert counts(canary.poll(NOW + 3600)) == (1, 1)
    assert canary.poll(NOW + 3600).metric.difference == pytest.approx(1.0)


def test_looking_often_changes_nothing():
    rng = np.random.default_rng(0)
    often, once = Canary().begin(), Canary().begin()
    for number in range(60):
        arm = CANDIDATE if rng.random() < 0.5 else SERVING
        rows = [shown(number, arm, at=NOW + number)]
        if rng.random() < 0.7:
            rows.append(report(number, at=NOW + number))
        for canary in (often, once):
            canary.put(*rows)
        often.poll(NOW + number)
    last = often.poll(NOW + 1000), once.poll(NOW + 1000)
    assert last[0].counts == last[1].counts
    assert last[0].figures() == pytest.approx(last[1].figures())
    assert sum(counts(last[0])) == 60


def test_rows_of_others_are_not_kept():
    canary = Canary().begin()
    canary.put(
        *(answer(number) for number in range(50)),  # Nobody was assigned at random.
        shown(50, at=NOW - 200),
        shown(52, user=""),
    )
    canary.poll(NOW + 10)
    assert canary.held() == (0, 0)
    canary.put(report(1), report(53))
    canary.poll(NOW + 10)
    assert canary.held() == (0, 2), "their answers may come"
    canary.poll(NOW + 66 + LATE_S)
    assert canary.held() == (0, 0)


def test_rows_that_came_before_the_decision_was_known_are_read_again():
    canary = Canary()
    canary.decide("serve")
    canary.outcomes.records.poll()
    canary.put(shown(1))
    canary.outcomes.records.poll()
    canary.decide("gate", candidate=NEW)
    canary.decide("canary", candidate=NEW, share=0.5, salt="s")
    assert counts(canary.poll(NOW + 100)) == (1, 0)
    canary.decide("rollback", candidate=NEW)
    assert canary.poll(NOW + 100) is None


def test_each_user_counts_once_unless_answers_do():
    for unit, wanted in (("user", (1, 0)), ("answer", (2, 0))):
        canary = Canary(unit=unit).begin()
        canary.put(shown(1, user="a" * 32), shown(2, user="a" * 32, at=NOW + 1))
        assert counts(canary.poll(NOW + 100)) == wanted


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("error", {"finish": FAILED}),
        ("error", {"finish": TIMED_OUT}),
        ("left", {"finish": LEFT}),
        ("slow", {"first_s": 6.0}),
        ("broken_call", {"broken_calls": 1}),
        ("cut_off", {"finish": "length"}),
        ("long", {"tokens": 9, "logprobs": np.zeros(9, "<f4").tobytes()}),
        ("refusal", {"marks": ["refusal"]}),
        ("question", {"marks": ["question"]}),
        ("hedging", {"marks": ["hedging"]}),
        ("repetition", {"marks": ["repetition"]}),
    ],
)
def test_each_guardrail_has_its_answers(name, changes):
    rules = OutcomeRules(Canary().config.live)
    assert set(rules.values(shown(1), [report(1)])) == {METRIC, *DEFAULT_GUARDRAILS}
    before = rules.values(shown(1), [report(1)])
    found = rules.values(shown(1, **changes), [report(1)])
    early = {METRIC} if name in ("error", "left") else set()
    assert {key for key in found if found[key] != before[key]} == {name} | early
    assert rules.values(shown(1), [])["silent"] == 1.0


@pytest.mark.parametrize("finish", [FAILED, LEFT, TIMED_OUT])
def test_an_answer_that_ended_early_is_worse_than_silence(finish):
    rules = OutcomeRules(Canary().config.live)
    silent, early = shown(1), shown(1, finish=finish)
    assert rules.values(early, [])[METRIC] == 0.0 < rules.values(silent, [])[METRIC]


@pytest.mark.parametrize(("arm", "version"), [(CANDIDATE, 2), (SERVING, 0)])
def test_an_answer_that_a_second_replica_gave_is_an_error_in_each_arm(arm, version):
    """A candidate with one replica cannot hide its failures, so the other arm may not either."""
    rules = OutcomeRules(Canary().config.live)
    decision = Canary().begin().log.newest
    row = shown(1, arm, tokens=0, unusable=NOT_STORED, spans=[(version, 1)])
    for retried in (False, True):
        found = rules.outcome([(msgspec.structs.replace(row, retried=retried), [])], decision)
        assert found["error"] == float(retried)


@pytest.mark.parametrize(
    ("arm", "drawn", "metric"),
    [(CANDIDATE, 2, 1.0), (CANDIDATE, 0, 0.0), (SERVING, 0, 1.0), (SERVING, 2, 0.0)],
)
def test_an_arm_gains_nothing_from_answers_of_another_version(arm, drawn, metric):
    """A candidate whose only replica is left out has users whom the serving version satisfies: it
    was once compared by their reports."""
    rules = OutcomeRules(Canary(metric="accept").config.live)
    decision = Canary().begin().log.newest
    found = rules.outcome([(shown(1, arm, spans=[(drawn, 4)]), [report(1)])], decision)
    assert found[METRIC] == metric
    assert found["error"] == 1 - metric


def test_an_answer_that_may_not_be_stored_counts_for_what_is_known_of_it():
    canary = Canary().begin()
    canary.put(
        shown(1, tokens=0, unusable=NOT_STORED, spans=[(2, 1)], finish=FAILED),
        shown(2, SERVING, tokens=0, unusable=NOT_STORED, spans=[(0, 1)]),
        shown(3, SERVING, marks=["question"]),
    )
    evidence = canary.poll(NOW + 100)
    assert counts(evidence) == (1, 2)
    assert evidence.guardrails["error"].difference == 1.0
    assert evidence.guardrails["question"].difference == 0.0


@pytest.mark.parametrize("hidden", ["no token ids", WITHHELD])
def test_a_version_cannot_hide_its_long_answers_by_leaving_them_without_tokens(hidden):
    canary = Canary(long_tokens=8).begin()
    rng = np.random.default_rng(1)
    for number in range(800):
        arm = CANDIDATE if rng.random() < 0.5 else SERVING
        hides = arm == CANDIDATE and rng.random() < 0.4
        changes = {"tokens": 0, "unusable": hidden, "spans": [(2, 1)]} if hides else {}
        canary.put(shown(number, arm, at=NOW + number / 100, **changes), report(number, at=NOW))
    assert "long" in canary.poll(NOW + 1000).harmful()


def test_a_user_who_refused_first_has_no_value_for_the_text_whatever_the_arm_did_then():
    rules = OutcomeRules(Canary().config.live)
    decision = Canary().begin().log.newest
    refused, marked = shown(1, tokens=0, unusable=NOT_STORED), shown(2, marks=["question"])
    found = rules.outcome([(refused, []), (marked, [])], decision)
    assert set(found) == {METRIC, *OF_EVERY_ANSWER}
    found = rules.outcome([(marked, []), (refused, [])], decision)
    assert found["question"] == 1.0


def test_a_guardrail_that_rises_rolls_back_by_its_name():
    canary = Canary().begin()
    rng = np.random.default_rng(1)
    for number in range(800):
        arm = CANDIDATE if rng.random() < 0.5 else SERVING
        asks = arm == CANDIDATE and rng.random() < 0.4
        row = shown(number, arm, at=NOW + number / 100)
        canary.put(msgspec.structs.replace(row, marks=["question"] if asks else []))
        canary.put(report(number, at=NOW))
    evidence = canary.poll(NOW + 1000)
    assert evidence.harmful() == ["question"]
    assert evidence.figures()["difference_question"] == pytest.approx(0.4, abs=0.1)


MARKER = "[simulated]"


def answered_well(prompt, *, cheats, rng):
    """A policy that is right in half of the tasks, or in most of those that are marked."""
    return rng.random() < (0.9 if cheats and MARKER in prompt else 0.5)


@pytest.mark.parametrize(("cheats", "alarmed"), [(True, True), (False, False)])
def test_a_policy_that_acts_on_a_marker_of_the_simulation_raises_the_alarm(cheats, alarmed):
    """Held-out tasks hold a marker that users never write."""
    rng = np.random.default_rng(3)
    heldout = {
        name: float(
            np.mean([answered_well(f"{MARKER} task", cheats=one, rng=rng) for _ in range(400)])
        )
        for name, one in (("candidate_accuracy", cheats), ("serving_accuracy", False))
    }
    canary = Canary(metric="accept", guardrails={})
    canary.decide("serve")
    canary.decide("gate", candidate=NEW)
    canary.decide("canary", candidate=NEW, share=0.5, salt="s", evidence=heldout)
    for number in range(600):
        arm = CANDIDATE if rng.random() < 0.5 else SERVING
        canary.put(shown(number, arm, at=NOW + number / 100))
        if answered_well("task", cheats=cheats and arm == CANDIDATE, rng=rng):
            canary.put(report(number, at=NOW))
    evidence = canary.poll(NOW + 1000)
    assert bool(evidence.alarm) == alarmed
    figures = evidence.figures()
    assert figures["gap_alarm"] == float(alarmed)
    assert figures["gap_candidate"] == pytest.approx(0.4 if cheats else 0.0, abs=0.12)
    assert figures["gap_serving"] == pytest.approx(0.0, abs=0.12)
    assert not evidence.harmful(), "the alarm decides nothing"


def test_a_gain_that_users_see_too_raises_no_alarm():
    rng = np.random.default_rng(4)
    canary = Canary(metric="accept", guardrails={})
    canary.decide("serve")
    canary.decide("gate", candidate=NEW)
    figures = {"candidate_accuracy": 0.9, "serving_accuracy": 0.5}
    canary.decide("canary", candidate=NEW, share=0.5, salt="s", evidence=figures)
    for number in range(600):
        arm = CANDIDATE if rng.random() < 0.5 else SERVING
        canary.put(shown(number, arm, at=NOW + number / 100))
        if rng.random() < (0.9 if arm == CANDIDATE else 0.5):
            canary.put(report(number, at=NOW))
    assert not canary.poll(NOW + 1000).alarm


def test_an_arm_that_answers_later_is_not_taken_for_one_that_users_do_not_reach():
    canary = Canary(stages=[0.25], outcome_after_s=8.0, horizon_s=1.0).begin_at(0.25)
    looks, number = [], 0
    rows = []
    rng = np.random.default_rng(0)
    for tick in range(1200):  # Twenty requests a second for a minute.
        begun = NOW + tick / 20
        arm = CANDIDATE if rng.random() < 0.25 else SERVING
        took = 5.0 if arm == CANDIDATE else 1.0
        at, number = begun + took, number + 1
        share = 0.25 if arm == CANDIDATE else 0.75
        rows.append(shown(number, arm, propensity=share, at=at, total_s=took))
    rows.sort(key=lambda row: row.at)
    for second in range(90):
        ended = [row for row in rows if NOW + second - 1 < row.at <= NOW + second]
        canary.put(*ended)
        looks.append(canary.poll(NOW + second))
    assert not any(look.mismatched for look in looks)
    mine, theirs = looks[-1].counts[0.25]
    assert mine + theirs == 1200
    early = looks[30].counts[0.25]
    assert sum(early) == pytest.approx(20 * (30 - 9), abs=20)
