"""``deltawire budget``: a controller's decisions, each computed again from the run's events."""

from __future__ import annotations

import argparse

from deltawire.cli.arguments import add_json, add_run_url, add_trust, trust_of


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declares the command."""
    parser = commands.add_parser(
        "budget", help="list the controller's decisions, and compute each again from the events"
    )
    parser.set_defaults(call=run)
    add_run_url(parser)
    add_trust(parser)
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Prints the decisions; returns 1 if one does not follow from the run's evaluations."""
    from rich.console import Console

    from deltawire.dashboard.budget_view import budget_table
    from deltawire.display import safe_json
    from deltawire.launch.budget import replay_budget

    found = replay_budget(arguments.run, trust=trust_of(arguments))
    if arguments.json:
        shown = {
            "equal": found.equal,
            "moves": len(found.moves),
            "differ": found.differ,
            "extra": found.extra,
            "decisions": found.decisions,
        }
        print(safe_json(shown), flush=True)  # noqa: T201
    else:
        Console().print(budget_table(found.decisions, differ=[*found.differ, *found.extra]))
    return 0 if found.equal else 1
