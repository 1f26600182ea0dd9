"""The bucket: any object store, behind a few verbs."""

from deltawire.store.bucket import Bucket, Entry, open_bucket
from deltawire.store.metered import MeteredBucket
from deltawire.store.retrying import RetryingBucket, RetryPolicy

__all__ = ["Bucket", "Entry", "MeteredBucket", "RetryPolicy", "RetryingBucket", "open_bucket"]
