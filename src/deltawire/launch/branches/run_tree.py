"""Draws a run with its forks, and theirs: where each began, and how far it is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

import msgspec

from deltawire.display import legible
from deltawire.errors import DeltawireError
from deltawire.launch.branches.fork_copy import children_from
from deltawire.launch.branches.fork_places import fork_names, open_fork
from deltawire.store import Bucket
from deltawire.sync import committed_versions, find_run
from deltawire.sync.chain.first_version import origin_of
from deltawire.sync.chain.tags import read_tags


class RunNode(msgspec.Struct, frozen=True, kw_only=True):
    """A run of the tree. ``began`` is the version of the run above that it began with, None if that
    cannot be read, or for the first one. ``first`` and ``newest`` are its versions, None in another
    bucket, which is not read. ``tags`` are its own, without those that keep what forks read."""

    url: str
    name: str = ""
    began: int | None = None
    first: int | None = None
    newest: int | None = None
    tags: dict[str, int] = {}
    elsewhere: bool = False
    forks: list[RunNode] = []


def tree_of(bucket: Bucket, *, began: int | None = None) -> RunNode:
    """Reads a run and all forks below it; those in other buckets are named by their notes."""
    run = find_run(bucket)
    versions = committed_versions(bucket)
    tags: dict[str, int] = {}
    if run is not None:
        read = read_tags(bucket, run, so="the tree is not drawn")
        tags = {name: tag.version for name, tag in read.items() if not name.startswith("fork-")}
    forks = [
        RunNode(url=one.url, began=one.version, elsewhere=True) for one in children_from(bucket, 0)
    ]
    for name in fork_names(bucket):
        fork, origin = open_fork(bucket, name), None
        with suppress(DeltawireError):
            origin = origin_of(fork)
        forks.append(tree_of(fork, began=origin))
    return RunNode(
        url=bucket.url,
        name="" if run is None else run.name,
        began=began,
        first=min(versions, default=None),
        newest=max(versions, default=None),
        tags=tags,
        forks=sorted(forks, key=lambda one: (one.began or 0, one.url)),
    )


def drawn(node: RunNode) -> Iterator[str]:
    """Yields the lines that draw a tree."""
    name, tags = legible(node.name, 80), _tags(node)
    if node.newest is None:
        yield f"{name} has no version{tags}".strip()
    else:
        yield f"{name} {node.first} to {node.newest}{tags}"
    yield from _branches(node, "")


def _branches(node: RunNode, before: str) -> Iterator[str]:
    for number, fork in enumerate(node.forks, 1):
        last = number == len(node.forks)
        began = "?" if fork.began is None else fork.began
        if fork.elsewhere:
            words = f"{legible(fork.url, 400)} (in another bucket)"
        elif fork.newest is None:
            words = f"{legible(fork.name or fork.url, 400)} is not finished"
        else:
            words = f"{legible(fork.name or fork.url, 400)} to {fork.newest}{_tags(fork)}"
        yield f"{before}{'└──' if last else '├──'} {began} ─▶ {words}"
        yield from _branches(fork, before + ("    " if last else "│   "))


def _tags(node: RunNode) -> str:
    shown = sorted(node.tags.items(), key=lambda one: (one[1], one[0]))
    tags = ", ".join(f"{legible(name, 80)} @{at}" for name, at in shown)
    return f" · {tags}" if tags else ""
