"""A gateway with receipts on real sockets, over a replica that states tokens as vLLM does."""

import asyncio
import json
from contextlib import asynccontextmanager

import aiohttp
from aiohttp import web
from fake_replica import FakeVllm

from deltawire.chat.requests import RequestDefaults
from deltawire.live.capture import uploader
from deltawire.live.capture.consent import ConsentRule
from deltawire.live.capture.redaction import Redaction
from deltawire.live.deployment_secret import DeploymentSecret, Generation, secret_text
from deltawire.live.gateway.app import LiveCalls
from deltawire.live.gateway.recorder import Recorder, RecorderOptions
from deltawire.runtime.decision_log import DecisionLog
from deltawire.serving import replica_set
from deltawire.serving.app import REPLICAS, TOKENS, build_app, build_runner
from deltawire.serving.bodies import BODIES
from deltawire.serving.replica_set import ReplicaSet
from deltawire.serving.vllm import VllmReplica
from deltawire.store import open_bucket
from deltawire.testing.tiny import start_publisher, start_run, weights
from deltawire.wire import keys
from deltawire.wire.captures import Capture, Feedback, GatewayState, decode_segment
from deltawire.wire.live_secret import GenerationRecord
from deltawire.wire.objects import encode_json
from deltawire.wire.receipts import ReceiptKeys

TOKEN, ADMIN, HOOK = "sampling-secret", "admin-secret", b"hook-secret"
SECRET = bytes(range(32))
GENERATION = Generation(SECRET)
KEYS = ReceiptKeys({GENERATION.fingerprint: GENERATION.receipt_key})
PROMPT = [5, 6, 7]
WORDS = ["Hello", " there", "!"]


class TokenReplica(FakeVllm):
    """Answers chats with `WORDS`, whose tokens are 100, 101, … and log-probabilities -0.5.

    ``mode``: ``tokens`` states them if asked; ``no tokens`` never does; ``break`` dies in
    mid-stream; ``error`` answers 400, ``fail`` 500; ``hang`` never answers, ``stall`` stops after
    the first word; ``calls`` makes a tool call. ``swap_to`` loads
    a version while it answers. ``seen`` are the requests. ``says`` are more members of a whole
    answer's message, ``draws`` are the texts of its tokens, ``prompt_text`` is that of its prompt.
    """

    def __init__(self, bucket, run, version=0):
        super().__init__(bucket, run, version)
        self.mode, self.swap_to, self.seen = "tokens", None, []
        self.says, self.draws, self.prompt_text = {}, WORDS, None
        self.server.app.router.add_post("/v1/chat/completions", self.chat)

    async def chat(self, request):
        body = await request.json()
        self.seen.append(body)
        if self.mode == "error":
            return web.json_response({"error": {"message": "no"}}, status=400)
        if self.mode == "fail":
            return web.json_response({"error": {"message": "out of memory"}}, status=500)
        if self.mode == "hang":
            await asyncio.Event().wait()
        if self.swap_to is not None:
            from deltawire.sync import load_mirror

            self.mirror = load_mirror(self.bucket, self.run, at=self.swap_to)
        count = body.get("n") or 1
        ids = body.get("return_token_ids") and self.mode != "no tokens"
        if not body.get("stream"):
            return web.json_response(self.whole(body, count, ids))
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)

        async def send(index, delta, finish=None, token=None, **more):
            row = {"index": index, "delta": delta, "finish_reason": finish, "logprobs": None}
            if token is not None and ids:
                row["token_ids"] = [100 + token]
            if token is not None and body.get("logprobs"):
                row["logprobs"] = {"content": [{"token": WORDS[token], "logprob": -0.5}]}
            event = {"id": "c", "object": "chat.completion.chunk", "model": "m", "choices": [row]}
            event = self.stated(event | more)
            await answer.write(b"data: %s\n\n" % json.dumps(event).encode())

        for index in range(count):
            first = {"prompt_token_ids": PROMPT} if ids else {}
            await send(index, {"role": "assistant", "content": ""}, **first)
        for place, word in enumerate(WORDS):
            for index in range(count):
                last = place == len(WORDS) - 1
                await send(index, {"content": word}, "stop" if last else None, place)
            if self.mode == "stall":
                await asyncio.Event().wait()
            if self.mode == "break":
                request.transport.abort()
                return answer
            await asyncio.sleep(0)
        if (body.get("stream_options") or {}).get("include_usage"):
            usage = {"id": "c", "choices": [], "usage": {"total_tokens": 6}}
            await answer.write(b"data: %s\n\n" % json.dumps(usage).encode())
        for event in self.last(body):
            await answer.write(b"data: %s\n\n" % json.dumps(event).encode())
        await answer.write(b"data: [DONE]\n\n")
        await answer.write_eof()
        return answer

    def last(self, body):
        """Returns what ends the stream that answers ``body``."""
        del body
        return []

    def whole(self, body, count, ids):
        rows = []
        for index in range(count):
            message = {"role": "assistant", "content": "".join(WORDS)} | self.says
            if self.mode == "calls":
                call = {"id": "1", "type": "function", "index": 0}
                message["tool_calls"] = [call | {"function": {"name": "f", "arguments": "{]"}}]
            row = {"index": index, "message": message, "finish_reason": "stop"}
            if body.get("logprobs"):
                rows_ = [{"token": w, "logprob": -0.5} for w in self.draws]
                row["logprobs"] = {"content": rows_}
            if ids:
                row["token_ids"] = [100, 101, 102]
            rows.append(row)
        return self.stated({
            "id": "c", "object": "chat.completion", "model": "m", "choices": rows,
            "prompt_token_ids": PROMPT if ids else None, "created": 1,
            "prompt_text": self.prompt_text,
        })  # fmt: skip

    def stated(self, body):
        """Returns an object of an answer as this replica states it."""
        return body


