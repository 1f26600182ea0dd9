"""The evaluation gate compares the same problems, and holds a candidate that is undecided."""

import numpy as np
import pytest

from benchmarks.live.gate import gated_runs
from deltawire.config.release import ReleaseConfig
from deltawire.live.release.next_decision import Situation, decide_next, next_candidate
from deltawire.live.release.paired_gate import SetScore, compare_sets
from deltawire.rl.evaluate.setting_scores import shares_correct
from deltawire.runtime.decision_log import DecisionLog
from deltawire.store import open_bucket
from deltawire.wire.decisions import ServedVersion, fault_after

OLD, NEW, NEXT = (ServedVersion(n, f"{n:032x}") for n in (3, 5, 6))
RELEASE = ReleaseConfig()


def score(correct):
    return SetScore(float(np.mean([one for one in correct if one >= 0])), tuple(correct))


def finding(mine, theirs):
    (found,) = compare_sets(RELEASE, {"accuracy": mine}, {"accuracy": theirs})
    return found


@pytest.mark.parametrize("samples", [1, 4])
def test_equal_versions_are_hardly_ever_rolled_back(samples):
    assert gated_runs(samples, 0.0, seed=1, runs=25).rolled_back <= 0.02
    facts = {"seed": 1, "runs": 25, "by_problem": False, "serving": "kept"}
    assert gated_runs(samples, 0.0, **facts).rolled_back > 0.2


def test_a_drop_of_chance_is_undecided_and_a_shown_one_fails():
    theirs = [1.0, 0.0] * 50
    lucky = score([0.0] * 6 + theirs[6:])
    shown = score([0.0] * 40 + theirs[40:])
    assert (finding(lucky, score(theirs)).below, finding(lucky, score(theirs)).failed) == (1, 0)
    assert finding(shown, score(theirs)).failed
    assert not finding(score(theirs), shown).below


def test_problems_that_failed_are_left_out_and_a_longer_result_is_cut():
    mine, theirs = score([1.0, -1.0, 0.0, 0.5]), score([1.0, 0.0, -1.0, 0.0])
    assert (finding(mine, theirs).problems, finding(mine, theirs).candidate) == (2, 0.75)
    for one, another in (([0.0, 1.0], [1.0, 1.0, 0.0]), ([0.0, 1.0, 1.0], [1.0, 1.0])):
        other = finding(score(one), score(another))
        assert (other.problems, other.candidate, other.serving) == (2, 0.5, 1.0)
    other = finding(score([0.0, 1.0]), SetScore(0.9))
    assert (other.problems, other.failed) == (0, True)
    assert "by accuracies only" in other.words
    assert not finding(SetScore(0.49), SetScore(0.5)).failed


def test_an_undecided_candidate_gives_way_to_the_next_evaluated_version():
    theirs = [1.0, 0.0] * 50
    scores = {3: {"accuracy": score(theirs)}, 5: {"accuracy": score([0.0] * 5 + theirs[5:])}}
    log = DecisionLog(open_bucket("memory://", create=True), "1" * 32)

    def step(**facts):
        situation = Situation(newest=OLD, scores=scores, **facts)
        decision = decide_next(log, RELEASE, situation, by="g0")
        if decision is not None:
            assert log.append(decision)
        return decision

    step(now=1.0)
    step(now=2.0, candidate=NEW)
    held = step(now=3.0)
    assert (held.verdict, held.waits_for, held.share) == ("hold", "data", 0.0)
    assert "undecided: accuracy" in held.reason
    assert step(now=4.0) is None
    assert next_candidate(log, RELEASE, newest=5, scores=scores, now=5.0) is None
    scores[6] = {"accuracy": score(theirs)}
    assert next_candidate(log, RELEASE, newest=6, scores=scores, now=5.0) == 6
    begun = step(now=5.0, candidate=NEXT)
    assert (begun.verdict, begun.candidate, begun.salt) == ("gate", NEXT, "")
    assert not log.rejected(), "nothing of its training is thrown away"
    assert step(now=6.0).verdict == "canary"
    older = log.decisions[1]
    assert "undecided" in fault_after(log.newest, older.__class__(**_fields(older, number=9)))


def test_an_undecided_candidate_goes_on_to_users_if_none_newer_comes():
    theirs = [1.0, 0.0] * 50
    scores = {3: {"accuracy": score(theirs)}, 5: {"accuracy": score([0.0] * 5 + theirs[5:])}}
    log = DecisionLog(open_bucket("memory://", create=True), "1" * 32)
    found = []
    for now in (1.0, 2.0, 3.0, 3.0 + RELEASE.gate_wait_s - 1, 3.0 + RELEASE.gate_wait_s):
        situation = Situation(newest=OLD, scores=scores, candidate=NEW, now=now)
        decision = decide_next(log, RELEASE, situation, by="g0")
        found.append(decision.verdict if decision else None)
        if decision is not None:
            assert log.append(decision)
    assert found == ["serve", "gate", "hold", None, "canary"]


