"""``deltawire replay``: a run's training done over, and compared to the bit."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from deltawire.dashboard.wording import legible
from deltawire.errors import InputError
from deltawire.rl.trainer.verify_training import NAMED, Dump, Replayed, replay
from deltawire.store import open_bucket

DIFFERENT = 5


def command(arguments: argparse.Namespace) -> int:
    """Replay; 0 if every version came out as it was published, 5 if not."""
    bucket = open_bucket(arguments.run)
    if (arguments.dump is None) != (not arguments.out):
        raise InputError("--dump and --out go together")
    dump = None if arguments.dump is None else Dump(arguments.dump, Path(arguments.out))
    console = Console(stderr=True)
    hidden = arguments.json or not console.is_terminal
    columns = (TextColumn("doing steps over"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console, disable=hidden) as bar:
        task = bar.add_task("", total=None)
        found = replay(
            bucket,
            first=arguments.first,
            last=arguments.to,
            dump=dump,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
    if arguments.json:
        print(json.dumps({**dataclasses.asdict(found), "exact": found.exact}))  # noqa: T201
    else:
        _tell(found)
    return 0 if found.exact else DIFFERENT


def _tell(found: Replayed) -> None:
    console = Console(highlight=False, soft_wrap=True)
    origin = f"from the state at version {found.origin}, on {found.groups} groups of the bucket"
    if found.exact:
        many = found.last - found.first + 1
        versions = "version" if many == 1 else "versions"
        console.print(
            f"{many} {versions} ({found.first} to {found.last}) done over {origin}: "
            "every one to the same bits"
        )
        return
    console.print(f"version {found.differs} is the first that differs, done over {origin}")
    console.print(f"{found.reason}", markup=False)
    worst = sorted(found.tensors.items(), key=lambda item: -item[1])
    for name, count in worst[:NAMED]:
        console.print(f"  {count} weights of {legible(name, 100)}", markup=False)
    if len(worst) > NAMED:
        console.print(f"  and {len(worst) - NAMED} more tensors")
