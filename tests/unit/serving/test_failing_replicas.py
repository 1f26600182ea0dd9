"""Replicas that fail, hang or are busy: who gets the next request, and what clients see."""

import asyncio
import json
import time
from contextlib import asynccontextmanager
from types import SimpleNamespace

import aiohttp
import pytest
from aiohttp.test_utils import TestServer
from fake_replica import FakeVllm
from live_gateway import live_serving, published

from deltawire.serving import outlier as outlier_module
from deltawire.serving import replica_set as replica_sets
from deltawire.serving.app import (
    LIMITS,
    REPLICAS,
    SESSION,
    CallLimits,
    Tries,
    _pieces_of,
    build_app,
    build_session,
    call_replica,
)
from deltawire.serving.outlier import FAILURES, LEFT_OUT_AT_MOST_S, LEFT_OUT_S, Outlier
from deltawire.serving.replica import HeldVersion, Replica
from deltawire.serving.replica_set import LEAST_LOAD, ReplicaSet, TargetVersion
from deltawire.serving.vllm import VllmReplica
from deltawire.testing.tiny import start_run

QUICK = CallLimits(connect_s=10.0, first_s=2.0, silence_s=2.0, whole_s=2.0)
"""Enough for a sound replica on a busy machine; each test waits for a hanging one once or twice."""
PATIENT = CallLimits()


@pytest.fixture
def bucket():
    return published(versions=1)


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(replica_sets, "POLL_EVERY_S", 0.02)


@asynccontextmanager
async def front(bucket, *, count=2, limits=PATIENT):
    """A client's call ``ask``, the fake replicas and the set of them."""
    run = start_run(bucket)
    fakes = [FakeVllm(bucket, run) for _ in range(count)]
    async with build_session() as upstream, build_session() as client:
        for fake in fakes:
            await fake.server.start_server()
        replicas = ReplicaSet(
            bucket,
            run,
            [VllmReplica(str(f.server.make_url("/")), upstream, key="upstream") for f in fakes],
        )
        app = build_app(replicas, upstream, token="t", admin_token="a", limits=limits)
        server = TestServer(app)
        await server.start_server()

        async def ask(path="/v1/completions", **body):
            headers = {"Authorization": "Bearer t"}
            method, more = ("POST", {"json": {"model": "m", **body}}) if body else ("GET", {})
            async with client.request(
                method, server.make_url(path), headers=headers, **more
            ) as answer:
                return answer.status, await answer.read()

        try:
            async with asyncio.timeout(60):
                while not replicas.ready:
                    await asyncio.sleep(0.01)
            yield ask, fakes, replicas
        finally:
            await server.close()
            for fake in fakes:
                await fake.server.close()


def test_a_replica_that_always_fails_is_left_out_and_no_client_sees_it(bucket, monkeypatch):
    monkeypatch.setattr(outlier_module, "LEFT_OUT_S", LEFT_OUT_AT_MOST_S)

    async def scenario():
        async with front(bucket) as (ask, fakes, replicas):
            fakes[0].status = 500
            for _ in range(40):
                assert (await ask(prompt="x"))[0] == 200
            assert fakes[0].asked == FAILURES
            assert fakes[1].asked == 40
            messages = [one.loading_state.message for one in replicas.state().replicas]
            assert [bool(message) for message in messages] == [True, False]
            assert "5 requests in a row failed" in messages[0]
            assert replicas.ready, "it holds its version, whatever it answers"

    asyncio.run(scenario())


def test_if_all_replicas_fail_half_of_them_stay(bucket):
    async def scenario():
        async with front(bucket, count=1) as (ask, fakes, _):
            fakes[0].status = 500
            for _ in range(2 * FAILURES):
                status, body = await ask(prompt="x")
                assert (status, json.loads(body)) == (500, {"error": "of the replica"})
            fakes[0].status = 200
            assert (await ask(prompt="x"))[0] == 200
        async with front(bucket, count=2) as (ask, fakes, replicas):
            fakes[0].status, fakes[1].status = 500, 503
            for _ in range(3 * FAILURES):
                assert (await ask(prompt="x"))[0] in (500, 503)
            messages = [bool(one.loading_state.message) for one in replicas.state().replicas]
            assert sorted(messages) == [False, True]

    asyncio.run(scenario())


