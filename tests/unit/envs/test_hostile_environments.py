"""Environments of others that hang, lie, flood or die: failed episodes, and a run that goes on."""

import asyncio
import json
from pathlib import Path
from typing import ClassVar

import pytest
from hostile_tools import replies
from scripted_agent import called, played

from deltawire.config.machine import URLS
from deltawire.config.tasks import ToolServerConfig
from deltawire.envs.base import Environment, Turn
from deltawire.envs.served_tools import ToolEpisode

SUPPORT = Path(__file__).parents[2] / "support"
HONEST = "honest"


class Question(Environment):
    """Any answer without a call is right."""

    async def reset(self):
        return Turn("2 + 3?")

    async def step(self, action):
        return Turn(reward=1.0, done=True)


class McpCommand:
    """Servers of tools in the sandbox."""

    causes: ClassVar = {
        "hangs at the start": "initialize: no answer within",
        "dies": "it ended (exit 1), its last words: out of luck",
        "eats memory": "it ended (exit 1), its last words:",
        "floods": "it sent a line of more than",
        "chatters": "it sent 1000 messages and no answer",
    }
    told: ClassVar = {"hangs": "no answer within"}
    said = (called("add", a=2, b=3), "5")

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        return

    def open(self, how):
        pytest.importorskip("jsonschema")
        from deltawire.envs.mcp.server import McpServer, files_of

        config = ToolServerConfig(
            name="hostile",
            command=["python3", "hostile_tools.py", how],
            path=str(SUPPORT / "hostile_tools.py"),
            start_limit_s=0.3 if how == "hangs at the start" else 60.0,
            call_limit_s=0.3 if how == "hangs" else 60.0,
            answer_kib=4,
        )
        return ToolEpisode(Question(), [McpServer(config, files_of(config))])


class McpHttp:
    """Servers of tools over HTTP."""

    causes: ClassVar = {
        "another protocol": "it speaks version '1' of MCP",
        "no tools": "it offers no tools",
        "two tools of one name": "it has two tools of one name",
        "a bad schema": "its tool add has no valid schema",
        "a bad name": r"it has a tool with the name 'add\n'",
        "too many tools": "it has more than 128 tools",
        "a list that is none": "its list of tools is none",
        "endless pages": "its list of tools has no end",
        "nobody": "it cannot be reached",
        "500 at the start": "initialize: the server answered 500",
        "redirects": "initialize: the server answered 307",
        "an image three times": "3 calls in a row failed: the answer has no text",
    }
    told: ClassVar = {
        "a schema elsewhere": "the arguments do not fit the tool",
        "an image": "the answer has no text",
        "no content": "the server's answer has no content",
        "a large answer": "more than 4096 bytes",
        "another's answer": "the server's answer is missing",
        "not JSON": "5",
        "deep": "5",
        "neither": "neither a result nor an error",
        "asks back": "5",
        "refuses": "not today",
        "an error": "error: 5",
        "half a text": "5\n(audio, which cannot be read as text)",
        "500": "the server answered 500",
        "hangs": "no answer within",
        "closes": "the server's answer broke off",
        "floods": "the server's answer has more than",
        "chatters": "the server's answer has more than",
        "floods a stream": "the server's answer has more than",
        "compresses": "the server's answer is compressed",
        "a page": "the server's answer is text/html",
    }
    said = (called("add", a=2, b=3), "5")

    async def __aenter__(self):
        web = pytest.importorskip("aiohttp.web")
        app = web.Application()
        app.router.add_route("*", "/{how}", self._answer)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self._port = site._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_):
        await self._runner.cleanup()

    def open(self, how):
        from deltawire.envs.mcp.server import McpServer

        port = 9 if how == "nobody" else self._port
        config = ToolServerConfig(
            name="hostile",
            url=f"http://127.0.0.1:{port}/{how.replace(' ', '_')}",
            call_limit_s=0.5 if how == "hangs" else 60.0,
            answer_kib=32 if how == "too many tools" else 4,
        )
        return ToolEpisode(Question(), [McpServer(config, {})])

    async def _answer(self, request):
        from aiohttp import web

        how = request.match_info["how"].replace("_", " ")
        asked = await request.json() if request.method == "POST" else {}
        if "id" not in asked or "method" not in asked:
            return web.Response(status=202)
        if how == "redirects":
            raise web.HTTPTemporaryRedirect("/honest")
        calling = asked["method"] == "tools/call"
        if how == "500 at the start" or (how == "500" and calling):
            raise web.HTTPInternalServerError
        if calling and how == "hangs":
            await asyncio.sleep(3600)
        if calling and how == "a page":
            return web.Response(text="hello", content_type="text/html")
        texts = replies(how.removesuffix(" three times"), asked)
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        if calling and how == "compresses":
            answer.headers["Content-Encoding"] = "gzip"
        await answer.prepare(request)
        try:
            if calling and how == "floods a stream":
                while True:
                    await answer.write(b": nothing\n" * 1000)
            if calling and how == "closes":
                await answer.write(b"data: {")
                request.transport.abort()
            for text in texts:
                await answer.write(f"data: {text[:1_000_000]}\r\n\r\n".encode())
        except ConnectionError:
            pass  # The client has read enough.
        return answer


@pytest.mark.parametrize("adapter", [McpCommand, McpHttp])
def test_a_hostile_environment_fails_its_episodes_and_no_others(
    adapter, byte_tokenizer, monkeypatch
):
    monkeypatch.setenv("DELTAWIRE_DATA_DIRS", str(SUPPORT))
    monkeypatch.setenv(URLS, "http://127.0.0.1:9/")
    causes, told = adapter.causes, adapter.told

    async def every():
        async with adapter() as adapted:
            if port := getattr(adapted, "_port", 0):
                monkeypatch.setenv(URLS, f"http://127.0.0.1:9/,http://127.0.0.1:{port}/")

            async def one(how):
                said = adapter.said
                if how.endswith("three times"):
                    said = (*said[:1] * 3, *said[1:])
                return how, await played(adapted.open(how), byte_tokenizer, *said)

            return await asyncio.gather(*map(one, [*causes, *told, HONEST]))

    for how, (episode, text) in asyncio.run(every()):
        if how in causes:
            assert causes[how] in episode.cause, (how, episode.cause, text)
            assert episode.trajectory.reward == 0
            assert len(episode.cause) <= 400
        else:
            assert episode.cause == "", how
            assert episode.trajectory.reward == 1.0
            assert told.get(how, "") in text, (how, text)
        assert len(json.dumps(text)) < 50_000
