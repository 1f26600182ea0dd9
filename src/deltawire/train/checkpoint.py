"""Stores the trainer's resumable state in the bucket, sharded over ranks, next to training.

Concurrency::

    every rank's main thread          every rank's writer thread
      copy the state (staging) ─────▶   plan with the other ranks (torch's distributed checkpoint)
      train on                          put own parts
      next save: wait for the last      rank 0: put the commit, remove old checkpoints

A checkpoint exists once its commit does. Each rank writes the shards that it holds, and a reader
takes what its own shards overlap, so another number of ranks can read it. The commit is JSON with a
hash of each shard: nothing that is read from the bucket is unpickled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

# The public functions warn whenever there is one process only, and check for collectives first.
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from torch.distributed.checkpoint.state_dict_saver import _save_state_dict

from deltawire.errors import CorruptError, DeltawireError, InputError
from deltawire.export.shards import local_part
from deltawire.store import Bucket
from deltawire.sync.publish.parallel_copy import Copier
from deltawire.train.checkpoint_commit import MAX_COMMIT_BYTES, Commit, TensorEntry
from deltawire.train.checkpoint_folders import KEPT, checkpoint_versions, remove_old
from deltawire.train.checkpoint_storage import (
    BucketReader,
    BucketWriter,
    StagedPlanner,
    WholeLoadPlanner,
    bytes_of,
)
from deltawire.train.parallel import TrainerMesh
from deltawire.wire import keys
from deltawire.wire.ledger import Ledger
from deltawire.wire.objects import FORMAT


class CheckpointWriter:
    """Writes states in a background thread. All ranks make one together, and call it together.

    ``confirm`` is called before rank 0 commits, and may raise to forbid it. An error of a save is
    raised by the next call.

    Example::

        writer = CheckpointWriter(bucket, masters.mesh, run=run.id)
        writer.save(masters.state(), ledger, version=20, digest=digest)
        ...  # train on
        writer.close()
    """

    def __init__(
        self,
        bucket: Bucket,
        mesh: TrainerMesh | None,
        *,
        run: str = "",
        confirm: Callable[[], None] = lambda: None,
    ) -> None:
        self._bucket = bucket
        self._ranks = 1 if mesh is None else mesh.ranks
        self._rank = 0 if mesh is None else mesh.rank
        # Its thread must not share a process group with training.
        self._group = dist.new_group(backend="gloo") if self._ranks > 1 else None
        self._run, self._confirm = run, confirm
        self._pool = ThreadPoolExecutor(1, "checkpoint")
        self._copier = Copier()
        self._staging: dict[str, Tensor] = {}
        self._pending: Future[None] | None = None

    def save(
        self,
        state: Mapping[str, Tensor],
        ledger: Ledger,
        *,
        version: int,
        digest: str,
        keep: int = KEPT,
    ) -> None:
        """Copies ``state`` and stores it in the background as that of a committed version; then
        removes all but the last ``keep`` (0 removes none). Waits for the previous save, and raises
        its error.
        """
        self.flush()
        self._stage(state)
        commit = Commit(
            run=self._run,
            version=version,
            digest=digest,
            ranks=self._ranks,
            tensors={},
            ledger=ledger.copy(),
        )
        self._pending = self._pool.submit(self._write, dict(state), commit, keep)

    @torch.no_grad()
    def _stage(self, state: Mapping[str, Tensor]) -> None:
        """Copies this rank's parts into memory that is kept from save to save."""
        pairs = []
        for name, tensor in state.items():
            local = local_part(tensor)
            held = self._staging.get(name)
            if held is None or (held.shape, held.dtype) != (local.shape, local.dtype):
                pinned = local.device.type == "cuda"
                held = torch.empty(local.shape, dtype=local.dtype, pin_memory=pinned)
                self._staging[name] = held
            if local.device.type == "cpu" and local.is_contiguous():
                pairs.append((bytes_of(held), bytes_of(local)))
            else:
                held.copy_(local)
        self._copier.copy(pairs)
        for name in self._staging.keys() - state.keys():
            del self._staging[name]

    def _write(self, state: dict[str, Tensor], commit: Commit, keep: int) -> None:
        def finish(tensors: dict[str, TensorEntry]) -> None:
            self._confirm()
            whole = msgspec.structs.replace(commit, tensors=tensors)
            self._bucket.put(keys.checkpoint_commit(commit.version), whole.encode())
            remove_old(self._bucket, keep)

        try:
            _save_state_dict(
                state,
                storage_writer=BucketWriter(
                    self._bucket, commit.version, rank=self._rank, ranks=self._ranks, finish=finish
                ),
                planner=StagedPlanner(self._staging),
                process_group=self._group,
                no_dist=self._group is None,
            )
        except CheckpointException as error:
            raise _cause_of(error) from error

    def flush(self) -> None:
        """Waits for the current save; raises its error."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def release_memory(self) -> None:
        """Waits for the current save, and frees the memory that states are copied to; the next save
        allocates it again.
        """
        self.flush()
        self._staging.clear()

    def close(self) -> None:
        """Waits for the current save and ends the threads."""
        try:
            self.flush()
        finally:
            self._pool.shutdown()
            self._copier.close()


def save_checkpoint(
    bucket: Bucket,
    state: Mapping[str, Tensor],
    ledger: Ledger,
    *,
    version: int,
    digest: str,
    keep: int = KEPT,
    run: str = "",
) -> None:
    """Stores the state of a single process and waits for it; see `CheckpointWriter.save`."""
    writer = CheckpointWriter(bucket, None, run=run)
    try:
        writer.save(state, ledger, version=version, digest=digest, keep=keep)
    finally:
        writer.close()


def load_checkpoint(
    bucket: Bucket,
    state: Mapping[str, Tensor],
    *,
    newest: int,
    mesh: TrainerMesh | None = None,
    run: str = "",
) -> Commit | None:
    """Fills ``state`` with the newest complete state of a version at or before ``newest``.

    A damaged one, or one that does not fit, is passed over for an older one; ``state`` then holds
    a mixture until the next is loaded. None if there is none. All ranks call this together, and
    get the same answer. Raises `InputError` for a checkpoint of another run.
    """
    versions = checkpoint_versions(bucket)
    if mesh is not None:
        versions = msgspec.json.decode(
            mesh.broadcast(msgspec.json.encode(versions)), type=list[int]
        )
    for version in reversed([one for one in versions if one <= newest]):
        try:
            commit: Commit | None = _load(bucket, state, version, run=run)
        except CorruptError:
            # From an older state, the same steps are computed again to the same bits.
            commit = None
        failed = commit is None
        if mesh is not None:
            failed = bool(mesh.sum([float(failed)])[0])
        if not failed:
            return commit
    return None


def _load(bucket: Bucket, state: Mapping[str, Tensor], version: int, *, run: str) -> Commit:
    key = keys.checkpoint_commit(version)
    raw = bucket.get(key, limit=MAX_COMMIT_BYTES)
    if raw is None:
        raise CorruptError("a checkpoint's commit is missing", run=bucket.url, key=key)
    commit = Commit.decode(raw, run=bucket.url, key=key)
    if commit.format != FORMAT or commit.version != version:
        raise CorruptError(
            f"format {commit.format}, version {commit.version}", run=bucket.url, key=key
        )
    if run and commit.run != run:
        raise InputError(
            "this checkpoint belongs to another run",
            hint="delete the checkpoints that were copied here, and the steps are recomputed",
            run=bucket.url,
            key=key,
        )
    if odd := sorted(commit.tensors.keys() ^ state.keys()):
        raise CorruptError(
            f"the checkpoint does not fit the model at {odd[0][:80]}", run=bucket.url, key=key
        )
    for name, entry in commit.tensors.items():
        entry.check(name, state[name], run=bucket.url, key=key)
    try:
        _load_state_dict(
            dict(state),
            storage_reader=BucketReader(bucket, version, commit.tensors),
            planner=WholeLoadPlanner(),
            no_dist=True,  # A shard's plan needs no other rank.
        )
    except CheckpointException as error:
        raise _cause_of(error) from error
    return commit


def _cause_of(error: CheckpointException) -> BaseException:
    """Returns the error of one rank, which torch wraps; a `DeltawireError` if there is one."""
    causes: Iterable[BaseException] = [failure[0] for failure in error.failures.values()]
    return next((one for one in causes if isinstance(one, DeltawireError)), next(iter(causes)))