def test_a_replica_that_hangs_is_given_up_and_another_one_answers(bucket):
    async def scenario():
        async with front(bucket, limits=QUICK) as (ask, fakes, _):
            fakes[0].hangs = True
            for stream in (True, False):
                status, body = await ask(prompt="x", stream=stream)
                assert status == 200
                assert body.endswith(b"[DONE]\n\n")
            assert fakes[0].asked > 0

    asyncio.run(scenario())


def test_only_what_the_client_did_not_get_is_tried_again(bucket):
    """A stream that breaks, or stays silent, after its first piece ends there."""

    async def scenario():
        async with front(bucket, limits=QUICK) as (ask, fakes, _):
            for more in ({"break": True}, {"wait": True}):
                asked = [fake.asked for fake in fakes]
                with pytest.raises(aiohttp.ClientError):
                    await ask(prompt="x", stream=True, **more)
                assert sum(fake.asked for fake in fakes) == sum(asked) + 1

    asyncio.run(scenario())


def test_a_request_is_tried_on_two_replicas_at_most(bucket):
    async def scenario():
        async with front(bucket, count=3) as (ask, fakes, _):
            for fake in fakes:
                fake.status = 503
            assert (await ask(prompt="x"))[0] == 503
            assert sum(fake.asked for fake in fakes) == 2

    asyncio.run(scenario())


@pytest.mark.parametrize("status", [500, 501])
def test_what_a_request_causes_on_each_replica_leaves_none_out(bucket, status):
    async def scenario():
        async with front(bucket, count=4) as (ask, fakes, replicas):
            for fake in fakes:
                fake.status = status
            for _ in range(4 * FAILURES):
                assert (await ask(prompt="x"))[0] == status
            tries = 1 if status == 501 else 2
            assert sum(fake.asked for fake in fakes) == tries * 4 * FAILURES
            assert not any(one.loading_state.message for one in replicas.state().replicas)

    asyncio.run(scenario())


def test_a_replica_that_lists_its_model_still_fails_its_answers(bucket):
    async def scenario():
        async with front(bucket, count=2) as (ask, fakes, replicas):
            fakes[0].status = 500
            for _ in range(FAILURES):
                assert (await ask(prompt="x"))[0] == 200
                assert (await ask("/v1/models"))[0] == 200
            assert replicas._members[0].outlier.is_left_out(time.monotonic())

    asyncio.run(scenario())


@pytest.mark.parametrize("stream", [True, 1])
def test_a_stream_may_pause_for_longer_than_its_first_piece_may_take(bucket, stream):
    limits = CallLimits(connect_s=10.0, first_s=2.0, silence_s=30.0, whole_s=2.0)

    async def scenario():
        async with front(bucket, count=1, limits=limits) as (ask, fakes, _):
            asked = asyncio.ensure_future(ask(prompt="x", stream=stream, wait=True))
            await fakes[0].started.wait()
            await asyncio.wait([asked], timeout=limits.first_s + 0.5)
            fakes[0].finish.set()
            assert (await asked)[0] == 200

    asyncio.run(scenario())


class SlowContent:
    """The content of an answer whose 30 pieces take 1.5 s together."""

    def __init__(self):
        self.content, self._left = self, 30

    async def readany(self):
        await asyncio.sleep(0.05)
        self._left -= 1
        return b"piece" if self._left >= 0 else b""


@pytest.mark.parametrize("silence_s", [None, 30.0])
def test_the_pieces_of_a_whole_answer_share_one_limit(silence_s):
    async def scenario():
        deadline = asyncio.get_running_loop().time() + 1.0
        return [piece async for piece in _pieces_of(SlowContent(), deadline, silence_s)]

    if silence_s is None:
        with pytest.raises(TimeoutError):
            asyncio.run(scenario())
    else:
        assert len(asyncio.run(scenario())) == 30


def stub_request():
    """As much of a request for an answer as its tries and its call read."""
    route = SimpleNamespace(resource=SimpleNamespace(canonical="/v1/completions"))
    return SimpleNamespace(
        app={},
        match_info=SimpleNamespace(route=route),
        method="POST",
        headers={},
        query={},
    )


