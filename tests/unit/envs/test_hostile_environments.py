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
        "prints for ever": "it sent 1000 messages and no answer",
    }
    told: ClassVar = {"hangs": "no answer within"}
    said = (called("add", a=2, b=3), "5")

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        return

    def open(self, how):
        pytest.importorskip("jsonschema")
        from deltawire.envs.mcp.server import McpServer, SchemaChecks, ServerParts, files_of

        self._checks = getattr(self, "_checks", None) or SchemaChecks()
        config = ToolServerConfig(
            name="hostile",
            command=["python3", "hostile_tools.py", how],
            path=str(SUPPORT / "hostile_tools.py"),
            start_limit_s=0.3 if how == "hangs at the start" else 60.0,
            call_limit_s=0.3 if how == "hangs" else 60.0,
            answer_kib=4,
        )
        return ToolEpisode(
            Question(), [McpServer(config, ServerParts(files_of(config), self._checks))]
        )


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
        "500 three times": "3 calls in a row failed: the server answered 500",
        "a long session": "initialize: its session's id is longer than 4096",
    }
    told: ClassVar = {
        "a schema elsewhere": "the arguments do not fit the tool",
        "an image three times": "the answer has no text",
        "a large answer three times": "more than 4096 bytes",
        "empty data": "more than 4096 bytes",
        "an older protocol": "5",
        "no content": "the server's answer has no content",
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
        from deltawire.envs.mcp.server import McpServer, SchemaChecks, ServerParts

        self._checks = getattr(self, "_checks", None) or SchemaChecks()
        port = 9 if how == "nobody" else self._port
        config = ToolServerConfig(
            name="hostile",
            url=f"http://127.0.0.1:{port}/{how.replace(' ', '_')}",
            call_limit_s=0.5 if how == "hangs" else 60.0,
            answer_kib=32 if how == "too many tools" else 4,
        )
        return ToolEpisode(Question(), [McpServer(config, ServerParts(checks=self._checks))])

    async def _answer(self, request):
        from aiohttp import web

        how = request.match_info["how"].replace("_", " ").removesuffix(" three times")
        asked = await request.json() if request.method == "POST" else {}
        agreed = "2025-03-26" if how == "an older protocol" else "2025-06-18"
        begun = asked.get("method") != "initialize"
        assert request.headers.get("MCP-Protocol-Version") == (agreed if begun else None)
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
        texts = replies(how, asked)
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        if calling and how == "compresses":
            answer.headers["Content-Encoding"] = "gzip"
        if how == "a long session":
            answer.headers["Mcp-Session-Id"] = "x" * 5000
        await answer.prepare(request)
        try:
            if calling and how == "empty data":
                await answer.write(b"data:\n" * 5000)
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


class OpenEnv:
    """Servers of OpenEnv's protocol."""

    causes: ClassVar = {
        "hangs": "step: no answer within",
        "hangs at the start": "reset: no answer within",
        "NaN": "step: the answer is not JSON",
        "1e308": "step gave the reward 1e+308",
        "a text": "the server's reward is '1.0', which is no number",
        "a list": "the server's reward is '[1]', which is no number",
        "a long integer": "reward",
        "floods": "the connection is lost: the message is too long",
        "closes": "the connection is lost: it ended",
        "binary": "the connection is lost: it ended",
        "not JSON": "step: the answer is not JSON",
        "deep": "step: the answer is not JSON",
        "no message": "step: the answer is no message",
        "500": "the server answered 500",
        "redirects": "the server answered 307",
        "nobody": "no session within 0.3 s",
        "full": "no session within 3 s: no room",
        "raises at the start": "reset failed on the server: no luck",
        "raises": "step failed on the server: no luck",
        "no observation": "the server's observation is none",
        "done in words": "the server's observation is none",
        "another type": "the server's observation does not fit its schema",
        "a state at once": "the server answered 'state'",
        "schemas without end": "the schemas have more than",
        "a field is missing": "the server's observation has no said",
        "no state": "the server's steps is 'None', which is no number",
    }
    told: ClassVar = {"an invalid action": "error: not an action", "full at first": ""}
    said = ("3", "5")

    async def __aenter__(self):
        web = pytest.importorskip("aiohttp.web")
        app = web.Application()
        app.router.add_get("/{how}/schema", self._schema)
        app.router.add_get("/{how}/ws", self._session)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self._port = site._server.sockets[0].getsockname()[1]
        self._rooms = 0
        return self

    async def __aexit__(self, *_):
        await self._runner.cleanup()

    def open(self, how):
        from deltawire.config import TaskConfig
        from deltawire.envs import open_tasks

        port = 9 if how == "nobody" else self._port
        options = {
            "url": f"http://127.0.0.1:{port}/{how.replace(' ', '_')}",
            "action": "message",
            "observation": "said",
            "probes": ["steps"],
            "message_kib": 4,
            "call_limit_s": 0.3 if "hangs" in how else 60.0,
            "connect_limit_s": {"nobody": 0.3, "full": 3.0}.get(how, 60.0),
        }
        tasks = open_tasks(TaskConfig(environment="openenv", options=options), seed=0)
        return tasks.open(tasks.draw("w", 0))

    async def _schema(self, request):
        from aiohttp import web

        how = request.match_info["how"].replace("_", " ")
        if how == "schemas without end":
            return web.Response(body=b" " * 3_000_000)
        said = {"type": "object", "properties": {"said": {"type": "string"}}}
        action = {"type": "object", "properties": {"message": {"type": "string"}}}
        return web.json_response({"action": action, "observation": said, "state": {}})

    async def _session(self, request):
        from aiohttp import web

        how = request.match_info["how"].replace("_", " ")
        if how == "500":
            raise web.HTTPInternalServerError
        if how == "redirects":
            raise web.HTTPTemporaryRedirect("/honest/ws")
        talk = web.WebSocketResponse()
        await talk.prepare(request)
        steps = 0
        async for message in talk:
            kind = json.loads(message.data)["type"]
            if kind == "close":
                break
            if kind == "state":
                steps = None if how == "no state" else steps
                await talk.send_json({"type": "state", "data": {"steps": steps}})
                continue
            steps += kind == "step"
            if (answer := self._answer(how, kind, steps)) is None:
                await asyncio.sleep(3600)
            elif answer == "closes":
                break
            elif answer == "binary":
                await talk.send_bytes(b"{}")
            else:
                await talk.send_str(answer if isinstance(answer, str) else json.dumps(answer))
        return talk

    def _answer(self, how, kind, steps):
        def error(text, code="EXECUTION_ERROR"):
            return {"type": "error", "data": {"message": text, "code": code}}

        if kind == "reset":
            if how == "hangs at the start":
                return None
            if how == "raises at the start":
                return error("no luck")
            self._rooms += how == "full at first"
            if how == "full" or (how == "full at first" and self._rooms < 3):
                return error("no room", "CAPACITY_REACHED")
            return {"type": "observation", "data": {"observation": {"said": "go"}}}
        if how == "an invalid action" and steps == 1:
            return error("not an action", "VALIDATION_ERROR")
        observation = {"said": "well done"}
        data = {"observation": observation, "reward": 1.0, "done": True}
        odd = {"a text": "1.0", "a list": [1], "1e308": 1e308, "NaN": float("nan")}
        data["reward"] = odd.get(how, 1.0)
        if how == "another type":
            observation["said"] = 5
        elif how == "a field is missing":
            observation.pop("said")
        elif how == "no observation":
            data["observation"] = "well"
        elif how == "done in words":
            data["done"] = "yes"
        whole = {"type": "state" if how == "a state at once" else "observation", "data": data}
        texts = {"not JSON": "{", "deep": "[" * 4000, "no message": "[]", "floods": "x" * 100_000}
        texts["a long integer"] = json.dumps(whole).replace("1.0", "1" + "0" * 400)
        if how in ("closes", "binary"):
            return how
        if how == "hangs":
            return None
        if how == "raises":
            return error("no luck")
        return texts.get(how, whole)


class TextGym:
    """Text environments in processes."""

    causes: ClassVar = {
        "hangs": "step raised TextGymError: no answer within",
        "hangs at the start": "reset raised TextGymError: no answer within",
        "raises": "the environment raised KeyError: 'no luck'",
        "raises at the start": "the environment raised RuntimeError: no luck",
        "NaN": "step gave the reward nan",
        "1e308": "step gave the reward 1e+308",
        "a text": "its reward is '1.0', which is no number",
        "a long integer": "reward",
        "floods": "it said more than 4 KiB at once",
        "dies": "the environment's process ended",
        "many messages": "its observation is no list of messages",
        "a role": "its observation is no list of messages",
        "no messages": "its observation is no list of messages",
        "done in words": "done is 'yes'",
        "eats memory": "the environment raised MemoryError",
        "a word": "its metadata steps is 'two', which is no number",
    }
    told: ClassVar = {"prints": "go", "no metadata": "go", "leaves a process": "go"}
    said = ("5",)

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        return

    def open(self, how):
        from deltawire.envs.text_gym import TextGymEpisode, TextGymOptions

        options = TextGymOptions(
            id="any",
            probes=["steps"],
            start_limit_s=0.5 if how == "hangs at the start" else 60.0,
            step_limit_s=0.5 if how == "hangs" else 60.0,
            message_kib=4,
        )
        asked = {"kind": "skyrl_gym", "id": how, "modules": [], "settings": {}, "row": {}}
        prompt = [{"role": "user", "content": "go"}]
        return TextGymEpisode(options, {**asked, "prompt": prompt, "memory_bytes": 4 << 30})


@pytest.mark.parametrize("adapter", [McpCommand, McpHttp, OpenEnv, TextGym])
def test_a_hostile_environment_fails_its_episodes_and_no_others(
    adapter, byte_tokenizer, monkeypatch
):
    monkeypatch.setenv("DELTAWIRE_DATA_DIRS", str(SUPPORT))
    monkeypatch.setenv("PYTHONPATH", str(SUPPORT / "hostile_packages"))
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
