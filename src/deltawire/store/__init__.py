"""Reads and writes one bucket on any object store: a few operations, retries, counters."""

from deltawire.store.bucket import Bucket, ObjectMeta, require_bucket
from deltawire.store.delegating import DelegatingBucket
from deltawire.store.folder import FolderBucket
from deltawire.store.metered import MeteredBucket
from deltawire.store.opening import open_bare_bucket, open_bucket
from deltawire.store.parallel import REQUESTS, in_parallel
from deltawire.store.probe import check_create_if_absent, overwrites_on_create
from deltawire.store.retrying import (
    RetryingBucket,
    RetryPolicy,
    WriterBucket,
    with_retry_policy,
    without_retries,
)
from deltawire.store.traffic import Traffic, traffic

__all__ = [
    "REQUESTS",
    "Bucket",
    "DelegatingBucket",
    "FolderBucket",
    "MeteredBucket",
    "ObjectMeta",
    "RetryPolicy",
    "RetryingBucket",
    "Traffic",
    "WriterBucket",
    "check_create_if_absent",
    "in_parallel",
    "open_bare_bucket",
    "open_bucket",
    "overwrites_on_create",
    "require_bucket",
    "traffic",
    "with_retry_policy",
    "without_retries",
]