def test_a_status_whose_body_breaks_off_is_one_failure():
    reports = []
    replicas = SimpleNamespace(report=lambda member, *, ok: reports.append((member, ok)))
    request = stub_request()
    request.app[REPLICAS] = replicas
    tries = Tries(request)
    tries.answered("member", 500)
    tries.failed("member")
    tries.close()
    assert reports == [("member", False)]


def test_the_headers_and_the_first_piece_of_a_stream_share_one_limit():
    class SlowAnswer(SlowContent):
        async def readany(self):
            await asyncio.sleep(0.6)
            return b"piece"

        async def __aenter__(self):
            return self

        async def __aexit__(self, *_):
            return None

    async def answer_slowly(*_, **__):
        await asyncio.sleep(0.6)
        return SlowAnswer()

    async def scenario():
        request = stub_request()
        request.app[LIMITS] = CallLimits(first_s=1.0)
        request.app[SESSION] = SimpleNamespace(request=answer_slowly)
        member = SimpleNamespace(replica=Replica())
        member.replica.base_url = member.replica.name = ""
        async with call_replica(request, member, b"", stream=True) as (_, pieces):
            await anext(pieces)

    with pytest.raises(TimeoutError):
        asyncio.run(scenario())


def test_what_a_client_did_wrong_is_no_failure_of_a_replica(bucket):
    async def scenario():
        async with front(bucket) as (ask, fakes, replicas):
            fakes[0].status = fakes[1].status = 400
            for _ in range(4 * FAILURES):
                assert (await ask(prompt="x"))[0] == 400
            assert sum(fake.asked for fake in fakes) == 4 * FAILURES
            assert not any(one.loading_state.message for one in replicas.state().replicas)

    asyncio.run(scenario())


def test_the_probes_of_an_orchestrator_need_one_replica(bucket):
    async def scenario():
        async with front(bucket) as (ask, _, replicas):
            one, other = replicas._members
            replicas._closing = True
            for task in replicas._tasks.values():
                task.cancel()
            one.held, other.held = None, HeldVersion(0, "0" * 32)
            assert [(await ask(path))[0] for path in ("/livez", "/readyz")] == [200, 200]
            assert (await ask("/health"))[0] == 503
            other.held = None
            assert [(await ask(path))[0] for path in ("/livez", "/readyz")] == [200, 503]

    asyncio.run(scenario())


def test_a_session_moves_on_once_its_replica_has_many_more_requests(bucket):
    async def scenario():
        async with front(bucket, count=3) as (_, _, replicas):
            home = replicas.pick("a session")
            for _ in range(LEAST_LOAD):
                assert replicas.pick("a session") is home
                replicas.begin(home)
            away = replicas.pick("a session")
            assert away is not home
            for _ in range(200):
                replicas.begin(replicas.pick("a session"))
            loads = sorted(member.requests for member in replicas._members)
            assert loads[-1] <= 1.25 * sum(loads) / 3 + 1
            assert loads[0] > 0

    asyncio.run(scenario())


def test_many_streams_under_way_keep_no_request_waiting(bucket):
    """aiohttp opens 100 connections at most unless it is told otherwise."""

    async def scenario():
        async with front(bucket, count=1) as (ask, fakes, _):
            under_way = [asyncio.create_task(ask(prompt="a", wait=True)) for _ in range(130)]
            async with asyncio.timeout(60):
                while fakes[0].asked < len(under_way):
                    await asyncio.sleep(0.01)
            assert (await ask(prompt="b"))[0] == 200
            fakes[0].finish.set()
            assert {status for status, _ in await asyncio.gather(*under_way)} == {200}

    asyncio.run(scenario())


