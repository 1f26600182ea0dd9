"""``deltawire probes``: rewards compared with checks that the reward does not see."""

from __future__ import annotations

import argparse

from deltawire.cli.arguments import add_json, add_run_url, add_trust, trust_of
from deltawire.cli.exit_codes import FLAGGED
from deltawire.errors import InputError


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declares the command."""
    parser = commands.add_parser("probes", help="compare rewards with checks that they do not see")
    parser.set_defaults(call=run)
    add_run_url(parser)
    add_trust(parser)
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Prints the table; 0, or 6 if a divergence is flagged."""
    from rich.console import Console

    from deltawire.dashboard.probes import whole
    from deltawire.display import safe_json
    from deltawire.reward_monitor.watch import figures_of, read_probes
    from deltawire.runtime.trusted import open_trusted
    from deltawire.sync import require_run

    bucket = open_trusted(arguments.run, trust_of(arguments))
    require_run(bucket)
    state = read_probes(bucket)
    if state is None:
        raise InputError(
            "the run has no probes yet",
            hint="its environment declares none, or no step was trained on",
            run=bucket.url,
        )
    if arguments.json:
        print(safe_json(figures_of(state)), flush=True)  # noqa: T201
    else:
        Console().print(whole(figures_of(state)))
    return FLAGGED if state.flagged else 0
