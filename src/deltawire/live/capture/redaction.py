"""Redaction: passes content through the deployment's function before anything is stored.

The function takes the texts of a conversation, the answer last, and returns as many. Tokens cannot
be redacted: an answer whose texts the function changed is stored without tokens, as unusable for
training, because tokens that were encoded again are not those that the model drew.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

from deltawire.config.own_code import load_own_code
from deltawire.errors import InputError

Redact = Callable[[list[str]], Sequence[str]]
OnFailure = Literal["closed", "open"]

REDACT_WITHIN_S = 2.0
AT_ONCE = 4
MOST_STUCK = 16
"""Calls that were given up and have not ended, beyond which none is begun."""
_LOG = logging.getLogger("deltawire.live")


class Redacted(NamedTuple):
    """The texts to store, None if nothing may be stored, and whether they differ."""

    texts: list[str] | None
    changed: bool


class _CallError(Exception):
    """The function failed; the message is the type of its error."""


class Redaction:
    """Calls a redaction function in threads, so that it delays no other answer, and waits for at
    most `AT_ONCE` calls at a time.

    If it raises, returns something else than as many texts, or takes longer than
    `REDACT_WITHIN_S`, its wait for others included: with ``on_failure`` ``closed`` nothing is
    stored; with ``open`` the texts are stored as they are. ``failures`` counts these cases. A call
    that takes longer is left to itself, since no thread can be stopped: up to `MOST_STUCK` of them.
    """

    def __init__(self, redact: Redact | None, *, on_failure: OnFailure = "closed") -> None:
        self.failures = 0
        self._redact = redact
        self._open = on_failure == "open"
        self._turn = asyncio.Semaphore(AT_ONCE)
        self._running = 0

    @property
    def on(self) -> bool:
        """Returns whether there is a redaction function."""
        return self._redact is not None

    async def apply(self, texts: list[str]) -> Redacted:
        """Returns the texts to store."""
        if self._redact is None:
            return Redacted(texts, changed=False)
        try:
            async with asyncio.timeout(REDACT_WITHIN_S), self._turn:
                found = list(await self._call(self._redact, list(texts)))
            if len(found) != len(texts) or not all(isinstance(text, str) for text in found):
                raise TypeError("it must return as many texts as it was given")
        except Exception as error:  # Its message may hold the user's words: only the type is kept.
            self.failures += 1
            kind = str(error) if isinstance(error, _CallError) else type(error).__name__
            _LOG.error("the redaction function failed: %s", kind)
            return Redacted(texts if self._open else None, changed=False)
        return Redacted(found, changed=found != texts)

    async def _call(self, redact: Redact, texts: list[str]) -> Sequence[str]:
        """Calls the function in a new thread, which does not keep the process alive."""
        if self._running >= AT_ONCE + MOST_STUCK:
            raise RuntimeError("too many calls have not ended")
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Sequence[str]] = loop.create_future()

        def settle(found: Any, error: BaseException | None) -> None:
            self._running -= 1
            if done.done():
                return
            if error is None:
                done.set_result(found)
            else:
                done.set_exception(_CallError(type(error).__name__))

        def work() -> None:
            found, error = None, None
            try:
                found = redact(texts)
            except BaseException as raised:
                error = raised
            with contextlib.suppress(RuntimeError):  # The gateway ended meanwhile.
                loop.call_soon_threadsafe(settle, found, error)

        threading.Thread(target=work, name="redaction", daemon=True).start()
        self._running += 1  # After the start, which may fail; `settle` waits for this loop.
        return await done


def load_redact(place: str) -> Redact:
    """Imports ``module:function``, which this machine's command line names, and calls it once, so
    that it loads what it needs before the first answer waits for it; raises `InputError`.

    Example::

        load_redact("deltawire.live.capture.presidio:redact")
    """
    found = load_own_code("--redact", place)
    if not callable(found):
        raise InputError(f"{place[:200]!r} is not a function")
    try:
        found([""])
    except InputError:
        raise
    except Exception as error:  # It may still succeed for an answer.
        _LOG.warning("the redaction function failed at its start: %s", type(error).__name__)
    return found  # type: ignore[no-any-return]
