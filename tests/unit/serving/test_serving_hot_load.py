"""The hot-load contract over replicas that fail, lie, crash and come back."""

import asyncio
import json
from contextlib import asynccontextmanager

import aiohttp
import pytest
from aiohttp.test_utils import TestServer
from fake_replica import FakeVllm
from yarl import URL

from deltawire.errors import InputError
from deltawire.export.snapshots import snapshot_identity
from deltawire.serving import replica_set as replica_sets
from deltawire.serving.app import SNAPSHOT_HEADER, build_app
from deltawire.serving.contract import read_request
from deltawire.serving.replica_set import ReplicaSet
from deltawire.serving.vllm import VllmReplica
from deltawire.store import open_bucket
from deltawire.sync import load_mirror, read_manifest
from deltawire.testing.tiny import start_publisher, start_run, weights

NEWEST = 5
TOKEN = "a token"
ADMIN = "an admin token"
HOT_LOAD = "/hot_load/v1/models/hot_load"


@pytest.fixture
def bucket():
    bucket = open_bucket("memory://")
    publisher = start_publisher(bucket)
    for version in range(NEWEST + 1):
        publisher.publish(weights(version))
    publisher.close()
    return bucket


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(replica_sets, "POLL_EVERY_S", 0.02)


class Front:
    """The app on a real socket, and a client that has its token."""

    def __init__(self, session, server, replicas, run):
        self.session, self.server, self.replicas, self.run = session, server, replicas, run

    async def call(self, method, path, *, token=ADMIN, **options):
        headers = {"Authorization": f"Bearer {token}"} | options.pop("headers", {})
        url = self.server.make_url(path)
        async with self.session.request(method, url, headers=headers, **options) as answer:
            return answer.status, await answer.read(), answer.headers

    async def json(self, method, path, **options):
        status, data, _ = await self.call(method, path, **options)
        return status, json.loads(data)

    async def load(self, version, **more):
        body = {"identity": snapshot_identity(self.run, version), **more}
        return await self.json("POST", HOT_LOAD, json=body)

    async def until(self, condition):
        async with asyncio.timeout(120):
            while True:
                _, state = await self.json("GET", HOT_LOAD)
                if condition(state["replicas"]):
                    return state["replicas"]
                await asyncio.sleep(0.01)

    async def ready(self, version):
        identity = snapshot_identity(self.run, version)
        return await self.until(
            lambda replicas: all(
                r["readiness"] and r["current_snapshot_identity"] == identity for r in replicas
            )
        )


@asynccontextmanager
async def front(bucket, *, count=2, **options):
    run = start_run(bucket)
    fakes = [FakeVllm(bucket, run) for _ in range(count)]
    async with aiohttp.ClientSession() as upstream, aiohttp.ClientSession() as client:
        for fake in fakes:
            await fake.server.start_server()
        replicas = [
            VllmReplica(str(f.server.make_url("/")), upstream, key="upstream") for f in fakes
        ]
        fleet = ReplicaSet(bucket, run, replicas, **options)
        app = build_app(
            fleet,
            upstream,
            token=TOKEN,
            admin_token=ADMIN,
            upstream_model="served",
        )
        server = TestServer(app)
        await server.start_server()
        try:
            yield Front(client, server, fakes, run)
        finally:
            await server.close()
            for fake in fakes:
                await fake.server.close()


def test_a_snapshot_is_ready_when_every_replica_holds_it(bucket):
    async def scenario():
        async with front(bucket) as at:
            await at.ready(0)
            status, state = await at.load(3)
            assert status == 200
            assert {r["loading_state"]["stage"] for r in state["replicas"]} <= {"loading", "ready"}
            replicas = await at.ready(3)
            digest = read_manifest(bucket, at.run, 3).digest
            assert [r["digest"] for r in replicas] == [digest] * 2
            assert [fake.mirror.version for fake in at.replicas] == [3, 3]
            assert (await at.json("GET", "/health", token=""))[0] == 200
            await at.load(1, reset_prompt_cache=False)  # Back is a way too.
            await at.ready(1)
            _, ledger = await at.json("GET", "/v1/accounts/a/deployments/d/ledger")
            assert [entry["version"] for entry in ledger["snapshots"]] == [3, 1]
            assert all(len(entry["ready_at"]) == 2 for entry in ledger["snapshots"])
            await at.json("DELETE", "/v1/accounts/a/deployments/d/ledger")
            _, ledger = await at.json("GET", "/v1/accounts/a/deployments/d/ledger")
            assert ledger["snapshots"] == []

    asyncio.run(scenario())


