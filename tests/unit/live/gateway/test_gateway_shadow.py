"""Copies of requests: answered by the candidate, unseen and unstored, and never in a user's way."""

import asyncio
import json

from aiohttp import web
from live_gateway import TokenReplica, live_serving, published
from test_gateway_canary import Decider, held, in_loop, until

from deltawire.config.release import ReleaseConfig
from deltawire.live.gateway import routing, shadow
from deltawire.live.release.shadow_evidence import read_shadow
from deltawire.sync import read_run
from deltawire.wire import keys
from deltawire.wire.captures import GatewayState
from deltawire.wire.objects import decode_json

RELEASE = ReleaseConfig(unit="answer", shadow=5, slow_s=5.0)


class ShadowReplica(TokenReplica):
    """Behaves as ``candidate_mode`` says while it holds version 2; ``asked`` are the requests that
    it got then. ``wait`` answers those once ``finish`` is set."""

    candidate_mode = "tokens"

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.asked = []

    async def chat(self, request):
        if self.mirror.version != 2:
            return await super().chat(request)
        self.asked.append(await request.json())
        if self.candidate_mode == "wait":
            await self.finish.wait()
        if self.candidate_mode == "refuse":
            return web.json_response({"error": {"message": "no"}}, status=429)
        self.mode = self.candidate_mode
        try:
            return await super().chat(request)
        finally:
            self.mode = "tokens"


class InShadow:
    """A gateway whose decisions shadow version 2, over two replicas."""

    def __init__(self, gateway, decider):
        self.gateway, self.decider = gateway, decider

    @property
    def counts(self):
        return self.gateway.recorder.shadow()

    @property
    def candidate(self):
        return next(fake for fake in self.gateway.fakes if fake.mirror.version == 2)

    async def seen(self):
        """Wait until nothing is copied any more."""
        await until(lambda: self.counts.copies + sum(self.counts.dropped.values()) > 0)


def shadowed(mode="tokens", *, replicas=2, release=RELEASE, **options):
    """Runs a test in a shadow with candidates of this mode."""

    def wrap(test):
        async def run(tmp_path, monkeypatch):
            monkeypatch.setattr(routing, "POLL_EVERY_S", 0.02)
            monkeypatch.setattr(ShadowReplica, "candidate_mode", mode)
            bucket = published()
            decider = Decider(bucket)
            async with live_serving(
                bucket, tmp_path, monkeypatch, replicas=replicas, replica=ShadowReplica,
                release=release, **options,
            ) as gateway:  # fmt: skip
                decider.decide("serve", 0)
                decider.decide("gate", 0, 2)
                decider.decide("shadow", 0, 2, copies=1.0, salt="s")
                await until(lambda: gateway.recorder.shadow() is not None)
                if replicas > 1:
                    await until(lambda: held(gateway) == [0, 2])
                await test(InShadow(gateway, decider))

        def started(tmp_path, monkeypatch):
            asyncio.run(run(tmp_path, monkeypatch))

        started.__name__ = test.__name__
        return started

    return wrap


async def asks(found, count=1, **options):
    """Ask as users; returns the statuses and what users read."""
    said = []
    for number in range(count):
        status, data, _ = await found.gateway.ask(user=f"u{number}", **options)
        assert status == 200
        if not options.get("stream"):
            said.append(json.loads(data)["choices"][0]["message"]["content"])
    return said


@shadowed("calls")
async def test_a_broken_candidate_is_counted_and_no_user_sees_it(found):
    assert await asks(found, 3) == ["Hello there!"] * 3
    await until(lambda: found.counts.copies == 3)
    assert found.counts.rose == {"broken_call": 3}
    assert found.counts.fell == {}
    assert found.counts.first_s[0] > 0
    captures, reports = await found.gateway.uploaded()
    assert len(captures) == 3, "answers of the candidate are not stored"
    assert not reports
    assert {span for row in captures for span in row.spans} == {(0, 3)}
    assert {(row.arm, row.propensity, row.broken_calls) for row in captures} == {("serving", 1, 0)}
    body = found.candidate.asked[0]
    serving = next(f for f in found.gateway.fakes if f is not found.candidate)
    assert body == serving.seen[0], "a copy is the same request"


