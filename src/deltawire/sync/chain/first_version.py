"""Finds the version that a run begins with: 0, or a later one of a fork or after retention."""

from __future__ import annotations

import msgspec

from deltawire.errors import CorruptError
from deltawire.store import Bucket
from deltawire.sync.chain.objects import (
    committed_versions,
    find_run,
    newest_retention_floor,
    read_manifest,
)
from deltawire.wire.ledger import FORK_RECORD, ForkRecord
from deltawire.wire.manifest import Manifest
from deltawire.wire.run import Run


def origin_of(fork: Bucket) -> int | None:
    """Returns the parent's version that a fork began with, None if it states none.

    Raises `CorruptError` if that cannot be read.
    """
    run = find_run(fork)
    if run is not None:
        for version in committed_versions(fork):
            manifest = read_manifest(fork, run, version)
            if manifest is not None and FORK_RECORD in manifest.metadata:
                return _stated_origin(fork, manifest)
    return None


def first_version(bucket: Bucket, run: Run) -> int:
    """Returns the oldest version of a run's own that can be read: 0, the parent's version that a
    fork began with, or the one that retention kept.

    Raises `CorruptError` if that cannot be read.
    """
    floor = newest_retention_floor(bucket, run)
    for version in committed_versions(bucket, newer_than=floor - 1):
        manifest = read_manifest(bucket, run, version)
        # The parent's versions, which a fork has from an anchor on, have no record there. Version 0
        # has none either, so of another run at most two manifests are read.
        if manifest is not None and manifest.metadata:
            forked = FORK_RECORD in manifest.metadata
            return max(_stated_origin(bucket, manifest), floor) if forked else floor
    return floor


def _stated_origin(bucket: Bucket, manifest: Manifest) -> int:
    try:
        return msgspec.convert(manifest.metadata[FORK_RECORD], ForkRecord).version
    except msgspec.ValidationError as error:
        version = manifest.version
        raise CorruptError(f"metadata: {error}", run=bucket.url, version=version) from error
