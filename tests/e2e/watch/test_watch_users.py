"""The page shows how users fare by version and arm, and what serves them, from the bucket only."""

from __future__ import annotations

import os
import time

import pytest
from watch_browser import Visit, chromium, served
from watched_run import write_run

from deltawire.runtime.decision_log import DecisionLog
from deltawire.store import open_bucket
from deltawire.sync import read_manifest, read_run
from deltawire.wire import keys
from deltawire.wire.captures import GatewayState, ServingReplica
from deltawire.wire.decider_state import DeciderState
from deltawire.wire.decisions import Decision, ServedVersion
from deltawire.wire.objects import encode_json
from deltawire.wire.user_windows import MeanSums, UserCounts, UserWindow

pytestmark = pytest.mark.drills
HOUR_S = 3600.0


def sums(count: int, mean: float) -> MeanSums:
    """Sums of values that are 0 or 1, or of equal values above."""
    total = count * mean
    return MeanSums(count, total, total if mean <= 1 else total * mean)


def counts(arm: str, version: int, satisfied: float, **more) -> UserCounts:
    return UserCounts(
        arm=arm, version=version, answers=400, errors=4, left=3, first_s=MeanSums(393, 117.9, 70.0),
        tokens=MeanSums(393, 47160.0, 7.0e6), satisfaction=sums(80, satisfied),
        kinds={"thumbs": sums(80, satisfied)}, reports={"thumbs": 90}, **more,
    )  # fmt: skip


def windows(now: float) -> list[UserWindow]:
    """Two days: a provider, then version 4, then a canary of version 8 that users dislike."""
    found = []
    for hour in range(46, 0, -1):
        since = (now - hour * HOUR_S) // HOUR_S * HOUR_S
        wave = 0.02 * ((hour * 7) % 5 - 2)
        held = counts("hold_back", -1, 0.52 + wave, upstream="openai")
        if hour > 30:
            rows = [counts("serving", -1, 0.55 + wave, upstream="openai")]
        elif hour > 8 or hour < 5:
            rows = [counts("serving", 4, 0.68 + wave), held]
        else:
            rows = [counts("serving", 4, 0.68 + wave), counts("candidate", 8, 0.35 + wave), held]
        found.append(UserWindow(since=since, seconds=HOUR_S, counts=rows))
    return found


def decide_all(bucket, now: float) -> None:
    run = read_run(bucket)
    log = DecisionLog(bucket, run.id)
    provider = ServedVersion.of_upstream("openai")
    four, eight = (ServedVersion(n, read_manifest(bucket, run, n).digest) for n in (4, 8))
    effect = {
        "hold_back_users": 900.0, "hold_back_difference": 0.12, "hold_back_low": 0.05,
        "hold_back_high": 0.19,
    }  # fmt: skip
    held = {"hold_back": provider, "hold_back_share": 0.05}
    for hours, verdict, serving, candidate, more in (
        (46, "serve", provider, None, {}),
        (36, "gate", provider, four, {}),
        (35, "canary", provider, four, {"share": 0.1, "salt": "a"}),
        (30, "promote", four, None, held),
        (9, "gate", four, eight, held),
        (8, "canary", four, eight, {**held, "share": 0.1, "salt": "b"}),
        (4, "rollback", four, eight, {**held, "evidence": effect, "reason": "worse: metric"}),
    ):
        decision = Decision(
            number=log.next_number, run=run.id, verdict=verdict, serving=serving,
            candidate=candidate, at=now - hours * HOUR_S, by="decider", **more,
        )  # fmt: skip
        assert log.append(decision)


def test_the_page_shows_whether_users_are_happier(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("DELTAWIRE_DURABLE", "0")
    place, now = tmp_path / "run", time.time()
    write_run(place, versions=12)
    bucket = open_bucket(str(place))
    run = read_run(bucket)
    decide_all(bucket, now)
    state = GatewayState(
        gateway="g0", run=run.id, started=now - 2e5, at=now + 600, windows=windows(now),
        upstreams={"openai": "gpt-x"}, counts={"answers": 40_000.0},
        replicas=[
            ServingReplica(name="10.0.0.5:8001", version=4),
            ServingReplica(name="10.0.0.6:8001", fault="it does not answer"),
            ServingReplica(name="upstream openai", upstream="openai"),
        ],
    )  # fmt: skip
    bucket.put(keys.live_gateway("g0"), encode_json(state))
    dead = DeciderState(run=run.id, by="ann", at=now - 900)
    bucket.put(keys.LIVE_DECIDER, encode_json(dead))
    with chromium() as browser, served([place], tmp_path / "cache") as link:
        visit = Visit(browser, link)
        visit.until("#users", "hold-back")
        problems = visit.text(".problems")
        assert "No problems" not in problems
        for words in (
            "decider decide (ann) is silent",
            "1 rollbacks within a day",
            "10.0.0.6:8001",
        ):
            assert words in problems
        table = visit.text("#users")
        for words in ("serving", "candidate", "hold-back", "Users by window", "decision 6: +0.12"):
            assert words in table
        legend = visit.text("#users-satisfaction .legend")
        for words in ("serving: version 4", "candidate: version 8", "hold-back: upstream openai"):
            assert words in legend
        visit.page.locator("#users-satisfaction").get_by_text("Table").click()
        assert visit.page.locator("#users-satisfaction .data-table tbody tr").count() >= 40
        visit.page.locator("#users-satisfaction").get_by_text("Table").click()
        assert visit.page.locator("#users-kind-thumbs canvas").count() == 1
        fleet = visit.text("#fleet")
        for words in ("gateway", "replica", "decider", "upstream openai, not attested"):
            assert words in fleet
        if folder := os.environ.get("WATCH_PICTURES"):
            visit.page.screenshot(path=f"{folder}/users.png", full_page=True)
        visit.sound()
        visit.context.close()
