"""The bucket: any object store, behind six verbs."""

from deltawire.store.bucket import Bucket, open_bucket

__all__ = ["Bucket", "open_bucket"]
