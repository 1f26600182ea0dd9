"""Whatever is known, and whoever decides: the series stays valid, and all readers agree on it."""

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from deltawire.config.release import ReleaseConfig
from deltawire.errors import InputError
from deltawire.live.release.evidence import CanaryTests
from deltawire.live.release.next_decision import (
    Situation,
    decide_by_hand,
    decide_next,
    next_candidate,
)
from deltawire.live.release.outcomes import METRIC, SettledAnswer
from deltawire.live.release.paired_gate import SetScore
from deltawire.live.release.shadow_evidence import shadow_evidence
from deltawire.runtime.decision_log import DecisionLog
from deltawire.store import open_bucket
from deltawire.wire.captures import ShadowCounts
from deltawire.wire.decisions import CANDIDATE, ServedVersion
from deltawire.wire.receipts import SERVING

RELEASE = ReleaseConfig(stages=[0.25, 0.5], stage_outcomes=5, max_outcomes=40, guardrails={})
SHADOW = msgspec.structs.replace(RELEASE, guardrails={"error": 0.01}, shadow=20)
STEPS = st.tuples(
    st.integers(0, 1),
    st.sampled_from(["tests"] * 9 + ["promote", "hold", "rollback"]),
    st.integers(0, 8),
    st.tuples(st.integers(0, 60), st.integers(0, 60), st.booleans(), st.booleans()),
    st.booleans(),
)


def shadow(mine, theirs, good, bad):
    """Copies, of which some failed where users' answers did not."""
    failed = {"error": mine // 4 if good and not bad else 0}
    return shadow_evidence([ShadowCounts(shadow="s", copies=mine, rose=failed)], SHADOW)


def evidence(release, share, mine, theirs, good, bad):
    arms = [(CANDIDATE, float(good))] * mine + [(SERVING, float(bad))] * theirs
    tests = CanaryTests(release)
    tests.add(
        SettledAnswer(0.0, arm, share, True, {METRIC: value, "error": 0.0}) for arm, value in arms
    )
    return tests.evidence()


@settings(max_examples=150, deadline=None)
@given(st.sampled_from([RELEASE, SHADOW]), st.lists(STEPS, min_size=15, max_size=40))
def test_any_two_deciders_keep_one_valid_series(release, steps):
    bucket = open_bucket("memory://", create=True)
    logs = [DecisionLog(bucket, "1" * 32) for _ in range(2)]
    for now, (who, action, newest, facts, reads) in enumerate(steps):
        log = logs[who]
        if reads:
            log.poll()
        scores = {version: {"accuracy": SetScore(0.5)} for version in range(newest + 1)}
        chosen = next_candidate(log, release, newest=newest, scores=scores, now=float(now))
        assert chosen not in log.rejected()
        served = ServedVersion(newest, f"{newest:032x}")
        try:
            if action == "tests":
                share = log.newest.share if log.newest else 0.0
                situation = Situation(
                    newest=served,
                    candidate=None if chosen is None else ServedVersion(chosen, f"{chosen:032x}"),
                    scores=scores,
                    evidence=evidence(release, share, *facts),
                    shadow=shadow(*facts),
                    now=float(now),
                )
                decision = decide_next(log, release, situation, by="process")
            else:
                decision = decide_by_hand(log, action, by="ann", now=float(now), target=None)
        except InputError:
            continue
        if decision is not None:
            before = log.next_number
            stored = log.append(decision)
            assert log.next_number > before
            known = [msgspec.structs.replace(one, previous="") for one in log.decisions]
            assert stored == (decision in known)
    for log in logs:
        log.poll()
        assert not log.void
    assert logs[0].decisions == logs[1].decisions
    for before, after in zip(logs[0].decisions, logs[0].decisions[1:], strict=False):
        if after.serving != before.serving:
            assert after.verdict in ("promote", "rollback")
        if after.verdict == "canary" and before.verdict == "canary":
            assert after.share > before.share
        if after.verdict == "shadow":
            assert before.verdict in ("gate", "hold")
            assert not before.share
