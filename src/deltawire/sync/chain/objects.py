"""Reads and creates the objects of a run's chain of versions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import blake3

from deltawire.codec import ITEMSIZE
from deltawire.errors import CorruptError, InputError, RetryError
from deltawire.store import Bucket, ObjectMeta, in_parallel, require_bucket
from deltawire.store.ranges import AT_ONCE, REQUEST_BYTES
from deltawire.wire import keys
from deltawire.wire.coordination import MAX_FLOOR_BYTES, RetentionFloor
from deltawire.wire.manifest import (
    MAX_MANIFEST_BYTES,
    CompactedDelta,
    Manifest,
    decode_compacted,
    decode_manifest,
)
from deltawire.wire.payload import BlobRef
from deltawire.wire.roles import Pin
from deltawire.wire.run import MAX_RUN_BYTES, ModelFile, Run, TensorSpec, decode_run, encode_run
from deltawire.wire.seal import Signer, check_signature, unseal
from deltawire.wire.signing import verify


def find_run(bucket: Bucket, *, public_key: str = "") -> Run | None:
    """Reads the run in this bucket; returns None if there is none. Raises `CorruptError`.

    With ``public_key`` (64 hexadecimal digits, optionally followed by a colon and the run's id),
    refuses a run that its owner did not sign or that has another id; everything read of the run
    afterwards must be signed by the same key. Raises `InputError` for a malformed key, and for a
    location instead of a bucket.
    """
    require_bucket(bucket)
    pin = Pin.parse(public_key) if public_key else None
    data = bucket.get(keys.RUN, limit=MAX_RUN_BYTES)
    if data is None:
        return None
    run = decode_run(data, run=bucket.url, key=keys.RUN)
    if pin is not None:
        pin.check(run.public_key, run.id, run=bucket.url)
    check_signed(bucket, run, data, keys.RUN)
    for tensor in run.tensors:
        if tensor.dtype not in ITEMSIZE:
            raise CorruptError(
                f"tensor {tensor.name[:80]!r} has the unknown dtype {tensor.dtype!r}",
                run=bucket.url,
                key=keys.RUN,
            )
    return run


def read_run(bucket: Bucket, *, public_key: str = "") -> Run:
    """Reads the run in this bucket as `find_run` does; raises `InputError` if there is none."""
    run = find_run(bucket, public_key=public_key)
    if run is None:
        raise InputError(
            "there is no run here",
            hint="check the bucket's path; a new run has none until its warm start ends",
            run=bucket.url,
            key=keys.RUN,
        )
    return run


def check_signed(bucket: Bucket, run: Run, data: bytes, key: str) -> None:
    """Raises `CorruptError` if the run is signed and the object's bytes are not."""
    if run.public_key:
        check_signature(data, public_key=run.public_key, verify=verify, run=bucket.url, key=key)


def check_signer(bucket: Bucket, run: Run, signer: Signer | None) -> None:
    """Raises `InputError` unless ``signer`` holds the run's key, or neither has one."""
    if run.public_key != (signer.public_key if signer else ""):
        raise InputError(
            "the run is signed with another key"
            if run.public_key
            else "a key was given for a run that is not signed",
            hint="pass the private key that belongs to the public_key in run.json",
            run=bucket.url,
        )


def create_run(bucket: Bucket, run: Run, *, signer: Signer | None = None) -> Run:
    """Writes ``run.json``, or returns the run that is already there.

    Raises `InputError` if that run has another model (other tensors, or another version 0), or if
    readers would refuse the new run.
    """
    check_signer(bucket, run, signer)
    existing = find_run(bucket)
    if existing is None:
        data = encode_run(run, signer=signer)
        _check_readable(bucket, data)
        if bucket.create(keys.RUN, data):
            return run
    existing = existing or find_run(bucket)
    if existing is None:
        raise RetryError("run.json existed and is now missing", run=bucket.url, key=keys.RUN)
    if existing.tensors != run.tensors or existing.digest != run.digest:
        raise another_model(bucket, existing.tensors, run.tensors)
    return existing


def another_model(
    bucket: Bucket, theirs: Sequence[TensorSpec], ours: Sequence[TensorSpec]
) -> InputError:
    """Makes the error for a bucket whose run.json has another model; names a difference.

    A start that ended before version 0 was committed leaves such a run.json, which no publisher of
    other weights can continue: the error then says how to remove it.
    """
    if newest_version(bucket) is None:
        return InputError(
            "another model started a run here and never committed version 0",
            hint="if no other process is starting this run, delete run.json and start again",
            run=bucket.url,
        )
    if (dtypes := _other_dtypes(theirs, ours)) is not None:
        return InputError(
            f"the run has dtype {dtypes[0]}, these tensors {dtypes[1]}; names and shapes agree",
            hint="publish the run's dtype: deltawire.tensors_of(model) rounds to bfloat16, and "
            "Publish(url) does by default",
            run=bucket.url,
        )
    return InputError(
        f"a run with another model is already here: {_difference(theirs, ours)}",
        hint="choose another bucket, or the model this run was started from",
        run=bucket.url,
    )


def _other_dtypes(
    theirs: Sequence[TensorSpec], ours: Sequence[TensorSpec]
) -> tuple[str, str] | None:
    """Returns both dtypes if two tensor tables differ only in one dtype."""
    pairs = {(a.dtype, b.dtype) for a, b in zip(theirs, ours, strict=False) if a.dtype != b.dtype}
    alike = [(spec.name, spec.shape) for spec in theirs] == [(s.name, s.shape) for s in ours]
    return pairs.pop() if alike and len(pairs) == 1 else None


def _difference(theirs: Sequence[TensorSpec], ours: Sequence[TensorSpec]) -> str:
    """Describes the first tensor, in name order, that differs between two tensor tables."""
    left = {spec.name: (spec.dtype, list(spec.shape)) for spec in theirs}
    right = {spec.name: (spec.dtype, list(spec.shape)) for spec in ours}
    for name in sorted(left.keys() | right.keys()):
        if left.get(name) == right.get(name):
            continue
        if name not in right:
            return f"its tensor {name[:120]!r} is missing in this one"
        if name not in left:
            return f"it has no tensor {name[:120]!r}"
        (dtype, shape), (own, size) = left[name], right[name]
        return f"its tensor {name[:120]!r} is {dtype} {shape}, this one's is {own} {size}"
    return "its weights at version 0 differ"


def _check_readable(bucket: Bucket, data: bytes) -> None:
    """Raises `InputError` if a reader would refuse this run.json, which is written only once."""
    try:
        if len(data) > MAX_RUN_BYTES:
            raise CorruptError(f"run.json has {len(data)} bytes; the limit is {MAX_RUN_BYTES}")
        decode_run(data, run=bucket.url, key=keys.RUN)
    except CorruptError as error:
        raise InputError(
            f"no reader would accept this run: {error.message}", hint=error.hint, run=bucket.url
        ) from error


def check_manifest(bucket: Bucket, run: Run, version: int, data: bytes) -> None:
    """Raises `InputError` if readers would refuse the manifest in ``data``, which is created once:
    it is too large, or its commit metadata are.
    """
    if len(data) > MAX_MANIFEST_BYTES:
        raise InputError(
            f"the manifest has {len(data)} bytes; readers accept {MAX_MANIFEST_BYTES}",
            hint="publish with less commit metadata",
            run=bucket.url,
            version=version,
        )
    try:
        decode_manifest(
            data, version=version, table=run, run=bucket.url, key=keys.manifest(version)
        )
    except CorruptError as error:
        raise InputError(
            f"no reader would accept this version: {error.message}",
            hint="correct the commit metadata",
            run=bucket.url,
            version=version,
        ) from error


def read_manifest(bucket: Bucket, run: Run, version: int) -> Manifest | None:
    """Reads the manifest of ``version``, None if it is not committed; raises `CorruptError`."""
    key = keys.manifest(version)
    data = bucket.get(key, limit=MAX_MANIFEST_BYTES)
    if data is None:
        return None
    check_signed(bucket, run, data, key)
    return decode_manifest(data, version=version, table=run, run=bucket.url, key=key)


def read_compacted_delta(
    bucket: Bucket, run: Run, base: int | None, version: int
) -> CompactedDelta | None:
    """Reads the compacted delta from ``base`` (None: the anchor made later) to ``version``, None if
    there is none; raises `CorruptError`."""
    key = keys.compacted(base, version)
    data = bucket.get(key, limit=MAX_MANIFEST_BYTES)
    if data is None:
        return None
    check_signed(bucket, run, data, key)
    return decode_compacted(data, base=base, version=version, table=run, run=bucket.url, key=key)


def newest_version(bucket: Bucket, *, newer_than: int | None = None) -> int | None:
    """Returns the newest version that a listing shows, or the newest one above ``newer_than``;
    None if there is none. Its manifest may be damaged: see `VersionPoller`."""
    if newer_than is None or newer_than < 0:
        newer_than = late_version(bucket) - 1
    return max(committed_objects(bucket, newer_than=newer_than), default=None)


FEW_VERSIONS = 1 << 10
"""Up to this many versions are listed without a search: a listing's request returns 1,000 keys."""

PROBES = 16
"""Keys that one round of a search asks for at once."""


def late_version(bucket: Bucket) -> int:
    """Returns a version near the newest one, or 0: a listing from there on shows every newer one.

    Asks for keys at powers of two and then between two of them, so that no command lists a hundred
    thousand manifests. Where numbers are missing it may find an earlier version, which only makes
    the listing longer.
    """

    def exist(versions: Sequence[int]) -> list[bool]:
        return in_parallel(bucket, lambda v: bucket.exists(keys.manifest(v)), versions)

    if not bucket.exists(keys.manifest(FEW_VERSIONS)):
        return 0
    powers = [1 << bit for bit in range(FEW_VERSIONS.bit_length(), keys.MAX_NUMBER.bit_length())]
    low = FEW_VERSIONS
    for version, there in zip(powers, exist(powers), strict=True):
        low = version if there else low
    high = min(2 * low, keys.MAX_NUMBER)
    while high - low > FEW_VERSIONS // 2:
        step = max((high - low) // (PROBES + 1), 1)
        probes = list(range(low + step, high, step))
        low = max([low, *(v for v, there in zip(probes, exist(probes), strict=True) if there)])
        high = min(low + step, high)
    return low


def committed_versions(bucket: Bucket, *, newer_than: int | None = None) -> list[int]:
    """Lists all committed versions, or those above ``newer_than``, in order."""
    return list(committed_objects(bucket, newer_than=newer_than))


def versions_listed_twice(bucket: Bucket, *, newer_than: int | None = None) -> list[int]:
    """Lists versions as `committed_versions` does, those that one of two listings shows: for a
    caller that acts on the absence of a version, which a short listing would pretend."""
    found = [committed_versions(bucket, newer_than=newer_than) for _ in range(2)]
    return sorted({*found[0], *found[1]})


def committed_objects(bucket: Bucket, *, newer_than: int | None = None) -> dict[int, ObjectMeta]:
    """Lists the manifests of all committed versions, or of those above ``newer_than``, in order; a
    reader that holds no version passes -1.

    A key that `read_manifest` would not read, such as a copy with another name, is ignored.
    """
    after = None if newer_than is None or newer_than < 0 else keys.manifest(newer_than)
    found = {}
    for entry in bucket.list_objects(keys.MANIFESTS, after=after):
        number = keys.trailing_number(entry.key)
        if number is not None and entry.key == keys.manifest(number):
            found[number] = entry
    return found


def later_anchors(bucket: Bucket, *, newer_than: int) -> list[int]:
    """Lists the versions above ``newer_than`` (-1: all) that have an anchor which was made after
    their commit, in order."""
    after = None if newer_than < 0 else keys.compacted_after(newer_than)
    names = map(keys.compacted_of, bucket.list(keys.COMPACTED, after=after))
    return sorted(name[1] for name in names if name is not None and name[0] is None)


class RetentionFloors(NamedTuple):
    """The floors of a run: ``valid`` ones by version, and why others were ``refused``."""

    valid: dict[int, ObjectMeta]
    refused: list[CorruptError]

    @property
    def newest(self) -> int:
        """Versions below this one are closed; 0 if none is."""
        return max(self.valid, default=0)


def read_retention_floors(bucket: Bucket, run: Run, *, unsigned: bool = False) -> RetentionFloors:
    """Reads the retention floors of a run.

    A floor closes versions permanently, so its key alone does not count: it must be sealed, belong
    to this run, be signed in a signed run (unless ``unsigned``), and name a committed version.
    """
    found = RetentionFloors({}, [])
    for entry in bucket.list_objects(keys.RETENTION_FLOORS):
        number = keys.trailing_number(entry.key)
        if number is None or entry.key != keys.retention_floor(number):
            continue
        try:
            if _is_floor(bucket, run, number, unsigned=unsigned):
                found.valid[number] = entry
        except CorruptError as error:
            found.refused.append(error)
    return found


def _is_floor(bucket: Bucket, run: Run, version: int, *, unsigned: bool) -> bool:
    """Returns whether a floor exists at ``version``. Raises `CorruptError` for one of another
    run.
    """
    key = keys.retention_floor(version)
    data = bucket.get(key, limit=MAX_FLOOR_BYTES)
    if data is None:
        return False  # Retention deleted it after the listing.
    check_floor(bucket, run, version, data, unsigned=unsigned)
    if not bucket.exists(keys.manifest(version)):
        raise CorruptError(
            "a retention floor is at a version that is not committed",
            hint="delete it: retention did not create it",
            run=bucket.url,
            version=version,
            key=key,
        )
    return True


def check_floor(
    bucket: Bucket, run: Run, version: int, data: bytes, *, unsigned: bool = False
) -> None:
    """Raises `CorruptError` unless ``data`` is the run's floor at ``version``."""
    key = keys.retention_floor(version)
    if not unsigned:
        check_signed(bucket, run, data, key)
    floor = unseal(data, RetentionFloor, run=bucket.url, key=key)
    if (floor.run, floor.version) != (run.id, version):
        raise CorruptError("a retention floor of another run or version", run=bucket.url, key=key)


def newest_retention_floor(bucket: Bucket, run: Run, *, unsigned: bool = False) -> int:
    """Returns the version below which all are closed, 0 if none is (see
    `read_retention_floors`)."""
    return read_retention_floors(bucket, run, unsigned=unsigned).newest


def put_blob(bucket: Bucket, data: bytes) -> BlobRef:
    """Stores an immutable blob under the BLAKE3 of its content.

    Overwrites an existing object with the same bytes: this repairs a damaged one, and retention
    counts its age from now.
    """
    digest = blake3.blake3(data).hexdigest()
    bucket.put(keys.blob(digest), data)
    return BlobRef(hash=digest, bytes=len(data))


class MissingBlobError(CorruptError):
    """A blob is missing.

    Retention may delete one between a commit and its writer's look at the deletion intents. The
    writer then stores it again, so a reader that finds no other route looks once more.
    """

    def is_over(self, bucket: Bucket) -> bool:
        """Returns whether the blob is there now."""
        return bool(self.key) and bucket.exists(self.key)


def missing_blobs(bucket: Bucket, refs: Sequence[BlobRef]) -> list[BlobRef]:
    """Returns the blobs that are not stored with their size."""

    def is_missing(ref: BlobRef) -> bool:
        return bucket.size(keys.blob(ref.hash)) != ref.bytes

    missing = in_parallel(bucket, is_missing, refs)
    return [ref for ref, lost in zip(refs, missing, strict=True) if lost]


def get_blob(bucket: Bucket, ref: BlobRef, *, version: int | None = None) -> bytes | bytearray:
    """Fetches a blob and checks it against its name; raises `CorruptError` if it is missing or
    damaged."""
    key = keys.blob(ref.hash)
    if ref.bytes <= REQUEST_BYTES:
        data: bytes | bytearray | None = bucket.get(key, limit=ref.bytes)
    else:
        data = _get_in_ranges(bucket, key, ref.bytes)
    if data is None:
        raise MissingBlobError("a blob is missing", run=bucket.url, version=version, key=key)
    if len(data) != ref.bytes or blake3.blake3(data).hexdigest() != ref.hash:
        raise CorruptError(
            "a blob's content does not match its name", run=bucket.url, version=version, key=key
        )
    return data


def _get_in_ranges(bucket: Bucket, key: str, size: int) -> bytearray | None:
    found = bytearray()
    wave = REQUEST_BYTES * AT_ONCE
    for at in range(0, size, wave):
        ends = range(at, min(at + wave, size), REQUEST_BYTES)
        ranges = [(start, min(REQUEST_BYTES, size - start)) for start in ends]
        parts = bucket.read_ranges(key, ranges)
        if parts is None:
            return None
        # Allocate only now: a manifest that overstates a blob's size must not decide how much
        # memory is used.
        found = found or bytearray(size)
        for (start, length), part in zip(ranges, parts, strict=True):
            found[start : start + length] = part
    return found


def files_of(run: Run, manifest: Manifest) -> list[ModelFile]:
    """Returns the other files of a version's directory."""
    return run.model_files if manifest.model_files is None else manifest.model_files
