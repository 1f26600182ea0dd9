"""A replica for the gateway's tests."""

import asyncio

from aiohttp import web
from aiohttp.test_utils import TestServer

from deltawire.sync import load_mirror


class FakeVllm:
    """The HTTP calls of a vLLM server with the plugin, over a real mirror. ``fails`` makes loads
    fail, ``lies`` makes it state a wrong digest; ``cancelled`` is set when a request is. Answers
    have the ``status``, and none begins while it ``hangs``; ``asked`` counts them."""

    engine = "vllm"

    def __init__(self, bucket, run, version=0):
        self.bucket, self.run = bucket, run
        self.mirror = load_mirror(bucket, run, at=version)
        self.wanted = version
        self.failure = ""
        self.fails = self.lies = False
        self.loads = []
        self.status, self.hangs, self.asked = 200, False, 0
        self.finish = asyncio.Event()
        self.started = asyncio.Event()
        self.cancelled = asyncio.Event()
        app = web.Application()
        app.router.add_post("/collective_rpc", self.rpc)
        app.router.add_post("/v1/completions", self.completions)
        app.router.add_get("/v1/models", self.models)
        self.server = TestServer(app)

    async def rpc(self, request):
        assert request.headers["Authorization"] == "Bearer upstream"
        call = await request.json()
        if call["method"] == "deltawire_want":
            self.wanted = int(*call["args"])
            self.failure = ""
            self.loads.append(self.wanted)
            if self.fails:
                self.failure = "a blob is damaged"
            else:
                self.mirror = load_mirror(self.bucket, self.run, at=self.wanted)
        digest = "0" * 32 if self.lies else self.mirror.digest.hex()
        status = {
            "engine": self.engine,
            "version": self.mirror.version,
            "wanted": self.wanted,
            "phase": "serving",
            "failure": self.failure,
            "digest": digest,
            "ranks": [],
        }
        return web.json_response({"results": [status]})

    async def completions(self, request):
        body = await request.json()
        self.asked += 1
        if self.status != 200:
            return web.json_response({"error": "of the replica"}, status=self.status)
        if self.hangs:
            await asyncio.Event().wait()
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        await answer.write(b"data: one " + body["model"].encode() + b"\n\n")
        self.started.set()
        if body.get("wait"):
            try:
                await self.finish.wait()
            except asyncio.CancelledError:
                self.cancelled.set()
                raise
        if body.get("break"):
            request.transport.abort()
            return answer
        await answer.write(b"data: [DONE]\n\n")
        await answer.write_eof()
        return answer

    async def models(self, request):
        return web.json_response({"data": [], "query": dict(request.query)})
