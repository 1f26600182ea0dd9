"""``deltawire probes``: rewards compared with checks that the reward does not see."""

from __future__ import annotations

import argparse

from deltawire.cli.arguments import add_json, add_run_url, add_trust, trust_of
from deltawire.cli.exit_codes import FLAGGED


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declares the command."""
    parser = commands.add_parser("probes", help="compare rewards with checks that they do not see")
    parser.set_defaults(call=run)
    add_run_url(parser)
    parser.add_argument(
        "--live",
        action="store_true",
        help="compare the rewards of live users' answers with what those rewards do not see",
    )
    add_trust(parser)
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Prints the table; 0, or 6 if a divergence is flagged."""
    from rich.console import Console

    from deltawire.dashboard.probes import whole
    from deltawire.display import safe_json
    from deltawire.launch.probes import probe_state
    from deltawire.reward_monitor.watch import figures_of

    state = probe_state(arguments.run, trust_of(arguments), live=arguments.live)
    if arguments.json:
        print(safe_json(figures_of(state)), flush=True)  # noqa: T201
    else:
        Console().print(whole(figures_of(state)))
    return FLAGGED if state.flagged else 0
