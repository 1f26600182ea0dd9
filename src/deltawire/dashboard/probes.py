"""Renders rewards and probes in a terminal: `deltawire probes`, live view, closing screen."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from deltawire.dashboard.wording import sparkline
from deltawire.display import legible
from deltawire.reward_monitor.evidence import threshold
from deltawire.reward_monitor.monitor import ALL, Example
from deltawire.reward_monitor.watch import ProbeFigures, StreamFigures

_BARS = 16
LIVE_ROWS = 5
LIVE_EXAMPLES = 2


def by_family(probes: ProbeFigures) -> list[StreamFigures]:
    """Sorts streams: all tasks together first, then each family."""
    return sorted(probes.streams, key=lambda s: (s.family != ALL, s.family, s.probe))


def worst_first(probes: ProbeFigures) -> list[StreamFigures]:
    """Sorts streams: flagged ones first, then by the excess of the reward over the probe."""
    return sorted(by_family(probes), key=lambda stream: (stream.flagged_at is None, -stream.excess))


def family_of(stream: StreamFigures) -> str:
    """Names the family in one or two words."""
    return "all tasks" if stream.family == ALL else legible(stream.family) or "unnamed"


def flags(probes: ProbeFigures) -> list[str]:
    """Describes each flag in one line: ``strings heldout_tests since 12``."""
    return [
        f"{family_of(stream)} {legible(stream.probe)} since {stream.flagged_at}"
        for stream in worst_first(probes)
        if stream.flagged_at is not None
    ]


def place_of(example: Example) -> str:
    """Returns the place of a rollout, or of a served answer, in the bucket."""
    folder = "live/captures" if example.answer else "rollouts"
    return f"{folder}/{legible(example.worker, 64)}/{example.sequence}"


def described(example: Example) -> str:
    """Describes an example after its place."""
    which = f"answer {legible(example.answer)}" if example.answer else f"episode {example.episode}"
    came = "drawn by" if example.answer else "trained into"
    return (
        f"{which}: reward {example.reward:g}, probe {example.probe:g}, task "
        f"{legible(example.task) or 'unnamed'}, {came} version {example.version}"
    )


def mean(value: float) -> str:
    """Writes a reward, a probe or an excess."""
    return f"{value:.3f}" if abs(value) < 1e6 else f"{value:.1e}"


def table(probes: ProbeFigures, streams: Sequence[StreamFigures]) -> Table:
    """Renders a row for each of ``streams``; the last column is the evidence or the flag."""
    drawn = Table(box=None, pad_edge=False, header_style="dim")
    drawn.add_column("family", no_wrap=True)
    drawn.add_column("probe", no_wrap=True)
    for name in ("groups", "reward", "probe", "excess"):
        drawn.add_column(name, justify="right", no_wrap=True)
    drawn.add_column("by time", no_wrap=True)
    drawn.add_column("", no_wrap=True)
    for stream in streams:
        drawn.add_row(
            Text(family_of(stream)),
            Text(legible(stream.probe)),
            f"{stream.groups}",
            *map(mean, (stream.reward, stream.value, stream.excess)),
            Text(_bars(stream)),
            _verdict(stream, probes),
        )
    return drawn


def whole(probes: ProbeFigures) -> RenderableType:
    """Renders every stream and example, and explains the figures."""
    parts: list[RenderableType] = [table(probes, by_family(probes))]
    for stream in by_family(probes):
        if stream.flagged_at is None:
            continue
        parts.append(Text(f"\n{family_of(stream)}, {legible(stream.probe)}: look at", "bold"))
        parts += [
            Text(f"  {place_of(example)}, {described(example)}")
            for example in reversed(stream.examples)
        ]
    return Group(*parts, Text(f"\n{meaning(probes)}", "dim"))


def meaning(probes: ProbeFigures) -> str:
    """Explains the last column and its error rate."""
    since = f" since version {probes.since}" if probes.since else ""
    return (
        f"As of version {probes.version}{since}; the last column is the evidence, as a share "
        f"of what flags, or the version of the flag. A run whose rewards exceed no probe by "
        f"more than {probes.tolerance:g} on average is flagged with a chance of at most "
        f"{probes.false_alarm:g}."
    )


def summary_of_streams(probes: ProbeFigures) -> RenderableType:
    """Renders the worst streams in a few lines, with rollouts to look at."""
    streams = worst_first(probes)
    parts: list[RenderableType] = [table(probes, streams[:LIVE_ROWS])]
    for stream in streams[:LIVE_ROWS]:
        if stream.flagged_at is not None and stream.examples:
            names = [legible(e.name) for e in stream.examples[: -LIVE_EXAMPLES - 1 : -1]]
            said = f"{family_of(stream)}, {legible(stream.probe)}: look at {', '.join(names)}"
            parts.append(Text(said, "red", no_wrap=True, overflow="ellipsis"))
    if len(streams) > LIVE_ROWS:
        more = f"and {len(streams) - LIVE_ROWS} more, in deltawire probes"
        parts.append(Text(more, "dim", no_wrap=True, overflow="ellipsis"))
    return Group(*parts)


def _verdict(stream: StreamFigures, probes: ProbeFigures) -> Text:
    if stream.flagged_at is not None:
        return Text(f"APART at {stream.flagged_at}", "bold red")
    share = stream.evidence / threshold(probes.false_alarm, stream.number)
    return Text(f"{share:.0e}", "dim")


def _bars(stream: StreamFigures) -> str:
    """Draws the excess in the stream's groups, 0 to 1, oldest first."""
    return sparkline(
        [point.excess / max(1, point.groups) for point in stream.points[-_BARS:]],
        _BARS,
        floor=0.0,
        ceiling=1.0,
    )
