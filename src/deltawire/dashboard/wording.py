"""Formats figures and names, the same way in the terminal and in the report."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from deltawire.display import legible
from deltawire.estimates import BudgetSetting
from deltawire.events import Controlled, Forecasted

MISSING = "—"

_BYTE_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")
_BARS = "▁▂▃▄▅▆▇█"


def byte_size(count: float | None) -> str:
    """Writes bytes with decimal units and three significant digits: ``1.42 MB``."""
    if count is None:
        return MISSING
    unit = 0
    while count >= 999.5 and unit < len(_BYTE_UNITS) - 1:
        count /= 1000
        unit += 1
    digits = 0 if unit == 0 or count >= 99.95 else 1 if count >= 9.995 else 2
    return f"{count:.{digits}f} {_BYTE_UNITS[unit]}"


def smaller(full: float | None, delta: float | None) -> str:
    """Writes how many times smaller a delta is than the full model: ``38x smaller``."""
    if not full or not delta:
        return MISSING
    ratio = full / delta
    return f"{ratio:.{0 if ratio >= 9.95 else 1}f}x smaller"


def percent(share: float | None, digits: int = 1) -> str:
    """Writes ``0.713`` as ``71.3 %``."""
    return MISSING if share is None else f"{100 * share:.{digits}f} %"


def duration(seconds: float) -> str:
    """Writes seconds as ``0:42``, ``12:34`` or ``3:12:34``."""
    whole = max(0, round(seconds))
    hours, minutes, rest = whole // 3600, whole // 60 % 60, whole % 60
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def milliseconds(value: float | None) -> str:
    """Writes ``0.42 ms``, ``14 ms`` or ``2.31 s``."""
    if value is None:
        return MISSING
    if value >= 1000:
        return f"{value / 1000:.2f} s"
    return f"{value:.{0 if value >= 9.95 else 1 if value >= 0.95 else 2}f} ms"


def figure(value: float | None) -> str:
    """Writes a number of any size with three significant digits, or all before the point."""
    if value is None:
        return MISSING
    return f"{value:.0f}" if 1000 <= abs(value) < 1e7 else f"{value:.3g}"


def controller_words(found: Controlled) -> str:
    """Writes a decision in one line: ``thinking 8 -> 16: longer thinking gains more …``."""
    before, after = found.before, found.after
    pairs = (
        ("thinking", before.thinking, after.thinking),
        ("completions", before.completions, after.completions),
        ("optimizer steps", before.steps, after.steps),
        ("scaffold", before.scaffold, after.scaffold),
    )
    moved = [f"{name} {old} -> {new}" for name, old, new in pairs if old != new]
    return f"{', '.join(moved) or 'no move'}: {found.reason}"


def setting_words(setting: BudgetSetting) -> str:
    """Writes a setting in one line: ``thinking 8, 16 completions, …``."""
    steps = "1 optimizer step" if setting.steps == 1 else f"{setting.steps} optimizer steps"
    thinking = f"thinking {setting.thinking:,}, " if setting.thinking else ""
    return f"{thinking}{setting.completions} completions, {steps}, scaffold {setting.scaffold}"


def forecast_words(found: Forecasted) -> str:
    """Writes a forecast in one line: ``twice the compute would add 0.012 (0.004 to 0.031)``."""
    gain, low, high = found.gain
    plateau = found.plateau[0]
    words = f"twice the compute would add {gain:.3f} ({low:.3f} to {high:.3f}) to the "
    words += f"{legible(found.measure)} of {found.value:.3f}; plateau {plateau:.3f}"
    return f"{words}; finished below {found.limit:g}" if found.stops else words


def sparkline(
    values: Sequence[float], width: int, floor: float | None = None, ceiling: float | None = None
) -> str:
    """Draws the whole series as at most ``width`` bars, each the mean of its part.

    The lowest bar stands for ``floor`` and less, or for the least of the values; the highest for
    ``ceiling`` and more, or for the largest.
    """
    if not values or width < 1:
        return ""
    count = min(width, len(values))
    edges = [index * len(values) // count for index in range(count + 1)]
    means = [sum(values[low:high]) / (high - low) for low, high in pairwise(edges)]
    low = min(means) if floor is None else floor
    high = max(means) if ceiling is None else ceiling
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((min(max(mean, low), high) - low) * scale)] for mean in means)
