"""Asks engines what they hold: over HTTP, in this process, or in an actor of Ray."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Sequence
from typing import Any

from deltawire.attest.engine import ask_engine, ranks_of, request_of
from deltawire.attest.sides import Side
from deltawire.engines.live_parts import METHOD, RankParts
from deltawire.errors import RetryError
from deltawire.integrations.checking import Ask

ANSWER_WITHIN_S = 600.0
"""Seconds that an actor may take: it may still be loading."""
POLL_S = 0.05


def over_http(url: str, token: str = "") -> Ask:
    """Returns what asks a vLLM server."""
    url = url if "://" in url else f"http://{url}"
    return lambda reference: ask_engine(url, reference, token=token)


def in_process(engine: Any, name: str) -> Ask:
    """Returns what asks an engine of this process that has ``collective_rpc``."""
    return lambda reference: ranks_of(
        engine.collective_rpc(METHOD, args=(request_of(reference),)), name
    )


def in_actor(actor: Any, attribute: str, name: str) -> Ask:
    """Returns what asks the engine that an actor of Ray holds as ``attribute``; it may be
    asynchronous, which such an actor cannot wait for in a call from outside, so it is polled."""

    def ask(reference: Side) -> list[RankParts]:
        answer = on_actors([actor], begin_pass, attribute, request_of(reference))[0]
        until = time.monotonic() + ANSWER_WITHIN_S
        while answer is None:
            if time.monotonic() > until:
                raise RetryError(f"{name} does not answer")
            time.sleep(POLL_S)
            answer = on_actors([actor], poll_pass)[0]
        return ranks_of(answer, name)

    return ask


def on_actors(actors: Sequence[Any], function: Any, *arguments: Any) -> list[Any]:
    """Calls a function of ours with each actor's own object, in all actors at the same time."""
    import ray

    found: list[Any] = ray.get([one.__ray_call__.remote(function, *arguments) for one in actors])
    return found


def begin_pass(holder: Any, attribute: str, request: str) -> Any:
    """Begins a pass in the actor; returns the answer, None if it comes later."""
    found = getattr(holder, attribute).collective_rpc(METHOD, args=(request,))
    if not inspect.isawaitable(found):
        return found
    holder._deltawire_pass = asyncio.ensure_future(found)
    return None


def poll_pass(holder: Any) -> Any:
    """Returns the answer of a pass that was begun, None if there is none yet."""
    task = holder._deltawire_pass
    return task.result() if task.done() else None
