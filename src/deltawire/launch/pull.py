"""Keeps a Hugging Face directory at a version of a run."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from deltawire.dashboard.wording import byte_size
from deltawire.display import safe_json
from deltawire.errors import CorruptError, InputError, RetryError
from deltawire.launch.progress import Bars, bars
from deltawire.runtime.reader_report import Kind, ReaderReporter
from deltawire.runtime.trusted import ANY, ReaderTrust, open_trusted
from deltawire.store import Bucket, MeteredBucket, open_bucket
from deltawire.store.opening import NoFolderError
from deltawire.sync import Checkout, read_run
from deltawire.sync.chain.version_poller import newest_readable
from deltawire.wire import keys
from deltawire.wire.manifest import Manifest
from deltawire.wire.run import Run

PATIENCE_S = 600.0
"""While following, requests to a store that does not answer are retried for this many seconds."""
FOLDER_POLL_S = 0.5
"""How often a folder is looked for that does not exist yet, in seconds."""


class Pulled(msgspec.Struct, frozen=True):
    """One version that the directory shows now; ``base`` is the version it showed before.

    ``bytes`` were fetched, and ``written`` bytes of weights written to the disk.
    """

    version: int
    base: int | None
    digest: str
    bytes: int
    seconds: float
    written: int = 0


def pull_directory(
    location: str,
    directory: Path,
    *,
    version: int | None = None,
    follow: bool = False,
    verify: bool = False,
    trust: ReaderTrust = ANY,
    threads: int | None = None,
    as_json: bool = False,
    report_to: str = "",
) -> None:
    """Brings the directory to ``version`` (default: the newest), or to each new version as it
    appears, and then reports to the run at ``report_to`` what it holds (empty: does not report).

    With ``verify``, compare what it shows with the run instead, and change nothing.
    """
    if (version is not None) + follow + verify > 1:
        raise InputError("--follow, --version and --verify exclude each other")
    with bars(hidden=as_json) as bar:
        if follow:
            wait_for_run(location, bar)
        bucket = MeteredBucket(open_trusted(location, trust), lambda read, _: bar.advance(read))
        run = read_run(bucket)
        if any(one.name.endswith((".lora_A", ".lora_B")) for one in run.tensors):
            # PEFT's own tensors end in ".weight".
            bar.log(
                f"the run's adapter has experts, which {directory} holds in a layout that PEFT "
                f"does not read: pull it with --adapter, into another directory"
            )
        with Checkout(bucket, run, directory, threads=threads) as checkout:
            puller = _Puller(bucket, run, checkout, bar, as_json=as_json)
            if verify:
                puller.verify()
            elif follow:
                with reporting(bucket, report_to) as reporter:
                    puller.follow(reporter)
            else:
                puller.once(version)


@contextlib.contextmanager
def reporting(
    bucket: Bucket, report_to: str, kind: Kind = "pull"
) -> Iterator[ReaderReporter | None]:
    """Reports a reader of ``bucket`` to the run at ``report_to`` while the body runs; not if that
    is empty."""
    if not report_to:
        yield None
        return
    # Reports are not signed, so nothing is read to open their place: that could end the reader.
    with ReaderReporter(bucket, kind, places=[open_bucket(report_to)]).running() as found:
        yield found


def wait_for_run(location: str, bar: Bars) -> None:
    """Waits until there is a run at a location; a folder need not exist yet either."""
    told = False
    while True:
        pause_s = FOLDER_POLL_S
        try:
            bucket = open_bucket(location)
            if bucket.exists(keys.RUN):
                return
            pause_s = bucket.poll_s
        except NoFolderError:
            pass
        if not told:
            bar.log(f"there is no run at {location} yet: waiting for its first version")
            told = True
        time.sleep(pause_s)


def note_held(reporter: ReaderReporter | None, version: int | None, reason: str) -> None:
    """Tells a reader's reporter, if there is one, what is held and what keeps it from more."""
    if reporter is not None:
        if version is not None and version >= 0:
            reporter.holds(version)
        reporter.waits(reason)


class _Puller:
    def __init__(
        self,
        bucket: MeteredBucket,
        run: Run,
        checkout: Checkout,
        bar: Bars,
        *,
        as_json: bool,
    ) -> None:
        self._bucket = bucket
        self._run = run
        self._checkout = checkout
        self._bar = bar
        self._json = as_json

    def once(self, version: int | None) -> None:
        if version is None:
            self._finish()
            newest = newest_readable(self._bucket, self._run)
            if newest is None:
                raise RetryError("no version is published yet", run=self._bucket.url)
            self._bring(newest.version, known=newest)
        else:
            self._bring(version)

    def verify(self) -> None:
        """Compares the directory with its version."""
        started = time.perf_counter()
        self._bar.begin("verifying")
        version, digest = self._checkout.verify()
        self._bar.hide()
        if self._json:
            done = Pulled(version, version, digest, 0, time.perf_counter() - started)
            print(safe_json(done), flush=True)  # noqa: T201
        else:
            self._bar.log(f"version {version} {digest[:16]}: every file is as published")

    def _finish(self) -> None:
        """Finishes a version that was begun earlier: most of it may be on disk already."""
        unfinished = self._checkout.unfinished()
        if unfinished is None or self._checkout.version is not None:
            return
        try:
            self._bring(unfinished)
        except CorruptError as error:
            self._bar.log(f"cannot finish version {unfinished}: {error}")

    def follow(self, reporter: ReaderReporter | None = None) -> None:
        """Brings each new version until interrupted."""
        self._finish()
        answered = time.monotonic()
        warned = ""
        while True:
            try:
                newest = self._checkout.newest()
                if newest is not None:
                    self._bring(newest)
                answered, failed = time.monotonic(), ""
            except RetryError as error:
                if time.monotonic() - answered > PATIENCE_S:
                    raise
                self._bar.log(f"trying again: {error}")
                newest, failed = None, str(error)
            alarm = "" if self._checkout.alarm is None else str(self._checkout.alarm)
            note_held(reporter, self._checkout.version, failed or alarm)
            if alarm and alarm != warned:
                self._bar.log(f"warning: passed over a manifest: {alarm}")
            warned = alarm
            if newest is None:
                time.sleep(self._checkout.pause_s)

    def _bring(self, version: int, *, known: Manifest | None = None) -> None:
        started, before = time.perf_counter(), self._bucket.read_bytes
        base = self._checkout.version
        self._bar.begin(f"version {version}")
        digest = self._checkout.bring_to(version, known=known)
        self._bar.hide()
        done = Pulled(
            version,
            base,
            digest,
            self._bucket.read_bytes - before,
            time.perf_counter() - started,
            self._checkout.bytes_written,
        )
        if self._json:
            print(safe_json(done), flush=True)  # noqa: T201
            return
        rate = byte_size(done.bytes / done.seconds) if done.seconds else "-"
        self._bar.log(
            f"version {version} {digest[:16]}: {byte_size(done.bytes)} in {done.seconds:.1f} s "
            f"({rate}/s), {byte_size(done.written)} written"
        )
