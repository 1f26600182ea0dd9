"""Keys vLLM's prefix cache by version.

vLLM finds cached keys and values by a hash of the preceding tokens, salted with a value that the
request brings.
"""

from __future__ import annotations

from typing import Any

from deltawire.engines.following import prefix_salt


def resalt(request: Any, epoch: str) -> None:
    """Assigns a request that is not running yet to ``epoch``, and recomputes its hashes."""
    if prefix_salt.resalt(request, "cache_salt", epoch) and request._block_hasher is not None:
        request.block_hashes.clear()
        request.update_block_hashes()


def not_running(scheduler: Any) -> list[Any]:
    """Returns all requests that hold no keys and values."""
    running = {request.request_id for request in scheduler.running}
    return [
        request
        for request in scheduler.requests.values()
        if request.request_id not in running and request.num_computed_tokens == 0
    ]
