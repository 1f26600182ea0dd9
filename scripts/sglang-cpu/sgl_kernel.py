"""Stands in for SGLang's kernels where there are none: any name imports, and raises when called."""

from __future__ import annotations

from typing import Any

__version__ = "0.4.10"  # the least that SGLang 0.5.23 accepts


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)

    def absent(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"this environment has no kernel sgl_kernel.{name}")

    absent.__name__ = name
    return absent