@shadowed()
async def test_an_equal_candidate_differs_in_nothing_streamed_or_whole(found):
    await asks(found, 2)
    await asks(found, 2, stream=True)
    await until(lambda: found.counts.copies == 4)
    assert (found.counts.rose, found.counts.fell, found.counts.dropped) == ({}, {}, {})
    await asyncio.to_thread(found.gateway.recorder._each_round)
    key = keys.live_gateway(found.gateway.recorder.name)
    data = found.gateway.bucket.get(key, limit=1 << 20)
    stored = decode_json(data, GatewayState, run="", key=key)
    assert stored.shadow == found.counts
    found.decider.log.poll()
    assert read_shadow(found.gateway.bucket, found.decider.log.newest) == [found.counts]
    assert b"u0" not in data
    assert stored.run == read_run(found.gateway.bucket).id


@shadowed("fail")
async def test_a_candidate_that_fails_is_an_error_of_the_candidate(found):
    await asks(found, 2)
    await until(lambda: found.counts.copies == 2)
    assert found.counts.rose == {"error": 2}
    assert found.gateway.recorder.counts["failed"] == 0


@shadowed("break")
async def test_a_stream_of_the_candidate_that_breaks_is_an_error(found):
    await asks(found, stream=True)
    await until(lambda: found.counts.copies == 1)
    assert found.counts.rose.keys() >= {"error"}


@shadowed("refuse")
async def test_a_copy_that_is_refused_says_nothing_of_the_candidate(found):
    await asks(found)
    await found.seen()
    assert (found.counts.copies, found.counts.dropped) == (0, {"refused": 1})


@shadowed("wait")
async def test_a_busy_candidate_delays_no_user_and_drops_copies(found):
    most = shadow.MOST_AT_ONCE
    assert len(await asks(found, most + 3)) == most + 3, "users are answered meanwhile"
    await until(lambda: len(found.candidate.asked) == most)
    await until(lambda: found.counts.dropped == {"busy": 3})
    assert found.counts.copies == 0
    found.candidate.finish.set()
    await until(lambda: found.counts.copies == most)


@shadowed("wait")
async def test_what_is_under_way_when_the_shadow_ends_is_forgotten(found):
    await asks(found)
    await until(lambda: found.candidate.asked)
    late = found.candidate
    found.decider.decide("rollback", 0, 2)
    await until(lambda: held(found.gateway) == [0, 0])
    late.finish.set()
    await asks(found, 3)
    assert (found.counts.copies, found.counts.dropped) == (0, {})
    assert len(late.asked) == 1


@shadowed()
async def test_requests_without_consent_are_not_copied(found):
    await asks(found, 3, capture="false")
    serving = next(fake for fake in found.gateway.fakes if fake is not found.candidate)
    serving.mode = "fail"  # That a replica failed is known without consent too.
    assert (await found.gateway.ask(capture="false"))[0] == 500
    serving.mode = "tokens"
    await asks(found, 1, n=2)
    await asks(found, text="with consent")
    await until(lambda: found.counts.copies)
    asked = [one["messages"][0]["content"] for one in found.candidate.asked]
    assert asked == ["with consent"]


@shadowed(release=ReleaseConfig(unit="user", shadow=5))
async def test_each_user_counts_once(found):
    for _ in range(3):
        await asks(found, 2)
    await until(lambda: found.counts.copies == 2)
    await asks(found, 2)
    assert len(found.candidate.asked) == 2


@shadowed(replicas=1)
async def test_with_one_replica_users_keep_it_and_copies_are_dropped(found):
    assert await asks(found) == ["Hello there!"]
    await found.seen()
    assert found.counts.dropped == {"no_replica": 1}
    assert held(found.gateway) == [0]


@in_loop
async def test_a_candidate_that_never_answers_fails(tmp_path, monkeypatch):
    monkeypatch.setattr(shadow, "WITHIN_S", 0.2)

    @shadowed("wait")
    async def scenario(found):
        await asks(found)
        await until(lambda: found.counts.copies == 1)
        assert found.counts.rose.keys() >= {"error"}

    await asyncio.to_thread(scenario, tmp_path, monkeypatch)


@shadowed(redact=lambda texts: ["x"] * len(texts))
async def test_redacted_conversations_leave_counts_only(found):
    await asks(found, 1, text="my name is Bob")
    await until(lambda: found.counts.copies == 1)
    await found.gateway.uploaded()
    await asyncio.to_thread(found.gateway.recorder._each_round)
    bucket = found.gateway.bucket
    stored = [bucket.get(key, limit=1 << 20) for key in bucket.list("live/")]
    assert not any(b"Bob" in data for data in stored)
