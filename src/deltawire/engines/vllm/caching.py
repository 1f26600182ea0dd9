"""Keys vLLM's prefix cache by version.

vLLM finds cached keys and values by a hash of the preceding tokens, salted with a value that the
request brings. Here the salt also names the weights, so a new request never reuses what older
weights computed. Sequences that keep running over a swap keep the salt they started with, so later
requests do not find what they add to the cache.
"""

from __future__ import annotations

from typing import Any


def resalt(request: Any, epoch: str) -> None:
    """Assigns a request that is not running yet to ``epoch``, and recomputes its hashes."""
    if getattr(request, "_deltawire_epoch", None) == epoch:
        return
    if not hasattr(request, "_deltawire_salt"):
        request._deltawire_salt = request.cache_salt or ""
    request._deltawire_epoch = epoch
    request.cache_salt = f"deltawire {epoch} {request._deltawire_salt}"
    if request._block_hasher is not None:
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
