"""Asks engines what they hold, and calls functions in actors of Ray."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from deltawire.attest.engine import ask_engine, ranks_of, request_of
from deltawire.engines.live_parts import METHOD
from deltawire.integrations.checking import Ask


def over_http(url: str, token: str = "") -> Ask:
    """Returns what asks a vLLM server."""
    url = url if "://" in url else f"http://{url}"
    return lambda reference: ask_engine(url, reference, token=token)


def in_process(engine: Any, name: str) -> Ask:
    """Returns what asks an engine of this process that has ``collective_rpc``."""
    return lambda reference: ranks_of(
        engine.collective_rpc(METHOD, args=(request_of(reference),)), name
    )


def on_actors(actors: Sequence[Any], function: Any, *arguments: Any) -> list[Any]:
    """Calls a function of ours with each actor's own object, in all actors at the same time."""
    import ray

    found: list[Any] = ray.get([one.__ray_call__.remote(function, *arguments) for one in actors])
    return found
