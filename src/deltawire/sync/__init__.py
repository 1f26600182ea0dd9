"""Publish and follow weights: both sides of the chain of versions."""

from deltawire.sync.announced import Announced
from deltawire.sync.chain import create_run, newest_version, read_manifest, read_run
from deltawire.sync.checkout import Checkout
from deltawire.sync.directory import Checkpoint, read_checkpoint
from deltawire.sync.folding import FOLD_STRIDES, Folder
from deltawire.sync.load import load_mirror
from deltawire.sync.mirror import Mirror
from deltawire.sync.mirror_file import AttachedMirror, FileMirror, open_mirror, shared_path
from deltawire.sync.publisher import Publisher, Receipt
from deltawire.sync.relay import Relay, Relayed
from deltawire.sync.retention import Retired, retire
from deltawire.sync.series import Series, Watched
from deltawire.sync.shards import ShardPublisher
from deltawire.sync.sources import open_publisher, read_safetensors
from deltawire.sync.subscriber import Follower, Steps, Subscriber, Update

__all__ = [
    "FOLD_STRIDES",
    "Announced",
    "AttachedMirror",
    "Checkout",
    "Checkpoint",
    "FileMirror",
    "Folder",
    "Follower",
    "Mirror",
    "Publisher",
    "Receipt",
    "Relay",
    "Relayed",
    "Retired",
    "Series",
    "ShardPublisher",
    "Steps",
    "Subscriber",
    "Update",
    "Watched",
    "create_run",
    "load_mirror",
    "newest_version",
    "open_mirror",
    "open_publisher",
    "read_checkpoint",
    "read_manifest",
    "read_run",
    "read_safetensors",
    "retire",
    "shared_path",
]
