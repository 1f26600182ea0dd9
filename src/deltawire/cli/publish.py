"""``deltawire publish``: a series of Hugging Face directories, or a folder that fills with them."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import msgspec

from deltawire.cli.transfer import Bars, bars, signer_of, size, strides_of
from deltawire.errors import InputError
from deltawire.store import Bucket, MeteredBucket, open_bucket
from deltawire.sync.huggingface.checkpoint_dir import Checkpoint, read_checkpoint
from deltawire.sync.huggingface.publish_dirs import (
    CheckpointPublisher,
    CheckpointWatcher,
    Outcome,
    order,
)

LOOK_S = 0.5


class Published(msgspec.Struct, frozen=True):
    """What became of one directory; sizes in bytes, None for what was there already."""

    path: str
    version: int
    state: str
    digest: str
    model_bytes: int
    delta_bytes: int | None
    anchor_bytes: int | None
    changed: float | None
    seconds: float


def publish(arguments: argparse.Namespace) -> int:
    """Publish each directory that is not a version yet, then those that come."""
    paths = [Path(path) for path in arguments.checkpoints]
    watched = None
    if arguments.watch:
        watched = CheckpointWatcher(Path(arguments.watch), settle_s=arguments.settle)
    elif not paths:
        raise InputError("nothing to publish", hint="name directories, or a folder to --watch")
    for path in paths:  # Told before anything is published, and not after an hour.
        read_checkpoint(path)
    with bars(arguments) as bar:
        series = _open(arguments, bar)
        with series:
            session = _Session(series, bar, as_json=arguments.json, dry_run=arguments.dry_run)
            for path in paths:
                session.publish(path)
            if watched is not None:
                session.watch(watched, idle_s=arguments.idle)
    return 0


def _open(arguments: argparse.Namespace, bar: Bars) -> CheckpointPublisher:
    where: Bucket
    try:
        where = open_bucket(arguments.to, create=not arguments.dry_run)
    except InputError:
        if not arguments.dry_run:
            raise
        where = open_bucket("memory://")  # A folder that is not there yet: an empty run.
    bucket = MeteredBucket(where, lambda _, written: bar.more(written))
    name = arguments.name or arguments.to.rstrip("/").rsplit("/", 1)[-1]
    return CheckpointPublisher(
        bucket,
        name=name[:64] or "run",
        signer=signer_of(arguments.key),
        retain=arguments.retain,
        grace_s=arguments.grace * 3600,
        dry_run=arguments.dry_run,
        threads=arguments.threads,
        progress=bar.more,
        on_digest=lambda path: bar.begin(f"uploading {path.name}"),
        on_version=lambda done, total: bar.count("reading versions", done, total),
        anchor_every=arguments.anchor_every,
        anchor_share=arguments.anchor_share,
        compaction_strides=strides_of(arguments.fold_strides),
    )


class _Session:
    def __init__(
        self, series: CheckpointPublisher, bar: Bars, *, as_json: bool, dry_run: bool
    ) -> None:
        self._series = series
        self._bar = bar
        self._json = as_json
        self._dry_run = dry_run

    def publish(self, path: Path) -> None:
        started = time.perf_counter()
        checkpoint = read_checkpoint(path)
        self._bar.begin(f"reading {path.name}", checkpoint.bytes)
        outcome = self._series.publish(path)
        self._bar.hide()
        self._tell(outcome, checkpoint, time.perf_counter() - started)

    def watch(self, watched: CheckpointWatcher, *, idle_s: float) -> None:
        """Publish each subfolder once it is whole, until interrupted or idle."""
        told = 0
        last = time.monotonic()
        while True:
            for path in watched.ready():
                try:
                    self.publish(path)
                except InputError as error:
                    if not path.is_dir():  # Trainers remove old checkpoints.
                        self._bar.say(f"{path.name} is gone: {error}")
                        continue
                    raise
                last = time.monotonic()
            for path in sorted(watched.passed_over, key=order)[told:]:
                self._bar.say(f"{path.name} became whole after a later one was published: left out")
            told = len(watched.passed_over)
            if idle_s and time.monotonic() - last > idle_s:
                return
            time.sleep(LOOK_S)

    def _tell(self, outcome: Outcome, checkpoint: Checkpoint, seconds: float) -> None:
        state = "published" if outcome.published else "there"
        if self._dry_run and outcome.planned:
            state = "planned"
        receipt = outcome.receipt
        row = Published(
            path=str(outcome.path),
            version=outcome.version,
            state=state,
            digest=outcome.digest,
            model_bytes=outcome.bytes,
            delta_bytes=None if receipt is None else receipt.bytes_delta,
            anchor_bytes=None if receipt is None else receipt.bytes_anchor,
            changed=None if receipt is None else receipt.changed / max(receipt.elements, 1),
            seconds=seconds,
        )
        if self._json:
            print(msgspec.json.encode(row).decode(), flush=True)  # noqa: T201
            return
        line = f"{outcome.path.name}: version {outcome.version}"
        if receipt is not None:
            kinds = [
                f"{name} {size(count)}"
                for name, count in (("delta", row.delta_bytes), ("anchor", row.anchor_bytes))
                if count
            ]
            line += f", {', '.join(kinds) or 'nothing changed'}, {row.changed:.2%} changed"
            line += f", {size(outcome.bytes / seconds)}/s"
        elif state == "there":
            line += " already"
        else:
            line += f" to be, {len(checkpoint.specs)} tensors of {size(outcome.bytes)}"
        if checkpoint.left_out:
            line += f"; not carried: {', '.join(checkpoint.left_out)}"
        self._bar.say(line)
