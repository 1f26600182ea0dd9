"""Measures commands on runs with many versions, through a store that answers in 20 ms.

Every version has its own valid manifest; the versions after the first change nothing, so that a
hundred thousand of them are made in seconds.
"""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import msgspec
import numpy as np

from benchmarks.training.keys import Measured, Options
from deltawire.dashboard.status import Watch
from deltawire.errors import BugError
from deltawire.store import Bucket, RetryingBucket, open_bare_bucket
from deltawire.sync import open_publisher, read_manifest
from deltawire.sync.huggingface.publish_dirs import CheckpointPublisher
from deltawire.testing.simulated import SimulatedBucket
from deltawire.wire import keys
from deltawire.wire.manifest import encode_manifest
from deltawire.wire.payload import Payload
from deltawire.wire.piece_table import encode_table, payload_ref

LISTED = 10_000
SHOWN = 100_000


def measure(options: Options) -> Measured:
    """Counts the requests of a start of publish, and times a status."""
    del options
    listed, shown = start_publish(LISTED), show_status(SHOWN)
    return Measured(
        {
            "publish_start_reads_10k_versions": listed["reads"],
            "status_s_100k_versions": shown["seconds"],
        },
        {"publish": listed, "status": shown},
    )


def start_publish(versions: int) -> dict[str, Any]:
    """Returns the requests that publish makes before its first directory, at its second start.

    The first start of a publisher that never wrote to the run may read more.
    """
    inner = make_run(versions)
    with CheckpointPublisher(inner):
        pass
    bucket = SimulatedBucket(inner)
    started = time.perf_counter()
    with CheckpointPublisher(RetryingBucket(bucket)):
        pass
    seconds = time.perf_counter() - started
    return {
        "reads": bucket.total_requests,
        "seconds": seconds,
        "requests": dict(bucket.requests),
    }


def show_status(versions: int) -> dict[str, Any]:
    """Returns seconds and requests of one status."""
    bucket = SimulatedBucket(make_run(versions))
    bucket.requests = Counter()
    started = time.perf_counter()
    found = Watch(bucket).poll()
    seconds = time.perf_counter() - started
    if found.version != versions - 1:
        raise BugError(f"the status says version {found.version}, not {versions - 1}")
    return {"seconds": seconds, "requests": dict(bucket.requests)}


def make_run(versions: int) -> Bucket:
    """Makes a run whose versions after the first change nothing."""
    bucket = open_bare_bucket("memory://")
    publisher = open_publisher(bucket, {"a": np.zeros(64, np.float32)}, compaction_strides=())
    publisher.close()
    run = publisher.run
    first = read_manifest(bucket, run, 0)
    if first is None:
        raise BugError("version 0 is missing")
    payload = Payload((), ())
    delta = payload_ref(payload, encode_table(payload, run))
    for version in range(1, versions):
        manifest = msgspec.structs.replace(
            first, version=version, base=version - 1, base_digest=first.digest,
            delta=delta, anchor=None, nonce=f"{version:032x}",
        )  # fmt: skip
        bucket.put(keys.manifest(version), encode_manifest(manifest))
    return bucket
