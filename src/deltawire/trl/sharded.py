"""Publishes a trainer's model from all ranks: each its own rows, and no rank a whole tensor."""

from __future__ import annotations

import inspect
import secrets
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from deltawire import codec
from deltawire.builds import build_name
from deltawire.codec import Digest
from deltawire.errors import InputError
from deltawire.export.cast import CastWeights
from deltawire.export.models import save_settings
from deltawire.export.tensors import is_sharded
from deltawire.placement.checkpoint_tensors import checkpoint_tensors
from deltawire.placement.layout import WIRE_DTYPES
from deltawire.store import Bucket, open_bucket
from deltawire.sync import ShardPublisher, newest_readable, newest_version
from deltawire.sync.chain.objects import another_model, create_run, find_run, read_run
from deltawire.sync.follow.mirror import Mirror
from deltawire.sync.publish.announcement import warn_of_uncommitted
from deltawire.sync.publish.outage import Outage
from deltawire.sync.publish.sharded import load_ranges
from deltawire.sync.publish.sources import stored_files
from deltawire.trl.ranks import on_rank_zero, rank_and_count
from deltawire.wire.run import Run, chunk_for, new_id

_SET_HERE = {"bucket", "run", "mirror", "rank", "ranks", "epoch", "session", "announce"}


class ShardedWriter:
    """A `deltawire.trl.ranks.RunWriter` over the ranks of a model that FSDP2 has sharded.

    ``options`` go to `ShardPublisher`. Raises `InputError` for a model whose checkpoints name or
    stack tensors differently from its parameters, such as one with fused experts, and for an
    adapter.
    """

    def __init__(
        self,
        url: str,
        model: Any,
        *,
        tokenizer: Any,
        dtype: str | None,
        metadata: dict[str, Any],
        name: str = "run",
        **options: Any,
    ) -> None:
        self._rank, self._ranks = rank_and_count()
        self._source = _rows_of(model, dtype)
        total = self._digest()

        def open_run() -> None:
            with tempfile.TemporaryDirectory(prefix="deltawire-") as folder:
                save_settings(model, tokenizer, Path(folder), dtype=dtype)
                bucket = open_bucket(url, create=True)
                _require_run(bucket, self._source, total, name=name, directory=Path(folder))

        on_rank_zero(open_run)
        bucket = open_bucket(url, create=True)
        run = read_run(bucket)
        newest, epoch, session = on_rank_zero(lambda: _start(bucket, run))
        self._publisher = ShardPublisher(
            bucket,
            run,
            self._mirror(bucket, run, newest),
            rank=self._rank,
            ranks=self._ranks,
            epoch=epoch,
            session=session,
            announce=True,
            **options,
        )
        self.publish(model, metadata, unless_held=True)
        self._publisher.flush()

    @property
    def version(self) -> int:
        """See `RunWriter.version`."""
        return self._publisher.version

    @property
    def outage(self) -> Outage | None:
        """See `RunWriter.outage`."""
        return self._publisher.outage

    def publish(self, model: Any, metadata: dict[str, Any], *, unless_held: bool = False) -> bool:
        """See `RunWriter.publish`."""
        del model  # The source reads it.
        if unless_held and self._publisher.version >= 0:
            self._publisher.flush()
            if self._digest() == self._publisher.digest:
                return True
        elif not self._all_answered():
            self._publisher.outage.superseded += 1
            return False
        shards = self._source.shards(self._rank)
        bits = {name: shard.bits for name, shard in shards.items()}
        self._publisher.publish(bits, metadata=metadata)
        return True

    def _all_answered(self) -> bool:
        """Returns whether no rank waits for the store, the same on all ranks: some may know that a
        version is committed while others do not.
        """
        answered = self._publisher.wait_while_answered()
        if self._ranks == 1:
            return answered
        found: list[Any] = [None] * self._ranks
        dist.all_gather_object(found, answered)
        return all(found)

    def close(self) -> None:
        """See `RunWriter.close`."""
        self._publisher.close()

    def _digest(self) -> Digest:
        """Computes the digest of the whole model; all ranks' shares add up to it."""
        dtypes = {spec.name: spec.dtype for spec in self._source.specs()}
        share = codec.ZERO
        for name, shard in self._source.shards(self._rank).items():
            share += codec.digest_bits(name, codec.bits_of(shard.bits, dtypes[name]), shard.start)
        if self._ranks == 1:
            return share
        shares: list[Any] = [None] * self._ranks
        dist.all_gather_object(shares, share.hex())
        return sum((Digest.from_hex(one) for one in shares), codec.ZERO)

    def _mirror(self, bucket: Bucket, run: Run, newest: int | None) -> Mirror:
        """Returns a mirror of this rank's ranges at the newest version, or of none yet."""
        shards = self._source.shards(self._rank)
        if newest is not None:
            ranges = {name: (shard.start, shard.bits.numel()) for name, shard in shards.items()}
            return load_ranges(bucket, run, ranges, at=newest)
        dtypes = {spec.name: spec.dtype for spec in run.tensors}
        bits = {
            name: codec.bits_of(shard.bits, dtypes[name]).copy() for name, shard in shards.items()
        }
        starts = {name: shard.start for name, shard in shards.items() if shard.start}
        return Mirror(bits, -1, codec.ZERO, starts)


