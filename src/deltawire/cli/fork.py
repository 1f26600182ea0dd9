"""``deltawire fork``: a new run that begins with a version of another."""

from __future__ import annotations

import argparse
import sys

from deltawire.cli.arguments import add_json, add_key, add_trust, trust_of
from deltawire.errors import InputError


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declares the command."""
    parser = commands.add_parser("fork", help="begin a new run with a version of another")
    parser.set_defaults(call=run)
    parser.add_argument("run", metavar="RUN_URL[@V]", help="a version (default: the newest)")
    parser.add_argument("name", metavar="NAME", help="the new run is RUN_URL/forks/NAME, or --to")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        dest="settings",
        metavar="KEY=VALUE",
        help="change a setting, such as train.optimizer.learning_rate=2e-6; may be repeated",
    )
    parser.add_argument(
        "--to",
        default="",
        metavar="URL",
        help="make it in this bucket, with a copy of all that it needs",
    )
    add_key(parser)
    add_trust(parser)
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Makes the fork, and prints where it is."""
    from deltawire.display import safe_json, safe_line
    from deltawire.launch.branches.forking import fork_run
    from deltawire.launch.branches.version_names import open_version
    from deltawire.launch.role_keys import read_signer

    settings = dict(_setting(text) for text in arguments.settings)
    bucket, parent, version = open_version(arguments.run, trust_of(arguments))
    signer = read_signer(arguments.key)
    made = fork_run(
        bucket,
        parent,
        version,
        arguments.name,
        settings=settings,
        signer=signer,
        to=arguments.to,
        announce=lambda line: print(safe_line(line), file=sys.stderr, flush=True),  # noqa: T201
    )
    if arguments.json:
        stated = {"url": made.url, "run": made.run.id, "version": made.version}
        print(safe_json({**stated, "state": made.state}))  # noqa: T201
        return 0
    state = {
        "shared": "the trainer's state is shared with its parent",
        "copied": "the trainer's state was copied",
        "computed": "the trainer's state was computed again and stored",
        "none": "the run has no trainer",
    }[made.state]
    print(f"{made.url} begins with version {made.version}; {state}")  # noqa: T201
    if made.state != "none":
        print(f"train it: deltawire run CONFIG.toml --bucket {made.url} --out DIR")  # noqa: T201
    return 0


def _setting(text: str) -> tuple[str, object]:
    import tomllib

    key, found, value = text.partition("=")
    try:
        if not found:
            raise ValueError("no value")
        return key.strip(), tomllib.loads(f"value = {value}")["value"]
    except ValueError as error:
        raise InputError(
            f"--set {text[:80]!r} is not KEY=VALUE with a value as in TOML",
            hint="a string needs quotes: --set device='\"cpu\"'",
        ) from error
