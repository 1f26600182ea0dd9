"""An OpenAI-compatible endpoint over any `Sampler`.

::

    POST /v1/chat/completions     tools, n, n_adaptive, stop, streaming, logprobs
    POST /v1/completions          of a text, or of token ids
    GET  /v1/models

Requests wait for the engine in the same event loop; the caller must step the engine
(`Sampler.advance`). A client that hangs up cancels its request. Every request needs the bearer
token.

With a recording, everything that is drawn is kept, and the run's own temperature is used instead of
the client's: a policy is trained on its own distribution.
"""

from __future__ import annotations

import asyncio
import hmac
import itertools
import json
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

from aiohttp import web

from deltawire.chat.messages import Message, shorten
from deltawire.chat.openai.adaptive import AdaptiveSampling, Ballot
from deltawire.chat.openai.answers import AnswerChoice, AnswerForm, AnswerStream
from deltawire.chat.openai.chat import ChatRequest, read_chat, read_completion
from deltawire.chat.openai.recording import Prompt, Recording
from deltawire.chat.openai.stops import StopWatch, cut
from deltawire.chat.text import Text
from deltawire.chat.thinking import (
    BoundedCompletion,
    ThinkingLimits,
    first_tokens,
    generate_within,
    limits_of,
)
from deltawire.config import ThinkingConfig
from deltawire.engines.base import EVERYTHING, Completion, OnToken, Sampler, Sampling, Truncation
from deltawire.errors import DeltawireError, InputError

MAX_BODY_BYTES = 16 << 20
EFFORTS = {"minimal": 1 / 16, "low": 1 / 4, "medium": 1 / 2, "high": 1.0}
"""The share of the largest budget that a ``reasoning_effort`` may think."""


Verifier = Callable[[Sequence[Message], str], float]


@dataclass
class Policy:
    """The sampling settings and limits of requests.

    With ``temperature`` None the client chooses it, and the truncation too. ``capacity`` bounds
    prompt and answer together, ``turns`` the answers of one recording, and ``characters`` the
    length of a message that the model reads.
    """

    max_tokens: int
    capacity: int
    temperature: float | None = None
    truncation: Truncation = EVERYTHING
    turns: int = 1_000_000
    characters: int = 1_000_000
    model: str = "policy"
    thinking: ThinkingConfig | None = None
    budget: int = 0
    """The most tokens of thinking in an answer, if ``thinking`` is set."""
    verifier: Verifier | None = None
    """Scores an answer to a conversation, for ``n_adaptive``; called in a thread."""


