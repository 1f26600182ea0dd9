"""Draws the report's charts as inline SVG with the colors and fonts of the page.

Charts are drawn in placeholder colors, which become CSS variables in the SVG text, so that one
drawing serves light and dark pages. The result refers to no other file.
"""

from __future__ import annotations

import io
import math
import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from deltawire.dashboard.state import ProcessState, RunState
from deltawire.dashboard.wording import byte_size, duration
from deltawire.display import legible
from deltawire.events import Activity, Published, Span

ACTIVITIES: tuple[Activity, ...] = (
    "sample",
    "train",
    "evaluate",
    "publish",
    "swap",
    "checkpoint",
    "start",
    "wait",
)
"""In the order of the stack and of the legend."""

_VARIABLES = ("ink", "muted", "grid", "accent", "second", "alarm", *ACTIVITIES)
_PAINT = {name: f"#fe00{index:02x}" for index, name in enumerate(_VARIABLES)}

MANY_TIMES = 16
"""Budgets that differ by more than this factor are drawn on a logarithmic axis."""
_WIDE, _HALF = 9.6, 4.6  # inches; the page sets both at 1.5 CSS pixels a point
_FINEST = 2000  # columns across the timeline
_MAX_BARS = 9000  # about 70 bytes each
_MAX_ROWS = 40
_MAX_SOURCES = 8
_MAX_POINTS = 2000
LABEL_SHARE = 0.04
"""Room of a version's label on the timeline, as a share of its width: five digits at 8 points."""


class Charts(NamedTuple):
    """One ``<svg>`` element for each chart; empty without data."""

    accuracy: str
    losses: str
    budgets: str
    staleness: str
    bytes: str
    pairs: str
    timeline: str


class Bar(NamedTuple):
    """A rectangle of a timeline row: columns from ``left`` to ``right``, heights within 0..1."""

    activity: Activity
    left: int
    right: int
    low: float
    high: float


def charts(state: RunState, bound: int) -> Charts:
    """Draws all of them with matplotlib, which is imported here."""
    from matplotlib import rc_context

    settings: Any = {
        "svg.fonttype": "none",
        "svg.hashsalt": "deltawire",
        "text.parse_math": False,
        "font.size": 8,
        "axes.unicode_minus": False,
        "text.color": _PAINT["muted"],
        "axes.labelcolor": _PAINT["muted"],
        "xtick.labelcolor": _PAINT["muted"],
        "ytick.labelcolor": _PAINT["muted"],
        "xtick.color": _PAINT["grid"],
        "ytick.color": _PAINT["grid"],
    }
    with rc_context(settings), warnings.catch_warnings():
        # A name may hold letters that matplotlib's own font lacks; the page's fonts draw them.
        warnings.filterwarnings("ignore", message="Glyph")
        return Charts(
            accuracy=_accuracy(state),
            losses=_losses(state),
            budgets=_budgets(state),
            staleness=_staleness(state, bound),
            bytes=_bytes(state),
            pairs=_pairs(state),
            timeline=_timeline(state),
        )


def bars(spans: Sequence[Span], opens: float, closes: float, columns: int) -> list[Bar]:
    """Turns spans into columns of equal time, each split by the activities in it.

    Where a span is longer than a column this is a plain bar; where many fall into one column,
    their shares (to an eighth) stay true. Neighbours alike are merged.
    """
    shares: list[dict[Activity, float]] = [{} for _ in range(columns)]
    per_second = columns / (closes - opens)
    for span in spans:
        begin = max(0.0, (span.start - opens) * per_second)
        end = min(float(columns), (span.end - opens) * per_second)
        for column in range(int(begin), min(columns, int(end) + 1)):
            inside = min(end, column + 1) - max(begin, column)
            if inside > 0:
                share = shares[column]
                share[span.activity] = share.get(span.activity, 0.0) + inside
    merged: list[Bar] = []
    for activity in ACTIVITIES:
        for column in range(columns):
            low, high = _extent(shares[column], activity)
            last = merged[-1] if merged else None
            if high <= low:
                continue
            if last and last[0] == activity and last[2:] == (column, low, high):
                merged[-1] = last._replace(right=column + 1)
            else:
                merged.append(Bar(activity, column, column + 1, low, high))
    return merged


