"""``deltawire watch``: a local web page over one or several runs."""

from __future__ import annotations

import argparse

from deltawire.cli.arguments import BUCKET, add_trust, trust_of


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declares the command."""
    parser = commands.add_parser("watch", help="show runs in a local web page, live and afterwards")
    parser.set_defaults(call=run)
    parser.add_argument(
        "run", metavar="RUN_URL", nargs="+", help=f"buckets of one or several runs: {BUCKET}"
    )
    parser.add_argument(
        "--port", type=int, default=0, help="the loopback port to listen on (default: any)"
    )
    parser.add_argument("--no-browser", action="store_true", help="print the link only")
    parser.add_argument(
        "--cache",
        default="",
        metavar="DIR",
        help="keep the indexes of groups here (default: deltawire/watch in the user's cache)",
    )
    add_trust(parser)


def run(arguments: argparse.Namespace) -> int:
    """Serves the page until interrupted."""
    from deltawire.launch.watch_page import PageOptions, show_page

    options = PageOptions(
        port=arguments.port,
        browser=not arguments.no_browser,
        cache=arguments.cache,
        trust=trust_of(arguments),
    )
    show_page(arguments.run, options)
    return 0
