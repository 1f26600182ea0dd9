"""Publishes each version of a run in further precisions, a line of versions for each.

Concurrency, for one further precision::

    main thread       copy bf16 into staging ─▶ next step …
                              │
    publisher         encode, upload, commit version n in bf16 ──┐ committed
    this thread       quantize the staged bits ─────────────────▶ encode, upload, commit version n

A line's version is a function of the run's version of the same number and of the scales of the
line's version before. It is committed after the run's, and before the run's next one: wherever a
process is killed, a line lacks its newest version at most. The next trainer makes that one from the
run's version, to the bits that would have been there, so no version stays without the other. Where
the run skips a number, because an object that cannot be read occupies it, its lines skip it too.

Nothing is quantized, encoded or requested while the trainer waits, unless a step takes less time
than all of that. Ranks exchange the peaks of shared blocks over a process group for each line.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Self

import torch.distributed as dist
from torch import Tensor, nn

from deltawire.config import TrainConfig
from deltawire.config.machine import machine_policy
from deltawire.errors import DeltawireError, InputError
from deltawire.export.quantized import QuantizedWeights
from deltawire.export.shards import LocalShard
from deltawire.export.source import open_source
from deltawire.runtime.lines import line_bucket
from deltawire.store import Bucket
from deltawire.sync import (
    COMPACTION_STRIDES,
    Publisher,
    ShardPublisher,
    load_mirror,
    newest_readable,
    read_history,
    read_run,
)
from deltawire.sync.follow.mirror import Mirror
from deltawire.sync.publish.sharded import load_ranges
from deltawire.train.parallel import TrainerMesh
from deltawire.train.publishing import open_rank_publisher
from deltawire.wire.run import Run
from deltawire.wire.seal import Signer


class Publication:
    """The line of a run's versions by one exporter that quantizes.

    ``main`` publishes the run's versions, and holds the newest. All ranks open it together, and
    make all calls together.
    """

    def __init__(
        self,
        bucket: Bucket,
        run: Run,
        exporter: str,
        model: nn.Module,
        mesh: TrainerMesh,
        *,
        main: Publisher | ShardPublisher,
        train: TrainConfig,
        epoch: int,
        session: str,
        signer: Signer | None = None,
    ) -> None:
        self.exporter, self._main, self._upper, self._upper_run = exporter, main, bucket, run
        self.bucket = line_bucket(bucket, exporter)
        self.run = read_run(self.bucket)
        head = newest_readable(self.bucket, self.run)
        if head is None:
            raise InputError(
                f"the run's line {exporter} has no version 0",
                hint="start the run again with its configuration: deltawire run CONFIG.toml",
                run=self.bucket.url,
            )
        source = open_source(exporter, model)
        assert isinstance(source, QuantizedWeights)  # The configuration allows no other.
        self.source = source
        if mesh.ranks > 1:
            self.source.exchange_over(dist.new_group(backend="gloo"))
        self._shapes = {spec.name: spec.shape for spec in self.run.tensors}
        if self.run.tensors != self.source.specs():
            raise InputError(
                f"the run's line {exporter} has other tensors than the model",
                hint="start a new run",
                run=self.bucket.url,
            )
        self._publisher = open_rank_publisher(
            self.bucket,
            self.run,
            mesh,
            lambda: self.source.derived(main.held),
            version=head.version,
            epoch=max(epoch, head.epoch + 1),
            session=session,
            anchor_every=train.anchor_every,
            compaction_strides=COMPACTION_STRIDES if train.compaction else (),
            signer=signer,
            snapshot_dir=machine_policy().publisher_dir(train.publisher_offload),
        )
        self._ranges = {
            name: (main.held.starts.get(name, 0), bits.size)
            for name, bits in main.held.tensors.items()
        }
        self._sharded = mesh.ranks > 1
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=f"publish-{exporter}")
        self._pending: Future[None] | None = None
        self._continue(head.version)

    def _continue(self, held: int) -> None:
        """Publishes the versions that the line lacks, from those of the run."""
        wanted = self.source.continued()
        mirror = load_mirror(self.bucket, self.run, at=held, wanted=wanted)
        self.source.continue_from(mirror)
        newest = self._main.version
        for manifest in read_history(self._upper, self._upper_run, after=held, to=newest):
            self._make(manifest.version, self._at(manifest.version))

    def _at(self, version: int) -> Mirror:
        """Returns this rank's ranges of the run's version."""
        if version == self._main.version:
            return self._main.held
        if self._sharded:
            return load_ranges(self._upper, self._upper_run, self._ranges, at=version)
        return load_mirror(self._upper, self._upper_run, at=version)

    @property
    def version(self) -> int:
        """The line's newest committed version."""
        return self._publisher.version

    def begin(self, version: int, staged: Mirror, committed: Future[None] | None) -> None:
        """Makes a version of the line in the background. ``staged`` are the run's bits, which stay
        until `flush`, and ``committed`` is the run's commit of them."""
        self._pending = self._pool.submit(self._make, version, staged, committed)

    def flush(self) -> None:
        """Waits until the version in progress is committed; raises its error."""
        if self._pending is not None:
            self._pending.result()
            self._pending = None

    def close(self) -> None:
        """Waits for the version in progress and ends the threads."""
        try:
            self.flush()
        finally:
            self._pool.shutdown()
            self._publisher.close()

    def _make(self, version: int, bits: Mirror, committed: Future[None] | None = None) -> None:
        shards: Mapping[str, LocalShard] = self.source.derived(bits)
        bits.touched(sum(one.nbytes for one in bits.tensors.values()))
        if committed is not None:
            committed.result()
        if self._publisher.next_version < version:
            self._publisher.skip_to(version)  # The run skipped these numbers.
        if self._publisher.next_version != version:
            raise InputError(
                f"line {self.exporter} would publish version {self._publisher.next_version}, the "
                f"run published version {version}",
                hint="deltawire fsck names the objects that occupy a number; delete these",
                run=self.bucket.url,
                version=version,
            )
        self._publisher.publish({name: self._shaped(name, one) for name, one in shards.items()})
        self._publisher.flush()

    def _shaped(self, name: str, shard: LocalShard) -> Tensor:
        return shard.bits if self._sharded else shard.bits.view(self._shapes[name])


