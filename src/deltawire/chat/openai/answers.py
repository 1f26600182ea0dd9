"""Writes an answer's choices in OpenAI's formats: one object, or server-sent events."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from deltawire.chat.messages import Message
from deltawire.chat.openai.chat import ChatRequest, spell_calls
from deltawire.chat.openai.stops import IncrementalText, safe
from deltawire.chat.text import Text
from deltawire.chat.thinking import BoundedCompletion
from deltawire.engines.base import Completion


@dataclass(frozen=True)
class AnswerChoice:
    """One choice: the tokens that are kept, and the reply that the client gets. If the reply ends
    before a stop string, ``kept`` is the text of all tokens."""

    completion: Completion
    reply: Message
    kept: str | None = None

    @property
    def finish(self) -> str:
        """The finish reason in OpenAI's terms."""
        return "tool_calls" if self.reply.calls else self.completion.finish


class AnswerForm:
    """The format of one answer.

    With ``return_token_ids`` it has the members that vLLM adds, ``prompt_token_ids`` and each
    choice's ``token_ids``, and two more: ``token_versions``, the weight version that drew each
    token, and ``prompt_text``, what the prompt's tokens say. A conversation that continues after
    the tokens that were drawn has more in its prompt than its request.
    """

    def __init__(
        self, asked: ChatRequest, number: int, model: str, prompt: Sequence[int], text: Text
    ) -> None:
        self.asked = asked
        self.chat = bool(asked.messages)
        self.kind = "chat.completion" if self.chat else "text_completion"
        self._prompt, self._text = prompt, text
        self._first = True
        self.unseen = 0
        """Tokens that were drawn for answers that are not returned."""
        self.report: dict[str, Any] = {}
        """How an adaptively sampled answer was found; empty for others."""
        self._head = {
            "id": f"{'chatcmpl' if self.chat else 'cmpl'}-{number}",
            "created": int(time.time()),
            "model": model,
        }

    def whole(self, choices: Sequence[AnswerChoice], text: Text) -> dict[str, Any]:
        """The answer as one object."""
        rows = [self._row(index, choice, text) for index, choice in enumerate(choices)]
        return self.envelope(self.kind, rows, choices) | {"usage": self.usage(choices)}

    def envelope(
        self, kind: str, rows: list[dict[str, Any]], choices: Sequence[AnswerChoice] = ()
    ) -> dict[str, Any]:
        """Common members of every object; the fingerprint names the newest version that sampled."""
        body: dict[str, Any] = {**self._head, "object": kind, "choices": rows}
        if self.asked.ids and self._first:
            self._first = False
            body["prompt_token_ids"] = list(self._prompt)
            body["prompt_text"] = self._text.decode(self._prompt)
        versions = [c.completion.versions[-1] for c in choices if c.completion.versions]
        if versions:
            body["system_fingerprint"] = f"version-{max(versions)}"
        if choices and self.report:
            body["n_adaptive"] = self.report
        return body

    def usage(self, choices: Sequence[AnswerChoice]) -> dict[str, int]:
        """Tokens read and drawn, also for answers that are not returned; the prompt counts once."""
        drawn = sum(len(choice.completion.tokens) for choice in choices) + self.unseen
        return {
            "prompt_tokens": len(self._prompt),
            "completion_tokens": drawn,
            "total_tokens": len(self._prompt) + drawn,
        }

    def _row(self, index: int, choice: AnswerChoice, text: Text) -> dict[str, Any]:
        row: dict[str, Any] = {"index": index, "finish_reason": choice.finish}
        if self.chat:
            message: dict[str, Any] = {
                "role": "assistant",
                "content": choice.reply.content or None,
            }
            if choice.reply.calls:
                message["tool_calls"] = spell_calls(choice.reply.calls)
            row["message"] = message
        else:
            row["text"] = choice.reply.content
        if self.asked.logprobs:
            row["logprobs"] = self.logprobs(choice.completion, text)
        return row | self.tokens(choice.completion)

    def tokens(self, completion: Completion) -> dict[str, Any]:
        """The members of a choice that list its tokens and their versions, if they were asked for.
        An answer whose thinking was closed by force has tokens that nothing drew: it has none."""
        if not self.asked.ids:
            return {}
        if isinstance(completion, BoundedCompletion) and completion.forced:
            return {"token_ids": None}
        return {"token_ids": completion.tokens, "token_versions": completion.versions}

    def logprobs(self, completion: Completion, text: Text) -> dict[str, Any]:
        """The member of a choice that lists its tokens and their log-probabilities."""
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


class AnswerStream:
    """An answer as server-sent events, with its choices as they are drawn.

    Log-probabilities and tokens come with each choice's finish reason, for all its tokens: text
    that is sent need not end where a token does. If tokens were asked for, ``tokens_follow`` marks
    the chunks before. Where tool calls are parsed, everything is held back until the
    end, since a call begins like any text; where there are stop strings, so is text with which one
    of them may begin.
    """

    def __init__(self, request: web.Request, form: AnswerForm, text: Text) -> None:
        self.held_back = form.asked.calls or text.structured
        self._form = form
        self._request = request
        self._response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
        )
        count = form.asked.choices
        self._text = text
        self._texts = [IncrementalText(text) for _ in range(count)]
        self._said = [""] * count
        self._sent = [0] * count
        self._kind = "chat.completion.chunk" if form.chat else "text_completion"

    async def begin(self) -> None:
        """Sends the header, and the start of each message."""
        await self._response.prepare(self._request)
        if self._form.chat:
            for index in range(len(self._said)):
                await self._delta(index, {"role": "assistant", "content": ""})

    async def token(self, index: int, token: int) -> None:
        """Sends the text that one more token of a choice adds."""
        self._said[index] += self._texts[index].add(token)
        await self._send_text(index, safe(self._said[index], self._form.asked.stops))

    async def end(self, choices: Sequence[AnswerChoice]) -> web.StreamResponse:
        """Sends what was held back, and the finish reason of each choice."""
        for index, choice in enumerate(choices):
            if choice.reply.content.startswith(self._said[index][: self._sent[index]]):
                await self._send_text(index, choice.reply.content)
            if choice.reply.calls:
                rows = enumerate(spell_calls(choice.reply.calls))
                await self._delta(index, {"tool_calls": [{"index": i, **call} for i, call in rows]})
            await self._delta(index, {}, finished=choice)
        if self._form.asked.usage:
            body = self._form.envelope(self._kind, [], choices)
            await self._write(body | {"usage": self._form.usage(choices)})
        await self._response.write(b"data: [DONE]\n\n")
        await self._response.write_eof()
        return self._response

    async def _send_text(self, index: int, whole: str) -> None:
        """Sends the new part of a choice's text."""
        new = whole[self._sent[index] :]
        if new:
            self._sent[index] += len(new)
            await self._delta(index, {"content": new})

    async def _delta(
        self, index: int, delta: dict[str, Any], finished: AnswerChoice | None = None
    ) -> None:
        finish = None if finished is None else finished.finish
        row: dict[str, Any] = {"index": index, "finish_reason": finish}
        if finished is not None:
            if self._form.asked.logprobs:
                row["logprobs"] = self._form.logprobs(finished.completion, self._text)
            row |= self._form.tokens(finished.completion)
        elif self._form.asked.ids:
            row["tokens_follow"] = True
        if self._form.chat:
            row["delta"] = delta
        else:
            row["text"] = delta.get("content", "")
        await self._write(self._form.envelope(self._kind, [row]))

    async def _write(self, body: dict[str, Any]) -> None:
        await self._response.write(f"data: {json.dumps(body)}\n\n".encode())
