"""``deltawire verify-training``: a run's training, computed again by intervals."""

from __future__ import annotations

import argparse
import sys

from deltawire.cli.arguments import add_json, add_run_url, add_trust, at_least, trust_of
from deltawire.cli.exit_codes import DIFFERENT, UNDECIDED


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declares the command."""
    parser = commands.add_parser(
        "verify-training", help="compute a run's training again, or intervals drawn at random"
    )
    parser.set_defaults(call=run)
    add_run_url(parser)
    parser.add_argument(
        "--spot",
        type=at_least(1),
        metavar="N",
        help="check N intervals between stored states, drawn at random (default: all)",
    )
    add_trust(parser)
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Computes the steps; 0 if all are exact, 5 if one differs, 11 if none could be checked."""
    import dataclasses

    from deltawire.dashboard.verification import lines_of_check
    from deltawire.display import safe_json, safe_line
    from deltawire.launch.progress import counting
    from deltawire.rl.trainer.verify_intervals import verify_intervals
    from deltawire.runtime.trusted import open_trusted

    def expect(doubts: list[str]) -> None:
        for one in doubts:
            print(  # noqa: T201
                safe_line(f"exactness cannot be expected: {one}"), file=sys.stderr
            )

    bucket = open_trusted(arguments.run, trust_of(arguments))
    with counting(hidden=arguments.json) as show:
        found = verify_intervals(
            bucket,
            spot=arguments.spot,
            progress=lambda done, total: show("repeating steps", done, total),
            expect=expect,
        )
    if arguments.json:
        body = {**dataclasses.asdict(found), "exact": found.exact}
        print(safe_json(body))  # noqa: T201
    else:
        for line in lines_of_check(found):
            print(safe_line(line))  # noqa: T201
    if not found.exact:
        return DIFFERENT
    return 0 if found.versions else UNDECIDED
