"""The trainer's resumable state, in the bucket: a safetensors object, then a small commit."""

from __future__ import annotations

from typing import Annotated

import blake3
import msgspec
import safetensors
import safetensors.torch
from msgspec import Meta
from torch import Tensor

from deltawire.errors import CorruptError
from deltawire.store import Bucket
from deltawire.sync.chain.objects import with_retries
from deltawire.wire import keys
from deltawire.wire.ledger import Ledger
from deltawire.wire.objects import FORMAT, decode_json, encode_json
from deltawire.wire.payload import Index
from deltawire.wire.run import Hash

MAX_STATE_BYTES = 1 << 40
MAX_COMMIT_BYTES = 64 << 20
KEPT = 2


class Commit(msgspec.Struct, frozen=True, kw_only=True):
    """Says that a state is whole. ``digest`` is that of the weights published at ``version``."""

    format: int = FORMAT
    version: Index
    digest: Annotated[str, Meta(max_length=32)]
    state: Hash
    bytes: Index
    ledger: Ledger


def save_checkpoint(
    bucket: Bucket, state: dict[str, Tensor], ledger: Ledger, *, version: int, digest: str
) -> None:
    """Store the state of a committed version; older ones than the last `KEPT` are removed."""
    data = safetensors.torch.save({name: tensor.contiguous() for name, tensor in state.items()})
    commit = Commit(
        version=version,
        digest=digest,
        state=blake3.blake3(data).hexdigest(),
        bytes=len(data),
        ledger=ledger,
    )
    with_retries(lambda: bucket.put(keys.checkpoint(version, "state"), data))
    with_retries(lambda: bucket.put(keys.checkpoint(version, "commit"), encode_json(commit)))
    with_retries(lambda: _remove_old(bucket))


def _remove_old(bucket: Bucket) -> None:
    """Whatever is older than those kept: also a state whose commit is gone, because a removal was
    cut off between the two. The commit goes first."""
    kept = _versions(bucket)[-KEPT:]
    for key in bucket.list(keys.CHECKPOINTS):  # Sorted, so the commit comes before the state.
        number = keys.trailing_number(key.rpartition("/")[0])
        if number is not None and kept and number < kept[0]:
            bucket.delete(key)


def load_checkpoint(bucket: Bucket, *, newest: int) -> tuple[Commit, dict[str, Tensor]] | None:
    """The newest whole state of a version at or before ``newest``; None if there is none.

    A damaged one is passed over for an older one.
    """
    for version in reversed(_versions(bucket)):
        if version > newest:
            continue
        try:
            return _load(bucket, version)
        except CorruptError:
            continue
    return None


def _load(bucket: Bucket, version: int) -> tuple[Commit, dict[str, Tensor]]:
    key = keys.checkpoint(version, "commit")
    raw = bucket.get(key, limit=MAX_COMMIT_BYTES)
    if raw is None:
        raise CorruptError("a checkpoint's commit is missing", run=bucket.url, key=key)
    commit = decode_json(raw, Commit, run=bucket.url, key=key)
    if commit.format != FORMAT or commit.version != version:
        raise CorruptError(
            f"format {commit.format}, version {commit.version}", run=bucket.url, key=key
        )
    state_key = keys.checkpoint(version, "state")
    data = bucket.get(state_key, limit=min(commit.bytes, MAX_STATE_BYTES))
    if data is None or blake3.blake3(data).hexdigest() != commit.state:
        raise CorruptError("a checkpoint's state is damaged", run=bucket.url, key=state_key)
    try:
        return commit, safetensors.torch.load(data)
    except safetensors.SafetensorError as error:
        raise CorruptError(f"checkpoint: {error}", run=bucket.url, key=state_key) from error


def _versions(bucket: Bucket) -> list[int]:
    """Versions with a commit, oldest first."""
    found = []
    for key in bucket.list(keys.CHECKPOINTS):
        parts = key.split("/")
        number = keys.trailing_number(parts[1]) if len(parts) == 3 else None
        if number is not None and key == keys.checkpoint(number, "commit"):
            found.append(number)
    return sorted(found)