def _extent(share: dict[Activity, float], activity: Activity) -> tuple[float, float]:
    """Finds the place of ``activity`` in a column's stack; overlapping spans are scaled to fit."""
    if activity not in share:
        return 0.0, 0.0
    scale = 8 / max(1.0, sum(share.values()))
    below = sum(share.get(other, 0.0) for other in ACTIVITIES[: ACTIVITIES.index(activity)])
    return round(below * scale) / 8, round((below + share[activity]) * scale) / 8


def _accuracy(state: RunState) -> str:
    curve, rewards = state.accuracy_curve, state.reward_curve
    if not curve and (not rewards or state.heldout_losses):
        return ""  # A run on documents has no rewards.
    from matplotlib.ticker import MaxNLocator

    figure, axes = _figure(_WIDE, 2.9, left=0.058, right=0.985, bottom=0.135)
    if rewards:
        at = [version for version, _ in rewards]
        raw = [reward for _, reward in rewards]
        # A reward is no share: it has an axis of plain numbers on the right.
        rewarded = axes.twinx()
        _strip(rewarded)
        rewarded.tick_params(axis="y", labelcolor=_PAINT["second"])
        rewarded.yaxis.set_major_formatter("{x:g}")
        rewarded.margins(y=0.1)
        figure.subplots_adjust(right=0.945)
        rewarded.plot(*_thinned(at, raw), color=_PAINT["second"], lw=0.7, alpha=0.28)
        rewarded.plot(*_thinned(at, _smooth(raw)), color=_PAINT["second"], lw=1.3, alpha=0.75)
    if curve:
        at = [version for version, _ in curve]
        level = [accuracy for _, accuracy in curve]
        dots = {"marker": "o", "markersize": 3.4} if len(curve) <= 80 else {}
        axes.plot(at, level, color=_PAINT["accent"], lw=2, solid_capstyle="round", **dots)
        _mark_ends(axes, at, level)
    else:
        axes.set_yticks([])
    axes.margins(x=0.07, y=0.1)
    if curve:
        _keep_to_shares(axes)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True))
    newest = max(version for version, _ in [*curve, *rewards])
    axes.xaxis.set_major_formatter(
        lambda version, _: f"{version:.0f}" if 0 <= version <= newest else ""
    )
    axes.set_xlabel("version")
    return _svg(figure, "accuracy")


def _losses(state: RunState) -> str:
    curve = state.heldout_loss_curve
    if not curve:
        return ""
    from matplotlib.ticker import MaxNLocator

    figure, axes = _figure(_WIDE, 2.9, left=0.058, right=0.985, bottom=0.135)
    newest = state.newest_heldout_loss
    names = sorted(newest.sources)[:_MAX_SOURCES] if newest else []
    for name in names if len(names) > 1 else ():
        points = [
            (version, loss)
            for version, _ in curve
            if (one := state.heldout_losses[version].sources.get(name)) is not None
            and (loss := one.loss) is not None
        ]
        if not points:
            continue
        at, level = [version for version, _ in points], [loss for _, loss in points]
        axes.plot(at, level, color=_PAINT["second"], lw=1, alpha=0.75)
        axes.annotate(
            legible(name, 24),
            (at[-1], level[-1]),
            xytext=(0, 5),
            textcoords="offset points",
            ha="right",
            color=_PAINT["second"],
        )
    at, level = [version for version, _ in curve], [loss for _, loss in curve]
    dots = {"marker": "o", "markersize": 3.4} if len(curve) <= 80 else {}
    axes.plot(at, level, color=_PAINT["accent"], lw=2, solid_capstyle="round", **dots)
    _mark_ends(axes, at, level, "{:.3f}".format)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.margins(x=0.07, y=0.1)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True))
    axes.set_xlabel("version")
    return _svg(figure, "losses")


