"""``deltawire publish``: versions from Hugging Face directories."""

from __future__ import annotations

import argparse
from pathlib import Path

from deltawire.cli.arguments import (
    BUCKET,
    add_count,
    add_json,
    add_key,
    add_retention,
    add_threads,
    seconds,
    share,
)


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declares the command."""
    parser = commands.add_parser("publish", help="publish Hugging Face directories as versions")
    parser.set_defaults(call=run)
    parser.add_argument(
        "checkpoints",
        nargs="*",
        metavar="CHECKPOINT_DIR",
        help="checkpoint directories, in the order of their versions",
    )
    parser.add_argument("--to", required=True, metavar="RUN_URL", help=BUCKET)
    parser.add_argument(
        "--watch",
        default="",
        metavar="FOLDER",
        help="also publish the subfolders of this folder as they appear; a pattern, in quotes, "
        "takes the newest folder that it matches",
    )
    parser.add_argument(
        "--settle",
        type=seconds,
        default=5.0,
        metavar="S",
        help="a subfolder is complete once unchanged for this long (default: 5)",
    )
    parser.add_argument(
        "--files",
        default="",
        metavar="MODEL_DIR",
        help="take config.json and tokenizer files from here if a directory lacks them",
    )
    parser.add_argument(
        "--idle",
        type=seconds,
        default=0.0,
        metavar="S",
        help="end after this long without a new checkpoint",
    )
    parser.add_argument("--name", default="", help="name of a new run (default: the bucket's)")
    add_count(parser, "--anchor-every", 25, "store every Nth version whole; 0 stores none", least=0)
    parser.add_argument(
        "--anchor-share",
        type=share,
        default=0.0,
        metavar="X",
        help="store a version whole once the deltas exceed this share of the model",
    )
    add_count(parser, "--retain", 0, "keep the newest N versions; 0 keeps all", least=0)
    parser.add_argument(
        "--backwards",
        action="store_true",
        help="let weights older than what is published become the newest version",
    )
    parser.add_argument("--dry-run", action="store_true", help="print what would be published")
    add_retention(parser)
    add_key(parser)
    add_threads(parser)
    add_json(parser, "print a JSON object for each version")


def run(arguments: argparse.Namespace) -> int:
    """Publishes what is not a version yet."""
    from deltawire.launch.progress import parse_strides
    from deltawire.launch.publish import PublishOptions, publish_directories
    from deltawire.launch.role_keys import read_signer
    from deltawire.sync.huggingface.checkpoint_dir import NO_FILES, lent_files
    from deltawire.sync.huggingface.checkpoint_watcher import CheckpointWatcher

    lent = lent_files(Path(arguments.files)) if arguments.files else NO_FILES
    watcher = None
    if arguments.watch:
        watcher = CheckpointWatcher(arguments.watch, settle_s=arguments.settle, lent=lent)
    options = PublishOptions(
        name=arguments.name,
        signer=read_signer(arguments.key),
        retain=arguments.retain,
        grace_s=arguments.grace * 3600,
        anchor_every=arguments.anchor_every,
        anchor_share=arguments.anchor_share,
        strides=parse_strides(arguments.compaction_strides),
        threads=arguments.threads,
        dry_run=arguments.dry_run,
        backwards=arguments.backwards,
        lent=lent,
    )
    publish_directories(
        arguments.to,
        [Path(path) for path in arguments.checkpoints],
        options,
        watcher=watcher,
        idle_s=arguments.idle,
        as_json=arguments.json,
    )
    return 0
