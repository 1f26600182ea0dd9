"""``deltawire probes``: reward against probes for each family of tasks, from the bucket alone."""

from __future__ import annotations

import argparse
import json

from rich.console import Console
from rich.table import Table
from rich.text import Text

from deltawire.dashboard.wording import legible
from deltawire.errors import InputError
from deltawire.rl.probes.evidence import threshold
from deltawire.rl.probes.monitor import ALL, ProbeState, Stream
from deltawire.rl.probes.watch import as_plain, read_probes
from deltawire.store import open_bucket
from deltawire.sync.chain import read_run

FLAGGED = 6
"""The exit code if any stream is flagged, for scripts."""
_BARS = "▁▂▃▄▅▆▇█"


def command(arguments: argparse.Namespace) -> int:
    """Print the table; 0, or 6 if a divergence is flagged."""
    bucket = open_bucket(arguments.run)
    if read_run(bucket) is None:
        raise InputError("there is no run here", hint="is the path right?", run=bucket.url)
    state = read_probes(bucket)
    if state is None:
        raise InputError(
            "the run has no probes yet",
            hint="its environment declares none, or no step was trained on",
            run=bucket.url,
        )
    if arguments.json:
        print(json.dumps(as_plain(state)), flush=True)  # noqa: T201
    else:
        _show(Console(), state)
    return FLAGGED if state.flagged else 0


def _show(console: Console, state: ProbeState) -> None:
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("family")
    table.add_column("probe")
    for name in ("groups", "reward", "probe", "excess"):
        table.add_column(name, justify="right")
    table.add_column("by time", no_wrap=True)
    table.add_column("", no_wrap=True)
    rows = sorted(state.streams, key=lambda s: (s.family != ALL, s.family, s.probe))
    for stream in rows:
        reward, value, excess = stream.means
        name = "all" if stream.family == ALL else legible(stream.family) or "unnamed"
        table.add_row(
            Text(name),
            Text(legible(stream.probe)),
            str(stream.groups),
            f"{reward:.3f}",
            f"{value:.3f}",
            f"{excess:.3f}",
            Text(_bars(stream)),
            _verdict(stream, state),
        )
    console.print(table)
    for stream in state.flagged:
        family = "all tasks" if stream.family == ALL else f"family {legible(stream.family)}"
        console.print(Text(f"\n{family}, {legible(stream.probe)}: look at", "bold"))
        for example in reversed(stream.examples):
            console.print(
                Text(
                    f"  rollouts/{legible(example.worker)}/{example.sequence}, episode "
                    f"{example.episode}: reward {example.reward:g}, probe {example.probe:g}, "
                    f"task {legible(example.task)}, trained into version {example.version}"
                )
            )
    since = f" since version {state.since}" if state.since else ""
    console.print(
        Text(
            f"\nAs of version {state.version}{since}; the last column is the evidence, as a share "
            f"of what flags, or the version of the flag. A run whose rewards exceed no probe by "
            f"more than {state.tolerance:g} on average is flagged with a chance of at most "
            f"{state.false_alarm:g}.",
            "dim",
        )
    )


def _verdict(stream: Stream, state: ProbeState) -> Text:
    if stream.flagged_at is not None:
        return Text(f"APART at {stream.flagged_at}", "bold red")
    share = stream.evidence / threshold(state.false_alarm, stream.number)
    return Text(f"{share:.0e}", "dim")


def _bars(stream: Stream) -> str:
    """The excess in the stream's groups, oldest first, at most 16 characters."""
    points = stream.points[-16:]
    return "".join(
        _BARS[min(len(_BARS) - 1, int(point.excess / max(1, point.groups) * len(_BARS)))]
        for point in points
    )