class SglangReplica(TokenReplica):
    """States tokens of chats as SGLang does, and refuses vLLM's way for streams."""

    engine = "sglang"

    async def chat(self, request):
        body = await request.json()
        if body.get("return_token_ids"):
            return web.json_response({"error": {"message": "not supported"}}, status=400)
        return await super().chat(request)

    def last(self, body):
        event = {"id": "c", "object": "chat.completion.chunk", "model": "m", "choices": []}
        return [event | self.sglext(body)] if body.get("return_output_ids_in_sglext") else []

    def sglext(self, body):
        ids = [[100, 101, 102]] * (body.get("n") or 1)
        return {"sglext": {"input_ids": PROMPT, "output_ids": ids}}

    def whole(self, body, count, ids):
        spans = [{"version": str(self.mirror.version), "start": 0, "end": 3}]
        found = super().whole(body, count, ids)
        found |= {"metadata": {"weight_version": spans[0]["version"], "weight_versions": spans}}
        return found | (self.sglext(body) if body.get("return_output_ids_in_sglext") else {})


def deployment_secret(bucket, run, generations=(GENERATION,)):
    """A deployment's secret with these generations, which the bucket names; the last is in use."""
    for number, one in enumerate(generations):
        record = GenerationRecord(
            number=number, run=run.id, fingerprint=one.fingerprint, at=0.0, adopted=one.adopted,
            public_key=one.public_key,
        )  # fmt: skip
        bucket.create(keys.live_secret(number), encode_json(record))
    return DeploymentSecret(generations, bucket, run.id)


def write_secret(bucket, run, path, generations=(GENERATION,)):
    """Writes the file of a deployment's secret, which the gateway ``g0`` held; returns its path."""
    deployment_secret(bucket, run, generations)
    path.write_text(secret_text(generations))
    state = GatewayState(
        gateway="g0", run=run.id, started=0.0, at=0.0,
        generations=[one.fingerprint for one in generations],
    )  # fmt: skip
    bucket.put(keys.live_gateway("g0"), encode_json(state))
    return str(path)


