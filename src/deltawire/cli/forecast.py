"""``deltawire forecast``: what more compute would buy a run."""

from __future__ import annotations

import argparse

from deltawire.cli.arguments import add_json, add_run_url, add_trust, trust_of


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declares the command."""
    parser = commands.add_parser(
        "forecast", help="fit a sigmoid of compute and say what more of it would buy"
    )
    parser.set_defaults(call=run)
    add_run_url(parser)
    parser.add_argument(
        "--of",
        choices=("accuracy", "greedy", "area", "reward"),
        default="accuracy",
        help="held-out accuracy of sampled or greedy answers, the area under accuracy over "
        "thinking budgets, or the steps' mean reward (default: accuracy)",
    )
    parser.add_argument(
        "--compute",
        choices=("tokens", "seconds", "versions"),
        default="tokens",
        help="the unit of compute: tokens sampled and trained on, seconds of steps, or versions "
        "(default: tokens)",
    )
    parser.add_argument(
        "--from", dest="first", type=int, default=0, metavar="V", help="leave out versions before V"
    )
    parser.add_argument(
        "--like",
        action="append",
        default=[],
        metavar="URL",
        help="an earlier run of the same kind, whose curve says what is likely; may be repeated",
    )
    parser.add_argument("--plot", default="", metavar="FILE", help="draw it: .svg, .png, .pdf")
    add_trust(parser)
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Prints the forecast."""
    from rich.console import Console

    from deltawire.dashboard.forecast_view import forecast_table
    from deltawire.display import safe_json
    from deltawire.launch.forecast import forecast_run

    found = forecast_run(
        arguments.run,
        measure=arguments.of,
        unit=arguments.compute,
        first=arguments.first,
        plot=arguments.plot,
        trust=trust_of(arguments),
        like=arguments.like,
    )
    if arguments.json:
        print(safe_json(found), flush=True)  # noqa: T201
    else:
        Console().print(forecast_table(found))
    return 0
