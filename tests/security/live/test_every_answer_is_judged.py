"""Every answer of a canary judges its arm, stored or not; of those that may not be stored, nothing
else is kept."""

import asyncio
import contextlib
import json
import secrets
import time

import aiohttp
import msgspec
import pytest
from live_answers import config_of
from live_decider import Decider, in_loop, until
from live_gateway import TOKEN, live_serving, published

from deltawire.live.capture.consent import ConsentRule
from deltawire.live.capture.uploader import UNDER_WAY_S
from deltawire.live.erasure.forgetting import forget_user
from deltawire.live.gateway import recorder, routing
from deltawire.live.learning.records import LiveRecords
from deltawire.live.release.canary_outcomes import CanaryOutcomes
from deltawire.live.release.next_decision import Situation, decide_next
from deltawire.live.release.upload_progress import GONE_S
from deltawire.sync import read_run
from deltawire.wire import keys
from deltawire.wire.captures import LEFT, NOT_STORED, TIMED_OUT, GatewayState
from deltawire.wire.objects import decode_json

PLANTED = "planted-text-4711"


@contextlib.asynccontextmanager
async def canary(folder, monkeypatch, *, rule=None, **options):
    """A gateway of a deployment that stores no answer, with a canary of version 2 at one half."""
    monkeypatch.setattr(routing, "POLL_EVERY_S", 0.02)
    bucket = published()
    decider = Decider(bucket)
    options.setdefault("release", config_of(release=release_of()).live.release)
    async with live_serving(
        bucket, folder, monkeypatch, replicas=2, consent=rule or ConsentRule(), **options
    ) as gateway:
        decider.decide("serve", 0)
        decider.decide("gate", 0, 2)
        decider.decide("canary", 0, 2, share=0.5, salt="s")
        await until(lambda: sorted(f.mirror.version for f in gateway.fakes) == [0, 2])
        await until(lambda: assigns(gateway))
        gateway.candidate = next(f for f in gateway.fakes if f.mirror.version == 2)
        gateway.decider = decider
        yield gateway


def release_of(**changes):
    return {"stages": [0.5], "stage_outcomes": 20, "outcome_after_s": 600.0} | changes


def assigns(gateway):
    """Returns whether the gateway assigns new users at random now."""
    return gateway.recorder.assign("0" * 32, secrets.token_hex(16)).propensity < 1


async def leave(gateway, user):
    """Asks, and gives up where the candidate has the request."""
    seen = len(gateway.candidate.seen)
    asking = asyncio.create_task(gateway.ask(user=user, capture=""))
    await until(lambda: asking.done() or len(gateway.candidate.seen) > seen)
    if not asking.done():
        asking.cancel()
    await asyncio.wait([asking])


def decided(gateway, now):
    """Returns the evidence in the bucket, and the decision that follows from it."""
    config = config_of(release=release_of())
    log = gateway.decider.log
    log.poll()
    evidence = CanaryOutcomes(gateway.bucket, config.live).poll(log, now)
    situation = Situation(newest=gateway.decider.served(2), evidence=evidence, now=now)
    return evidence, decide_next(log, config.live.release, situation, by="ann")


@pytest.mark.parametrize(("mode", "test"), [("fail", "error"), ("hang", "left"), ("cut", "error")])
def test_a_candidate_that_answers_nobody_is_rolled_back_though_nothing_is_stored(
    mode, test, tmp_path, monkeypatch
):
    @in_loop
    async def scenario():
        async with canary(tmp_path, monkeypatch) as gateway:
            gateway.candidate.mode = {"cut": "break"}.get(mode, mode)
            for number in range(100):
                if mode == "hang":
                    await leave(gateway, f"u{number}")
                    continue
                with contextlib.suppress(aiohttp.ClientError):
                    await gateway.ask(user=f"u{number}", capture="", stream=mode == "cut")
            await until(lambda: gateway.recorder.counts["judged"] == 100)
            await gateway.uploaded()
            evidence, decision = await asyncio.to_thread(decided, gateway, time.time() + 2 * GONE_S)
            assert sum(sum(pair) for pair in evidence.counts.values()) == 100
            assert test in evidence.harmful()
            assert decision.verdict == "rollback"

    scenario()


def test_reports_about_answers_that_are_not_stored_decide_too(tmp_path, monkeypatch):
    @in_loop
    async def scenario():
        async with canary(tmp_path, monkeypatch) as gateway:
            for number in range(200):
                seen = len(gateway.candidate.seen)
                receipt = await gateway.receipt(user=f"u{number}", capture="")
                bad = len(gateway.candidate.seen) > seen
                await gateway.report(receipt, value="down" if bad else "up")
            await gateway.uploaded()
            evidence, decision = await asyncio.to_thread(decided, gateway, time.time() + 2 * GONE_S)
            assert "metric" in evidence.harmful()
            assert decision.verdict == "rollback"

    scenario()


