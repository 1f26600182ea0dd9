"""Records what concurrent clients asked of one object and what they were told, and decides whether
some order of the operations explains it.

The search is that of Wing and Gong (1993): an operation may come next if no other one ended before
it began, and if its answer is what an object in this state answers. An operation that got no answer
may have been done at any moment after it began, or never.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from deltawire.errors import RetryError
from deltawire.store import Bucket

NO_ANSWER = object()


@dataclass(frozen=True)
class Operation:
    """A request, its answer, and when it began and ended, in seconds of one clock."""

    verb: str
    value: bytes | None
    answer: Any
    began: float
    ended: float


def _applied(state: bytes | None, one: Operation) -> tuple[bytes | None, Any]:
    """Returns an object's state after an operation, and the answer."""
    match one.verb:
        case "create":
            return (one.value, True) if state is None else (state, False)
        case "put":
            return one.value, None
        case "delete":
            return None, None
        case _:
            return state, state


def is_linearizable(history: Sequence[Operation]) -> bool:
    """Returns whether an order of the operations explains their answers."""
    tried: set[tuple[frozenset[int], bytes | None]] = set()

    def follows(left: frozenset[int], state: bytes | None) -> bool:
        if all(history[number].answer is NO_ANSWER for number in left):
            return True
        if (left, state) in tried:
            return False
        tried.add((left, state))
        first_end = min(history[number].ended for number in left)
        for number in left:
            one = history[number]
            if one.began > first_end:
                continue
            after, answer = _applied(state, one)
            if one.answer in (NO_ANSWER, answer) and follows(left - {number}, after):
                return True
        return False

    return follows(frozenset(range(len(history))), None)


def record(bucket: Bucket, key: str, clients: int, rounds: int) -> list[Operation]:
    """Lets clients create, read, replace and delete one object at the same time."""
    history: list[Operation] = []
    barrier = threading.Barrier(clients)

    def note(verb: str, value: bytes | None, call: Callable[[], Any]) -> None:
        began = time.monotonic()
        try:
            answer = call()
        except RetryError:
            answer = NO_ANSWER
        ended = float("inf") if answer is NO_ANSWER else time.monotonic()
        history.append(Operation(verb, value, answer, began, ended))

    def client(number: int) -> None:
        for turn in range(rounds):
            value = f"{number} {turn}".encode()
            barrier.wait(60)
            match (number + turn) % 4:
                case 0 | 1:
                    note("create", value, partial(bucket.create, key, value))
                case 2:
                    note("get", None, partial(bucket.get, key, limit=64))
                case _ if turn % 2:
                    note("delete", None, partial(bucket.delete, key))
                case _:
                    note("put", value, partial(bucket.put, key, value))
            note("get", None, partial(bucket.get, key, limit=64))

    threads = [threading.Thread(target=client, args=(number,)) for number in range(clients)]
    for one in threads:
        one.start()
    for one in threads:
        one.join(120)
    return history