class LiveGateway:
    """The gateway and a client."""

    def __init__(self, client, port, fakes, recorder, bucket, app, calls):
        self.client, self.port, self.fakes = client, port, fakes
        self.bodies, self.tokens = app[BODIES], app[TOKENS]
        self.recorder, self.bucket = recorder, bucket
        self.fake = fakes[0]
        self.names, self.replicas = calls._names, app[REPLICAS]

    def decision(self):
        """The newest decision in the bucket."""
        log = DecisionLog(self.bucket, self.replicas.run.id)
        log.poll()
        return log.newest

    def url(self, path):
        return f"http://127.0.0.1:{self.port}{path}"

    async def call(self, method, path, token=TOKEN, headers=None, **options):
        headers = {"Authorization": f"Bearer {token}"} | (headers or {})
        async with self.client.request(
            method, self.url(path), headers=headers, **options
        ) as answer:
            return answer.status, await answer.read(), answer.headers

    async def ask(self, text="Hi", *, user="alice", capture="true", messages=None, **body):
        messages = messages or [{"role": "user", "content": text}]
        headers = {"x-deltawire-user": user, "x-deltawire-capture": capture}
        status, data, found = await self.call(
            "POST", "/v1/chat/completions", headers=headers,
            json={"model": "m", "messages": messages, **body},
        )  # fmt: skip
        return status, data, found

    async def receipt(self, text="Hi", **options):
        status, data, _ = await self.ask(text, **options)
        assert status == 200, data
        return json.loads(data)["deltawire"]["receipt"]

    async def report(self, receipt, kind="thumbs", value="up", headers=None, **more):
        body = {"receipt": receipt, "kind": kind, "value": value} | more
        status, data, _ = await self.call("POST", "/v1/feedback", json=body, headers=headers)
        return status, json.loads(data)

    async def uploaded(self):
        assert await asyncio.to_thread(self.recorder.uploader.upload)
        return rows_in(self.bucket)


def rows_in(bucket):
    """All captures and feedback in a bucket."""
    found = []
    for prefix, kind in ((keys.LIVE_CAPTURES, Capture), (keys.LIVE_FEEDBACK, Feedback)):
        rows = []
        for key in bucket.list(prefix):
            gateway, number = key.removeprefix(prefix).split("/")
            data = bucket.get(key, limit=1 << 30)
            rows += decode_segment(data, kind, gateway=gateway, number=int(number), run="", key=key)
        found.append(rows)
    return found


def published(versions=3, url="memory://"):
    """A bucket with a run of a few versions."""
    bucket = open_bucket(url, create=True) if "://" not in url else open_bucket(url)
    publisher = start_publisher(bucket)
    for version in range(versions):
        publisher.publish(weights(version))
    publisher.close()
    return bucket


@asynccontextmanager
async def live_serving(bucket, folder, monkeypatch, *, replicas=1, redact=None, **options):
    r"""A gateway over ``replica``\ s; uploads happen by `LiveGateway.uploaded` only."""
    monkeypatch.setattr(replica_set, "POLL_EVERY_S", 0.02)
    monkeypatch.setattr(uploader, "UPLOAD_EVERY_S", 3600.0)
    on_failure = options.pop("redact_failure", "closed")
    make = options.pop("replica", TokenReplica)
    defaults = options.pop("defaults", RequestDefaults())
    release = options.pop("release", None)
    hook = options.pop("hook", HOOK)
    names, extra = options.pop("model_names", ()), options.pop("extra", None)
    wait, clients = options.pop("wait", True), options.pop("clients", None)
    options.setdefault("consent", ConsentRule(header=True))
    run = start_run(bucket)
    secret = options.pop("secret", None) or deployment_secret(bucket, run)
    reread, reconsent = options.pop("reread", None), options.pop("reconsent", None)
    limits, filters = options.pop("call_limits", None), options.pop("filters", None)
    recorder = Recorder(
        bucket, run, folder, secret, Redaction(redact, on_failure=on_failure),
        RecorderOptions(**options), reread=reread, reconsent=reconsent,
    )  # fmt: skip
    recorder.uploader._every_s = 3600.0
    fakes = [make(bucket, run) for _ in range(replicas)]
    async with aiohttp.ClientSession() as upstream, aiohttp.ClientSession() as client:
        for fake in fakes:
            await fake.server.start_server()
        members = [
            VllmReplica(str(fake.server.make_url("/")), upstream, key="upstream") for fake in fakes
        ]
        members += await extra(upstream) if extra else []
        members = ReplicaSet(bucket, run, members)
        app = build_app(
            members, upstream, token=TOKEN, admin_token=ADMIN,
            limits=limits, clients=clients,
        )  # fmt: skip
        calls = LiveCalls(
            recorder, defaults, release=release, webhook_secret=hook, model_names=names,
            filters=filters,
        )  # fmt: skip
        calls.add_to(app)
        runner = build_runner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        try:
            async with asyncio.timeout(60):
                while wait and not members.ready:
                    await asyncio.sleep(0.01)
            yield LiveGateway(client, runner.addresses[0][1], fakes, recorder, bucket, app, calls)
        finally:
            await runner.cleanup()
            for fake in fakes:
                await fake.server.close()