def test_of_an_answer_that_may_not_be_stored_only_what_judges_it_is(tmp_path, monkeypatch):
    @in_loop
    async def scenario():
        async with canary(tmp_path, monkeypatch, keep_text=True) as gateway:
            headers = {
                "x-deltawire-user": "alice", "x-deltawire-capture": "false",
                "x-deltawire-conversation": PLANTED, "x-deltawire-task": PLANTED,
                "x-deltawire-cohort": PLANTED,
            }  # fmt: skip
            status, data, _ = await gateway.call(
                "POST", "/v1/chat/completions", headers=headers,
                json={"model": "m", "messages": [{"role": "user", "content": PLANTED}]},
            )  # fmt: skip
            assert status == 200
            receipt = json.loads(data)["deltawire"]["receipt"]
            await gateway.report(receipt, id=PLANTED, note=PLANTED)
            edit = await gateway.report(receipt, kind="edit", value=1, id="e", text=PLANTED)
            assert edit[0] == 200
            (row,), reports = await gateway.uploaded()
            report, edited = sorted(reports, key=lambda one: one.kind, reverse=True)
            assert (edited.kind, edited.text) == ("edit", "")
            assert stored_fields(row) == {
                "answer", "conversation", "turn", "user", "arm", "propensity", "at", "receipt",
                "finish", "spans", "unusable", "first_s", "total_s",
            }  # fmt: skip
            assert (row.conversation, row.receipt, row.turn) == (row.answer, "", 0)
            assert (row.finish, row.unusable) == ("stop", NOT_STORED)
            assert row.spans == [(0 if row.arm == "serving" else 2, 1)]
            assert (report.kind, report.answer, report.recorded) == ("thumbs", row.answer, False)
            kept = [gateway.bucket.get(key, limit=1 << 30) for key in gateway.bucket.list("live/")]
            files = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
            for place in (*kept, *files):
                for text in (PLANTED, "alice", "Hello", receipt[40:80]):
                    assert text.encode() not in place
            records = LiveRecords(gateway.bucket)
            records.poll()
            assert not records.answers, "a learner does not see it"
            run = read_run(gateway.bucket)
            await asyncio.to_thread(forget_user, gateway.bucket, run, row.user)
            assert await gateway.uploaded() == [[], []]

    scenario()


def stored_fields(row):
    """The members of a row that its bytes hold."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(row)).keys()


def test_outside_a_canary_and_for_users_who_were_forgotten_nothing_is_stored(tmp_path, monkeypatch):
    @in_loop
    async def scenario():
        async with canary(tmp_path, monkeypatch) as gateway:
            await gateway.ask(user="", capture="")
            await gateway.ask(user="bob", capture="")
            (row,), _ = await gateway.uploaded()
            run = read_run(gateway.bucket)
            await asyncio.to_thread(forget_user, gateway.bucket, run, row.user)
            gateway.recorder._read_forgotten()
            with monkeypatch.context() as short:  # A listing that leaves the record out.
                short.setattr(recorder, "forgotten_users", lambda _: frozenset())
                gateway.recorder._read_forgotten()
            await gateway.ask(user="bob", capture="")
            gateway.decider.decide("rollback", 0, 2)
            await until(lambda: not assigns(gateway))
            await gateway.ask(user="carol", capture="")
            assert await gateway.uploaded() == [[], []]
            assert gateway.recorder.counts["judged"] == 1

    scenario()


@pytest.mark.parametrize("capture", ["", "true"])
@pytest.mark.parametrize("mode", ["hang", "stall"])
def test_a_client_that_leaves_is_an_outcome(mode, capture, tmp_path, monkeypatch):
    """Before the first word, and in the middle of an answer."""

    @in_loop
    async def scenario():
        async with canary(tmp_path, monkeypatch, rule=ConsentRule(header=True)) as gateway:
            for fake in gateway.fakes:
                fake.mode = mode
            asking = asyncio.create_task(begun(gateway, capture))
            await until(lambda: asking.done() or any(fake.seen for fake in gateway.fakes))
            if mode == "hang":
                asking.cancel()
            await asyncio.wait([asking])
            await until(lambda: gateway.recorder.counts["left"] == 1)
            (row,), _ = await gateway.uploaded()
            assert (row.finish, row.judged_only) == (LEFT, not capture)
            assert row.total_s > 0

    scenario()


async def begun(gateway, capture):
    """Reads the beginning of a stream, and closes the connection."""
    headers = {
        "Authorization": f"Bearer {TOKEN}", "x-deltawire-user": "alice",
        "x-deltawire-capture": capture,
    }  # fmt: skip
    body = {"model": "m", "stream": True, "messages": [{"role": "user", "content": "Hi"}]}
    url = gateway.url("/v1/chat/completions")
    async with gateway.client.post(url, headers=headers, json=body) as answer:
        assert b"assistant" in await answer.content.readany()
        answer.close()


def test_an_answer_without_an_end_is_an_outcome_when_that_is_due(tmp_path, monkeypatch):
    release = config_of(release=release_of(outcome_after_s=0.05)).live.release

    @in_loop
    async def scenario():
        async with canary(tmp_path, monkeypatch, release=release) as gateway:
            for fake in gateway.fakes:
                fake.mode = "hang"
            asking = asyncio.create_task(gateway.ask(capture=""))
            await until(lambda: gateway.recorder.counts["timed_out"] == 1)
            asking.cancel()
            await until(lambda: gateway.recorder.counts["left"] == 1)
            (row,), _ = await gateway.uploaded()
            assert row.finish == TIMED_OUT

    scenario()


def test_a_gateway_states_what_it_uploaded_and_that_it_ended(tmp_path, monkeypatch):
    """The deciding process waits for it."""
    states = []

    def stated(gateway):
        data = gateway.bucket.get(keys.live_gateway(gateway.recorder.name), limit=1 << 20)
        states.append(decode_json(data, GatewayState, run="", key=""))
        return states[-1]

    @in_loop
    async def scenario():
        async with canary(tmp_path, monkeypatch) as gateway:
            began = time.time()
            await gateway.ask(capture="")
            await gateway.uploaded()
            assert stated(gateway).uploaded_until == 0.0, "it states what the round before stored"
            await gateway.uploaded()  # In a canary each round states it.
            assert began - UNDER_WAY_S <= stated(gateway).uploaded_until <= time.time()
        assert stated(gateway).ended

    scenario()
    assert [one.ended for one in states] == [False, False, True]
