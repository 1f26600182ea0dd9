"""``deltawire import``: the whole model that a snapshot and its base make."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declares the command."""
    parser = commands.add_parser("import", help="combine a snapshot and its base into a directory")
    parser.set_defaults(call=run)
    parser.add_argument("snapshot", metavar="SNAPSHOT_DIR", help="of an arc_v2 delta")
    parser.add_argument("base", metavar="BASE_DIR", help="the directory that it builds on")
    parser.add_argument("directory", metavar="DIR", help="the new directory")


def run(arguments: argparse.Namespace) -> int:
    """Writes the directory."""
    from deltawire.export.snapshots import import_snapshot

    folders = (arguments.snapshot, arguments.base, arguments.directory)
    import_snapshot(*(Path(folder) for folder in folders))
    return 0