class Endpoint:
    """The endpoint of one session. ``refused`` is the reason if the last request was refused for
    lack of room (``context``) or of turns (``turns``).

    Example::

        async with listening(Endpoint(engine, text, policy, token=token)) as url:
            ...  # POST {url}/chat/completions
    """

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
        self._drawing = 0
        self._requests = itertools.count(1)
        self._turns = itertools.count()

    def app(self) -> web.Application:
        """The application; serve it with ``handler_cancellation``."""
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
            return _error(401, "the bearer token is missing or wrong", "invalid_api_key")
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
        # Requests that are being answered count as well.
        if recording.turns + self._drawing + asked.most > self._policy.turns:
            raise _RefusedError(
                "the episode has used all its turns", "turn_limit_exceeded", "turns"
            )
        short = [shorten(message, self._policy.characters) for message in asked.messages]
        asked = replace(asked, messages=tuple(short))
        prompt, lead = self._prompt(asked, recording)
        bounds = self._bounds(asked)
        inserted = 0 if bounds is None else len(bounds.format.forced)
        sampling = self._sampling(asked, len(prompt.tokens), inserted)
        form = AnswerForm(asked, next(self._requests), self._policy.model, prompt.tokens)
        stream = AnswerStream(request, form, self._text) if asked.stream else None
        verifier = self._verifier(asked)
        self._drawing += asked.most
        try:
            if stream is not None:
                await stream.begin()

            async def draw(count: int, live: AnswerStream | None) -> list[AnswerChoice]:
                drawn = await self._draw(
                    prompt.tokens, sampling, replace(asked, choices=count), live, bounds
                )
                choices = [self._choice(asked, lead, completion) for completion in drawn]
                for choice in choices:
                    recording.add(asked, prompt, choice.completion, choice.reply, kept=choice.kept)
                return choices

            if asked.adaptive is None:
                choices = await draw(asked.choices, stream)
            else:
                choices = [await self._chosen(asked, asked.adaptive, draw, form, verifier)]
        finally:
            self._drawing -= asked.most
        if stream is not None:
            return await stream.end(choices)
        return web.json_response(form.whole(choices, self._text))

    def _verifier(self, asked: ChatRequest) -> Verifier | None:
        """The function that scores the answers to a request, None for a vote. Raises `InputError`
        if the policy has none."""
        if asked.adaptive is None or asked.adaptive.by == "vote":
            return None
        if self._policy.verifier is None:
            raise InputError(
                'n_adaptive by "verifier" is not supported here: the endpoint has no verifier',
                hint='use by = "vote", or give the harness a method verify',
            )
        return self._policy.verifier

    async def _chosen(
        self,
        asked: ChatRequest,
        adaptive: AdaptiveSampling,
        draw: Callable[[int, AnswerStream | None], Awaitable[list[AnswerChoice]]],
        form: AnswerForm,
        verifier: Verifier | None,
    ) -> AnswerChoice:
        """Draws answers until the vote is decided or the verifier accepts one; returns that one.

        Nothing is streamed while answers are drawn.
        """
        ballot, choices = Ballot(adaptive), list[AnswerChoice]()
        while not ballot.ended:
            for choice in await draw(ballot.wave, None):
                choices.append(choice)
                answer = self._answer_text(choice)
                calls = json.dumps([[c.name, dict(c.arguments)] for c in choice.reply.calls])
                given = [*asked.messages] or [Message("user", str(asked.prompt))]
                score = 0.0 if verifier is None else await _score(verifier, given, answer)
                ballot.add((adaptive.read(answer), calls), score)
        tokens = [len(choice.completion.tokens) for choice in choices]
        form.unseen = sum(tokens) - tokens[ballot.winner]
        form.report = ballot.report()
        return choices[ballot.winner]

    def _answer_text(self, choice: AnswerChoice) -> str:
        """The text after the thinking."""
        completion = choice.completion
        if not isinstance(completion, BoundedCompletion):
            return choice.reply.content
        return choice.reply.content.removeprefix(self._text.decode(completion.thought_tokens))

    def _prompt(self, asked: ChatRequest, recording: Recording) -> tuple[Prompt, str]:
        """The prompt of the answer, and the beginning of a forced call at its end."""
        prompt = recording.prompt(asked)
        if asked.forced is None:
            return prompt, ""
        lead, tokens = self._text.opening(asked.forced or None)
        return (
            Prompt([*prompt.tokens, *tokens], [*prompt.between, *tokens], prompt.before),
            lead,
        )

    def _choice(self, asked: ChatRequest, lead: str, completion: Completion) -> AnswerChoice:
        """The drawn tokens up to a stop string, and the reply to the client, with its calls parsed
        if the client offered tools."""
        found = cut(self._text, completion.tokens, asked.stops)
        if found is not None:
            count = found.tokens
            completion = first_tokens(completion, count)
        said = lead + (self._text.decode(completion.tokens) if found is None else found.said)
        kept = None if found is None else lead + found.kept
        if not (asked.calls or self._text.structured):
            return AnswerChoice(completion, Message("assistant", said), kept)
        parsed = self._text.read_calls(said, turn=next(self._turns), tools=asked.tools)
        if parsed.calls and not asked.calls:
            return AnswerChoice(completion, Message("assistant", said), kept)
        content = "\n".join(part for part in (parsed.content, *parsed.broken) if part)
        return AnswerChoice(completion, Message("assistant", content, calls=parsed.calls), kept)

    def _sampling(self, asked: ChatRequest, length: int, inserted: int = 0) -> Sampling:
        policy = self._policy
        room = min(policy.capacity, self._sampler.capacity) - length
        if room < 1:
            raise _RefusedError(
                f"the conversation has {length} tokens; this model's context length is "
                f"{policy.capacity}",
                "context_length_exceeded",
                "context",
            )
        # Tokens that close thinking by force are not drawn, so they do not count as the model's.
        wanted = min(asked.max_tokens or policy.max_tokens, policy.max_tokens) + inserted
        temperature, truncation = policy.temperature, policy.truncation
        if temperature is None:
            temperature = 1.0 if asked.temperature is None else asked.temperature
            truncation = asked.truncation
        return Sampling(min(wanted, room), temperature, truncation)

    def _bounds(self, asked: ChatRequest) -> ThinkingLimits | None:
        """The bounds of thinking for a request. In a recorded session they are the run's own.

        Raises `InputError` if a client asks for a budget and the policy has none.
        """
        policy = self._policy
        if policy.thinking is None:
            if asked.max_thinking is not None or asked.effort:
                option = "reasoning_effort" if asked.effort else "max_thinking_tokens"
                raise InputError(
                    f"{option} is not supported here: the policy has no thinking budgets",
                    hint=f"set rollout.thinking in the run, or leave out {option}",
                )
            return None
        budget = policy.budget
        if self._recording is None:
            budget = max(1, int(budget * EFFORTS.get(asked.effort, 1.0)))
            budget = min(budget, asked.max_thinking or budget)
        return limits_of(self._text, policy.thinking, budget)

    async def _draw(
        self,
        tokens: list[int],
        sampling: Sampling,
        asked: ChatRequest,
        stream: AnswerStream | None,
        bounds: ThinkingLimits | None,
    ) -> list[Completion]:
        """Draws all choices at the same time; a stream gets their tokens as they come."""
        told: asyncio.Queue[tuple[int, int]] = asyncio.Queue()
        live = None if stream is None or stream.held_back else stream

        def choice(index: int) -> Coroutine[Any, Any, Completion]:
            listener = self._listener(index, asked.stops, told if live else None)
            if bounds is None:
                return self._sampler.generate(tokens, sampling, on_token=listener)

            def insert(forced: Sequence[int]) -> None:
                for token in forced if live else ():
                    told.put_nowait((index, token))

            return generate_within(
                self._sampler, tokens, sampling, bounds, on_token=listener, on_forced=insert
            )

        tasks = [asyncio.create_task(choice(index)) for index in range(asked.choices)]
        together = asyncio.gather(*tasks)
        try:
            while live is not None and not (together.done() and told.empty()):
                next_token = asyncio.ensure_future(told.get())
                either: set[asyncio.Future[Any]] = {together, next_token}
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
                if next_token.done():
                    await live.token(*next_token.result())
                else:
                    next_token.cancel()
            return await together
        finally:
            for task in tasks:
                task.cancel()

    def _listener(
        self, index: int, stops: Sequence[str], told: asyncio.Queue[tuple[int, int]] | None
    ) -> OnToken | None:
        """A callback for a choice's tokens, which returns True when there are enough."""
        if told is None and not stops:
            return None
        watch = StopWatch(self._text, stops) if stops else None

        def listen(token: int) -> bool:
            if told is not None:
                told.put_nowait((index, token))
            return watch is not None and watch.add(token)

        return listen


async def _score(verifier: Verifier, messages: Sequence[Message], answer: str) -> float:
    """Asks the verifier in a thread: it may take long. Raises `DeltawireError` if it fails."""
    try:
        score = float(await asyncio.to_thread(verifier, messages, answer))
    except Exception as error:
        raise DeltawireError(f"the verifier raised {type(error).__name__}: {error}") from error
    if not math.isfinite(score):
        raise DeltawireError(f"the verifier gave the score {score}")
    return score


class _RefusedError(Exception):
    """A request for which there is no room."""

    def __init__(self, message: str, code: str, why: str) -> None:
        super().__init__(message)
        self.code = code
        self.why = why


def _error(status: int, message: str, code: str) -> web.Response:
    body = {"error": {"message": message, "type": "invalid_request_error", "code": code}}
    return web.json_response(body, status=status)


@asynccontextmanager
async def listening(endpoint: Endpoint) -> AsyncIterator[str]:
    """Serves an endpoint on a free port of the loopback interface; yields its base URL."""
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
