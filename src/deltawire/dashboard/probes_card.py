"""Renders rewards and probes in ``report.html``: a row for each family and probe, and examples.

Names come from the bucket, so each is escaped where it enters the page.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import NamedTuple

from deltawire.dashboard.probes import family_of, mean, place_of, worst_first
from deltawire.display import legible
from deltawire.reward_monitor.monitor import Example, Point
from deltawire.reward_monitor.watch import ProbeFigures, StreamFigures

MAX_ROWS = 40
MAX_LISTED = 8
"""Flagged streams whose rollouts are listed."""
_WIDTH, _HEIGHT = 240.0, 38.0
_LARGEST = 1e6


class _Scale(NamedTuple):
    """Maps groups and values to places in the drawing."""

    groups: int
    low: float
    high: float

    def place(self, groups: float, value: float) -> str:
        """Returns ``x,y`` of a value after ``groups`` groups."""
        x = _WIDTH * groups / self.groups
        y = 1 + (_HEIGHT - 2) * (self.high - value) / (self.high - self.low)
        return f"{x:.1f},{y:.1f}"


def probes_card(probes: ProbeFigures | None) -> str:
    """Renders the card; empty without probes."""
    if probes is None or not probes.streams:
        return ""
    streams = worst_first(probes)
    rows = "".join(map(_row, streams[:MAX_ROWS]))
    heads = (
        '<th>Tasks</th><th>Probe</th><th class="number">Groups</th><th class="number">Reward</th>'
        '<th class="number">Probe</th><th class="number">Excess</th><th>By time</th><th></th>'
    )
    more = len(streams) - MAX_ROWS
    rest = f"<p>And {more} more, in report.json.</p>" if more > 0 else ""
    return (
        f'<section class="card{" flagged" if probes.flagged else ""}">'
        f"<h2>{_title(probes)}</h2><p>{_caption(probes)}</p>{_LEGEND}"
        f'<div class="scroll"><table class="probes"><thead><tr>{heads}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>{rest}{_examples(streams)}</section>"
    )


_LEGEND = (
    '<ul class="legend"><li><i class="stroke" style="background:var(--second)"></i>reward</li>'
    '<li><i class="stroke" style="background:var(--accent)"></i>probe</li>'
    '<li><i style="background:var(--apart)"></i>excess of the reward</li></ul>'
)


def _title(probes: ProbeFigures) -> str:
    if not probes.flagged:
        return "Rewards against probes"
    pairs = "one pair" if probes.flagged == 1 else f"{probes.flagged} pairs"
    return f'<span class="bad">✗</span> Rewards came apart from probes, in {pairs}'


def _caption(probes: ProbeFigures) -> str:
    since = f" since version {probes.since}" if probes.since else ""
    return (
        "Probes are checks that the reward does not see. Each curve runs over a family's groups in "
        f"the order in which they were trained on{since}. A run whose rewards exceed no probe by "
        f"more than {probes.tolerance:g} on average is flagged with a chance of at most "
        f"{probes.false_alarm:g}, however long it is."
    )


def _row(stream: StreamFigures) -> str:
    verdict = '<span class="good">✓</span> together'
    if stream.flagged_at is not None:
        verdict = f'<span class="bad">✗ apart since version {stream.flagged_at}</span>'
    figures = (str(stream.groups), *map(mean, (stream.reward, stream.value, stream.excess)))
    return (
        f"<tr><td>{escape(family_of(stream))}</td>"
        f"<td><code>{escape(legible(stream.probe))}</code></td>"
        + "".join(f'<td class="number">{escape(text)}</td>' for text in figures)
        + f"<td>{_curves(stream.points)}</td><td>{verdict}</td></tr>"
    )


def _examples(streams: Sequence[StreamFigures]) -> str:
    flagged = [s for s in streams if s.flagged_at is not None and s.examples]
    lists = "".join(
        f"<div><h3>Look at, for {escape(family_of(stream))} and "
        f"<code>{escape(legible(stream.probe))}</code></h3>"
        f"<ul>{''.join(map(_example, reversed(stream.examples)))}</ul></div>"
        for stream in flagged[:MAX_LISTED]
    )
    return f'<div class="examples">{lists}</div>' if lists else ""


def _example(example: Example) -> str:
    return (
        f"<li><code>{escape(place_of(example))}</code>, episode {example.episode}: reward "
        f"{example.reward:g}, probe {example.probe:g}, task "
        f"<code>{escape(legible(example.task))}</code>, trained into version {example.version}</li>"
    )


def _curves(points: Sequence[Point]) -> str:
    """Reward and probe as steps, the excess as an area, each point as wide as it has groups."""
    points = [point for point in points if point.groups > 0]
    if not points:
        return ""
    series = [[_within(p.reward / p.groups) for p in points]]
    series += [[_within(p.probe / p.groups) for p in points]]
    excesses = [_within(p.excess / p.groups) for p in points]
    values = [*series[0], *series[1], *excesses]
    groups = [point.groups for point in points]
    scale = _Scale(sum(groups), min(0.0, *values), max(1.0, *values))
    area = f"M{scale.place(0, 0)}L{_steps(scale, groups, excesses)}L{scale.place(sum(groups), 0)}Z"
    lines = "".join(
        f'<path d="M{_steps(scale, groups, line)}" fill="none" stroke="var(--{color})" '
        'stroke-width="1.6" stroke-linejoin="round" vector-effect="non-scaling-stroke"/>'
        for color, line in zip(("accent", "second"), reversed(series), strict=True)
    )
    return (
        '<svg class="curve" role="img" aria-label="reward and probe by time" '
        f'viewBox="0 0 {_WIDTH:g} {_HEIGHT:g}" preserveAspectRatio="none">'
        f'<path d="{area}" fill="var(--apart)"/>{lines}</svg>'
    )


def _steps(scale: _Scale, groups: Sequence[int], values: Sequence[float]) -> str:
    corners, before = [], 0
    for count, value in zip(groups, values, strict=True):
        corners += [scale.place(before, value), scale.place(before + count, value)]
        before += count
    return "L".join(corners)


def _within(value: float) -> float:
    """No drawing needs more, and differences of larger numbers could overflow."""
    return min(max(value, -_LARGEST), _LARGEST)