def _budgets(state: RunState) -> str:
    """Accuracy over thinking budgets at the first, the middle and the last measured version."""
    measured = [version for version in sorted(state.evaluated) if state.evaluated[version].budgets]
    if not measured:
        return ""
    figure, axes = _figure(_WIDE, 2.9, left=0.058, right=0.9, bottom=0.135)
    shown = sorted({measured[0], measured[len(measured) // 2], measured[-1]})
    ends: list[tuple[float, int, str]] = []
    at: list[int] = []
    for version in shown:
        scores = state.evaluated[version].budgets
        at, level = [one.budget for one in scores], [one.accuracy for one in scores]
        last = version == shown[-1]
        paint = _PAINT["accent" if last else "second"]
        axes.plot(at, level, color=paint, lw=2 if last else 1, marker="o", markersize=3.4)
        ends.append((level[-1], version, paint))
    axes.margins(x=0.03, y=0.15)
    if at[-1] > MANY_TIMES * at[0]:
        axes.set_xscale("log", base=2)
        axes.set_xticks(at, [f"{budget:,}" for budget in at])
        axes.minorticks_off()
    _keep_to_shares(axes)
    low, high = axes.get_ylim()
    place = high + 0.05 * (high - low)
    for end, version, paint in sorted(ends, reverse=True):
        # Lines that end close to each other would have their names on top of each other.
        place = min(end, place - 0.085 * (high - low))
        axes.annotate(
            f"version {version}",
            (1.01, place),
            xycoords=("axes fraction", "data"),
            va="center",
            color=paint,
            annotation_clip=False,
        )
    axes.set_xlabel("thinking budget in tokens")
    return _svg(figure, "budgets")


def _keep_to_shares(axes: Any) -> None:
    """Labels an axis in percent, and leaves out most of what is below 0 and above 100 %."""
    low, high = axes.get_ylim()
    room = 0.05 * (high - low)
    axes.set_ylim(max(low, -room), min(high, 1 + room))
    low, high = axes.get_ylim()
    # Enough digits that about six ticks of a narrow range have distinct labels.
    digits = min(max(0, -math.floor(math.log10(100 * max(high - low, 1e-9) / 6))), 6)
    axes.yaxis.set_major_formatter(
        lambda value, _: f"{100 * value:.{digits}f} %" if -1e-9 < value < 1 + 1e-9 else ""
    )


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _mark_ends(
    axes: Any,
    at: Sequence[int],
    level: Sequence[float],
    write: Callable[[float], str] = _percent,
) -> None:
    """Writes the first and the last value at their points."""
    for index, side in ((0, "right"), (-1, "left"))[-min(2, len(at)) :]:
        axes.annotate(
            write(level[index]),
            (at[index], level[index]),
            xytext=(7 if side == "left" else -7, 0),
            textcoords="offset points",
            ha=side,
            va="center_baseline",
            color=_PAINT["ink"],
            fontsize=9,
            fontweight="bold",
        )


def _staleness(state: RunState, bound: int) -> str:
    steps = [step for step in state.steps_in_order if step.staleness]
    if not steps:
        return ""
    figure, axes = _figure(_HALF, 2.5, left=0.075, right=0.97, bottom=0.155)
    at = [step.version for step in steps]
    low = [float(min(step.staleness)) for step in steps]
    high = [float(max(step.staleness)) for step in steps]
    mean = [sum(step.staleness) / len(step.staleness) for step in steps]
    at_low, low = _thinned(at, low)
    _, high = _thinned(at, high)
    axes.fill_between(at_low, low, high, step="mid", color=_PAINT["accent"], alpha=0.2, lw=0)
    axes.plot(*_thinned(at, mean), color=_PAINT["accent"], lw=0.7, alpha=0.45)
    axes.plot(*_thinned(at, _smooth(mean)), color=_PAINT["accent"], lw=1.6)
    axes.axhline(bound, color=_PAINT["alarm"], lw=1.2, dashes=(4, 3))
    axes.annotate(
        f"bound {bound}",
        (1, bound),
        xycoords=("axes fraction", "data"),
        xytext=(0, 4),
        textcoords="offset points",
        ha="right",
        color=_PAINT["alarm"],
    )
    from matplotlib.ticker import MaxNLocator

    axes.yaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    axes.set_ylim(0, max(bound, *high, 1) * 1.18)
    axes.margins(x=0.02)
    axes.set_xlabel("version")
    return _svg(figure, "staleness")


def _pairs(state: RunState) -> str:
    known = [(step.version, step.pairs) for step in state.steps_in_order if step.pairs is not None]
    if not known:
        return ""
    figure, axes = _figure(_WIDE, 2.5, left=0.058, right=0.985, bottom=0.155)
    at = [version for version, _ in known]
    counts = [float(count) for _, count in known]
    axes.plot(*_thinned(at, counts), color=_PAINT["accent"], lw=0.7, alpha=0.45)
    axes.plot(*_thinned(at, _smooth(counts)), color=_PAINT["accent"], lw=1.6)
    from matplotlib.ticker import MaxNLocator

    axes.yaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    axes.set_ylim(0, max(*counts, 1.0) * 1.18)
    axes.margins(x=0.02)
    axes.set_xlabel("version")
    return _svg(figure, "pairs")


def _bytes(state: RunState) -> str:
    deltas = [event for event in state.deltas if event.bytes_delta > 0]
    if not deltas:
        return ""
    figure, axes = _figure(_HALF, 2.5, left=0.13, right=0.97, bottom=0.155)
    at = [event.version for event in deltas]
    sizes = [float(event.bytes_delta) for event in deltas]
    axes.set_yscale("log")
    axes.plot(*_thinned(at, sizes), color=_PAINT["accent"], lw=1.4)
    anchors = [event for event in state.deltas if event.bytes_anchor > 0]
    axes.plot(
        [event.version for event in anchors],
        [event.bytes_anchor for event in anchors],
        color=_PAINT["second"],
        ls="none",
        marker="D",
        markersize=3.4,
    )
    levels = [*sizes, *(float(event.bytes_anchor) for event in anchors)]
    if full := state.bytes_full:
        levels.append(float(full))
        axes.axhline(full, color=_PAINT["ink"], lw=1.2)
        axes.annotate(
            f"full model {byte_size(full)}",
            (1, full),
            xycoords=("axes fraction", "data"),
            xytext=(0, 4),
            textcoords="offset points",
            ha="right",
            color=_PAINT["ink"],
        )
    from matplotlib.ticker import LogLocator, NullLocator

    axes.set_ylim(min(levels) / 2, max(levels) * 3)
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 3.0) if _narrow(levels) else (1.0,)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(lambda value, _: _axis_size(value))
    axes.margins(x=0.02)
    axes.set_xlabel("version")
    return _svg(figure, "bytes")


def _narrow(levels: Sequence[float]) -> bool:
    return max(levels) < 30 * min(levels)


def _axis_size(value: float) -> str:
    """``100 kB``, without the zeros that `byte_size` keeps for measured values."""
    number, unit = byte_size(value).split(" ")
    return f"{float(number):g} {unit}"


def _timeline(state: RunState) -> str:
    rows, extent = _timeline_rows(state), state.extent
    if not rows or extent is None or extent[1] <= extent[0]:
        return ""
    opens, closes = extent
    columns = _FINEST
    drawn = [bars(row.spans, opens, closes, columns) for row in rows]
    while sum(map(len, drawn)) > _MAX_BARS and columns > 50:
        columns //= 2
        drawn = [bars(row.spans, opens, closes, columns) for row in rows]
    height = 0.75 + 0.34 * len(rows)
    top, bottom = 1 - 0.36 / height, 0.36 / height
    figure, axes = _figure(_WIDE, height, left=0.13, right=0.985, bottom=bottom, top=top)
    per_column = (closes - opens) / columns
    for row, row_bars in enumerate(drawn):
        _draw_bars(axes, row_bars, row, per_column)
    axes.set_xlim(0, closes - opens)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_yticks(range(len(rows)), [legible(row.name, 18) for row in rows])
    axes.tick_params(axis="y", labelcolor=_PAINT["ink"])
    axes.grid(visible=False)
    axes.spines["bottom"].set_visible(False)
    step_s = _clock_step(closes - opens)
    axes.set_xticks([tick * step_s for tick in range(int((closes - opens) / step_s) + 1)])
    axes.xaxis.set_major_formatter(lambda seconds, _: duration(seconds))
    _mark_versions(axes, state, opens)
    return _svg(figure, "timeline")


def _timeline_rows(state: RunState) -> list[ProcessState]:
    order = ("warm-start", "trainer", "worker", "evaluator", "reference", "supervisor", None)
    rows = [process for process in state.processes.values() if process.spans]
    rows.sort(key=lambda process: (order.index(process.role), process.name))
    return rows[:_MAX_ROWS]


def _draw_bars(axes: Any, row_bars: Sequence[Bar], row: int, per_column: float) -> None:
    """Draws all bars of one activity as one path: separate elements would make a large file."""
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path

    for activity in ACTIVITIES:
        corners: list[tuple[float, float]] = []
        for bar in row_bars:
            if bar.activity != activity:
                continue
            left, right = bar.left * per_column, bar.right * per_column
            low, high = row + 0.36 - 0.72 * bar.low, row + 0.36 - 0.72 * bar.high
            corners += [(left, low), (right, low), (right, high), (left, high), (left, low)]
        if corners:
            codes = [Path.MOVETO, Path.LINETO, Path.LINETO, Path.LINETO, Path.CLOSEPOLY]
            path = Path(corners, codes * (len(corners) // 5))
            axes.add_patch(PathPatch(path, facecolor=_PAINT[activity], lw=0, snap=False))


def _mark_versions(axes: Any, state: RunState, opens: float) -> None:
    """Marks round versions on the top edge, with a thin line down to the rows.

    Versions stand at their times, so those of a run that was interrupted crowd together: a mark
    that would touch the one before it is left out.
    """
    newest = state.version or 0
    steps = (lead * 10**power for power in range(18) for lead in (1, 2, 5))
    every = next((step for step in steps if newest / step <= 12), newest)
    low, high = axes.get_xlim()
    marks: list[Published] = []
    for event in sorted(state.published.values(), key=lambda event: event.at):
        room = (high - low) * LABEL_SHARE
        if event.version % every == 0 and (not marks or event.at - marks[-1].at >= room):
            marks.append(event)
    above = axes.secondary_xaxis("top")
    above.set_xticks([event.at - opens for event in marks], [str(event.version) for event in marks])
    above.tick_params(length=3, width=0.6, color=_PAINT["muted"], pad=2)
    above.spines["top"].set_visible(False)
    axes.vlines(
        [event.at - opens for event in marks],
        *axes.get_ylim(),
        color=_PAINT["ink"],
        lw=0.5,
        alpha=0.3,
        zorder=0,
    )
    axes.annotate(
        "version",
        (0, 1),
        xycoords="axes fraction",
        xytext=(-8, 6),
        textcoords="offset points",
        ha="right",
    )


def _clock_step(seconds: float) -> int:
    """Chooses a round interval with at most ten ticks."""
    steps = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 43200]
    return next((step for step in steps if seconds / step <= 10), int(seconds / 10))


def _figure(
    width: float, height: float, *, left: float, right: float, bottom: float, top: float = 0.97
) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), facecolor="none")
    figure.subplots_adjust(left=left, right=right, bottom=bottom, top=top)
    axes = figure.add_subplot(facecolor="none")
    _strip(axes)
    axes.grid(axis="y", color=_PAINT["grid"], lw=0.6)
    axes.set_axisbelow(True)
    axes.spines["bottom"].set_visible(True)
    axes.spines["bottom"].set_color(_PAINT["grid"])
    return figure, axes


def _strip(axes: Any) -> None:
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0, pad=5)