def test_no_untested_version_answers_because_a_replica_failed(bucket):
    """Users of a candidate whose replica fails get the version that serves, and not the other way
    around."""

    async def scenario():
        async with front(bucket) as (_, _, replicas):
            serving, candidate = replicas._members
            replicas._closing = True
            for task in replicas._tasks.values():
                task.cancel()
            serving.held, candidate.held = (HeldVersion(n, "0" * 32) for n in (0, 1))
            replicas.wanted = TargetVersion(0, "0" * 32, "all")
            pick = replicas.pick
            assert pick(version=0) is serving
            assert pick(version=1) is candidate
            assert pick(version=0, without=[serving]) is None
            assert pick(version=1, without=[candidate]) is serving
            for _ in range(FAILURES):
                replicas.report(serving, ok=False)
            assert pick(version=0) is serving
            assert pick(version=1, without=[candidate]) is None
            serving.outlier = Outlier()
            for _ in range(FAILURES):
                replicas.report(candidate, ok=False)
            assert pick(version=1) is serving
            serving.held = None
            assert pick(version=0) is candidate, "as before: it is the only one that answers"

    asyncio.run(scenario())


def test_a_replica_on_trial_gets_one_request_at_a_time(bucket):
    async def scenario():
        async with front(bucket) as (_, _, replicas):
            member, other = replicas._members
            for _ in range(FAILURES):
                replicas.report(member, ok=False)
            member.outlier.until = 0.0
            replicas.begin(other)
            assert replicas.pick() is member
            replicas.begin(member)
            for _ in range(5):
                assert replicas.pick() is other
                replicas.begin(other)
            replicas.end(member)
            assert replicas.pick() is member
            replicas.report(member, ok=True)
            replicas.begin(member)
            assert replicas.pick() is member

    asyncio.run(scenario())


def test_an_outlier_comes_back_on_trial_and_is_left_out_longer_each_time():
    outlier, now, waits = Outlier(), 0.0, []
    for _ in range(FAILURES - 1):
        outlier.report(ok=False, now=now, may_leave_out=True)
        assert not outlier.is_left_out(now)
    for _ in range(8):
        outlier.report(ok=False, now=now, may_leave_out=True)
        assert outlier.is_left_out(now)
        outlier.report(ok=False, now=now, may_leave_out=True)  # One that was under way.
        waits.append(outlier.until - now)
        now = outlier.until
        assert not outlier.is_left_out(now)
    assert waits == [min(LEFT_OUT_S * 2**n, LEFT_OUT_AT_MOST_S) for n in range(8)]
    outlier.report(ok=True, now=now, may_leave_out=True)
    for _ in range(FAILURES - 1):
        outlier.report(ok=False, now=now, may_leave_out=True)
    assert not outlier.is_left_out(now)
    outlier.report(ok=False, now=now, may_leave_out=False)
    assert not outlier.is_left_out(now)
    outlier.report(ok=False, now=now, may_leave_out=True)
    assert outlier.until - now == LEFT_OUT_S


@pytest.mark.parametrize("mode", ["fail", "hang"])
@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_another_replica_gave_is_stored_once_and_as_no_failure(
    bucket, tmp_path, monkeypatch, mode, stream
):
    async def scenario():
        serving = live_serving(bucket, tmp_path, monkeypatch, replicas=2, call_limits=QUICK)
        async with serving as gateway:
            gateway.fakes[0].mode = mode
            count = 0
            while not gateway.fakes[0].seen:
                assert count < 12, "each request went to the other one at once"
                status, data, _ = await gateway.ask(f"question {count}", stream=stream)
                assert status == 200
                assert b'"receipt"' in data
                count += 1
            captures, _ = await gateway.uploaded()
            assert [one.finish for one in captures] == ["stop"] * count
            assert [one.retried for one in captures] == [False] * (count - 1) + [True]
            assert gateway.recorder.counts["broken"] == 0

    asyncio.run(scenario())


def test_an_answer_that_no_replica_gave_is_one_failure(bucket, tmp_path, monkeypatch):
    async def scenario():
        serving = live_serving(bucket, tmp_path, monkeypatch, replicas=2, call_limits=QUICK)
        async with serving as gateway:
            for fake, mode in zip(gateway.fakes, ("fail", "hang"), strict=True):
                fake.mode = mode
            status, _, _ = await gateway.ask("question")
            assert status in (500, 503)
            assert sum(len(fake.seen) for fake in gateway.fakes) == 2
            captures, _ = await gateway.uploaded()
            assert [one.finish for one in captures] == ["error"]

    asyncio.run(scenario())
