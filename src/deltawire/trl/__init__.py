"""Publishes the weights of TRL's trainers, and of any Hugging Face trainer.

`Publish` is a callback for every trainer; `Transfer` is the ``weight_transfer`` of TRL's
``AsyncGRPOTrainer``. Both are loaded at first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deltawire.trl.callback import Publish
    from deltawire.trl.transfer import Transfer

__all__ = ["Publish", "Transfer"]

_HOMES = {"Publish": "deltawire.trl.callback", "Transfer": "deltawire.trl.transfer"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
