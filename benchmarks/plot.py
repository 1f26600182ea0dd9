"""Plots ratio against speed for every coding that compresses.

Colors are Okabe and Ito's, which are distinct for color-blind readers; shapes differ as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, Final

import matplotlib as mpl

mpl.use("Agg")

from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from benchmarks.measure import Measured
from benchmarks.table import label
from deltawire.dashboard.pictures import check_suffix, save_picture

_OURS: Final = "#0072B2"
_COLOURS: Final = {
    "arc-v2": "#E69F00",
    "arc-v3": "#D55E00",
    "sparse-int32": "#CC79A7",
    "rowcol-zstd1": "#009E73",
    "xor-zstd1": "#56B4E9",
    "gaps-xor-zstd1": "#000000",
    "full-zstd1": "#777777",
    "raw": "#BBBBBB",
}
_MARKERS: Final = {
    "arc-v2": "p",
    "arc-v3": "h",
    "sparse-int32": "<",
    "rowcol-zstd1": ">",
    "xor-zstd1": "X",
    "gaps-xor-zstd1": "P",
    "full-zstd1": "d",
    "raw": "8",
    "anchor": "*",
    "avx512": "o",
    "avx2": "s",
    "neon": "s",
    "portable": "^",
}


def plot(rows: Sequence[Measured], path: Path) -> None:
    """Writes the plot; its format follows from the suffix. Raises InputError for others."""
    check_suffix(path)
    shown = [row for row in rows if row.ratio and not row.error]
    figure = Figure(figsize=(12, 5.8), layout="constrained")
    panels = figure.subplots(1, 2, sharex=True, sharey=True)
    ways = (("encode_gbs", "Encode"), ("decode_gbs", "Decode and apply"))
    for panel, (way, title) in zip(panels, ways, strict=True):
        for name in dict.fromkeys(label(row) for row in shown):
            _points(panel, [row for row in shown if label(row) == name], name, way)
        _limit(panel, shown)
        _dress(panel, title)
    panels[0].set_ylabel("× smaller than the model (higher is better)")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center", fontsize=9, frameon=False)
    pairs = list(dict.fromkeys(row.pair for row in shown))
    what = pairs[0] if len(pairs) == 1 else f"{len(pairs)} pairs (small) and their medians (large)"
    figure.suptitle(f"Savings and speed of each coding: {what}", x=0.01, ha="left", fontsize=12)
    save_picture(figure, path)


def _points(panel: Any, rows: Sequence[Measured], name: str, way: str) -> None:
    found = [(getattr(row, way), row.ratio) for row in rows]
    points = [(speed, ratio) for speed, ratio in found if speed and ratio]
    if not points:
        return
    row = rows[0]
    colour = _COLOURS.get(row.codec, _OURS)
    marker = _MARKERS.get(row.codec) or _MARKERS.get(row.simd, "o")
    speeds, ratios = zip(*points, strict=True)
    if len(points) > 1:
        panel.scatter(speeds, ratios, s=14, alpha=0.4, linewidths=0, color=colour, marker=marker)
    panel.scatter(
        median(speeds),
        median(ratios),
        s=95,
        marker=marker,
        facecolors=colour if row.threads == 1 else "none",
        edgecolors="white" if row.threads == 1 else colour,
        linewidths=0.8 if row.threads == 1 else 1.6,
        zorder=3,
        label=name,
    )


def _limit(panel: Any, rows: Sequence[Measured]) -> None:
    speeds = [row.read_gbs for row in rows if row.threads == 1 and row.read_gbs]
    if not speeds:
        return
    panel.axvline(median(speeds), color="#777777", linestyle="--", linewidth=1)
    panel.annotate(
        "reading both operands, one core",
        (median(speeds), 0.03),
        xycoords=("data", "axes fraction"),
        xytext=(-3, 0),
        textcoords="offset points",
        rotation=90,
        ha="right",
        va="bottom",
        fontsize=8,
        color="#555555",
    )


def _dress(panel: Any, title: str) -> None:
    panel.set_title(title, loc="left", fontsize=11)
    panel.set_xlabel("GB of model a second (further right is faster)")
    panel.set_xscale("log")
    panel.set_yscale("log")
    for axis in (panel.xaxis, panel.yaxis):
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter(NullFormatter())
    panel.grid(visible=True, which="major", color="#dddddd", linewidth=0.7)
    panel.grid(visible=True, which="minor", color="#f0f0f0", linewidth=0.5)
    panel.set_axisbelow(True)
    panel.margins(0.08)
    panel.spines[["top", "right"]].set_visible(False)
