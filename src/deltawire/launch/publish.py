"""Publishes Hugging Face directories as versions, in order or as they appear in a folder."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from deltawire.dashboard.wording import byte_size
from deltawire.display import safe_json
from deltawire.errors import InputError, RetryError
from deltawire.launch.progress import Bars, bars
from deltawire.store import Bucket, MeteredBucket, open_bucket
from deltawire.sync.huggingface.checkpoint_dir import Checkpoint, read_checkpoint
from deltawire.sync.huggingface.checkpoint_watcher import (
    CheckpointWatcher,
    checkpoint_name,
    checkpoint_order,
)
from deltawire.sync.huggingface.publish_dirs import (
    CheckpointPublisher,
    DirectoryResult,
)
from deltawire.sync.publish.safetensors_files import CheckpointDirError
from deltawire.wire.seal import Signer

POLL_S = 0.5
LONGEST_PAUSE_S = 30.0
"""The longest pause between two attempts while the store does not answer."""


class PublishedDirectory(msgspec.Struct, frozen=True):
    """The outcome of one directory; sizes in bytes, None for a version that existed already."""

    path: str
    version: int
    state: str
    digest: str
    model_bytes: int
    delta_bytes: int | None
    anchor_bytes: int | None
    changed: float | None
    seconds: float


@dataclass(frozen=True, kw_only=True)
class PublishOptions:
    """Options of publishing; durations in seconds, ``retain`` 0 keeps every version."""

    name: str = ""
    signer: Signer | None = None
    retain: int = 0
    grace_s: float = 86400.0
    anchor_every: int = 25
    anchor_share: float = 0.0
    strides: tuple[int, ...] = ()
    threads: int | None = None
    dry_run: bool = False
    backwards: bool = False
    lent: Mapping[str, bytes] = field(default_factory=dict)


def publish_directories(
    location: str,
    paths: Sequence[Path],
    options: PublishOptions,
    *,
    watcher: CheckpointWatcher | None = None,
    idle_s: float = 0.0,
    as_json: bool = False,
) -> None:
    """Publishes each directory that is not a version yet, then those that the watcher finds.

    With ``idle_s``, watching ends after this many seconds without a new directory. A watcher waits
    while the store does not answer, however long that takes.
    """
    if watcher is None and not paths:
        raise InputError("nothing to publish", hint="name directories, or a folder to --watch")
    for path in paths:  # Refuse now, not after an hour of publishing.
        read_checkpoint(path, lent=options.lent)
    with bars(hidden=as_json) as bar, _open(location, options, bar) as publisher:
        session = _Session(publisher, bar, lent=options.lent, as_json=as_json)
        session.publish_all(paths, backwards=options.backwards)
        if watcher is not None:
            session.watch(watcher, idle_s=idle_s)


def _open(location: str, options: PublishOptions, bar: Bars) -> CheckpointPublisher:
    where: Bucket
    try:
        where = open_bucket(location, create=not options.dry_run)
    except InputError:
        if not options.dry_run:
            raise
        where = open_bucket("memory://")  # The folder does not exist yet: an empty run.
    bucket = MeteredBucket(where, lambda _, written: bar.advance(written))
    name = options.name or location.rstrip("/").rsplit("/", 1)[-1]
    return CheckpointPublisher(
        bucket,
        name=name[:64] or "run",
        signer=options.signer,
        retain=options.retain,
        grace_s=options.grace_s,
        dry_run=options.dry_run,
        backwards=options.backwards,
        lent=options.lent,
        threads=options.threads,
        progress=bar.advance,
        on_digest=lambda path: bar.begin(f"uploading {path.name}"),
        on_version=lambda done, total: bar.count("reading versions", done, total),
        anchor_every=options.anchor_every,
        anchor_share=options.anchor_share,
        compaction_strides=options.strides,
    )


class _Session:
    def __init__(
        self,
        publisher: CheckpointPublisher,
        bar: Bars,
        *,
        lent: Mapping[str, bytes],
        as_json: bool,
    ) -> None:
        self._publisher = publisher
        self._lent = lent
        self._bar = bar
        self._json = as_json

    def publish_all(self, paths: Sequence[Path], *, backwards: bool) -> None:
        """Publishes directories in order, except those before one that is a version already."""
        known = [-1]
        if not backwards:
            for number, path in enumerate(paths):
                self._bar.begin(f"reading {path.name}")
                if self._publisher.find(path) is not None:
                    known.append(number)
        for number, path in enumerate(paths):
            if number < max(known) and number not in known:
                self._bar.log(
                    f"{path.name} comes before {paths[max(known)].name}, which is a version "
                    "already: skipped; --backwards publishes it as the newest"
                )
            else:
                self.publish(path)

    def publish(self, path: Path, *, in_name_order: bool = False) -> None:
        """Publishes one directory and reports the result."""
        started = time.perf_counter()
        checkpoint = read_checkpoint(path, lent=self._lent)
        self._bar.begin(f"reading {path.name}", checkpoint.bytes)
        outcome = self._publisher.publish(path, in_name_order=in_name_order)
        self._bar.hide()
        self._report(outcome, checkpoint, time.perf_counter() - started)

    def watch(self, watcher: CheckpointWatcher, *, idle_s: float) -> None:
        """Publishes each subfolder once it is complete, until interrupted or idle."""
        logged = told = noted = 0
        last = time.monotonic()
        while True:
            for path in watcher.ready():
                try:
                    self._publish_patiently(path)
                except CheckpointDirError as error:  # Trainers also remove old checkpoints.
                    self._bar.log(f"{checkpoint_name(path)} is skipped: {error}")
                    continue
                last = time.monotonic()
            for note in watcher.notes[noted:]:
                self._bar.log(note)
            noted = len(watcher.notes)
            for path in sorted(watcher.passed_over, key=checkpoint_order)[logged:]:
                self._bar.log(
                    f"{checkpoint_name(path)} was complete only after a later one had been "
                    "published; skipped"
                )
            logged = len(watcher.passed_over)
            for path, why in watcher.not_taken[told:]:
                self._bar.log(f"{path.relative_to(watcher.folder.base)} is not taken: {why}")
            told = len(watcher.not_taken)
            if idle_s and time.monotonic() - last > idle_s:
                return
            time.sleep(POLL_S)

    def _publish_patiently(self, path: Path) -> None:
        """Publishes a directory, as often as it takes: a trainer goes on through an outage too.

        The next attempt finds out what the store did of one without an answer.
        """
        pause_s = POLL_S
        while True:
            try:
                self.publish(path, in_name_order=True)
                return
            except RetryError as error:
                if pause_s == POLL_S:
                    self._bar.log(f"{checkpoint_name(path)} waits for the store: {error}")
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _report(self, outcome: DirectoryResult, checkpoint: Checkpoint, seconds: float) -> None:
        stats = outcome.stats
        row = PublishedDirectory(
            path=str(outcome.path),
            version=outcome.version,
            state=outcome.state,
            digest=outcome.digest,
            model_bytes=outcome.bytes,
            delta_bytes=None if stats is None else stats.bytes_delta,
            anchor_bytes=None if stats is None else stats.bytes_anchor,
            changed=None if stats is None else stats.changed / max(stats.elements, 1),
            seconds=seconds,
        )
        if self._json:
            print(safe_json(row), flush=True)  # noqa: T201
            return
        name = checkpoint_name(outcome.path)
        line = f"{name}: version {outcome.version}"
        if stats is not None:
            kinds = [
                f"{name} {byte_size(count)}"
                for name, count in (("delta", row.delta_bytes), ("anchor", row.anchor_bytes))
                if count
            ]
            line += f", {', '.join(kinds) or 'nothing changed'}, {row.changed:.2%} changed"
            line += f", {byte_size(outcome.bytes / seconds)}/s"
        elif outcome.state == "there":
            line += " already"
        elif outcome.state == "older":
            line = f"{name} comes before what is published: skipped"
        else:
            line += f" to publish, {len(checkpoint.specs)} tensors of {byte_size(outcome.bytes)}"
        if checkpoint.left_out:
            line += f"; not published: {', '.join(checkpoint.left_out)}"
        self._bar.log(line)
        if stats is not None and stats.compaction_error:
            self._bar.log(f"warning: compacted deltas are missing: {stats.compaction_error}")
