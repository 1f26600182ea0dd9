"""``deltawire pull``: a Hugging Face directory at a run's version."""

from __future__ import annotations

import argparse
from pathlib import Path

from deltawire.cli.arguments import (
    add_json,
    add_precision,
    add_report,
    add_run_url,
    add_threads,
    add_trust,
    at_least,
    location_of,
    report_place,
    split_version,
    trust_of,
)
from deltawire.errors import InputError


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declares the command."""
    parser = commands.add_parser("pull", help="keep a Hugging Face directory at a run's version")
    parser.set_defaults(call=run)
    add_run_url(parser)
    parser.add_argument("directory", metavar="DIR", help="becomes a link to the version's files")
    parser.add_argument(
        "--version", type=at_least(0), metavar="N", help="the version to show (default: the newest)"
    )
    parser.add_argument("--follow", action="store_true", help="also bring every newer version")
    parser.add_argument(
        "--verify", action="store_true", help="compare DIR with its version and change nothing"
    )
    parser.add_argument(
        "--adapter",
        action="store_true",
        help="fetch only the adapter, and write DIR as PEFT does, as a plain folder",
    )
    add_precision(parser)
    add_report(parser)
    add_trust(parser)
    add_threads(parser)
    add_json(parser, "print a JSON object for each version")


def run(arguments: argparse.Namespace) -> int:
    """Brings the directory to a version, or to each new one."""
    from deltawire.launch.adapters import pull_adapter
    from deltawire.launch.pull import pull_directory

    split_version(arguments)
    if arguments.adapter:
        if arguments.verify:
            raise InputError("--adapter and --verify exclude each other")
        if arguments.precision:
            raise InputError("--adapter and --precision exclude each other")
        pull_adapter(
            arguments.run,
            Path(arguments.directory),
            version=arguments.version,
            follow=arguments.follow,
            trust=trust_of(arguments),
            threads=arguments.threads,
            as_json=arguments.json,
            report_to=report_place(arguments),
        )
        return 0
    pull_directory(
        location_of(arguments.run, arguments.precision, trust_of(arguments)),
        Path(arguments.directory),
        version=arguments.version,
        follow=arguments.follow,
        verify=arguments.verify,
        trust=trust_of(arguments),
        threads=arguments.threads,
        as_json=arguments.json,
        report_to=report_place(arguments),
    )
    return 0
