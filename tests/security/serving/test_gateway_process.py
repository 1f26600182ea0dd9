"""A `deltawire gateway` process on loopback, and clients that send what no honest one does."""

import asyncio
import hashlib
import hmac
import json
import os
import subprocess
import sys
import threading
from contextlib import contextmanager

import pytest
from aiohttp import web
from fake_replica import FakeVllm
from live_gateway import TokenReplica

from deltawire.launch.live_secret import SecretPlace, create_secret
from deltawire.store import open_bucket
from deltawire.testing.tiny import start_publisher, start_run, weights

TOKEN, ADMIN, HOOK = "sampling-secret", "admin-secret", "hook-secret"
WEBHOOK = "/v1/feedback/webhook"


class OpenReplica(TokenReplica):
    """A replica that answers whatever path and method it is asked for, and lists them."""

    def __init__(self, bucket, run):
        super().__init__(bucket, run)
        self.asked = []
        self.server.app.router.add_route("*", "/{path:.*}", self.anything)

    async def anything(self, request):
        self.asked.append((request.method, request.raw_path))
        return web.json_response({"loaded": True})

    async def models(self, request):
        """The gateway itself asks for the names of the model: no client's request is here."""
        assert (request.raw_path, request.query_string) == ("/v1/models", "")
        return await FakeVllm.models(self, request)

    async def chat(self, request):
        self.asked.append((request.method, request.raw_path))
        return await super().chat(request)


@contextmanager
def replica(folder):
    """A replica in a thread, next to a run of one version."""
    bucket = open_bucket(str(folder / "run"), create=True)
    publisher = start_publisher(bucket)
    publisher.publish(weights(0))
    publisher.close()
    loop = asyncio.new_event_loop()
    fake = OpenReplica(bucket, start_run(bucket))
    loop.run_until_complete(fake.server.start_server())
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield bucket, fake
    finally:
        asyncio.run_coroutine_threadsafe(fake.server.close(), loop).result(30)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


class Process:
    """The gateway's port, its replica, and raw requests."""

    def __init__(self, port, fake):
        self.port, self.fake = port, fake

    def send(self, data):
        """The answer to raw bytes, whole; the request must say ``Connection: close``."""
        import socket

        with socket.create_connection(("127.0.0.1", self.port), timeout=60) as connection:
            connection.sendall(data)
            found = b""
            while piece := connection.recv(1 << 16):
                found += piece
        return int(found.split(b" ", 2)[1]) if found.startswith(b"HTTP/") else 0, found

    def ask(self, method, target, token="", body=b"", *headers):
        lines = [f"{method} {target} HTTP/1.1", "Host: x", "Connection: close", *headers]
        if token:
            lines.append(f"Authorization: Bearer {token}")
        if body:
            lines.append(f"Content-Length: {len(body)}")
        return self.send("\r\n".join([*lines, "", ""]).encode() + body)


@contextmanager
def process(folder, *arguments):
    """A gateway with the sampling token, the admin token, and a key for its replica."""
    with replica(folder) as (bucket, fake):
        place = SecretPlace(folder / "live.secret")
        create_secret(bucket, start_run(bucket), place)
        started = subprocess.Popen(
            [
                sys.executable, "-m", "deltawire", "gateway", bucket.url, "--port", "0",
                "--replica", str(fake.server.make_url("/")), "--state", str(folder / "state"),
                "--secret", str(place),
                "--capture-header", *arguments,
            ],
            stderr=subprocess.PIPE, text=True,
            env={
                **os.environ, "DELTAWIRE_TOKEN": TOKEN, "DELTAWIRE_ADMIN_TOKEN": ADMIN,
                "DELTAWIRE_REPLICA_KEY": "upstream",
            },
        )  # fmt: skip
        try:
            line = started.stderr.readline()
            assert " on http://" in line, line + started.stderr.read()
            at = Process(int(line.rsplit(":", 1)[1]), fake)
            while " ready" not in started.stderr.readline():
                assert started.poll() is None
            yield at
        finally:
            started.terminate()
            started.communicate(timeout=60)


@pytest.fixture(scope="module")
def gateway(tmp_path_factory):
    with process(tmp_path_factory.mktemp("gateway")) as at:
        yield at


