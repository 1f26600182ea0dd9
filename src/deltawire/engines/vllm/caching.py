"""Prefix caches keyed by version.

vLLM finds cached keys and values by a hash of the tokens before them, salted with what a request
brings. Here the salt also says which weights, so that a new request never meets what older ones
computed. That holds for running sequences too: those kept over a swap go on under the salt they
started with, and what they add to the cache is found by nobody who starts after them.
"""

from __future__ import annotations

from typing import Any


def resalt(request: Any, epoch: str) -> None:
    """Move a request that does not run yet to the weights of ``epoch``; its hashes are redone."""
    if getattr(request, "_deltawire_epoch", None) == epoch:
        return
    if not hasattr(request, "_deltawire_salt"):
        request._deltawire_salt = request.cache_salt or ""
    request._deltawire_epoch = epoch
    request.cache_salt = f"deltawire {epoch} {request._deltawire_salt}"
    if request._block_hasher is not None:
        request.block_hashes.clear()
        request.update_block_hashes()


def resalt_waiting(scheduler: Any, epoch: str) -> None:
    """Move all requests that hold no keys and values to the weights of ``epoch``."""
    running = {request.request_id for request in scheduler.running}
    for request in scheduler.requests.values():
        if request.request_id not in running and request.num_computed_tokens == 0:
            resalt(request, epoch)
