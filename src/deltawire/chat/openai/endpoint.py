"""An OpenAI-compatible endpoint over any `Sampler`.

::

    POST /v1/chat/completions     tools, n, n_adaptive, stop, streaming, logprobs
    POST /v1/completions          of a text, or of token ids
    GET  /v1/models

Requests wait for the engine in the same event loop; the caller must step the engine
(`Sampler.advance`). A client that hangs up cancels its request. Every request needs the bearer
token.

With a recording, everything that is drawn is kept, and the run's own settings are used instead of
the client's: a policy is trained on its own distribution. Requests are built by
`deltawire.chat.requests`, as those of training and evaluation.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

from aiohttp import web

from deltawire.bearer import bears
from deltawire.chat.messages import Message
from deltawire.chat.openai.adaptive import AdaptiveSampling, Ballot
from deltawire.chat.openai.answers import AnswerChoice, AnswerForm, AnswerStream
from deltawire.chat.openai.chat import ChatRequest, read_chat, read_completion
from deltawire.chat.openai.recording import Prompt, Recording
from deltawire.chat.openai.stops import StopWatch, cut
from deltawire.chat.requests import RequestBuilder, RequestSettings
from deltawire.chat.text import Text
from deltawire.chat.thinking import (
    BoundedCompletion,
    ThinkingLimits,
    first_tokens,
    generate_within,
)
from deltawire.engines.base import Completion, OnToken, Sampler, Sampling
from deltawire.errors import DeltawireError, InputError

MAX_BODY_BYTES = 16 << 20
MAX_REMEMBERED = 1 << 20
"""Tokens of answered conversations that an endpoint without a recording keeps, in main memory: a
conversation that goes on continues after the tokens that were drawn, as in training."""
EFFORTS = {"minimal": 1 / 16, "low": 1 / 4, "medium": 1 / 2, "high": 1.0}
"""The share of the largest budget that a ``reasoning_effort`` may think."""


Verifier = Callable[[Sequence[Message], str], float]


@dataclass
class Policy:
    """The settings and limits of requests.

    With ``client_samples`` a client may choose temperature and truncation. ``turns`` bounds the
    answers of one recording.
    """

    settings: RequestSettings
    client_samples: bool = False
    turns: int = 1_000_000
    model: str = "policy"
    budget: int = 0
    """The most tokens of thinking in an answer, if the settings have budgets."""
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
        context = min(policy.settings.context, sampler.capacity)
        self._settings = replace(policy.settings, context=context)
        self._token = token
        self._recording = recording
        self._remembered = Recording(text, remembered=MAX_REMEMBERED)
        self._drawing = 0
        self._requests = itertools.count(1)

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
        if not bears(request.headers.get("Authorization", ""), self._token):
            return _error(401, "the bearer token is missing or wrong", "invalid_api_key")
        try:
            return await handler(request)
        except _RefusedError as error:
            self.refused = error.why or self.refused
            return _error(error.status, str(error), error.code)
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
        # A gateway's clients name a deployment, not a replica's model.
        if self._recording is not None and asked.model not in ("", self._policy.model):
            raise _RefusedError(
                f"there is no model {asked.model!r} here; this endpoint has {self._policy.model!r}",
                "model_not_found",
                status=404,
            )
        recording = self._recording_of(asked)
        # Requests that are being answered count as well.
        turns = 0 if self._recording is None else self._recording.turns
        if turns + self._drawing + asked.most > self._policy.turns:
            raise _RefusedError(
                "the episode has used all its turns", "turn_limit_exceeded", "turns"
            )
        builder = self._builder(asked)
        asked = replace(asked, messages=builder.shortened(asked.messages))
        prompt, lead = self._prompt(asked, recording, builder)
        sampling = self._sampling(asked, builder, len(prompt.tokens))
        bounds = builder.bounds
        form = AnswerForm(
            asked, next(self._requests), self._policy.model, prompt.tokens, self._text
        )
        stream = AnswerStream(request, form, self._text) if asked.stream else None
        verifier = self._verifier(asked)
        self._drawing += asked.most
        try:
            if stream is not None:
                await stream.begin()

            total = 0

            async def draw(count: int, live: AnswerStream | None) -> list[AnswerChoice]:
                nonlocal total
                before, total = total, total + count
                drawn = await self._draw(
                    prompt.tokens, sampling, replace(asked, choices=count), live, bounds, before
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

    def _recording_of(self, asked: ChatRequest) -> Recording:
        """The answers that a request may continue."""
        if self._recording is not None:
            return self._recording
        return self._remembered if asked.messages else Recording(self._text)

    def _prompt(
        self, asked: ChatRequest, recording: Recording, builder: RequestBuilder
    ) -> tuple[Prompt, str]:
        """The prompt of the answer, and the beginning of a forced call at its end."""
        prompt = recording.prompt(asked, builder)
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
        # As in an episode: some templates render the identity of a call, which has the turn in it.
        turn = 1 + sum(message.role == "assistant" for message in asked.messages)
        parsed = self._text.read_calls(said, turn=turn, tools=asked.tools)
        if parsed.calls and not asked.calls:
            return AnswerChoice(completion, Message("assistant", said), kept)
        content = "\n".join(part for part in (parsed.content, *parsed.broken) if part)
        return AnswerChoice(completion, Message("assistant", content, calls=parsed.calls), kept)

    def _sampling(self, asked: ChatRequest, builder: RequestBuilder, length: int) -> Sampling:
        """The sampling settings of a request. Raises `_RefusedError` if there is no room for an
        answer."""
        if builder.room(length) < 1:
            raise _RefusedError(
                f"the conversation has {length} tokens; this model's context length is "
                f"{self._policy.settings.context}",
                "context_length_exceeded",
                "context",
            )
        most = self._settings.max_tokens
        if asked.max_tokens is not None and asked.max_tokens > most:
            raise InputError(
                f"max_tokens is {asked.max_tokens}, and an answer has at most {most} tokens here",
                hint=f"ask for at most {most}, or leave max_tokens out; the run's "
                "rollout.max_tokens decides",
            )
        if asked.seed is not None and not self._policy.client_samples:
            raise InputError(
                "seed is not supported here: a policy is trained on draws of its own",
                hint="leave out seed",
            )
        return builder.sampling(length, max_tokens=asked.max_tokens or 0, seed=asked.seed)

    def _builder(self, asked: ChatRequest) -> RequestBuilder:
        """The builder for a request. In a recorded session its settings are the run's own.

        Raises `InputError` if a client asks for a budget and the policy has none, or for another
        form of the chat template than the run's.
        """
        policy, settings = self._policy, self._settings
        if asked.variables and asked.variables != self._text.variables:
            raise InputError(
                "chat_template_kwargs is not supported here: all turns are rendered as in the run",
                hint="leave out chat_template_kwargs",
            )
        if settings.thinking is None and (asked.max_thinking is not None or asked.effort):
            option = "reasoning_effort" if asked.effort else "max_thinking_tokens"
            raise InputError(
                f"{option} is not supported here: the policy has no thinking budgets",
                hint=f"set rollout.thinking in the run, or leave out {option}",
            )
        budget = policy.budget
        if self._recording is None and settings.thinking is not None:
            budget = max(1, int(budget * EFFORTS.get(asked.effort, 1.0)))
            budget = min(budget, asked.max_thinking or budget)
        if policy.client_samples:
            if asked.temperature is not None:
                settings = replace(settings, temperature=asked.temperature)
            settings = replace(settings, truncation=asked.truncated(settings.truncation))
        return RequestBuilder(self._text, settings, budget=budget)

    async def _draw(
        self,
        tokens: list[int],
        sampling: Sampling,
        asked: ChatRequest,
        stream: AnswerStream | None,
        bounds: ThinkingLimits | None,
        drawn: int,
    ) -> list[Completion]:
        """Draws all choices at the same time, after ``drawn`` others of the request; a stream gets
        their tokens as they come."""
        told: asyncio.Queue[tuple[int, int]] = asyncio.Queue()
        live = None if stream is None or stream.held_back else stream

        def choice(index: int) -> Coroutine[Any, Any, Completion]:
            listener = self._listener(index, asked.stops, told if live else None)
            one = sampling.numbered(drawn + index)
            if bounds is None:
                return self._sampler.generate(tokens, one, on_token=listener)

            def insert(forced: Sequence[int]) -> None:
                for token in forced if live else ():
                    told.put_nowait((index, token))

            return generate_within(
                self._sampler, tokens, one, bounds, on_token=listener, on_forced=insert
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
    """A request for which there is no room (``why``), or no model."""

    def __init__(self, message: str, code: str, why: str = "", *, status: int = 400) -> None:
        super().__init__(message)
        self.code = code
        self.why = why
        self.status = status


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
