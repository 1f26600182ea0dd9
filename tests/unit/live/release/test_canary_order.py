"""Outcomes of users: all their answers, in the order of their requests, once all reports are in."""

import numpy as np
import pytest
from live_answers import NOW, report
from live_canary import OLD, Canary, counts, shown

from deltawire.live.release.canary_outcomes import MOST_ANSWERS
from deltawire.live.release.outcomes import METRIC
from deltawire.live.release.upload_progress import GONE_S
from deltawire.wire import keys
from deltawire.wire.captures import GatewayState
from deltawire.wire.decisions import CANDIDATE
from deltawire.wire.objects import encode_json
from deltawire.wire.receipts import SERVING


def drawn_arm(rng):
    return CANDIDATE if rng.random() < 0.5 else SERVING


def test_a_candidate_that_fails_after_the_first_answer_is_found():
    """All answers within the horizon count: the mean metric, and the worst of the guardrails."""
    canary = Canary(metric="accept").begin()
    rng = np.random.default_rng(5)
    for number in range(300):
        user, arm = f"{number:032x}", drawn_arm(rng)
        cut = {"finish": "length"} if arm == CANDIDATE else {}
        first, second, late = (1000 * number + place for place in range(3))
        canary.put(
            shown(first, arm, user=user),
            shown(second, arm, user=user, at=NOW + 5, **cut),
            shown(late, arm, user=user, at=NOW + 11),
            report(first),
            report(late, at=NOW + 11),
            *([report(second, at=NOW + 5)] if arm == SERVING else []),
        )
    evidence = canary.poll(NOW + 100)
    assert sum(counts(evidence)) == 300
    assert set(evidence.harmful()) >= {METRIC, "cut_off", "silent"}
    assert evidence.metric.difference == pytest.approx(-0.5), "one of two answers"
    assert evidence.guardrails["cut_off"].difference == 1.0


def test_what_another_version_had_to_answer_is_an_error_of_its_arm():
    """An arm whose replica is gone must neither lose its users nor be credited with the answers of
    the other arm's version."""
    canary = Canary(metric="accept").begin()
    rng = np.random.default_rng(6)
    for number in range(300):
        canary.put(shown(number, drawn_arm(rng), spans=[(OLD.version, 4)]), report(number))
    evidence = canary.poll(NOW + 100)
    assert sum(counts(evidence)) == 300
    assert not evidence.mismatched
    assert evidence.harmful() == [METRIC, "error"]


def gateway_state(canary, name, **facts):
    state = GatewayState(gateway=name, run="1" * 32, started=NOW, **facts)
    canary.bucket.put(keys.live_gateway(name), encode_json(state))


def test_outcomes_wait_for_the_reports_of_a_gateway_that_was_cut_off():
    canary = Canary(metric="accept").begin()
    gateway_state(canary, "g0", at=NOW + 100, uploaded_until=NOW + 100)
    gateway_state(canary, "g1", at=NOW + 10, uploaded_until=NOW + 8)
    gateway_state(canary, "g2", at=NOW - 2 * GONE_S, uploaded_until=NOW)
    gateway_state(canary, "g3", at=NOW, uploaded_until=NOW - 50, ended=True)
    canary.put(shown(1), shown(2, SERVING), report(2))
    assert counts(canary.poll(NOW + 100)) == (0, 0)
    canary.put(report(1))  # From the disk of `g1`, after the outage.
    for name in ("g0", "g1"):
        gateway_state(canary, name, at=NOW + 110, uploaded_until=NOW + 110)
    evidence = canary.poll(NOW + 110)
    assert counts(evidence) == (1, 1)
    assert evidence.live == (1.0, 1.0)
    gateway_state(canary, "g1", at=NOW + 110, uploaded_until=0.0)
    canary.put(shown(3, at=NOW + 60))
    assert counts(canary.poll(NOW + 200)) == (1, 1), "it started again, with rows on its disk"
    assert counts(canary.poll(NOW + 200 + GONE_S)) == (2, 1), "it is not waited for without end"


def test_a_state_that_cannot_be_read_is_waited_for():
    canary = Canary().begin()
    canary.bucket.put(keys.live_gateway("g0"), b"{")
    canary.put(shown(1))
    assert counts(canary.poll(NOW + 1000)) == (0, 0)
    gateway_state(canary, "g0", at=NOW + 1000, uploaded_until=NOW + 1000)
    assert counts(canary.poll(NOW + 1000)) == (1, 0)


def test_outcomes_come_in_the_order_of_requests_whatever_the_arms_take():
    """By the end of answers, users of a slow candidate would be compared with those of the serving
    version who asked later."""
    canary = Canary().begin()
    canary.poll(NOW)
    seen, rows, rng = [], [], np.random.default_rng(7)
    canary.outcomes._tests.add = seen.extend
    for number in range(200):
        arm = drawn_arm(rng)
        took = float(rng.uniform(0, 50 if arm == CANDIDATE else 1))
        rows.append(shown(number, arm, at=NOW + number + took, total_s=took))
    rows.sort(key=lambda row: row.at)
    for second in range(0, 400, 7):
        canary.put(*(row for row in rows if second - 7 < row.at - NOW <= second))
        canary.poll(NOW + second)
    asked = [one.asked for one in seen]
    assert len(asked) == 200
    assert asked == sorted(asked)
    assert canary.outcomes.late == 0


def test_a_user_who_comes_to_light_too_late_is_counted_and_left_out():
    canary = Canary().begin()
    canary.put(shown(1, at=NOW + 20))
    canary.poll(NOW + 100)
    canary.put(shown(2))
    assert counts(canary.poll(NOW + 100)) == (1, 0)
    assert canary.outcomes.late == 1


def test_no_user_counts_without_limit():
    for unit, most in (("user", 1), ("answer", MOST_ANSWERS)):
        canary = Canary(unit=unit).begin()
        canary.put(*(shown(number, user="a" * 32, at=NOW + number / 10) for number in range(40)))
        canary.put(shown(100))
        assert counts(canary.poll(NOW + 200)) == (most + 1, 0)