@pytest.mark.parametrize("later", [0.0, 1.0])
def test_a_candidate_is_compared_once(later):
    """Results that come after a comparison neither stop a held candidate nor let it pass."""
    theirs = [1.0, 0.0] * 50
    mine = {"accuracy": score([0.0] * 5 + theirs[5:])}
    log, found = DecisionLog(open_bucket("memory://", create=True), "1" * 32), []
    for now, serving in (
        (1.0, score(theirs)),
        (2.0, score(theirs)),
        (3.0, score(theirs)),
        (4.0, SetScore(0.5, tuple(theirs), again=(later,) * 100)),
        (3.0 + RELEASE.gate_wait_s, SetScore(0.5, tuple(theirs), again=(later,) * 100)),
    ):
        scores = {3: {"accuracy": serving}, 5: mine}
        situation = Situation(newest=OLD, scores=scores, candidate=NEW, now=now)
        decision = decide_next(log, RELEASE, situation, by="g0")
        found.append(decision.verdict if decision else None)
        if decision is not None:
            assert log.append(decision)
    assert found == ["serve", "gate", "hold", None, "canary"]
    assert log.newest.evidence["serving_accuracy"] == 0.5, "what it was compared with"


def test_a_candidate_that_was_held_for_want_of_results_is_compared_once_they_come():
    theirs = {"accuracy": score([1.0, 0.0] * 50)}
    mine = {"accuracy": score([0.0] * 5 + [0.0, 1.0] + [1.0, 0.0] * 46 + [0.0])}
    log, found = DecisionLog(open_bucket("memory://", create=True), "1" * 32), []
    late = 2.0 + RELEASE.gate_wait_s
    for now, scores in (
        (1.0, {}), (2.0, {}), (late, {3: theirs}),
        *[(late + more, {3: theirs, 5: mine}) for more in (1.0, 2.0, 1.0 + RELEASE.gate_wait_s)],
    ):  # fmt: skip
        situation = Situation(newest=OLD, scores=scores, candidate=NEW, now=now)
        decision = decide_next(log, RELEASE, situation, by="g0")
        found.append(decision.verdict if decision else None)
        if decision is not None:
            assert log.append(decision)
    assert found == ["serve", "gate", "hold", "hold", None, "canary"]
    assert "undecided: accuracy" in log.decisions[-2].reason


def _fields(decision, **changed):
    return {name: getattr(decision, name) for name in decision.__struct_fields__} | changed


def test_shares_of_each_problem_come_in_the_order_of_the_set():
    class Played:
        def __init__(self, solved, cause=""):
            self.solved, self.cause = solved, cause

    episodes = [Played(1.0), Played(0.0), Played(0.0, "x"), Played(1.0), *[Played(1.0, "x")] * 2]
    assert shares_correct(episodes, 2) == [0.5, 1.0, -1.0]


def test_a_version_that_serves_is_compared_by_its_second_measurement():
    theirs = [1.0, 0.0] * 50
    lucky = SetScore(0.9, tuple([1.0] * 80 + theirs[80:]), again=tuple(theirs))
    assert not finding(score(theirs), lucky).below
    assert finding(score(theirs), SetScore(0.9, lucky.correct)).below, "without it"
    assert finding(lucky, score(theirs)).candidate == 0.9, "a candidate has its first one"


def test_the_gate_waits_for_results_of_the_serving_version_that_are_to_come():
    mine = {"accuracy": score([1.0, 0.0] * 50)}
    awaited = {"accuracy": SetScore(0.5, tuple([1.0, 0.0] * 50), awaited=True)}
    log = DecisionLog(open_bucket("memory://", create=True), "1" * 32)
    found = []
    for now in (1.0, 2.0, 3.0, 2.0 + RELEASE.gate_wait_s):
        situation = Situation(newest=OLD, scores={3: awaited, 5: mine}, candidate=NEW, now=now)
        decision = decide_next(log, RELEASE, situation, by="g0")
        found.append(decision.verdict if decision else None)
        if decision is not None:
            assert log.append(decision)
    assert found == ["serve", "gate", None, "canary"]


def test_fewer_equal_versions_are_held_the_more_often_the_serving_one_is_measured():
    once, twice, each = (
        gated_runs(1, 0.0, seed=1, runs=40, serving=serving)
        for serving in ("kept", "again", "each")
    )
    assert twice.held < once.held - 0.1
    assert each.held < twice.held - 0.1
    assert each.rolled_back <= twice.rolled_back <= 0.02
