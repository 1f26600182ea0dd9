"""An OpenAI-compatible endpoint over any `Sampler`.

::

    POST /v1/chat/completions     tools, streaming, logprobs
    POST /v1/completions          of a text, or of token ids
    GET  /v1/models

Requests wait for the engine in the same event loop; whoever runs this must drive the engine
(`Sampler.advance`). A client that hangs up cancels its request. Everything wants the bearer token.

With a recording, all that is drawn is kept, and the run's own temperature is used whatever the
client asks for: a policy is trained on what it draws, as it draws it.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

from aiohttp import web

from deltawire.engines.base import Completion, Sampler, Sampling
from deltawire.engines.calls import read_calls
from deltawire.engines.messages import Message, shorten
from deltawire.engines.text import Text
from deltawire.errors import DeltawireError, InputError
from deltawire.serving.chat import ChatRequest, read_chat, read_completion, spell_calls
from deltawire.serving.recording import Recording

MAX_BODY_BYTES = 16 << 20


@dataclass
class Policy:
    """How requests are sampled and bounded.

    ``temperature`` None leaves it to the client. ``capacity`` bounds prompt and answer together;
    ``turns`` the answers that one recording may hold; ``characters`` those of a message that the
    model gets to read.
    """

    max_tokens: int
    capacity: int
    temperature: float | None = None
    turns: int = 1_000_000
    characters: int = 1_000_000
    model: str = "policy"


class Endpoint:
    """One session's endpoint. ``refused`` says why the last request was not answered, if it was
    for want of room (``context``) or of turns (``turns``)."""

    def __init__(
        self,
        sampler: Sampler,
        text: Text,
        policy: Policy,
        *,
        token: str,
        recording: Recording | None = None,
    ) -> None:
        if not token:
            raise InputError("a server needs a token")
        self.refused = ""
        self._sampler = sampler
        self._text = text
        self._policy = policy
        self._token = f"Bearer {token}".encode()
        self._recording = recording
        self._number = 0

    def app(self) -> web.Application:
        """The application; serve it with ``handler_cancellation`` on."""
        app = web.Application(middlewares=[self._guard], client_max_size=MAX_BODY_BYTES)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/v1/completions", self._complete)
        return app

    @web.middleware
    async def _guard(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        given = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
        if not hmac.compare_digest(given, self._token):
            return _error(401, "a bearer token is needed, and this is not it", "invalid_api_key")
        try:
            return await handler(request)
        except _RefusedError as error:
            self.refused = error.why
            return _error(400, str(error), error.code)
        except InputError as error:
            return _error(400, str(error), "invalid_request")
        except DeltawireError as error:
            return _error(500, str(error), "server_error")
        except web.HTTPException as error:
            return _error(error.status, error.reason, "invalid_request")

    async def _models(self, request: web.Request) -> web.StreamResponse:
        del request
        model = {"id": self._policy.model, "object": "model", "created": 0, "owned_by": "deltawire"}
        return web.json_response({"object": "list", "data": [model]})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, read_chat(await request.read()))

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, read_completion(await request.read()))

    async def _answer(self, request: web.Request, asked: ChatRequest) -> web.StreamResponse:
        recording = self._recording or Recording(self._text)
        if recording.turns >= self._policy.turns:
            raise _RefusedError("the episode has had its turns", "turn_limit_exceeded", "turns")
        short = [shorten(message, self._policy.characters) for message in asked.messages]
        asked = replace(asked, messages=tuple(short))
        prompt = recording.prompt(asked)
        sampling = self._sampling(asked, len(prompt.tokens))
        self._number += 1
        form = _Form(asked, self._number, self._policy.model, len(prompt.tokens))
        stream = _Stream(request, form, self._text) if asked.stream else None
        if stream is not None:
            await stream.begin()
        completion = await self._draw(prompt.tokens, sampling, stream)
        said = self._text.decode(completion.tokens)
        reply = _reply(asked, said, self._number)
        recording.add(asked, prompt, completion, said, reply)
        if stream is not None:
            return await stream.end(completion, said, reply)
        return web.json_response(form.whole(completion, said, reply, self._text))

    def _sampling(self, asked: ChatRequest, length: int) -> Sampling:
        policy = self._policy
        room = min(policy.capacity, self._sampler.capacity) - length
        if room < 1:
            raise _RefusedError(
                f"the conversation has {length} tokens; this model's context length is "
                f"{policy.capacity}",
                "context_length_exceeded",
                "context",
            )
        wanted = min(asked.max_tokens or policy.max_tokens, policy.max_tokens)
        temperature = policy.temperature
        if temperature is None:
            temperature = 1.0 if asked.temperature is None else asked.temperature
        return Sampling(min(wanted, room), temperature)

    async def _draw(
        self, tokens: list[int], sampling: Sampling, stream: _Stream | None
    ) -> Completion:
        if stream is None or stream.held_back:
            return await self._sampler.generate(tokens, sampling)
        drawn: asyncio.Queue[int] = asyncio.Queue()
        task = asyncio.ensure_future(
            self._sampler.generate(tokens, sampling, on_token=drawn.put_nowait)
        )
        try:
            while not (task.done() and drawn.empty()):
                next_token = asyncio.ensure_future(drawn.get())
                await asyncio.wait({task, next_token}, return_when=asyncio.FIRST_COMPLETED)
                if next_token.done():
                    await stream.token(next_token.result())
                else:
                    next_token.cancel()
            return await task
        finally:
            task.cancel()


class _RefusedError(Exception):
    """A request that finds no room."""

    def __init__(self, message: str, code: str, why: str) -> None:
        super().__init__(message)
        self.code = code
        self.why = why


def _reply(asked: ChatRequest, said: str, number: int) -> Message:
    """How the client is told what was said: calls apart, if it offered tools."""
    if not asked.tools:
        return Message("assistant", said)
    written = read_calls(said, prefix=f"call-{number}")
    content = "\n".join(part for part in (written.content, *written.broken) if part)
    return Message("assistant", content, calls=written.calls)


class _Form:
    """The shape of one answer."""

    def __init__(self, asked: ChatRequest, number: int, model: str, prompt_tokens: int) -> None:
        self.chat = bool(asked.messages)
        self._asked = asked
        self._prompt_tokens = prompt_tokens
        self._head = {
            "id": f"{'chatcmpl' if self.chat else 'cmpl'}-{number}",
            "created": int(time.time()),
            "model": model,
        }

    @property
    def usage_wanted(self) -> bool:
        return self._asked.usage

    @property
    def tools(self) -> bool:
        return bool(self._asked.tools)

    def whole(
        self, completion: Completion, said: str, reply: Message, text: Text
    ) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": 0, "finish_reason": self.finish(completion, reply)}
        if self.chat:
            message: dict[str, Any] = {"role": "assistant", "content": reply.content or None}
            if reply.calls:
                message["tool_calls"] = spell_calls(reply.calls)
            choice["message"] = message
        else:
            choice["text"] = said
        if self._asked.logprobs:
            choice["logprobs"] = self._logprobs(completion, text)
        kind = "chat.completion" if self.chat else "text_completion"
        return self.envelope(kind, [choice], completion) | {"usage": self.usage(completion)}

    def envelope(
        self, kind: str, choices: list[dict[str, Any]], completion: Completion | None = None
    ) -> dict[str, Any]:
        body = {**self._head, "object": kind, "choices": choices}
        if completion is not None and completion.versions:
            body["system_fingerprint"] = f"version-{completion.versions[-1]}"
        return body

    def usage(self, completion: Completion) -> dict[str, int]:
        drawn = len(completion.tokens)
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": drawn,
            "total_tokens": self._prompt_tokens + drawn,
        }

    @staticmethod
    def finish(completion: Completion, reply: Message) -> str:
        return "tool_calls" if reply.calls else completion.finish

    def _logprobs(self, completion: Completion, text: Text) -> dict[str, Any]:
        tokens = [text.decode([token]) for token in completion.tokens]
        if not self.chat:
            return {"tokens": tokens, "token_logprobs": completion.logprobs}
        rows = zip(tokens, completion.logprobs, strict=True)
        return {
            "content": [
                {"token": token, "logprob": logprob, "bytes": None, "top_logprobs": []}
                for token, logprob in rows
            ]
        }


class _Stream:
    """One answer as server-sent events. Where tools are offered, all of it is held back until the
    end: a call begins like any text."""

    def __init__(self, request: web.Request, form: _Form, text: Text) -> None:
        self.held_back = form.tools
        self._form = form
        self._text = text
        self._request = request
        self._response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
        )
        self._tokens: list[int] = []
        self._clean = self._shown = 0
        self._sent = ""

    async def begin(self) -> None:
        await self._response.prepare(self._request)
        if self._form.chat:
            await self._delta({"role": "assistant", "content": ""})

    async def token(self, token: int) -> None:
        """Tell the text of a token, or nothing while it ends in half a character."""
        self._tokens.append(token)
        before = self._text.decode(self._tokens[self._clean : self._shown])
        now = self._text.decode(self._tokens[self._clean :])
        if len(now) > len(before) and not now.endswith("\ufffd"):
            self._clean, self._shown = self._shown, len(self._tokens)
            await self._say(now[len(before) :])

    async def end(self, completion: Completion, said: str, reply: Message) -> web.StreamResponse:
        whole = reply.content if self._form.chat else said
        if whole.startswith(self._sent) and len(whole) > len(self._sent):
            await self._say(whole[len(self._sent) :])
        if reply.calls:
            rows = enumerate(spell_calls(reply.calls))
            await self._delta({"tool_calls": [{"index": i, **call} for i, call in rows]})
        await self._delta({}, finish=self._form.finish(completion, reply))
        if self._form.usage_wanted:
            body = self._form.envelope(self._kind, [], completion)
            await self._write(body | {"usage": self._form.usage(completion)})
        await self._response.write(b"data: [DONE]\n\n")
        await self._response.write_eof()
        return self._response

    @property
    def _kind(self) -> str:
        return "chat.completion.chunk" if self._form.chat else "text_completion"

    async def _say(self, text: str) -> None:
        self._sent += text
        await self._delta({"content": text})

    async def _delta(self, delta: dict[str, Any], finish: str | None = None) -> None:
        choice: dict[str, Any] = {"index": 0, "finish_reason": finish}
        if self._form.chat:
            choice["delta"] = delta
        else:
            choice["text"] = delta.get("content", "")
        await self._write(self._form.envelope(self._kind, [choice]))

    async def _write(self, body: dict[str, Any]) -> None:
        await self._response.write(f"data: {json.dumps(body)}\n\n".encode())


def _error(status: int, message: str, code: str) -> web.Response:
    body = {"error": {"message": message, "type": "invalid_request_error", "code": code}}
    return web.json_response(body, status=status)


@asynccontextmanager
async def listening(endpoint: Endpoint) -> AsyncIterator[str]:
    """Serve an endpoint on a free port of this machine alone; gives its base URL."""
    runner = web.AppRunner(
        endpoint.app(), handler_cancellation=True, access_log=None, shutdown_timeout=1.0
    )
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        await runner.cleanup()
