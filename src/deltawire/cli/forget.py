"""``deltawire forget``: deletes what was stored of a live user."""

from __future__ import annotations

import argparse
import json

from deltawire.cli.arguments import add_json, add_key, add_run_url, add_trust, trust_of


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    parser = commands.add_parser("forget", help="delete what was stored of a live user")
    parser.set_defaults(call=run)
    add_run_url(parser)
    parser.add_argument("user", metavar="USER", help="the name that requests gave, or - to read it")
    parser.add_argument(
        "--state",
        default="",
        metavar="DIR",
        help="the state folder of a gateway without --key (default: below $XDG_STATE_HOME)",
    )
    parser.add_argument(
        "--learner-key",
        action="append",
        default=[],
        metavar="NAME=FILE",
        help="in a signed run: the private key of the learner NAME; may be repeated",
    )
    parser.add_argument(
        "--rebuild",
        action="store_true",
        help="also restore the last weights that were not trained on the user",
    )
    add_key(parser)
    add_trust(parser)
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Delete it, and print which versions were trained on it."""
    from deltawire.launch.gateway import forget_by_name

    record, rebuild = forget_by_name(
        arguments.run,
        arguments.user,
        key=arguments.key,
        state=arguments.state,
        trust=trust_of(arguments),
        learner_keys=arguments.learner_key,
        rebuild=arguments.rebuild,
    )
    if arguments.json:
        body = {name: getattr(record, name) for name in record.__struct_fields__}
        if rebuild is not None:
            body["rebuild"] = rebuild._asdict()
        print(json.dumps(body))  # noqa: T201
        return 0
    trained = ", ".join(map(str, record.versions)) or "none"
    print(  # noqa: T201
        f"deleted {record.answers} answers, {record.feedback} reports and {len(record.groups)} "
        f"groups of user {record.user}; versions trained on them: {trained}"
    )
    if rebuild is not None and rebuild.restores is None:
        print("rebuild: the newest version does not come from the user's answers")  # noqa: T201
    elif rebuild is not None:
        print(  # noqa: T201
            f"rebuild: decision {rebuild.decision} asks the trainer to restore version "
            f"{rebuild.restores}; deltawire live status shows when it has"
        )
    return 0
