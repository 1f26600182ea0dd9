"""Writes a run's adapter as a directory of PEFT, or merged with its base."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from deltawire.dashboard.wording import byte_size
from deltawire.display import safe_json
from deltawire.errors import InputError, RetryError
from deltawire.launch.progress import Bars, bars
from deltawire.launch.pull import PATIENCE_S, Pulled, note_held, reporting, wait_for_run
from deltawire.runtime.reader_report import ReaderReporter
from deltawire.runtime.trusted import ANY, ReaderTrust, open_trusted
from deltawire.store import MeteredBucket
from deltawire.sync import load_mirror, newest_version, read_run
from deltawire.sync.chain.version_poller import VersionPoller, newest_readable

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from deltawire.export.merge import MergeReport


class Merged(msgspec.Struct, frozen=True):
    """A version that was written with its adapter merged: the shares that were kept."""

    version: int
    bytes: int
    seconds: float
    merge: MergeReport


def merge_run(
    location: str,
    out: Path,
    *,
    version: int | None = None,
    floor: float = 0.0,
    trust: ReaderTrust = ANY,
    as_json: bool = False,
) -> None:
    """Writes a version of a run, by default the newest, as a plain model with the adapter merged.

    Raises `InputError` if the merge keeps less of the adapter's change than ``floor``.
    """
    from deltawire.export.merged_checkpoint import write_merged
    from deltawire.runtime.needs import config_of

    started = time.perf_counter()
    with bars(hidden=as_json) as bar:
        bucket = MeteredBucket(open_trusted(location, trust), lambda read, _: bar.advance(read))
        run = read_run(bucket)
        newest = newest_version(bucket) if version is None else version
        if newest is None:
            raise RetryError("no version is published yet", run=bucket.url)
        bar.begin(f"merging version {newest}")
        config = config_of(run, url=bucket.url)
        report = write_merged(bucket, run, config, newest, out, floor=floor)
        bar.hide()
        done = Merged(newest, bucket.read_bytes, time.perf_counter() - started, report)
        if as_json:
            print(safe_json(done), flush=True)  # noqa: T201
            return
        total = report.total
        bar.log(
            f"version {newest} merged into {out}: {total.kept:.1%} of the adapter's change is "
            f"kept, {total.changed:.1%} of the weights of {len(report.layers)} layers changed"
        )
        for one in report.worst(5):
            bar.log(f"  {one.name}: {one.kept:.1%} kept, change {one.size:.2e} of the weight")


def pull_adapter(
    location: str,
    directory: Path,
    *,
    version: int | None = None,
    follow: bool = False,
    trust: ReaderTrust = ANY,
    threads: int | None = None,
    as_json: bool = False,
    report_to: str = "",
) -> None:
    """Writes a version's adapter, by default the newest's, to a directory that PEFT loads; with
    ``follow``, also that of every newer version, and reports to the run at ``report_to``. The base
    is not fetched.

    Raises `InputError` for a run without an adapter, and if the directory holds something else.
    """
    if follow and version is not None:
        raise InputError("--follow and --version exclude each other")
    with bars(hidden=as_json) as bar:
        if follow:
            wait_for_run(location, bar)
        bucket = MeteredBucket(open_trusted(location, trust), lambda read, _: bar.advance(read))
        puller = _AdapterPuller(bucket, directory, bar, threads=threads, as_json=as_json)
        if follow:
            with reporting(bucket, report_to) as reporter:
                puller.follow(reporter)
        else:
            puller.bring(version)


class _AdapterPuller:
    def __init__(
        self,
        bucket: MeteredBucket,
        directory: Path,
        bar: Bars,
        *,
        threads: int | None,
        as_json: bool,
    ) -> None:
        from deltawire.export.adapter import PREFIX
        from deltawire.export.merged_checkpoint import adapter_of, adapter_structure
        from deltawire.runtime.needs import config_of
        from deltawire.sync.follow.mirror import empty_mirror, select

        _check_free(directory)
        self._bucket, self._directory, self._bar = bucket, directory, bar
        self._json, self._threads = as_json, threads
        self._run = read_run(self._bucket)
        self._config = config_of(self._run, url=bucket.url)
        self._adapter = adapter_of(self._run, self._config, url=bucket.url)
        self._model = adapter_structure(self._bucket, self._run, self._adapter)
        self._specs = {one.name: one for one in self._run.tensors if one.name.startswith(PREFIX)}
        self._mirror = empty_mirror(self._run, select(self._run, list(self._specs)))
        self._poller = VersionPoller(self._bucket, self._run)

    def follow(self, reporter: ReaderReporter | None = None) -> None:
        """Writes each new version until interrupted."""
        answered = time.monotonic()
        while True:
            try:
                newest = self._poller.newer(self._mirror.version)
                if newest is not None:
                    self.bring(newest.version)
                answered, failed = time.monotonic(), ""
            except RetryError as error:
                if time.monotonic() - answered > PATIENCE_S:
                    raise
                self._bar.log(f"trying again: {error}")
                newest, failed = None, str(error)
            alarm = "" if self._poller.alarm is None else str(self._poller.alarm)
            note_held(reporter, self._mirror.version, failed or alarm)
            if newest is None:
                time.sleep(self._poller.pause_s)

    def bring(self, version: int | None) -> None:
        """Writes one version, None for the newest."""
        from deltawire.export.merged_checkpoint import tensor_of

        started, before = time.perf_counter(), self._bucket.read_bytes
        if version is None:
            newest = newest_readable(self._bucket, self._run)
            if newest is None:
                raise RetryError("no version is published yet", run=self._bucket.url)
            version = newest.version
        held = self._mirror.version
        base = None if held < 0 else held
        self._bar.begin(f"version {version}")
        load_mirror(self._bucket, self._run, at=version, into=self._mirror, threads=self._threads)
        tensors = {
            name: tensor_of(self._mirror.tensors[name], spec) for name, spec in self._specs.items()
        }
        self._write(tensors)
        self._bar.hide()
        done = Pulled(
            version,
            base,
            self._mirror.digest.hex(),
            self._bucket.read_bytes - before,
            time.perf_counter() - started,
        )
        if self._json:
            print(safe_json(done), flush=True)  # noqa: T201
        else:
            self._bar.log(
                f"version {version}: adapter in {self._directory}, {byte_size(done.bytes)} read"
            )

    def _write(self, tensors: Mapping[str, Tensor]) -> None:
        """Replaces the directory by a complete one."""
        from deltawire.export.peft_directory import write_peft

        folder = self._directory
        work, old = (folder.with_name(f".{folder.name}.{part}") for part in ("new", "old"))
        for one in (work, old):
            shutil.rmtree(one, ignore_errors=True)
        base = self._config.model.path
        write_peft(work, self._model, self._adapter, tensors, base=base)
        if folder.exists():
            folder.rename(old)
        work.rename(folder)
        shutil.rmtree(old, ignore_errors=True)


def _check_free(directory: Path) -> None:
    """Raises `InputError` unless a directory is missing, empty, or holds an adapter."""
    if directory.is_symlink() or (directory.exists() and not directory.is_dir()):
        raise InputError(f"{directory} is no directory", hint="name another one")
    if directory.is_dir():
        names = {one.name for one in directory.iterdir()}
        if names - {"adapter_config.json", "adapter_model.safetensors"}:
            raise InputError(
                f"{directory} holds other files than an adapter's", hint="name a new directory"
            )