def check_shard_options(options: Mapping[str, Any]) -> None:
    """Raises `InputError` for an option that `ShardedWriter` does not take."""
    known = set(inspect.signature(ShardPublisher).parameters) - _SET_HERE | {"name"}
    if unknown := sorted(options.keys() - known):
        raise InputError(
            f"there is no option {unknown[0][:60]!r} with sharded=True",
            hint=f"there are {', '.join(sorted(known))}",
        )


def _rows_of(model: Any, dtype: str | None) -> CastWeights:
    """Returns the source of a sharded model's rows; raises `InputError` for one that has none."""
    if hasattr(model, "get_base_model"):
        raise InputError(
            "an adapter cannot be added to rows of its base", hint="publish with sharded=False"
        )
    if not is_sharded(model):
        raise InputError(
            "sharded=True, but no parameter is sharded over ranks",
            hint="leave it out; it is for FSDP version 2",
        )
    found = getattr(torch, dtype or "", None)
    wire = WIRE_DTYPES.get(found) if isinstance(found, torch.dtype) else None
    if wire is None:
        raise InputError(f"rows cannot be published as {dtype!r}", hint='for example "bfloat16"')
    source = CastWeights(model, wire)
    shapes = {spec.name: torch.empty(spec.shape, device="meta") for spec in source.specs()}
    saved = checkpoint_tensors(model, dict(shapes))
    if saved.keys() != shapes.keys():
        odd = min(saved.keys() ^ shapes.keys())
        raise InputError(
            f"checkpoints of this model have other tensors than its parameters: {odd[:120]!r}",
            hint="publish with sharded=False, which converts them",
        )
    return source


def _require_run(
    bucket: Bucket, source: CastWeights, digest: Digest, *, name: str, directory: Path
) -> None:
    """Makes the run, unless it is there; raises `InputError` if it is another model's."""
    specs = source.specs()
    existing = find_run(bucket)
    if existing is None:
        run = Run(
            id=new_id(),
            name=name,
            created_at=time.time(),
            build=build_name(),
            tensors=specs,
            digest=digest.hex(),
            chunk=chunk_for(specs),
            model_files=stored_files(bucket, directory),
        )
        existing = create_run(bucket, run)
    same = existing.tensors == specs
    if same and newest_version(bucket) is None:
        same = existing.digest == digest.hex()
    if not same:
        raise another_model(bucket, existing.tensors, specs)


def _start(bucket: Bucket, run: Run) -> tuple[int | None, int, str]:
    """Returns the newest version, the epoch to publish under, and a new session."""
    newest = newest_readable(bucket, run)
    warn_of_uncommitted(bucket, run, -1 if newest is None else newest.version)
    session = secrets.token_hex(16)
    return (None, 0, session) if newest is None else (newest.version, newest.epoch + 1, session)
