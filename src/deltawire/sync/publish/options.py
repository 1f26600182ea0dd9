"""Declares the options of publishers, with their types, for those who pass them on.

`open_publisher`, `deltawire.trl.Publish` and `deltawire.trl.Transfer` take these as keyword
arguments. A type checker names one that does not exist, and so does the call itself, before a run
is made.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypedDict

from deltawire.errors import InputError
from deltawire.sync.publish.commit import CommitStats
from deltawire.sync.publish.later_anchors import AnchorStats


class CommitOptions(TypedDict, total=False):
    """How versions are encoded and stored."""

    anchor_every: int
    """A version is stored whole every so many versions; 50 by default."""
    anchor_share: float
    """An anchor is also due once the deltas since the last one exceed this share of its bytes; 0
    is never."""
    compaction_strides: Sequence[int]
    """Deltas over so many versions are made in the background, for readers that fell back."""
    threads: int | None
    """How many threads copy and encode; None is the number of processors."""
    blob_bytes: int
    """The size at which a blob is closed and the next one begun, in bytes."""
    on_commit: Callable[[CommitStats], None] | None
    """Called in another thread after each commit, with its sizes and times."""
    on_anchor: Callable[[AnchorStats], None] | None
    """Called in another thread after each anchor that follows a version."""
    frozen: Collection[str]
    """Names of tensors that are not expected to change; a hint that saves uploads."""
    grace_s: float
    """Seconds between the moment when a version is chosen for pruning and its deletion."""


class TransferOptions(CommitOptions, total=False):
    """The options of `deltawire.trl.Transfer` that go to its publisher."""

    retain: int
    """How many of the newest versions stay readable; older ones are pruned. 0 keeps all."""


class PublisherOptions(TransferOptions, total=False):
    """The options of `deltawire.open_publisher` that go to its `Publisher`.

    Example::

        options: PublisherOptions = {"retain": 100, "max_outage": None}
        publisher = deltawire.open_publisher(url, tensors, **options)
    """

    max_outage: float | None
    """Seconds for which publishing goes on while the store does not answer; None is no limit, 0
    raises at the next call."""


class HookOptions(CommitOptions, total=False):
    """The options of `deltawire.trl.Publish` that go to its publisher."""

    timeout_s: float
    """With ``sharded``: the longest that ranks wait for each other, in seconds."""
    name: str
    """With ``sharded``: the name of a new run."""


def check_options(options: Mapping[str, Any]) -> None:
    """Raises `InputError` for a name that `PublisherOptions` does not have, before a run is
    made."""
    known = PublisherOptions.__optional_keys__
    if unknown := sorted(options.keys() - known):
        raise InputError(
            f"there is no option {unknown[0][:60]!r} of a publisher",
            hint=f"there are {', '.join(sorted(known))}",
        )
