"""Draws how far two engines have drifted apart after each layer."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import matplotlib as mpl

mpl.use("Agg")

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from deltawire.dashboard.pictures import check_suffix, save_picture
from deltawire.parity.comparison import Comparison

_DRIFT: Final = "#0072B2"
_OWN: Final = "#E69F00"
_MUTED: Final = "#777777"


def plot_layers(found: Comparison, source: str, path: Path) -> None:
    """Plots the drift by layer, accumulated and by itself, with the tolerance.

    Raises `InputError` for a suffix that is not a picture's.
    """
    check_suffix(path)
    figure = Figure(figsize=(8, 4.2), layout="constrained")
    panel = figure.subplots()
    numbers = [layer.number for layer in found.layers]
    panel.fill_between(
        numbers,
        [layer.drift for layer in found.layers],
        [layer.worst for layer in found.layers],
        color=_DRIFT,
        alpha=0.15,
        linewidth=0,
        label="up to the worst token",
    )
    panel.plot(
        numbers,
        [layer.drift for layer in found.layers],
        color=_DRIFT,
        marker="o",
        label="of its output, mean over tokens",
    )
    panel.plot(
        numbers,
        [layer.own for layer in found.layers],
        color=_OWN,
        marker="s",
        label="given the same input",
    )
    panel.axhline(found.tolerance, color=_MUTED, linestyle="--", linewidth=1)
    panel.annotate(
        "tolerance",
        (numbers[0], found.tolerance),
        xytext=(0, 3),
        textcoords="offset points",
        color=_MUTED,
        fontsize=9,
    )
    panel.set_yscale("log")
    panel.set_xlabel("decoder layer")
    panel.set_ylabel("‖right − left‖ / ‖left‖")
    panel.xaxis.set_major_locator(MaxNLocator(integer=True))
    panel.set_title(f"{found.left} against {found.right}: {source}", loc="left", fontsize=10)
    panel.grid(visible=True, which="major", color="#dddddd", linewidth=0.7)
    panel.set_axisbelow(True)
    panel.spines[["top", "right"]].set_visible(False)
    panel.legend(frameon=False, fontsize=9)
    save_picture(figure, path)
