"""Lists a run's versions and their readers, and the outcome of a check."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from deltawire.config import FaultsConfig
from deltawire.dashboard.readers import ReaderWatch
from deltawire.dashboard.wording import byte_size
from deltawire.display import legible, safe_line
from deltawire.errors import CorruptError
from deltawire.runtime.fleet import Fleet
from deltawire.store import Bucket
from deltawire.sync import committed_versions, read_manifest
from deltawire.sync.chain.objects import read_compacted_delta
from deltawire.sync.huggingface.identities import CHECKPOINT_RECORD
from deltawire.sync.maintain.fsck import CheckedRun
from deltawire.sync.publish.commit import STEP_RECORD
from deltawire.wire import keys
from deltawire.wire.run import Run


def print_check(found: CheckedRun, console: Console) -> None:
    """Prints the outcome of ``deltawire fsck``, a line for each fault."""
    console.print(
        f"{found.versions} versions ({found.pruned} pruned, {found.anchors} anchors), "
        f"{found.compacted} compacted deltas, {found.blobs} blobs of {byte_size(found.bytes)}"
    )
    if found.unreferenced:
        console.print(
            f"{found.unreferenced} blobs of {byte_size(found.unreferenced_bytes)} that no version "
            "refers to; retention removes them"
        )
    for fault in found.faults:
        place = fault.key or f"version {fault.version}"
        console.print(
            safe_line(f"{fault.level}: {place}: {fault.message}"), markup=False, emoji=False
        )
    console.print("whole" if found.whole else "damaged")


def version_table(versions: list[dict[str, Any]], readers: list[dict[str, Any]]) -> Table:
    """A row for each version: its kinds, sizes, age and readers, and what it was made from if its
    publisher said so."""
    made = any(row["made_from"] for row in versions)
    columns = ("version", "kind", "delta", "anchor", "compacted from", "age")
    table = Table(*columns, *(["made from"] if made else []), "held by")
    for row in versions:
        holders = [reader["worker"] for reader in readers if reader["version"] == row["version"]]
        delta, anchor = (byte_size(row[name]) if row[name] else "" for name in ("delta", "anchor"))
        bases = ", ".join(map(str, row["compacted_from"]))
        age = "" if row["age_s"] is None else _age(row["age_s"])
        cells = (str(row["version"]), row["kind"], delta, anchor, bases, age)
        source = [Text(legible(row["made_from"], 80))] if made else []
        table.add_row(*cells, *source, Text(legible(", ".join(holders), 400)))
    return table


def list_versions(
    bucket: Bucket,
    run: Run,
    last: int,
    *,
    below: int | None = None,
    known: Sequence[int] | None = None,
) -> list[dict[str, Any]]:
    """Describes the ``last`` newest objects that have the name of a version, newest first; with
    ``below`` the newest of those that have a lower number. ``known`` are all of them, in order,
    where they were listed before.

    Numbers that a publisher skipped because unreadable objects occupy them show as ``damaged``.
    """
    committed = committed_versions(bucket) if known is None else known
    if below is not None:
        committed = [version for version in committed if version < below]
    shown = committed[-last:][::-1]
    bases: dict[int, list[int]] = {}
    anchored: set[int] = set()
    after = keys.compacted_after(shown[-1] - 1) if shown and shown[-1] else None
    for key in bucket.list(keys.COMPACTED, after=after):
        base, target = keys.compacted_of(key) or (None, -1)
        if base is not None:
            bases.setdefault(target, []).append(base)
        else:
            anchored.add(target)
    rows = []
    for version in shown:
        row: dict[str, Any] = {"version": version, "kind": "missing", "delta": 0, "anchor": 0}
        row |= {"compacted_from": sorted(bases.get(version, [])), "age_s": None, "made_from": ""}
        rows.append(row)
        try:
            manifest = read_manifest(bucket, run, version)
        except CorruptError as error:
            row |= {"kind": "damaged", "error": str(error)}
            continue
        if manifest is None:
            continue
        sizes = {
            name: ref.bytes
            for name, ref in (("delta", manifest.delta), ("anchor", manifest.anchor))
            if ref is not None
        }
        if version in anchored and (size := _later_anchor_bytes(bucket, run, version)) is not None:
            sizes.setdefault("anchor", size)
        row["kind"] = "pruned" if manifest.pruned else " + ".join(sizes)
        row |= sizes
        row |= {"digest": manifest.digest, "epoch": manifest.epoch}
        row["age_s"] = max(time.time() - manifest.created_at, 0.0)
        row["made_from"] = _made_from(manifest.metadata)
        step = manifest.metadata.get(STEP_RECORD)
        row["global_step"] = step if isinstance(step, int) else None
    return rows


def _later_anchor_bytes(bucket: Bucket, run: Run, version: int) -> int | None:
    with suppress(CorruptError):
        made = read_compacted_delta(bucket, run, None, version)
        return None if made is None else made.payload.bytes
    return None


def _made_from(metadata: dict[str, Any]) -> str:
    """Names the trainer's step or the directory that a version was made from, as far as known."""
    step, name = metadata.get(STEP_RECORD), metadata.get(CHECKPOINT_RECORD)
    if isinstance(step, int):
        return f"step {step}"
    return name if isinstance(name, str) else ""


def list_readers(bucket: Bucket) -> list[dict[str, Any]]:
    """Says which worker holds which version, from the heartbeats, and which pull, relay or rank of
    vLLM, from their reports."""
    fleet = Fleet(bucket, silence_s=FaultsConfig().silence_s)
    fleet.poll()
    workers = [
        {"worker": name, "version": one.worker.version, "phase": one.worker.phase}
        for name, one in fleet.heartbeats.items()
        if one.worker is not None
    ]
    return workers + [
        {
            "worker": f"{one.host}/{one.process}", "version": one.version, "phase": one.state,
            "lag": one.lag, "late_s": one.late_s, "reason": one.reason,
        }
        for one in ReaderWatch(bucket).lines()
        if one.state != "ended"
    ]  # fmt: skip


def _age(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.0f} s"
