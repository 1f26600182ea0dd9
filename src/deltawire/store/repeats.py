"""Repeats single requests to a store that got no answer, in place of the store's library.

The library would repeat a refused request at once and hide the refusal, so that many readers keep a
store above its rate. It is therefore told to repeat nothing, except parts of a large upload, and
what it was asked to do happens here.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

from obstore import exceptions
from obstore.store import ObjectStore

from deltawire.errors import RetryError, ThrottledError
from deltawire.store.lanes import is_repeated
from deltawire.store.request_limit import note_refusal
from deltawire.store.traffic import count
from deltawire.store.translation import translate

T = TypeVar("T")

RETRIES = 4
FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 2.0
TIMEOUT_S = 20.0


@dataclass(frozen=True)
class Repeats:
    """How often a request without an answer is repeated (``most``), for how long, and the pauses
    between. A refusal because there are too many requests is repeated for ``timeout_s``.

    Example::

        repeats = Repeats.of(store)
    """

    most: int = RETRIES
    first_s: float = FIRST_PAUSE_S
    longest_s: float = LONGEST_PAUSE_S
    timeout_s: float = TIMEOUT_S

    @classmethod
    def of(cls, store: ObjectStore) -> Repeats:
        """Reads the ``retry_config`` with which a store was opened."""
        try:
            _, options = store.__getnewargs_ex__()  # type: ignore[union-attr]
        except (AttributeError, TypeError, ValueError):
            options = {}
        given = options.get("retry_config") or {}
        backoff = given.get("backoff") or {}
        return cls(
            int(given.get("max_retries", RETRIES)),
            _seconds(backoff.get("init_backoff"), FIRST_PAUSE_S),
            _seconds(backoff.get("max_backoff"), LONGEST_PAUSE_S),
            _seconds(given.get("retry_timeout"), TIMEOUT_S),
        )

    def pause_s(self, attempt: int) -> float:
        """Returns how long to wait after the attempt of this number, which counts from 0."""
        doubled_s = self.first_s * 2.0 ** min(attempt, 32)
        return min(doubled_s, self.longest_s) * (0.5 + random.random())


def _seconds(given: Any, default: float) -> float:
    return given.total_seconds() if isinstance(given, timedelta) else default


def repeat(
    request: Callable[[], T], repeats: Repeats, *, url: str, key: str, once: bool = False
) -> T:
    """Makes a request, unless only ``once`` again after no answer, and again after a refusal if the
    caller does not do that itself (`deltawire.store.lanes.repeated`). Raises the library's errors.
    """
    began, paused_s = time.monotonic(), 0.0
    attempt = 0
    while True:
        try:
            return request()
        except (exceptions.NotFoundError, exceptions.AlreadyExistsError):
            raise
        except exceptions.BaseError as error:
            made = translate(error, "read", url, key)
            last = once or not repeats.most or not isinstance(made, RetryError)
            if isinstance(made, ThrottledError):
                note_refusal(url)
                # Waiting for the window is no refusal, so only pauses count.
                last = last or is_repeated() or paused_s > repeats.timeout_s
            else:
                spent_s = time.monotonic() - began
                last = last or attempt >= repeats.most or spent_s > repeats.timeout_s
            if last:
                raise
        pause_s = repeats.pause_s(attempt)
        count("retries")
        time.sleep(pause_s)
        paused_s += pause_s
        attempt += 1


def opened_again(store: ObjectStore, *, retries: int | None = None) -> ObjectStore:
    """Opens the same store a second time, with connections of its own; ``retries`` replaces the
    number of times that the store's library repeats a request that got no answer.

    A store of another library's kind, which cannot say how it was opened, is returned as it is.
    """
    try:
        arguments, options = store.__getnewargs_ex__()  # type: ignore[union-attr]
    except (AttributeError, TypeError, ValueError):
        return store
    if retries is not None:
        options["retry_config"] = {**(options.get("retry_config") or {}), "max_retries": retries}
    opened: ObjectStore = type(store)(*arguments, **options)
    return opened
