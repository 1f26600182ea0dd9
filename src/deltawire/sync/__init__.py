"""Publishes and follows weights: the writers and the readers of the chain of versions.

The folders build on each other in this order: ``chain`` (objects, routes, retention), ``follow``
(readers), ``publish`` (writers and compaction), ``maintain`` (relays, fsck), ``huggingface``
(directories).
"""

from deltawire.sync.chain.history import read_history
from deltawire.sync.chain.objects import (
    committed_versions,
    create_run,
    find_run,
    newest_version,
    read_manifest,
    read_run,
)
from deltawire.sync.chain.retention import Pruned, prune
from deltawire.sync.chain.version_poller import newest_readable
from deltawire.sync.follow.follower import Follower, Steps
from deltawire.sync.follow.load import load_mirror
from deltawire.sync.follow.manifest_follower import ManifestFollower
from deltawire.sync.follow.mirror import Mirror
from deltawire.sync.follow.mirror_file import FileMirror, open_mirror
from deltawire.sync.follow.subscriber import Subscriber, Update
from deltawire.sync.huggingface.checkout import Checkout
from deltawire.sync.huggingface.checkpoint_dir import Checkpoint, read_checkpoint
from deltawire.sync.huggingface.checkpoint_watcher import CheckpointWatcher
from deltawire.sync.huggingface.publish_dirs import CheckpointPublisher
from deltawire.sync.maintain.relay import Relay, Relayed
from deltawire.sync.publish.commit import CommitStats
from deltawire.sync.publish.compaction import COMPACTION_STRIDES, Compactor
from deltawire.sync.publish.later_anchors import AnchorStats
from deltawire.sync.publish.publisher import Publisher
from deltawire.sync.publish.safetensors_files import read_safetensors
from deltawire.sync.publish.sharded import ShardPublisher
from deltawire.sync.publish.sources import open_publisher

__all__ = [
    "COMPACTION_STRIDES",
    "AnchorStats",
    "Checkout",
    "Checkpoint",
    "CheckpointPublisher",
    "CheckpointWatcher",
    "CommitStats",
    "Compactor",
    "FileMirror",
    "Follower",
    "ManifestFollower",
    "Mirror",
    "Pruned",
    "Publisher",
    "Relay",
    "Relayed",
    "ShardPublisher",
    "Steps",
    "Subscriber",
    "Update",
    "committed_versions",
    "create_run",
    "find_run",
    "load_mirror",
    "newest_readable",
    "newest_version",
    "open_mirror",
    "open_publisher",
    "prune",
    "read_checkpoint",
    "read_history",
    "read_manifest",
    "read_run",
    "read_safetensors",
]
