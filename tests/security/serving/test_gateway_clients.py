"""Clients with and without tokens cannot harm the gateway, and its logs reveal nothing."""

import asyncio
import logging
import os
import ssl
import subprocess
import sys
import urllib.request
from contextlib import asynccontextmanager

import aiohttp
import pytest
from aiohttp import web
from fake_replica import FakeVllm

from deltawire.errors import InputError
from deltawire.launch.gateway import GatewayOptions, run_gateway
from deltawire.launch.live_secret import SecretPlace, create_secret
from deltawire.serving import app as gateway
from deltawire.serving import bodies, replica_set
from deltawire.serving.app import build_app, build_runner
from deltawire.serving.replica_set import ReplicaSet
from deltawire.serving.vllm import VllmReplica
from deltawire.store import open_bucket
from deltawire.sync import read_run
from deltawire.testing.tiny import start_publisher, start_run, weights

TOKEN, ADMIN = "sampling-secret", "admin-secret"
HOT_LOAD = "/hot_load/v1/models/hot_load"
ALLOWED_S = gateway.HEADER_WITHIN_S


@pytest.fixture
def bucket():
    bucket = open_bucket("memory://")
    publisher = start_publisher(bucket)
    publisher.publish(weights(0))
    publisher.close()
    return bucket


class Gateway:
    """The gateway on a real socket, as ``deltawire gateway`` runs it."""

    def __init__(self, client, port, fake, replicas, bodies):
        self.client, self.port, self.fake, self.replicas = client, port, fake, replicas
        self.bodies = bodies

    def url(self, path):
        return f"http://127.0.0.1:{self.port}{path}"

    async def call(self, method, path, token, **options):
        headers = {"Authorization": f"Bearer {token}"}
        url = self.url(path)
        async with self.client.request(method, url, headers=headers, **options) as answer:
            return answer.status, await answer.text()


@asynccontextmanager
async def serving(bucket, monkeypatch):
    monkeypatch.setattr(replica_set, "POLL_EVERY_S", 0.02)
    run = start_run(bucket)
    fake = FakeVllm(bucket, run)
    async with aiohttp.ClientSession() as upstream, aiohttp.ClientSession() as client:
        await fake.server.start_server()
        replica = VllmReplica(str(fake.server.make_url("/")), upstream, key="upstream")
        replicas = ReplicaSet(bucket, run, [replica])
        app = build_app(replicas, upstream, token=TOKEN, admin_token=ADMIN)
        runner = build_runner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        try:
            async with asyncio.timeout(120):
                while not replicas.ready:
                    await asyncio.sleep(0.01)
            yield Gateway(client, runner.addresses[0][1], fake, replicas, app[bodies.BODIES])
        finally:
            await runner.cleanup()
            await fake.server.close()


