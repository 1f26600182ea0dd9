"""``deltawire fsck`` and ``deltawire log``: what a run holds, and whether it is whole."""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from deltawire.config import FaultsConfig
from deltawire.errors import CorruptError
from deltawire.runtime.fleet import Fleet
from deltawire.store import Bucket, open_bucket
from deltawire.sync import newest_version, read_manifest, require_run
from deltawire.sync.maintain.fsck import Checked, check_run
from deltawire.wire import keys
from deltawire.wire.run import Run

DAMAGED = 3


def fsck(arguments: argparse.Namespace) -> int:
    """Check a run; 0 if every version can be read, 3 if not."""
    bucket = open_bucket(arguments.run)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    console = Console(stderr=True)
    hidden = arguments.json or not console.is_terminal
    with Progress(*columns, TimeRemainingColumn(), console=console, disable=hidden) as bar:
        task = bar.add_task("", total=None)

        def show(what: str, done: int, total: int) -> None:
            bar.update(task, description=f"checking {what}", completed=done, total=total)

        found = check_run(
            bucket,
            deep=not arguments.quick,
            public_key=arguments.public_key,
            progress=show,
        )
    if arguments.json:
        print(json.dumps({**dataclasses.asdict(found), "whole": found.whole}))  # noqa: T201
    else:
        _tell(found)
    return 0 if found.whole else DAMAGED


def _tell(found: Checked) -> None:
    console = Console(highlight=False, soft_wrap=True)
    console.print(
        f"{found.versions} versions ({found.pruned} pruned, {found.anchors} anchors), "
        f"{found.folds} folds, {found.blobs} blobs of {_size(found.bytes)}"
    )
    if found.unreferenced:
        console.print(
            f"{found.unreferenced} blobs of {_size(found.unreferenced_bytes)} that nothing refers "
            "to; retention takes them"
        )
    for fault in found.faults:
        place = fault.key or f"version {fault.version}"
        console.print(f"{fault.level}: {place}: {fault.message}", markup=False)
    console.print("whole" if found.whole else "damaged")


def log(arguments: argparse.Namespace) -> int:
    """List a run's versions, newest first, and who holds which."""
    bucket = open_bucket(arguments.run)
    run = require_run(bucket, public_key=arguments.public_key)
    versions = _versions(bucket, run, arguments.last)
    readers = _readers(bucket)
    if arguments.json:
        print(json.dumps({"run": run.name, "versions": versions, "readers": readers}))  # noqa: T201
        return 0
    console = Console(highlight=False)
    table = Table("version", "kind", "delta", "anchor", "folds from", "changed", "age", "held by")
    for row in versions:
        holders = [reader["worker"] for reader in readers if reader["version"] == row["version"]]
        changed = "" if row["changed"] is None else f"{row['changed']:.3%}"
        delta, anchor = (_size(row[name]) if row[name] else "" for name in ("delta", "anchor"))
        folds = ", ".join(map(str, row["folds"]))
        age = "" if row["age_s"] is None else _age(row["age_s"])
        cells = (str(row["version"]), row["kind"], delta, anchor, folds, changed, age)
        table.add_row(*cells, ", ".join(holders))
    console.print(table)
    return 0


def _versions(bucket: Bucket, run: Run, last: int) -> list[dict[str, Any]]:
    newest = newest_version(bucket)
    folds: dict[int, list[int]] = {}
    for key in bucket.list(keys.COMPACTED):
        base, target = keys.compacted_of(key) or (None, -1)
        if base is not None:
            folds.setdefault(target, []).append(base)
    elements = sum(tensor.count for tensor in run.tensors)
    first = 0 if newest is None else max(newest - last + 1, 0)
    rows = []
    for version in range(-1 if newest is None else newest, first - 1, -1):
        row: dict[str, Any] = {"version": version, "kind": "missing", "delta": 0, "anchor": 0}
        row |= {"folds": sorted(folds.get(version, [])), "changed": None, "age_s": None}
        rows.append(row)
        try:
            manifest = read_manifest(bucket, run, version)
        except CorruptError as error:
            row |= {"kind": "damaged", "error": str(error)}
            continue
        if manifest is None:
            continue
        kinds = [name for name in ("delta", "anchor") if getattr(manifest, name) is not None]
        row["kind"] = "pruned" if manifest.pruned else " + ".join(kinds)
        row |= {name: getattr(manifest, name).bytes for name in kinds}
        row |= {"digest": manifest.digest, "epoch": manifest.epoch}
        row["age_s"] = max(time.time() - manifest.created_at, 0.0)
        if manifest.delta is not None and elements:
            row["changed"] = manifest.delta.changed / elements
    return rows


def _readers(bucket: Bucket) -> list[dict[str, Any]]:
    fleet = Fleet(bucket, silence_s=FaultsConfig().silence_s)
    fleet.poll()
    return [
        {"worker": name, "version": one.worker.version, "phase": one.worker.phase}
        for name, one in fleet.heartbeats.items()
        if one.worker is not None
    ]


def _size(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def _age(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.0f} s"
