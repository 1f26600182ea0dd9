"""``deltawire prune``: deletes old versions of a run."""

from __future__ import annotations

import argparse

from deltawire.cli.arguments import (
    add_count,
    add_grace,
    add_json,
    add_key,
    add_run_url,
    add_trust,
    trust_of,
)


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declares the command."""
    parser = commands.add_parser("prune", help="delete old versions of a run")
    parser.set_defaults(call=run)
    add_run_url(parser)
    add_count(parser, "--retain", 100, "keep the newest N versions readable", least=1)
    add_grace(parser)
    parser.add_argument("--dry-run", action="store_true", help="print what would be deleted")
    add_key(parser)
    add_trust(parser)
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Prunes once; what the grace period still protects is deleted by a later call."""
    from deltawire.launch.prune import prune_run
    from deltawire.launch.role_keys import read_signer

    prune_run(
        arguments.run,
        retain=arguments.retain,
        grace_s=arguments.grace * 3600,
        trust=trust_of(arguments),
        signer=read_signer(arguments.key),
        dry_run=arguments.dry_run,
        as_json=arguments.json,
    )
    return 0
