"""``deltawire prove``: signed statements on how each version of a run was made."""

from __future__ import annotations

import argparse
from pathlib import Path

from deltawire.cli.arguments import add_json, add_key, add_trust, trust_of
from deltawire.errors import InputError


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declares the command."""
    parser = commands.add_parser("prove", help="state how each version was made, signed")
    parser.set_defaults(call=run)
    parser.add_argument("run", metavar="RUN_URL[@V]", help="the last version (default: the newest)")
    parser.add_argument("--out", required=True, metavar="DIR", help="the new folder of statements")
    parser.add_argument(
        "--derived",
        action="append",
        default=[],
        metavar="KIND=DIR",
        help="also state that pull, pull:PRECISION, merge, export or a format of pack "
        "(int8-row:o_proj) made DIR of the last version, after making it again; may be repeated",
    )
    add_key(parser)
    add_trust(parser)
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Writes the statements."""
    from deltawire.display import safe_json, safe_line
    from deltawire.launch.branches.proving import Derived, prove_run
    from deltawire.launch.branches.version_names import open_version
    from deltawire.launch.progress import counting
    from deltawire.wire.signing import Ed25519Signer

    if not arguments.key:
        raise InputError(
            "statements need a key that signs them",
            hint="deltawire keygen FILE makes one; give it with --key",
        )
    signer = Ed25519Signer.read(Path(arguments.key))
    bucket, found, version = open_version(arguments.run, trust_of(arguments))
    with counting(hidden=arguments.json) as show:
        proven = prove_run(
            bucket,
            found,
            version,
            Path(arguments.out),
            signer,
            derived=[Derived.parse(text) for text in arguments.derived],
            progress=lambda done, total: show("reading versions", done, total),
        )
    if arguments.json:
        print(safe_json(proven))  # noqa: T201
        return 0
    lines = [
        (
            f"statements of {proven.versions} versions, made of {proven.groups} groups, are in "
            f"{arguments.out}"
        )
    ]
    if proven.not_checkable:
        numbers = sorted(proven.not_checkable)
        lines.append(
            f"not checkable: {len(numbers)} versions, the first is {numbers[0]}: "
            f"{proven.not_checkable[numbers[0]]}"
        )
    lines += [
        f"made again from the run's versions, and stated: {count} versions of line {name}"
        for name, count in proven.lines.items()
    ]
    lines += [f"made again from version {version}, and stated: {name}" for name in proven.derived]
    for line in lines:
        print(safe_line(line))  # noqa: T201
    return 0
