"""A client for feedback, with the standard library only.

Example::

    client = FeedbackClient("http://gateway:8400", token)
    client.send(receipt, "thumbs", "up", id="click-17")

The same without Python::

    curl -sS https://gateway:8400/v1/feedback -H "Authorization: Bearer $DELTAWIRE_TOKEN" \\
      -H 'Content-Type: application/json' \\
      -d '{"receipt": "dw2.…", "kind": "accept", "id": "click-17"}'
"""

from __future__ import annotations

import asyncio
import http.client
import json
import time
import urllib.error
import urllib.request
import uuid
from functools import partial
from typing import Any

from deltawire.errors import DeltawireError, InputError, RetryError

RECEIPT_HEADER = "x-deltawire-receipt"
ATTEMPTS = 5
ANSWER_WITHIN_S = 10.0
LONGEST_PAUSE_S = 10.0
_MAX_ANSWER_BYTES = 1 << 16


def receipt_of(answer: Any) -> str:
    """Returns the receipt of an answer of OpenAI's client, or of its JSON as a dict, or of the
    last chunk of a stream; empty if there is none."""
    if not isinstance(answer, dict):
        extra = getattr(answer, "model_extra", None)
        answer = extra if isinstance(extra, dict) else {}
    found = answer.get("deltawire")
    receipt = found.get("receipt", "") if isinstance(found, dict) else ""
    return receipt if isinstance(receipt, str) else ""


class FeedbackClient:
    """Reports to a gateway, and repeats a report that got no answer with the same id."""

    def __init__(self, url: str, token: str, *, attempts: int = ATTEMPTS) -> None:
        if not url.startswith(("http://", "https://")):
            raise InputError(f"{url[:80]!r} is not an http:// or https:// URL")
        self._url = url.rstrip("/") + "/v1/feedback"
        self._token = token
        self._attempts = attempts

    def send(
        self,
        receipt: str,
        kind: str,
        value: float | bool | str = 1.0,
        *,
        id: str = "",  # noqa: A002 - the name of the request's member
        at: float | None = None,
        text: str = "",
    ) -> str:
        """Sends one report and returns its id. ``text`` is the better answer of an ``edit``.

        Raises `InputError` if the gateway refuses it and `RetryError` if it does not answer.
        """
        body: dict[str, Any] = {"receipt": receipt, "kind": kind, "value": value}
        body["id"] = id or f"py-{uuid.uuid4().hex}"
        if at is not None:
            body["at"] = at
        if text:
            body["text"] = text
        data = json.dumps(body).encode()
        for attempt in range(self._attempts):
            try:
                return self._post(data)
            except RetryError:
                if attempt == self._attempts - 1:
                    raise
                time.sleep(min(0.2 * 2**attempt, LONGEST_PAUSE_S))
        raise RetryError("the gateway was not asked", hint="give at least one attempt")

    def _post(self, data: bytes) -> str:
        request = urllib.request.Request(  # noqa: S310 - the scheme was checked
            self._url,
            data,
            {"Authorization": f"Bearer {self._token}", "Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=ANSWER_WITHIN_S) as answer:  # noqa: S310
                return str(json.loads(answer.read(_MAX_ANSWER_BYTES))["id"])
        except urllib.error.HTTPError as error:
            raise _error_of(error) from error
        except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError) as error:
            raise RetryError(f"the gateway does not answer: {type(error).__name__}") from error


class AsyncFeedbackClient:
    """The same for a program on an event loop: each report waits in a thread of its own.

    Example::

        client = AsyncFeedbackClient("http://gateway:8400", token)
        await client.send(receipt_of(answer), "thumbs", "up", id="click-17")
    """

    def __init__(self, url: str, token: str, *, attempts: int = ATTEMPTS) -> None:
        self._client = FeedbackClient(url, token, attempts=attempts)

    async def send(
        self,
        receipt: str,
        kind: str,
        value: float | bool | str = 1.0,
        *,
        id: str = "",  # noqa: A002 - the name of the request's member
        at: float | None = None,
        text: str = "",
    ) -> str:
        """Sends one report and returns its id; raises as `FeedbackClient.send`. A caller that is
        cancelled leaves it under way: it is sent once, by its id."""
        send = partial(self._client.send, receipt, kind, value, id=id, at=at, text=text)
        return await asyncio.to_thread(send)


def _error_of(answer: urllib.error.HTTPError) -> DeltawireError:
    try:
        message = str(json.loads(answer.read(_MAX_ANSWER_BYTES))["error"]["message"])
    except (OSError, ValueError, KeyError, TypeError):
        message = "no reason given"
    if answer.code in (425, 429) or answer.code >= 500:
        return RetryError(f"the gateway answers {answer.code}: {message[:300]}")
    return InputError(f"the gateway refuses the feedback ({answer.code}): {message[:300]}")
