"""Publish and follow weights: both sides of the chain of versions."""

from deltawire.sync.chain import create_run, newest_version, read_manifest, read_run
from deltawire.sync.folding import FOLD_STRIDES, Folder
from deltawire.sync.load import load_mirror
from deltawire.sync.mirror import Mirror
from deltawire.sync.publisher import Publisher, Receipt
from deltawire.sync.subscriber import Follower, Subscriber, Update

__all__ = [
    "FOLD_STRIDES",
    "Folder",
    "Follower",
    "Mirror",
    "Publisher",
    "Receipt",
    "Subscriber",
    "Update",
    "create_run",
    "load_mirror",
    "newest_version",
    "read_manifest",
    "read_run",
]
