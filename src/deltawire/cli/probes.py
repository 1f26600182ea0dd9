"""``deltawire probes``: reward against probes for each family of tasks, from the bucket alone."""

from __future__ import annotations

import argparse

import msgspec
from rich.console import Console

from deltawire.dashboard.probes import whole
from deltawire.errors import InputError
from deltawire.reward_monitor.watch import figures_of, read_probes
from deltawire.store import open_bucket
from deltawire.sync.chain.objects import require_run

FLAGGED = 6
"""The exit code if any stream is flagged, for scripts."""


def command(arguments: argparse.Namespace) -> int:
    """Print the table; 0, or 6 if a divergence is flagged."""
    bucket = open_bucket(arguments.run)
    require_run(bucket)
    state = read_probes(bucket)
    if state is None:
        raise InputError(
            "the run has no probes yet",
            hint="its environment declares none, or no step was trained on",
            run=bucket.url,
        )
    if arguments.json:
        print(msgspec.json.encode(figures_of(state)).decode(), flush=True)  # noqa: T201
    else:
        Console().print(whole(figures_of(state)))
    return FLAGGED if state.flagged else 0
