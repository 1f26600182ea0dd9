"""Names the weights in the salt by which an engine looks for cached prefixes.

A new request then never reuses keys and values that older weights computed. Sequences that keep
running over a swap keep the salt they started with, so later requests do not find what they add to
the cache.
"""

from __future__ import annotations

from typing import Any

_OWN = "_deltawire_salt"
_EPOCH = "_deltawire_epoch"


def resalt(request: Any, member: str, epoch: str) -> bool:
    """Assigns a request that holds no keys and values to ``epoch``, by its ``member``, which may
    hold a salt of the client; returns whether that changed."""
    if getattr(request, _EPOCH, None) == epoch:
        return False
    if not hasattr(request, _OWN):
        setattr(request, _OWN, getattr(request, member) or "")
    setattr(request, _EPOCH, epoch)
    setattr(request, member, f"deltawire {epoch} {getattr(request, _OWN)}")
    return True
