"""The bucket: any object store, behind a few verbs."""

from deltawire.store.bucket import Bucket, Entry, open_bucket
from deltawire.store.metered import MeteredBucket

__all__ = ["Bucket", "Entry", "MeteredBucket", "open_bucket"]