def test_a_replica_that_fails_reports_why_and_keeps_its_version(bucket):
    async def scenario():
        async with front(bucket) as at:
            await at.ready(0)
            at.replicas[1].fails = True
            await at.load(2)
            replicas = await at.until(lambda rs: rs[1]["loading_state"]["stage"] == "error")
            assert "a blob is damaged" in replicas[1]["loading_state"]["message"]
            assert not replicas[1]["readiness"]
            assert replicas[1]["current_snapshot_identity"] == snapshot_identity(at.run, 0)
            assert (await at.json("GET", "/health"))[0] == 503
            at.replicas[1].fails = False  # It is tried again without being asked.
            await at.ready(2)
            assert at.replicas[1].loads.count(2) >= 2

    asyncio.run(scenario())


def test_no_request_goes_to_a_replica_whose_digest_is_wrong(bucket):
    async def scenario():
        async with front(bucket) as at:
            await at.ready(0)
            at.replicas[0].lies = True
            await at.until(lambda rs: rs[0]["loading_state"]["stage"] == "error")
            for _ in range(4):
                await at.call("POST", "/v1/completions", json={"model": "m"})
            assert not at.replicas[0].started.is_set()
            assert at.replicas[1].started.is_set()

    asyncio.run(scenario())


def test_a_replica_that_restarts_is_reloaded_automatically(bucket):
    async def scenario():
        async with front(bucket) as at:
            await at.load(4)
            await at.ready(4)
            at.replicas[0].mirror = load_mirror(bucket, at.run, at=0)  # A crash forgets.
            await at.until(lambda _: at.replicas[0].loads.count(4) >= 2)
            await at.ready(4)

    asyncio.run(scenario())


def test_a_replica_that_exited_costs_no_request(bucket):
    async def scenario():
        async with front(bucket) as at:
            await at.ready(0)
            await at.replicas[0].server.close()
            for _ in range(4):
                status, data, headers = await at.call(
                    "POST", "/v1/completions", json={"model": "m"}
                )
                assert status == 200
                assert data.endswith(b"data: [DONE]\n\n")
                assert headers[SNAPSHOT_HEADER] == snapshot_identity(at.run, 0)
            await at.until(lambda rs: not rs[0]["readiness"] and rs[1]["readiness"])
            await at.replicas[1].server.close()
            status, error = await at.json("POST", "/v1/completions", json={"model": "m"})
            assert status == 503
            assert "no replica" in error["error"]["message"]

    asyncio.run(scenario())


def test_streams_are_proxied_and_the_model_is_renamed(bucket):
    async def scenario():
        async with front(bucket, count=1) as at:
            await at.ready(0)
            for prefix in ("", "/inference"):
                body = {"model": "accounts/a/models/m@s", "stream": True}
                status, data, _ = await at.call("POST", f"{prefix}/v1/completions", json=body)
                assert (status, data) == (200, b"data: one served\n\ndata: [DONE]\n\n")
            _, models = await at.json("GET", "/v1/models?x=1")
            assert models == {"data": [], "query": {"x": "1"}}

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "path",
    ["..%2Fcollective_rpc", "%2E%2E/collective_rpc", "x%2F..%2F..%2Fcollective_rpc", "models%3Fx"],
)
def test_no_path_leads_to_a_replicas_own_calls(bucket, path):
    async def scenario():
        async with front(bucket, count=1) as at:
            await at.ready(0)
            call = {"method": "deltawire_want", "args": ["1"]}
            url = URL(f"{at.server.make_url('/v1/')}{path}", encoded=True)
            headers = {"Authorization": f"Bearer {TOKEN}"}
            async with at.session.post(url, headers=headers, json=call) as answer:
                assert answer.status == 404
            assert at.replicas[0].loads == []

    asyncio.run(scenario())


def test_a_broken_stream_does_not_look_complete(bucket):
    async def scenario():
        async with front(bucket, count=1) as at:
            await at.ready(0)
            with pytest.raises(aiohttp.ClientError):
                await at.call("POST", "/v1/completions", json={"model": "m", "break": True})

    asyncio.run(scenario())


