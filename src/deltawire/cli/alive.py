"""``deltawire alive``: whether one process of a run lives and makes progress, for a probe."""

from __future__ import annotations

import argparse

from deltawire.cli.arguments import add_json, add_run_url, add_trust, trust_of
from deltawire.cli.exit_codes import NOT_ALIVE


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declares the command."""
    parser = commands.add_parser(
        "alive",
        help="say by exit code if one process lives, for a probe of Kubernetes",
        description="Exits with 0 if the process lives, has ended normally, or its store does not "
        "answer, and with 12 if it is silent or makes no progress.",
    )
    parser.set_defaults(call=run)
    add_run_url(parser)
    parser.add_argument(
        "name", metavar="NAME", help="trainer, evaluator, decider, or the id of a worker"
    )
    parser.add_argument(
        "--silence",
        type=float,
        metavar="S",
        help="seconds without a heartbeat that are allowed (default: faults.silence_s)",
    )
    add_trust(parser)
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Prints the state; 0 unless the process must be replaced."""
    import msgspec

    from deltawire.launch.alive import examine_process

    found = examine_process(
        arguments.run, arguments.name, silence_s=arguments.silence, trust=trust_of(arguments)
    )
    if arguments.json:
        print(msgspec.json.encode(found).decode())  # noqa: T201
    else:
        print(f"{arguments.name}: {found.state}" + (f", {found.reason}" if found.reason else ""))  # noqa: T201
    return NOT_ALIVE if found.state in ("silent", "stalled") else 0