class Publications:
    """The further precisions of a run; often none.

    Example::

        with Publications(
            bucket, run, model, mesh,
            main=publisher, train=config.train, epoch=1, session="s",
        ) as further:
            further.publish(lambda: publisher.publish(tensors))
    """

    def __init__(
        self,
        bucket: Bucket,
        run: Run,
        model: nn.Module,
        mesh: TrainerMesh,
        *,
        main: Publisher | ShardPublisher,
        train: TrainConfig,
        epoch: int,
        session: str,
        signer: Signer | None = None,
    ) -> None:
        self._main = main
        self.by_name: dict[str, Publication] = {}
        """The publications by their exporters."""
        try:
            for one in train.also_publish:
                self.by_name[one] = Publication(
                    bucket, run, one, model, mesh,
                    main=main, train=train, epoch=epoch, session=session, signer=signer,
                )  # fmt: skip
        except BaseException:
            self.__exit__(None, None, None)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Ends the threads; an error of a version in progress is not raised."""
        for one in self.by_name.values():
            with contextlib.suppress(DeltawireError, RuntimeError):
                one.close()

    def publish(self, publish: Callable[[], int]) -> int:
        """Calls ``publish``, which publishes the run's next version, and makes the others of it in
        the background. First waits for those of the version before; raises their errors."""
        if not self.by_name:
            return publish()
        self.flush()
        self._main.flush()
        staged = self._main.staged
        version = publish()
        for one in self.by_name.values():
            one.begin(version, staged, self._main.committing)
        return version

    def serve(self, exporter: str, model: nn.Module) -> None:
        """Sets a copy of the model to the values that readers of a line compute with now."""
        self.flush()
        self.by_name[exporter].source.write_served(model)

    def flush(self) -> None:
        """Waits until all versions in progress are committed; raises the first error."""
        for one in self.by_name.values():
            one.flush()

    def close(self) -> None:
        """Waits for the versions in progress, ends the threads, and raises the first error."""
        with contextlib.ExitStack() as stack:
            for one in self.by_name.values():
                stack.callback(one.close)