@pytest.fixture(scope="module")
def hooked(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hooked")
    secret = folder / "secret"
    secret.write_text(HOOK)
    with process(folder, "--webhook-secret-file", str(secret)) as at:
        yield at


SPELLED = [
    WEBHOOK, "/v1/feedback/%77ebhook", "/v1/feedback%2Fwebhook", "//v1/feedback/webhook",
    "/v1//feedback/webhook", "/v1/feedback/webhook/", "/v1/feedback/./webhook",
    "/v1/x/../feedback/webhook", "/v1/feedback/webhook;x=1", "/v1/feedback/webhook?x=1",
    "/V1/feedback/webhook", "/v1/feedback/webhook%00", "http://x/v1/feedback/webhook",
    "/inference/v1/feedback/webhook", "/v1/feedback/webhook%2f..%2f..%2fload_lora_adapter",
]  # fmt: skip


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "PATCH", "POST", "HEAD", "OPTIONS"])
def test_without_a_secret_nothing_of_the_webhooks_path_is_open(gateway, method):
    for target in SPELLED:
        assert gateway.ask(method, target)[0] in (400, 401), target
    assert gateway.fake.asked == []


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "PATCH", "POST", "HEAD", "OPTIONS"])
def test_with_a_secret_only_a_signed_post_is_taken(hooked, method):
    for target in SPELLED:
        assert hooked.ask(method, target, "", b"[]")[0] in (400, 401), target
    signature = hmac.new(HOOK.encode(), b"[]", hashlib.sha256).hexdigest()
    header = f"x-deltawire-signature: sha256={signature}"
    for target in (WEBHOOK, "/v1/feedback/%77ebhook"):
        found = hooked.ask(method, target, "", b"[]", header)
        assert found[0] == (200 if method == "POST" else 401)
    assert hooked.fake.asked == []


def test_a_sampling_token_reaches_what_is_listed_and_nothing_else(gateway):
    body = b'{"lora_name": "x", "lora_path": "/etc"}'
    for method in ("GET", "POST", "PUT", "DELETE"):
        for target in (
            "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/v1/responses", "/v1/messages",
            "/collective_rpc", "/v1/../collective_rpc", "/v1/%2e%2e/collective_rpc", "/tokenize",
            "/inference/v1/load_lora_adapter", "/v1/chat/completions/render", "/v1/models/m",
            "/v1/models%2F..%2Fload_lora_adapter", "/v1/chat%2Fcompletions", "//v1/models",
            "/v1/chat/completions/", "/v1/chat/completions;x", "/v1/CHAT/completions",
            "http://x/v1/load_lora_adapter", "/v1/models?/../../load_lora_adapter",
        ):  # fmt: skip
            status, found = gateway.ask(method, target, ADMIN, body)
            if method == "GET" and target.startswith("/v1/models?"):
                continue
            assert status in (400, 404, 405), (method, target, found)
    assert gateway.fake.asked == []
    for target in ("/v1/models", "/inference/v1/models", "/v1/%6dodels", "http://x/v1/models"):
        assert gateway.ask("GET", target, TOKEN)[0] == 200, target
    for method in ("POST", "PUT", "HEAD"):
        assert gateway.ask(method, "/v1/models", TOKEN)[0] == 405
    assert gateway.fake.asked == [], "the gateway answers from what it knows"


@pytest.mark.parametrize(
    "target",
    ["/v1/chat/completions", "/v1/%63hat/completions", "/inference/v1/chat/completions"],
)
def test_every_answer_has_a_receipt_however_its_path_is_spelled(gateway, target):
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "Hi"}]}).encode()
    status, found = gateway.ask("POST", target, TOKEN, body, "Content-Type: application/json")
    assert status == 200
    assert json.loads(found.split(b"\r\n\r\n", 1)[1])["deltawire"]["receipt"].startswith("dw2.")
    assert gateway.fake.asked == [("POST", "/v1/chat/completions")]
    gateway.fake.asked.clear()


@pytest.mark.parametrize(
    "body",
    [
        b'{"model": "m", "messages": [], "temperature": NaN}',
        b'{"model": "m", "messages": [], "x": Infinity}',
        b"{'model': 'm'}",
        b'\xef\xbb\xbf{"model": "m", "messages": []}',
        b'{"model": "m", "messages": [], }',
        b'{"model": "\xff", "messages": []}',
        b"[]",
        b"",
        b"\x1f\x8b\x08",
    ],
)
def test_what_a_tolerant_parser_would_answer_is_refused(gateway, body):
    status, found = gateway.ask("POST", "/v1/chat/completions", TOKEN, body)
    assert status == 400, found
    assert gateway.fake.asked == []


@pytest.mark.parametrize(
    "headers",
    [
        ("Transfer-Encoding: chunked", "Content-Length: 5"),
        ("Content-Length: 5", "Content-Length: 6"),
        ("Transfer-Encoding: identity, chunked", "Transfer-Encoding: x"),
        (" Authorization: Bearer " + ADMIN,),
        ("X: a\rAuthorization: Bearer " + ADMIN,),
        ("X-HTTP-Method-Override: DELETE", "X-Original-URL: /live/state"),
        ("Content-Length: -1",),
        ("Upgrade: websocket",),
    ],
)
def test_headers_that_disagree_open_nothing(gateway, headers):
    for target in ("/live/state", "/v1/models", WEBHOOK):
        status, _ = gateway.ask("GET", target, "", b"", *headers)
        assert status in (400, 401), target
    assert gateway.fake.asked == []


def test_a_compressed_body_is_not_unpacked(gateway):
    status, _ = gateway.ask(
        "POST", "/v1/chat/completions", TOKEN, b"\x1f\x8b", "Content-Encoding: gzip"
    )
    assert status == 415
