"""``deltawire live compact``: merges small segments, and deletes what is old."""

from __future__ import annotations

import argparse
import json

from deltawire.cli.arguments import add_json, add_key, add_run_url, add_trust, trust_of


def add_compact_action(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declares the action."""
    parser = actions.add_parser(
        "compact",
        help="merge stored segments, and delete what [retain] says",
        description="Gateways do this for their own segments. This command does it for all, also "
        "for gateways that do not run any more.",
    )
    parser.set_defaults(call=_run)
    add_run_url(parser)
    add_key(parser)
    add_trust(parser)
    add_json(parser)


def _run(arguments: argparse.Namespace) -> int:
    from deltawire.launch.live_compact import compact_run

    found = compact_run(arguments.run, trust=trust_of(arguments), key=arguments.key)
    if arguments.json:
        print(json.dumps(found))  # noqa: T201
    else:
        print(f"{found['compacted']} objects made, {found['expired']} old rows deleted")  # noqa: T201
    return 0
