"""Redaction: passes content through the deployment's function before anything is stored.

The function takes the texts of a conversation, the answer last, and returns as many. Tokens cannot
be redacted: an answer whose texts the function changed is stored without tokens, as unusable for
training, because tokens that were encoded again are not those that the model drew.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Literal, NamedTuple

from deltawire.config.own_code import load_own_code
from deltawire.errors import InputError

Redact = Callable[[list[str]], Sequence[str]]
OnFailure = Literal["closed", "open"]

REDACT_WITHIN_S = 5.0
_LOG = logging.getLogger("deltawire.live")


class Redacted(NamedTuple):
    """The texts to store, None if nothing may be stored, and whether they differ."""

    texts: list[str] | None
    changed: bool


class Redaction:
    """Calls a redaction function in a thread, so that it delays no other answer.

    If it raises, returns something else than as many texts, or takes longer than
    `REDACT_WITHIN_S`: with ``on_failure`` ``closed`` nothing is stored; with ``open`` the texts are
    stored as they are. ``failures`` counts these cases.
    """

    def __init__(self, redact: Redact | None, *, on_failure: OnFailure = "closed") -> None:
        self.failures = 0
        self._redact = redact
        self._open = on_failure == "open"
        self._thread = ThreadPoolExecutor(1, "redaction") if redact is not None else None

    @property
    def on(self) -> bool:
        """Returns whether there is a redaction function."""
        return self._redact is not None

    async def apply(self, texts: list[str]) -> Redacted:
        """Returns the texts to store."""
        if self._thread is None or self._redact is None:
            return Redacted(texts, changed=False)
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(REDACT_WITHIN_S):
                found = list(await loop.run_in_executor(self._thread, self._redact, list(texts)))
            if len(found) != len(texts) or not all(isinstance(text, str) for text in found):
                raise TypeError("it must return as many texts as it was given")
        except Exception as error:  # Its message may hold the user's words: only the type is kept.
            self.failures += 1
            _LOG.error("the redaction function failed: %s", type(error).__name__)
            return Redacted(texts if self._open else None, changed=False)
        return Redacted(found, changed=found != texts)

    def close(self) -> None:
        """Ends the thread."""
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)


def load_redact(place: str) -> Redact:
    """Imports ``module:function``, which this machine's command line names; raises `InputError`.

    Example::

        load_redact("deltawire.live.capture.presidio:redact")
    """
    found = load_own_code("--redact", place)
    if not callable(found):
        raise InputError(f"{place[:200]!r} is not a function")
    return found  # type: ignore[no-any-return]