async def closed_after(port, sent):
    """The gateway's answer on a connection on which only ``sent`` arrives, once it has closed it:
    before the time that it allows otherwise."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(sent)
    async with asyncio.timeout(ALLOWED_S - 5):
        answer = await reader.read()
    writer.close()
    return answer


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n",
    ],
    ids=["nothing", "half a head", "one request"],
)
def test_a_connection_that_sends_nothing_more_is_closed(bucket, monkeypatch, sent):
    monkeypatch.setattr(gateway, "HEADER_WITHIN_S", 0.3)

    async def scenario():
        async with serving(bucket, monkeypatch) as at:
            await closed_after(at.port, sent)

    asyncio.run(scenario())


def test_a_body_that_does_not_come_ends_its_request(bucket, monkeypatch):
    monkeypatch.setattr(bodies, "BODY_WITHIN_S", 0.3)

    async def scenario():
        async with serving(bucket, monkeypatch) as at:
            head = (
                f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n"
                "Content-Length: 100\r\nConnection: close\r\n\r\n{"
            )
            answer = await closed_after(at.port, head.encode())
            assert answer.startswith(b"HTTP/1.1 408")
            assert not at.fake.started.is_set()

    asyncio.run(scenario())


async def pouring(port, count, token, *, whole=1 << 20):
    """Connections that sent ``count`` bytes each of a body and nothing more; the first bytes of
    their answers, empty for those that the gateway waits for."""
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\n"
        f"Content-Length: {whole}\r\n\r\n"
    )
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(head.encode() + b"x" * count)
    return reader, writer


def test_bodies_of_all_connections_share_a_budget(bucket, monkeypatch):
    monkeypatch.setattr(gateway, "BODIES_BYTES", 1 << 20)

    async def scenario():
        async with serving(bucket, monkeypatch) as at, asyncio.timeout(50):
            for _ in range(8):  # Without a token a body is not read at all.
                reader, writer = await pouring(at.port, 1 << 16, "wrong")
                assert (await reader.readline()).startswith(b"HTTP/1.1 401")
                writer.close()
            assert at.bodies.held == 0
            clients = [await pouring(at.port, 300 << 10, TOKEN) for _ in range(3)]
            while at.bodies.held < 900 << 10:
                await asyncio.sleep(0.01)
            clients.append(await pouring(at.port, 300 << 10, TOKEN))
            assert (await clients[-1][0].readline()).startswith(b"HTTP/1.1 503")
            for _, writer in clients:
                writer.close()
            while at.bodies.held:
                await asyncio.sleep(0.01)
            body = {"model": "m", "prompt": "x" * (300 << 10)}
            assert (await at.call("POST", "/v1/completions", TOKEN, json=body))[0] == 200
            assert at.bodies.held == 0

    asyncio.run(scenario())


def test_a_bodys_values_count_as_what_they_become(bucket, monkeypatch):
    monkeypatch.setattr(gateway, "BODIES_BYTES", 8 << 20)

    async def scenario():
        async with serving(bucket, monkeypatch) as at:
            body = b'{"prompt": [%s]}' % b",".join([b"{}"] * 100_000)
            status, text = await at.call("POST", "/v1/completions", TOKEN, data=body)
            assert status == 400
            assert "too much memory" in text
            assert at.bodies.held == 0

    asyncio.run(scenario())


def test_a_client_that_hangs_up_cancels_its_request_at_the_replica(bucket, monkeypatch):
    async def scenario():
        async with serving(bucket, monkeypatch) as at:
            body = {"model": "m", "wait": True}
            call = asyncio.create_task(at.call("POST", "/v1/completions", TOKEN, json=body))
            async with asyncio.timeout(50):
                await at.fake.started.wait()
                call.cancel()
                await at.fake.cancelled.wait()
                while at.replicas._members[0].requests:
                    await asyncio.sleep(0.01)

    asyncio.run(scenario())


def test_a_client_that_reads_nothing_does_not_hold_its_replica(bucket, monkeypatch):
    monkeypatch.setattr(gateway, "WRITE_WITHIN_S", 0.3)

    flooding = asyncio.Event()

    async def flood(self, request):
        flooding.set()
        answer = web.StreamResponse()
        await answer.prepare(request)
        while True:
            await answer.write(b"x" * (1 << 20))

    monkeypatch.setattr(FakeVllm, "models", flood)

    async def scenario():
        async with serving(bucket, monkeypatch) as at:
            _, writer = await asyncio.open_connection("127.0.0.1", at.port, limit=1 << 10)
            head = f"GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n\r\n"
            writer.write(head.encode())
            async with asyncio.timeout(50):
                await flooding.wait()
                while at.replicas._members[0].requests:
                    await asyncio.sleep(0.01)
            writer.close()

    asyncio.run(scenario())


def test_the_sampling_token_cannot_change_weights(bucket, monkeypatch):
    async def scenario():
        async with serving(bucket, monkeypatch) as at:
            ledger = "/v1/accounts/a/deployments/d/ledger"
            admin_only = [("POST", HOT_LOAD), ("GET", HOT_LOAD), ("GET", ledger)]
            for method, path in [*admin_only, ("DELETE", ledger)]:
                assert (await at.call(method, path, TOKEN, json={"identity": "0"}))[0] == 403
                assert (await at.call(method, path, "", json={"identity": "0"}))[0] == 401
                assert (await at.call(method, path, ADMIN, json={"identity": "0"}))[0] == 200
            assert at.fake.loads == []
            for token in (TOKEN, ADMIN):
                body = {"model": "m"}
                assert (await at.call("POST", "/v1/completions", token, json=body))[0] == 200

    asyncio.run(scenario())


def test_logs_hold_no_traceback_and_no_token(bucket, monkeypatch, caplog):
    caplog.set_level(logging.DEBUG)

    def fail(self):
        raise RuntimeError(f"planted with {ADMIN}")

    async def scenario():
        async with serving(bucket, monkeypatch) as at:
            monkeypatch.setattr(ReplicaSet, "state", fail)
            status, text = await at.call("GET", HOT_LOAD, ADMIN)
            assert status == 500
            assert ADMIN not in text
            answer = await closed_after(at.port, f"GET /{TOKEN} \x01\r\n\r\n".encode())
            assert b"400" in answer.splitlines()[0]

    asyncio.run(scenario())
    assert "request failed: RuntimeError" in caplog.text
    for secret in (TOKEN, ADMIN, "upstream", "Traceback"):
        assert secret not in caplog.text


def test_credentials_in_a_replicas_url_are_refused_without_echo(tmp_path):
    options = GatewayOptions(replicas=["http://user:hunter2@host:8000"])
    with pytest.raises(InputError) as caught:
        run_gateway(str(tmp_path), options)
    assert "URL of host contains credentials" in str(caught.value)
    assert "hunter2" not in str(caught.value)
    replica = VllmReplica("http://user:hunter2@host:8000/a", None)
    assert replica.name == "host:8000/a"


@pytest.mark.parametrize(("token", "admin"), [("", ADMIN), (TOKEN, ""), (TOKEN, TOKEN)])
def test_the_gateway_needs_two_tokens(token, admin):
    with pytest.raises(InputError, match="two different tokens"):
        build_app(None, None, token=token, admin_token=admin)


def certificate(folder):
    """A self-signed certificate for localhost, and its key."""
    done = subprocess.run(
        [
            "openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1",
            "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1",
            "-keyout", str(folder / "key.pem"), "-out", str(folder / "cert.pem"),
        ],
        capture_output=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def command(run, *arguments, **environment):
    return subprocess.Popen(
        [
            sys.executable, "-m", "deltawire", "gateway", run, "--port", "0",
            "--replica", "http://127.0.0.1:1", *arguments,
        ],
        stderr=subprocess.PIPE, text=True, env={**os.environ, **environment},
    )  # fmt: skip


def test_https_and_no_token_in_a_log(tmp_path):
    bucket = open_bucket(str(tmp_path / "run"), create=True)
    publisher = start_publisher(bucket)
    publisher.publish(weights(0))
    publisher.close()
    create_secret(bucket, read_run(bucket), SecretPlace(tmp_path / "secret"))
    secret = ("--secret", str(tmp_path / "secret"))
    refused = command(bucket.url, *secret, DELTAWIRE_TOKEN=TOKEN)
    _, line = refused.communicate(timeout=120)
    assert refused.returncode == 2
    assert "--admin-token-file" in line
    certificate(tmp_path)
    files = (
        *secret,
        "--tls-cert",
        str(tmp_path / "cert.pem"),
        "--tls-key",
        str(tmp_path / "key.pem"),
    )
    process = command(
        bucket.url, *secret, *files, DELTAWIRE_TOKEN=TOKEN, DELTAWIRE_ADMIN_TOKEN=ADMIN
    )
    try:
        written = process.stderr.readline()
        url = written.split(" on ")[1].strip()
        assert url.startswith("https://")
        context = ssl.create_default_context(cafile=str(tmp_path / "cert.pem"))
        with pytest.raises(urllib.error.HTTPError, match="503"):
            urllib.request.urlopen(f"{url}/health", context=context, timeout=120)
    finally:
        process.terminate()
        rest = process.communicate(timeout=120)[1]
    assert not {TOKEN, ADMIN} & set((written + rest).split())
    bad = command(
        bucket.url,
        *secret,
        "--tls-cert",
        __file__,
        DELTAWIRE_TOKEN=TOKEN,
        DELTAWIRE_ADMIN_TOKEN=ADMIN,
    )
    assert "cannot use --tls-cert" in bad.communicate(timeout=120)[1]
