"""Content filters by URL: another server says whether a request may be answered, and whether its
answer may be shown.

::

    request ─▶ POST before ─▶ replica ─▶ whole answer ─▶ POST after ─▶ client
                 └─ no: 400, code content_filter            └─ no: an empty answer that ends
                                                               with finish_reason content_filter

A filter gets ``{"stage", "id", "messages" or "prompt", "request"}``, where ``request`` lists all
texts that a model may get, and after the answer its ``texts``, one for each choice; it says
``{"allowed": true}`` or ``false``, with a ``reason`` for the log. It gets texts unredacted, and
neither user, arm nor version. With a filter after the answer a stream is held until its end.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Any

import aiohttp
import msgspec
from msgspec import Meta

from deltawire.display import safe_line
from deltawire.errors import CorruptError, RetryError
from deltawire.live.gateway.requests import AskedAnswer
from deltawire.serving.errors import RequestError
from deltawire.serving.http_answers import post_json
from deltawire.serving.request_ids import REQUEST_ID
from deltawire.wire.captures import FILTERED

ANSWER_WITHIN_S = 5.0
MAX_ANSWER_BYTES = 64 << 10
MOST_HELD_BYTES = 256 << 20
_LOG = logging.getLogger("deltawire.live")


class FilterVerdict(msgspec.Struct, frozen=True):
    """A filter's answer."""

    allowed: bool
    reason: Annotated[str, Meta(max_length=4096)] = ""


class ContentFilter:
    """The filters of one gateway; an empty URL is no filter. ``key`` is sent as a bearer token.

    A filter that does not answer within `ANSWER_WITHIN_S`, or says anything else, lets nothing
    pass (`RetryError`), or everything with ``open_on_failure``.

    Example::

        filters = ContentFilter(before="https://filter.example.com/v1", key="…")
        await filters.check_request(session, asked)
    """

    def __init__(
        self, *, before: str = "", after: str = "", key: str = "", open_on_failure: bool = False
    ) -> None:
        self._before, self._after = before, after
        self._key = key
        self._open_on_failure = open_on_failure
        self.counts: Counter[str] = Counter()
        """``filter_refused``, ``filter_withheld`` and ``filter_failed``."""
        self._held_bytes = 0

    @property
    def checks_answers(self) -> bool:
        """True if answers are checked: their streams are held then."""
        return bool(self._after)

    def hold(self, size: int) -> None:
        """Counts bytes of streams that wait for their verdict; a negative size gives them back.
        Raises `CorruptError` beyond `MOST_HELD_BYTES` in all of them."""
        self._held_bytes += size
        if size > 0 and self._held_bytes > MOST_HELD_BYTES:
            raise CorruptError("too many bytes of answers wait for the content filter")

    async def check_request(self, session: aiohttp.ClientSession, asked: AskedAnswer) -> None:
        """Raises `RequestError` for a request that the filter does not allow, or cannot read: parts
        that are no text, such as images and ids of tokens."""
        if not self._before:
            return
        if asked.texts().opaque:
            raise RequestError(
                "the content filter cannot read all of the request",
                hint="send text only",
                code=FILTERED,
            )
        if not await self._allows(session, self._before, _request_of(asked)):
            self.counts["filter_refused"] += 1
            raise RequestError("the content filter refused the request", code=FILTERED)

    async def allows_answer(
        self, session: aiohttp.ClientSession, asked: AskedAnswer, texts: Sequence[str]
    ) -> bool:
        """Returns whether an answer, of one text for each choice, may be shown."""
        if not self._after:
            return True
        body = {**_request_of(asked), "stage": "answer", "texts": texts}
        allowed = await self._allows(session, self._after, body)
        self.counts["filter_withheld"] += not allowed
        return allowed

    async def _allows(self, session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> bool:
        try:
            verdict = await post_json(
                session,
                url,
                {**body, "id": REQUEST_ID.get()},
                FilterVerdict,
                key=self._key,
                limit=MAX_ANSWER_BYTES,
                within_s=ANSWER_WITHIN_S,
            )
        except CorruptError as error:
            # A damaged verdict counts as none: nothing passes, unless the operator chose otherwise.
            self.counts["filter_failed"] += 1
            passes = "everything passes" if self._open_on_failure else "nothing passes"
            _LOG.error("the content filter failed, so %s: %s", passes, error.message)
            if self._open_on_failure:
                return True
            raise RetryError("the content filter does not answer") from error
        if not verdict.allowed:
            _LOG.info("the content filter says no: %s", safe_line(verdict.reason)[:256])
        return verdict.allowed


def _request_of(asked: AskedAnswer) -> dict[str, Any]:
    name = "messages" if asked.chat else "prompt"
    texts = asked.texts().texts  # Also of tools, documents, variables: models get those too.
    return {"stage": "request", name: asked.given.get(name), "request": texts}
