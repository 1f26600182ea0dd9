"""Measures the peak memory of a function above the memory held before it."""

from __future__ import annotations

import ctypes
import gc
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

T = TypeVar("T")

_CLEAR_REFS: Final = Path("/proc/self/clear_refs")
_STATUS: Final = Path("/proc/self/status")
_RESET_PEAK: Final = "5"
"""Sets the peak of the resident set to its present size: proc_pid_clear_refs(5)."""


class Peak(NamedTuple):
    """Bytes at the peak above those before; ``method`` is ``resident`` where the system counted
    pages, or ``traced`` where only allocations that Python and NumPy make are seen."""

    extra_bytes: int
    method: str


def measure_peak(work: Callable[[], T]) -> tuple[T, Peak]:
    """Do ``work`` once; returns what it returns, and its peak.

    The result of ``work`` counts too, because it is held at the end.
    """
    gc.collect()
    if _reset_resident_peak():
        before = _resident("VmRSS")
        result = work()
        return result, Peak(max(0, _resident("VmHWM") - before), "resident")
    tracemalloc.start()
    try:
        result = work()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    return result, Peak(peak, "traced")


def _reset_resident_peak() -> bool:
    """Returns freed memory to the system and starts counting; False if that is not possible."""
    if not sys.platform.startswith("linux"):
        return False
    library = ctypes.CDLL(None)
    if hasattr(library, "malloc_trim"):
        library.malloc_trim(0)
    try:
        _CLEAR_REFS.write_text(_RESET_PEAK)
        return _resident("VmHWM") <= _resident("VmRSS") + (1 << 20)
    except (OSError, ValueError):
        return False


def _resident(field: str) -> int:
    """A field of the process's status, in bytes."""
    for line in _STATUS.read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) << 10
    raise ValueError(f"{_STATUS} has no {field}")
