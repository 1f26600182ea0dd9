"""Imports of heavy libraries at the start of a process."""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Pauses the garbage collector while the body imports, and spares later collections what it
    imported.

    PyTorch and transformers bring a million objects that live as long as the process. Collections
    between their imports take a fifth of the time of these, and each full collection afterwards
    would visit all of them again, for half a second. A process that has them already is left alone:
    what it made since may become garbage.
    """
    if "torch" in sys.modules or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
