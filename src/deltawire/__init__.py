"""Reinforcement-learning post-training of language models over an object-store bucket.

`open_publisher` and `tensors_of` publish the weights of any trainer from here, with the `Publisher`
that the first returns and the `PublisherOptions` that it takes. They are loaded at first use: the
command line needs none of them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deltawire.export.tensors import tensors_of
    from deltawire.sync.publish.options import PublisherOptions
    from deltawire.sync.publish.publisher import Publisher
    from deltawire.sync.publish.sources import open_publisher

__version__ = "0.1.0"
__all__ = ["Publisher", "PublisherOptions", "__version__", "open_publisher", "tensors_of"]

_HOMES = {
    "Publisher": "deltawire.sync.publish.publisher",
    "PublisherOptions": "deltawire.sync.publish.options",
    "open_publisher": "deltawire.sync.publish.sources",
    "tensors_of": "deltawire.export.tensors",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
