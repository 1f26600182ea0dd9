"""What ways a bucket offers: reads as few manifests as the planner needs, and more if it must.

Three looks, each only if the one before found no way. The first reads the newest manifest, the
folds that a listing shows, and the manifests of those versions alone that no fold spans. A fold is
only ever published if it is smaller than what it spans, so that nothing cheaper is overlooked. The
second reads every manifest from the version held to the target, the third older ones too, back to
one anchor after the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from deltawire.errors import CorruptError
from deltawire.store import Bucket
from deltawire.sync.chain.objects import read_compacted_delta, read_manifest
from deltawire.sync.chain.routes import Edge, Reach, Route
from deltawire.sync.follow.fetch import wanted_pieces
from deltawire.sync.follow.mirror import Mirror
from deltawire.wire import keys
from deltawire.wire.manifest import CompactedDelta, Manifest, Payload
from deltawire.wire.run import Run

WINDOW = 32
"""How many manifests are read at a time on the way back to an anchor."""

READERS = 8


class RouteFinder:
    """The edges from ``mirror``'s version (None: from nothing) to ``goal``.

    Everything is read once; what could not be read, or was `ban`ned after it turned out damaged,
    is left out of every route. ``failure`` is the first thing that went wrong, for the error that
    is raised if no way is left. Raises `RetryError` if the store does not answer.
    """

    def __init__(
        self, bucket: Bucket, run: Run, mirror: Mirror | None, held: int | None, goal: int
    ) -> None:
        self.bucket = bucket
        self.run = run
        self.goal = goal
        self.held = held
        self.failure: CorruptError | None = None
        self._mirror = mirror
        self._manifests: dict[int, Manifest | None] = {}
        self._folds: dict[tuple[int | None, int], CompactedDelta | None] | None = None
        self._read_folds: set[tuple[int | None, int]] = set()
        self._banned: set[Edge] = set()
        self._anchors = True
        self._back = False

    def know(self, manifest: Manifest) -> None:
        """Take in a manifest that was read before."""
        self._manifests[manifest.version] = manifest

    def ban(self, edge: Edge, error: CorruptError) -> None:
        """Leave an edge out from now on: what it promised is not there."""
        self._banned.add(edge)
        self.failure = self.failure or error

    def find(self, *, anchors: bool = True) -> Route | None:
        """The cheapest route to the goal, None if there is none; without ``anchors``, only over
        deltas and folds."""
        self._anchors = anchors
        self._back = False
        for look in (self._look_coarsely, self._look_finely, self._look_back):
            if (route := self._reach(look()).route(self.goal)) is not None:
                return route
        return None

    def find_any(self, *, newer_than: int) -> Route | None:
        """The cheapest route to the newest version that can be reached at all, if it is newer."""
        reach = self._reach(self._known_edges())
        newest = reach.newest
        return None if newest is None or newest <= newer_than else reach.route(newest)

    def step(self, edge: Edge) -> tuple[Manifest | CompactedDelta, Payload]:
        """The object that states an edge, and its payload; raises `CorruptError` if a fold does
        not lead to what its target's manifest says."""
        manifest = self.manifest(edge.target)
        if edge.key == keys.manifest(edge.target):
            assert manifest is not None
            payload = manifest.delta if edge.kind == "delta" else manifest.anchor
            assert payload is not None
            return manifest, payload
        fold = (self._folds or {}).get((edge.base, edge.target))
        assert fold is not None
        if manifest is None or manifest.digest != fold.digest:
            raise self._note(
                CorruptError(
                    "a fold leads to a version that is not there"
                    if manifest is None
                    else "a fold does not lead to the digest of its version",
                    run=self.bucket.url,
                    version=edge.target,
                    key=edge.key,
                )
            )
        return fold, fold.payload

    def error(self) -> CorruptError:
        """Why there is no way, naming what is missing."""
        return self.failure or CorruptError(
            "no anchor leads to this version", run=self.bucket.url, version=self.goal
        )

    def _reach(self, edges: Iterable[Edge]) -> Reach:
        return Reach(
            self.held,
            [
                edge
                for edge in edges
                if edge.target <= self.goal
                and edge not in self._banned
                and (edge.kind != "anchor" or self._open_to(edge.target))
            ],
        )

    def _open_to(self, anchor: int) -> bool:
        """Whether an anchor may be used: one behind the version held only if all else fails."""
        return self._anchors and (self.held is None or anchor > self.held or self._back)

    def _look_coarsely(self) -> Iterator[Edge]:
        head = self.manifest(self.goal)
        starts: list[int] = [] if self.held is None else [self.held]
        starts += [target for base, target in self._listed_folds() if base is None][-1:]
        if head is not None and head.last_anchor is not None:
            starts.append(head.last_anchor)
        for start in starts:
            if self.held is None or start >= self.held:
                self._walk(start)
        return self._known_edges()

    def _walk(self, start: int) -> None:
        """Read on from ``start`` to the goal, over the longest folds."""
        longest: dict[int, int] = {}
        for base, target in self._listed_folds():
            if base is not None and target <= self.goal and (base, target) not in self._read_folds:
                longest[base] = max(target, longest.get(base, 0))
        at = start
        if self.manifest(at) is None and at != self.held:
            return
        following = None if start in longest else self.manifest(start + 1)
        if start not in longest and start < self.goal and (not following or following.pruned):
            return  # Nothing leads on from here: not worth reading what comes behind.
        steps = []
        while at < self.goal:
            if at in longest:
                self._fold(at, longest[at])
                at = longest[at]
            else:
                at += 1
                steps.append(at)
        self._read_manifests(steps)

    def _look_finely(self) -> Iterator[Edge]:
        for base, target in self._listed_folds():
            if target <= self.goal:
                self._fold(base, target)
        if self.held is not None:
            self._read_manifests(range(self.held + 1, self.goal + 1))
        return self._known_edges()

    def _look_back(self) -> Iterator[Edge]:
        self._back = True
        self._list_all_folds()
        for end in range(self.goal + 1, 0, -WINDOW):
            self._read_manifests(range(max(end - WINDOW, 0), end))
            if self._reach(self._known_edges()).route(self.goal) is not None:
                break
        return self._known_edges()

    def _known_edges(self) -> Iterator[Edge]:
        for manifest in self._manifests.values():
            if manifest is None:
                continue
            key = keys.manifest(manifest.version)
            if manifest.delta is not None:
                cost = self._cost(manifest.delta)
                yield Edge(manifest.base, manifest.version, cost, "delta", key)
            if manifest.anchor is not None:
                cost = self._cost(manifest.anchor)
                yield Edge(None, manifest.version, cost, "anchor", key)
        for (base, target), fold in (self._folds or {}).items():
            if fold is not None:
                kind, cost = "anchor" if base is None else "fold", self._cost(fold.payload)
                yield Edge(base, target, cost, kind, keys.compacted(base, target))  # type: ignore[arg-type]

    def _cost(self, payload: Payload) -> int:
        if self._mirror is None:
            return payload.bytes
        pieces = wanted_pieces(self.run, payload, self._mirror)
        if len(pieces) == len(payload.pieces):
            return payload.bytes
        return sum(piece.length for piece in pieces)

    def manifest(self, version: int) -> Manifest | None:
        """A version's manifest, None if it is missing or damaged."""
        if version not in self._manifests:
            self._manifests[version] = self._read_or_note(
                partial(read_manifest, self.bucket, self.run, version), version
            )
        return self._manifests[version]

    def _read_manifests(self, versions: Iterable[int]) -> None:
        unread = [version for version in versions if version not in self._manifests]
        if self.bucket.local or len(unread) < 2:
            for version in unread:
                self.manifest(version)
            return
        with ThreadPoolExecutor(READERS, thread_name_prefix="surveyor") as pool:
            list(pool.map(self.manifest, unread))

    def _read_or_note(self, read: partial[Manifest | None], version: int) -> Manifest | None:
        try:
            found = read()
            if found is None:
                raise CorruptError(
                    "a manifest is missing",
                    run=self.bucket.url,
                    version=version,
                    key=keys.manifest(version),
                )
            if found.pruned:
                self._note(
                    CorruptError(
                        "retention has taken this version",
                        hint="ask for a newer one",
                        run=self.bucket.url,
                        version=version,
                    )
                )
        except CorruptError as error:
            self._note(error)
            return None
        return found

    def _listed_folds(self) -> list[tuple[int | None, int]]:
        if self._folds is None:
            self._folds = {}
            self._list_folds(None if self.held is None else keys.compacted_after(self.held))
        return sorted(self._folds, key=lambda fold: (fold[1], fold[0] or 0))

    def _list_all_folds(self) -> None:
        if self.held is not None:
            self._list_folds(None)
        for base, target in self._listed_folds():
            if target <= self.goal:
                self._fold(base, target)

    def _list_folds(self, after: str | None) -> None:
        assert self._folds is not None
        for key in self.bucket.list(keys.COMPACTED, after=after):
            if (found := keys.compacted_of(key)) is not None:
                self._folds.setdefault(found, None)

    def _fold(self, base: int | None, target: int) -> None:
        assert self._folds is not None
        if (base, target) in self._read_folds:
            return
        self._read_folds.add((base, target))
        try:
            self._folds[base, target] = read_compacted_delta(self.bucket, self.run, base, target)
        except CorruptError as error:
            self._note(error)

    def _note(self, error: CorruptError) -> CorruptError:
        self.failure = self.failure or error
        return error