def test_a_session_stays_with_one_replica(bucket):
    async def scenario():
        async with front(bucket) as at:
            await at.ready(0)
            headers = {"x-session-affinity": "s"}
            for _ in range(6):
                await at.call("POST", "/v1/completions", json={"model": "m"}, headers=headers)
            assert sum(fake.started.is_set() for fake in at.replicas) == 1

    asyncio.run(scenario())


def test_sync_drains_before_it_loads_and_defers_new_requests(bucket):
    async def scenario():
        async with front(bucket, count=1, transition="sync") as at:
            await at.ready(0)
            (fake,) = at.replicas
            running = asyncio.create_task(
                at.call("POST", "/v1/completions", json={"model": "m", "wait": True})
            )
            await fake.started.wait()
            await at.load(2)
            async with asyncio.timeout(120):
                while (await at.call("POST", "/v1/completions", json={"model": "m"}))[0] != 425:
                    await asyncio.sleep(0.01)
            assert fake.loads == []
            fake.finish.set()
            assert (await running)[0] == 200
            await at.ready(2)
            assert (await at.call("POST", "/v1/completions", json={"model": "m"}))[0] == 200

    asyncio.run(scenario())


def test_sync_gives_up_on_a_request_that_does_not_end(bucket):
    async def scenario():
        async with front(bucket, count=1, transition="sync", drain_s=0.05) as at:
            await at.ready(0)
            (fake,) = at.replicas
            running = asyncio.create_task(
                at.call("POST", "/v1/completions", json={"model": "m", "wait": True})
            )
            await fake.started.wait()
            await at.load(2)
            (replica,) = await at.until(lambda rs: rs[0]["loading_state"]["stage"] == "error")
            assert "had not ended" in replica["loading_state"]["message"]
            fake.finish.set()
            await running
            await at.ready(2)

    asyncio.run(scenario())


def test_async_loads_under_a_running_request(bucket):
    async def scenario():
        async with front(bucket, count=1) as at:
            await at.ready(0)
            (fake,) = at.replicas
            running = asyncio.create_task(
                at.call("POST", "/v1/completions", json={"model": "m", "wait": True})
            )
            await fake.started.wait()
            await at.load(2)
            await at.ready(2)
            fake.finish.set()
            assert (await running)[1].endswith(b"data: [DONE]\n\n")

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"identity": "../../etc"}, "identity"),
        ({"identity": "other-00000000-0000000001"}, "not a snapshot of this run"),
        ({"identity": "99"}, "no version 99"),
        ({"identity": "1" * 30}, "not a snapshot of this run"),
        ({"identity": "1", "reset_prompt_cache": "some"}, "reset_prompt_cache"),
        ({"identity": "1", "compress": True}, "compress"),
        ({}, "identity"),
        ([], "object"),
        (
            {"identity": "1", "incremental_snapshot_metadata": {"previous_snapshot_identity": "2"}},
            "cannot be a delta to version 2",
        ),
        ({"identity": "1", "incremental_snapshot_metadata": {}}, "previous_snapshot_identity"),
    ],
)
def test_a_wrong_request_is_one_clear_error_and_changes_nothing(bucket, body, reason):
    async def scenario():
        async with front(bucket, count=1) as at:
            await at.ready(0)
            status, answer = await at.json("POST", HOT_LOAD, json=body)
            assert status == 400
            assert reason in answer["error"]["message"]
            assert at.replicas[0].loads == []
            await at.ready(0)

    asyncio.run(scenario())


@pytest.mark.parametrize("data", [b"", b"\xff", b"{", b"[" * 60000, b"x" * (1 << 17)])
def test_a_body_that_is_no_request(data):
    with pytest.raises(InputError):
        read_request(data)


def test_only_health_works_without_a_token(bucket):
    async def scenario():
        async with front(bucket, count=1) as at:
            for token in ("", "wrong", TOKEN + "x", "\u00e9"):
                for method, path in (
                    ("GET", HOT_LOAD),
                    ("POST", HOT_LOAD),
                    ("GET", "/v1/models"),
                    ("GET", "/nowhere"),
                    ("DELETE", "/v1/accounts/a/deployments/d/ledger"),
                ):
                    assert (await at.call(method, path, token=token))[0] == 401
            assert (await at.call("GET", "/nowhere"))[0] == 404
            await at.ready(0)
            for path in ("/health", "/livez", "/readyz"):
                assert (await at.call("GET", path, token=""))[0] == 200

    asyncio.run(scenario())
