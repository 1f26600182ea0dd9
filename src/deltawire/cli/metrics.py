"""``deltawire metrics``: a run's figures for Prometheus, or for an experiment tracker."""

from __future__ import annotations

import argparse

from deltawire.cli.arguments import (
    add_address,
    add_run_url,
    add_token_file,
    add_trust,
    add_window,
    trust_of,
)


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declares the command."""
    parser = commands.add_parser("metrics", help="send a run's figures to Prometheus or a tracker")
    parser.set_defaults(call=run)
    add_run_url(parser)
    add_trust(parser)
    add_address(parser, port=9464)
    add_token_file(parser)
    parser.add_argument("--no-token", action="store_true", help="let everyone on this machine read")
    parser.add_argument(
        "--every",
        type=float,
        default=5.0,
        metavar="S",
        help="read the bucket at most once in this many seconds",
    )
    add_window(parser)
    parser.add_argument(
        "--to",
        choices=("tensorboard", "wandb", "trackio"),
        default="",
        help="forward each version's figures to this tracker, instead of serving",
    )
    parser.add_argument(
        "--out", default="", metavar="DIR", help="the folder for the tracker's files"
    )
    parser.add_argument("--project", default="deltawire", help="the project of wandb or trackio")
    parser.add_argument(
        "--offline", action="store_true", help="wandb: keep the files here, for wandb sync"
    )


def run(arguments: argparse.Namespace) -> int:
    """Serves until interrupted; or forward until the run is over."""
    from deltawire.launch.metrics import Destination, Listener, export_metrics, forward_metrics

    if arguments.to:
        destination = Destination(
            kind=arguments.to,
            folder=arguments.out,
            project=arguments.project,
            offline=arguments.offline,
        )
        forward_metrics(
            arguments.run, destination, every_s=arguments.every, trust=trust_of(arguments)
        )
        return 0
    listener = Listener(
        host=arguments.host,
        port=arguments.port,
        token_file=arguments.token_file,
        open=arguments.no_token,
    )
    export_metrics(
        arguments.run,
        listener,
        every_s=arguments.every,
        window_s=arguments.window,
        trust=trust_of(arguments),
    )
    return 0
