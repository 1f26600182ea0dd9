"""One bucket on any object store: a few operations, retries, counters."""

from deltawire.store.bucket import Bucket, ObjectMeta, open_bucket
from deltawire.store.delegating import DelegatingBucket
from deltawire.store.metered import MeteredBucket
from deltawire.store.retrying import RetryingBucket, RetryPolicy

__all__ = [
    "Bucket",
    "DelegatingBucket",
    "MeteredBucket",
    "ObjectMeta",
    "RetryPolicy",
    "RetryingBucket",
    "open_bucket",
]
