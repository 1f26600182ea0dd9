"""The bucket: any object store, behind a few verbs."""

from deltawire.store.bucket import Bucket, Entry, open_bucket

__all__ = ["Bucket", "Entry", "open_bucket"]
