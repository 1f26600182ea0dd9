"""Reinforcement-learning post-training of language models over an object-store bucket.

`open_publisher` and `tensors_of` publish the weights of any trainer from here; they are loaded at
first use.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"
__all__ = ["__version__", "open_publisher", "tensors_of"]

_HOMES = {
    "open_publisher": "deltawire.sync.publish.sources",
    "tensors_of": "deltawire.export.tensors",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
