"""Shows a forecast: as a table in the terminal, and as a picture of the curve with its band."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from rich.console import Group
from rich.table import Table
from rich.text import Text

from deltawire.dashboard.pictures import check_suffix, save_picture
from deltawire.dashboard.wording import figure, percent
from deltawire.rl.forecast.forecast import Forecast, Range

_CURVE: Final = "#0072B2"
_MUTED: Final = "#777777"


def forecast_table(found: Forecast) -> Group:
    """Renders a forecast, each figure with its 90 % interval."""
    table = Table("", found.measure, "90 % interval", box=None, pad_edge=False)
    for label, one in (
        (f"now, version {found.version}", found.now),
        ("with twice the compute", found.doubled),
        ("gain of that", found.gain),
        ("plateau", found.plateau),
    ):
        table.add_row(label, f"{one.median:.3f}", _interval(one))
    spent = f"{figure(found.compute)} {found.unit} in {found.points} measurements"
    way = f"{percent(found.reached, 0)} of the way to the plateau"
    if found.like:
        way += f"; with what {found.like} earlier run{'s' * (found.like > 1)} say"
    parts: list[Table | Text] = [table, Text(f"{spent}; {way}", "dim")]
    test = found.backtest
    if test is None:
        words = "too few measurements to fit the first half and compare it with the second"
    else:
        words = f"fitted on the first half, the second is missed by {test.error:.3f} (median); "
        words += f"carrying the last value forward misses it by {test.carried_error:.3f}"
    parts.append(Text(words, "dim"))
    if found.falling:
        parts.append(Text("the newest measurements fall, which no such curve describes", "yellow"))
    return Group(*parts)


def plot_forecast(found: Forecast, name: str, path: Path) -> None:
    """Plots measurements, curve and band up to twice the compute, with the plateau.

    Raises `InputError` for a suffix that is not a picture's.
    """
    check_suffix(path)
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib.figure import Figure

    drawing = Figure(figsize=(8, 4.2), layout="constrained")
    panel = drawing.subplots()
    at = [one.compute for one in found.band]
    panel.fill_between(
        at,
        [one.value.low for one in found.band],
        [one.value.high for one in found.band],
        color=_CURVE,
        alpha=0.18,
        linewidth=0,
        label="90 % interval",
    )
    panel.plot(at, [one.value.median for one in found.band], color=_CURVE, label="sigmoid")
    panel.plot(
        [one.compute for one in found.curve],
        [one.value for one in found.curve],
        "o",
        color="#E69F00",
        markersize=3.5,
        label="measured",
    )
    panel.axvline(found.compute, color=_MUTED, linestyle=":", linewidth=1)
    panel.axhline(found.plateau.median, color=_MUTED, linestyle="--", linewidth=1)
    panel.annotate(
        f"plateau {found.plateau.median:.3f} ({_interval(found.plateau)})",
        (0, found.plateau.median),
        xytext=(2, 3),
        textcoords="offset points",
        color=_MUTED,
        fontsize=9,
    )
    panel.set_xlabel(f"compute: {found.unit}")
    panel.set_ylabel(found.measure)
    panel.set_title(f"{name}: version {found.version}", loc="left", fontsize=10)
    panel.grid(visible=True, color="#dddddd", linewidth=0.7)
    panel.set_axisbelow(True)
    panel.spines[["top", "right"]].set_visible(False)
    panel.legend(frameon=False, fontsize=9, loc="lower right")
    save_picture(drawing, path)


def _interval(one: Range) -> str:
    return f"{one.low:.3f} to {one.high:.3f}"