def _smooth(values: Sequence[float]) -> list[float]:
    """Computes a centered running mean over a twentieth of the series."""
    reach = max(1, len(values) // 40)
    sums = [0.0]
    for value in values:
        sums.append(sums[-1] + value)
    spans = ((max(0, at - reach), min(len(values), at + reach + 1)) for at in range(len(values)))
    return [(sums[high] - sums[low]) / (high - low) for low, high in spans]


def _thinned(at: Sequence[int], values: Sequence[float]) -> tuple[list[int], list[float]]:
    """Takes at most `_MAX_POINTS` points, evenly."""
    stride = -(-len(at) // _MAX_POINTS)
    return list(at[::stride]), list(values[::stride])


def _svg(figure: Any, name: str) -> str:
    """Converts a figure to an element of the page: unique ids, the page's colors and fonts."""
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    drawn = io.StringIO()
    canvas: Any = FigureCanvasSVG(figure)
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    canvas.print_svg(drawn, metadata=nothing)
    text = drawn.getvalue()
    text = re.sub(r"<!--.*?-->\n?", "", text[text.index("<svg") :], flags=re.DOTALL)
    width, height = (round(72 * inches) for inches in figure.get_size_inches())
    opening = f'<svg class="chart" role="img" viewBox="0 0 {width} {height}">'
    text = opening + text[text.index(">") + 1 :]
    text = re.sub(r"<metadata>.*?</metadata>\n?", "", text, count=1, flags=re.DOTALL)
    # Only within tags: the text between them may be anything.
    return re.sub(r"<[^>]*>", lambda tag: _adapted(tag[0], name), text)


def _adapted(tag: str, name: str) -> str:
    tag = re.sub(r'\bid="', f'id="{name}-', tag)
    tag = re.sub(r'(?:xlink:)?href="#', f'href="#{name}-', tag)
    tag = tag.replace("url(#", f"url(#{name}-")
    tag = re.sub(r"(\d\.\d\d)\d+", r"\1", tag)
    tag = re.sub(r"font-family: [^;\"]*", "font-family: var(--font)", tag)
    for variable, paint in _PAINT.items():
        tag = tag.replace(paint, f"var(--{variable})")
    return tag
