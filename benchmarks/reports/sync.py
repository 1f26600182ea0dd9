"""``deltawire bench sync``: the cost of publishing, following and relaying, in one process."""

from __future__ import annotations

import argparse
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from benchmarks.peers import PEERS, missing
from benchmarks.sync import SyncFigures
from benchmarks.sync import bench_sync as measure
from deltawire.dashboard.wording import byte_size
from deltawire.errors import InputError
from deltawire.store import Bucket, open_bucket


def run(arguments: argparse.Namespace) -> int:
    """Measures, and prints the table or the JSON."""
    if arguments.repeats < 1 or arguments.size <= 0 or arguments.region_size <= 0:
        raise InputError("--repeats must be at least 1, sizes above 0")
    console = Console(stderr=True, highlight=False)
    rivals = [name for name in arguments.rivals.split(",") if name]
    for name in rivals:
        if name not in PEERS:
            raise InputError(f"unknown rival {name[:40]!r}", hint=f"known: {', '.join(PEERS)}")
    skipped = [name for name in rivals if missing(name)]
    for name in skipped:
        console.print(f"{name} is left out: it needs {', '.join(missing(name))}", style="yellow")
    with _buckets(arguments) as make_bucket:
        found = measure(
            make_bucket,
            model_bytes=int(arguments.size * 1e9),
            region_bytes=int(arguments.region_size * 1e9),
            density=arguments.density,
            repeats=arguments.repeats,
            rivals=[name for name in rivals if name not in skipped],
            threads=arguments.threads,
            tell=console.print,
        )
    if arguments.json:
        Console().print_json(msgspec.json.encode(found).decode())
    else:
        _print(found)
    return 0


@contextmanager
def _buckets(arguments: argparse.Namespace) -> Iterator[Callable[[str], Bucket]]:
    """Opens empty buckets in a temporary folder, on an in-memory S3 server, or under a URL.

    Objects under a URL are not deleted afterwards.
    """
    if arguments.s3:
        from deltawire.testing.s3_server import S3Server

        with S3Server() as server:
            server.make_bucket("bench")
            yield lambda name: server.open(f"s3://bench/{name}")
        return
    if "://" in arguments.bucket:
        root = arguments.bucket.rstrip("/")
        yield lambda name: open_bucket(f"{root}/{name}")
        return
    parent = Path(arguments.bucket) if arguments.bucket else None
    if parent is not None and not parent.is_dir():
        raise InputError(f"--bucket {parent}: there is no such folder")
    folder = Path(tempfile.mkdtemp(prefix="deltawire-bench-", dir=parent))
    try:
        yield lambda name: open_bucket(str(folder / name), create=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _print(found: SyncFigures) -> None:
    console = Console(highlight=False)
    table = Table("", "measured", "floor")
    table.add_row(
        "trainer blocked per publish, as a share of one memcpy",
        f"{found.trainer_blocked_vs_memcpy:.2f}",
        "≤ 1.5",
    )
    table.add_row(
        "publish to verified mirror, times faster than the whole model as safetensors",
        f"{found.end_to_end_speedup_vs_full:.1f}",
        "≥ 5",
    )
    table.add_row(
        "bytes to a new region, 50 versions of 50 full models",
        f"{found.region_share_first_50:.2%}",
        "≤ 3 %",
    )
    table.add_row("the 50 after it", f"{found.region_share_next_50:.2%}", "≤ 1 %")
    table.add_row(
        "a reader's memory beyond its mirror",
        byte_size(found.extra_memory_bytes),
        f"≤ {byte_size(found.extra_memory_limit)}",
    )
    table.add_row("objects at lag 60", str(found.objects_at_lag_60), "≤ 12")
    console.print(table)
    ways = Table("way", "used by", "seconds", "bytes", "times slower")
    ways.add_row("deltawire", "", f"{found.end_to_end_s:.3f}", byte_size(found.delta_bytes), "1.0")
    for rival in found.rivals:
        slower = f"{rival.seconds / found.end_to_end_s:.1f}"
        ways.add_row(
            rival.name, rival.used_by, f"{rival.seconds:.3f}", byte_size(rival.bytes), slower
        )
    console.print(ways)
    console.print(
        f"{byte_size(found.model_bytes)} of bf16, {found.changed:.2%} changed a step, "
        f"{found.machine.processor}, {found.machine.processors} processors"
    )
