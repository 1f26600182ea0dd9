"""The world of leases: processes that take one name, and confirm that they still have it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from exploring import World
from stepping import Process, ScriptedBucket

from deltawire.errors import FencedError
from deltawire.runtime.lease import Lease
from deltawire.store import RetryingBucket
from deltawire.wire import keys

NAME = "w0"


def holder(name: str, *, make: Callable[..., Lease] = Lease) -> Process:
    """Takes the name, and confirms twice that it has it."""

    def body(bucket: ScriptedBucket) -> None:
        lease = make(RetryingBucket.over(bucket), NAME, nonce=f"nonce-{name}")
        lease.acquire(0)
        bucket.note("took", lease.number)
        try:
            for _ in range(2):
                later = bucket.ask("size", keys.lease(NAME, lease.number + 1), sure=True)
                lease.confirm(fresh=True)
                if later is not None:
                    bucket.note("confirmed late", lease.number)
        except FencedError:
            bucket.note("replaced", lease.number)

    return Process(name, body, writes=(keys.LEASES,))


def invariant(objects: dict[str, bytes], notes: dict[str, tuple[Any, ...]]) -> str | None:
    """Checks that no two processes have one number, and that only an older holder is replaced."""
    taken: dict[int, str] = {}
    for name, stated in notes.items():
        for note in stated:
            number = note[1]
            if note[0] == "took":
                if number in taken:
                    return f"{taken[number]} and {name} took lease {number}"
                taken[number] = name
                if objects.get(keys.lease(NAME, number)) != f"nonce-{name}".encode():
                    return f"{name} took lease {number}, which is not its own"
            if note[0] == "confirmed late":
                return f"{name} confirmed lease {number} after a later one was taken"
            if note[0] == "replaced" and keys.lease(NAME, number + 1) not in objects:
                return f"{name} was replaced, and nobody took a later lease"
    return None


def leases(processes: int = 2) -> World:
    """Processes that start under one name at the same time."""
    return World({}, [holder(name) for name in "ABC"[:processes]], invariant)
