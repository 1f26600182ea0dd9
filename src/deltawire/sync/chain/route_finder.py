"""Finds routes through a bucket, reading no more manifests than the planner needs.

It has three searches and runs each only if the one before found no route. The coarse search reads
the newest manifest, the compacted deltas that a listing shows, and the manifests that no compacted
delta spans. A compacted delta is published only if it is smaller than the deltas that it spans, so
no cheaper route is missed. The fine search reads every manifest from the version held to the
target. The backward search also reads older ones, one anchor after another.

Only versions that a listing shows are visited, never a range of numbers: a key may state any number
of up to ten digits, even if no such version exists.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from functools import partial

from deltawire.errors import CorruptError
from deltawire.store import Bucket
from deltawire.store.worker_threads import WorkerThreads
from deltawire.sync.chain.objects import committed_versions, read_compacted_delta, read_manifest
from deltawire.sync.chain.routes import CheapestRoutes, Edge, Kind, Route, lowest_start
from deltawire.wire import keys
from deltawire.wire.manifest import CompactedDelta, Manifest
from deltawire.wire.payload import PayloadRef
from deltawire.wire.run import Run

WINDOW = 32
"""Manifests read at a time by the backward search."""

SHORT = 16
"""Up to this many versions, a route whose manifests are all known is taken without a listing."""

READERS = 8
"""Manifests read at once from a store that is not on this machine."""


class RouteFinder:
    """Finds the cheapest routes from ``held`` (None: from nothing) to ``goal``.

    Every object is read once; an object that could not be read, or that was damaged and passed to
    `ban`, is left out of every route. ``failure`` is the first such fault, for the error that is
    raised if no route is left. Raises `RetryError` if the store does not answer.

    Example::

        finder = RouteFinder(bucket, run, held=mirror.version, goal=40)
        route = finder.find()
        steps = [finder.step(edge) for edge in route.edges]
    """

    def __init__(
        self,
        bucket: Bucket,
        run: Run,
        *,
        held: int | None,
        goal: int,
    ) -> None:
        self.bucket = bucket
        self.run = run
        self.goal = goal
        self.held = held
        self.failure: CorruptError | None = None
        self._manifests: dict[int, Manifest | None] = {}
        self._versions: list[int] = []
        self._listed: tuple[int, int] | None = None
        self._compacted: dict[tuple[int | None, int], CompactedDelta | None] | None = None
        self._read_compacted: set[tuple[int | None, int]] = set()
        self._banned: set[Edge] = set()
        self._anchors = True
        self._back = False

    def know(self, manifest: Manifest) -> None:
        """Records a manifest that was read before, so that it is not read again."""
        self._manifests[manifest.version] = manifest
        self._note_if_pruned(manifest)

    def ban(self, edge: Edge, error: CorruptError) -> None:
        """Excludes an edge from all routes: its payload is missing or damaged."""
        self._banned.add(edge)
        self.failure = self.failure or error

    def find(self, *, anchors: bool = True) -> Route | None:
        """Returns the cheapest route to the goal, None if there is none; without ``anchors``, only
        over deltas and compacted deltas."""
        self._anchors = anchors
        self._back = False
        if not self.bucket.local and self._knows_the_way():
            # With few deltas, all known, a listing of shorter routes would cost more time than they
            # save.
            route = self._routes(self._known_edges()).route(self.goal)
            if route is not None:
                return route
        for search in (self._search_coarsely, self._search_finely, self._search_back):
            if (route := self._routes(search()).route(self.goal)) is not None:
                return route
        return None

    def _knows_the_way(self) -> bool:
        if self.held is None or not 0 < self.goal - self.held <= SHORT:
            return False
        between = (self._manifests.get(v) for v in range(self.held + 1, self.goal + 1))
        return all(found is not None and found.delta is not None for found in between)

    def find_newest(self, *, newer_than: int) -> Route | None:
        """Returns the cheapest route to the newest version below the goal that can be reached, if
        it is newer than ``newer_than``."""
        self._anchors = self._back = True
        for window in self._windows_back(newer_than):
            self._read_manifests(window)
            routes = self._routes(self._known_edges())
            if routes.newest is not None and routes.newest > newer_than:
                return routes.route(routes.newest)
        return None

    def step(self, edge: Edge) -> tuple[Manifest | CompactedDelta, PayloadRef]:
        """Returns the object that states an edge, and its payload; raises `CorruptError` if a
        compacted delta does not lead to the digest that its target's manifest states."""
        manifest = self.manifest(edge.target)
        if edge.key == keys.manifest(edge.target):
            assert manifest is not None
            payload = manifest.delta if edge.kind == "delta" else manifest.anchor
            assert payload is not None
            return manifest, payload
        compacted = (self._compacted or {}).get((edge.base, edge.target))
        assert compacted is not None
        if manifest is None or manifest.digest != compacted.digest:
            raise self._note(
                CorruptError(
                    "a compacted delta leads to a missing version"
                    if manifest is None
                    else "a compacted delta does not lead to the digest of its version",
                    run=self.bucket.url,
                    version=edge.target,
                    key=edge.key,
                )
            )
        return compacted, compacted.payload

    def error(self) -> CorruptError:
        """Returns the reason why there is no route, naming what is missing."""
        if self.failure is None:
            version = self.goal
            while (found := self.manifest(version)) is not None and found.base is not None:
                version = found.base  # It is lower than the version, or the manifest was refused.
        return self.failure or CorruptError(
            "no anchor leads to this version", run=self.bucket.url, version=self.goal
        )

    def manifest(self, version: int) -> Manifest | None:
        """Returns a version's manifest, None if it is missing or damaged."""
        if version not in self._manifests:
            self._manifests[version] = self._read_or_note(
                partial(read_manifest, self.bucket, self.run, version), version
            )
        return self._manifests[version]

    def _routes(self, edges: Iterable[Edge]) -> CheapestRoutes:
        return CheapestRoutes(self.held, self._usable(edges))

    def _usable(self, edges: Iterable[Edge]) -> list[Edge]:
        return [
            edge
            for edge in edges
            if edge.target <= self.goal
            and edge not in self._banned
            and (edge.kind != "anchor" or self._open_to(edge.target))
        ]

    def _open_to(self, anchor: int) -> bool:
        """Returns whether an anchor may be used; one older than ``held`` is a last resort."""
        return self._anchors and (self.held is None or anchor > self.held or self._back)

    def _search_coarsely(self) -> Iterator[Edge]:
        self.manifest(self.goal)
        starts: list[int] = [] if self.held is None else [self.held]
        if (anchor := self._newest_later_anchor()) is not None:
            starts.append(anchor)
        for start in starts:
            self._walk(start)
        return self._known_edges()

    def _newest_later_anchor(self) -> int | None:
        """Reads the newest anchor that was made after its version's commit, if one is listed that
        may be used.
        """
        banned = {edge.key for edge in self._banned}
        for base, target in reversed(self._listed_compacted() if self._anchors else []):
            if base is None and (self.held is None or target > self.held):
                self._read_one_compacted(None, target)
                found = (self._compacted or {})[None, target] is not None
                if found and keys.compacted(None, target) not in banned:
                    return target
        return None

    def _walk(self, start: int) -> None:
        """Reads the edges from ``start`` to the goal, along the longest compacted deltas."""
        if self.manifest(start) is None and start != self.held:
            return
        longest: dict[int, int] = {}
        for base, target in self._listed_compacted():
            if base is not None and (base, target) not in self._read_compacted:
                longest[base] = max(target, longest.get(base, 0))
        versions = self._committed(start)
        if start not in longest and versions:
            first = self.manifest(versions[0])
            if first is None or first.pruned:
                return  # No edge leads on from here, so later manifests need not be read.
        at, place, steps = start, 0, []
        while at < self.goal:
            if at in longest:
                self._read_one_compacted(at, longest[at])
                at = longest[at]
                place = bisect_right(versions, at)
            elif place < len(versions):
                at = versions[place]
                place += 1
                steps.append(at)
            else:
                break
        self._read_manifests(steps)

    def _search_finely(self) -> Iterator[Edge]:
        for base, target in self._listed_compacted():
            self._read_one_compacted(base, target)
        if self.held is not None:
            self._read_manifests(self._committed(self.held))
        return self._known_edges()

    def _search_back(self) -> Iterator[Edge]:
        self._back = True
        if self.held is not None:
            self._list_compacted(None)
        for base, target in self._listed_compacted():
            self._read_one_compacted(base, target)
        for window in self._windows_back(-1):
            edges = self._usable(self._known_edges())
            if CheapestRoutes(self.held, edges).route(self.goal) is not None:
                break
            if lowest_start(self.goal, edges) > window[-1] and self.goal not in window:
                break  # Older objects cannot complete a route.
            self._read_manifests(window)
        return self._known_edges()

    def _windows_back(self, newer_than: int) -> Iterator[list[int]]:
        """Yields the committed versions up to the goal, newest first, a few at a time."""
        versions = [v for v in self._committed(-1) if v > newer_than]
        for end in range(len(versions), 0, -WINDOW):
            yield versions[max(end - WINDOW, 0) : end]

    def _known_edges(self) -> Iterator[Edge]:
        for manifest in self._manifests.values():
            if manifest is None:
                continue
            key = keys.manifest(manifest.version)
            if manifest.delta is not None:
                yield Edge(manifest.base, manifest.version, manifest.delta.bytes, "delta", key)
            if manifest.anchor is not None:
                yield Edge(None, manifest.version, manifest.anchor.bytes, "anchor", key)
        for (base, target), compacted in (self._compacted or {}).items():
            if compacted is not None:
                kind: Kind = "anchor" if base is None else "compacted"
                key = keys.compacted(base, target)
                yield Edge(base, target, compacted.payload.bytes, kind, key)

    def _committed(self, after: int) -> list[int]:
        """Returns the versions with ``after`` < version ≤ goal whose manifests a listing shows."""
        if self.held is not None and (after, self.goal) == (self.held, self.held + 1):
            return [self.goal]  # The common case: known without a listing.
        if self._listed is None or after < self._listed[0] or self.goal > self._listed[1]:
            start = after if self._listed is None else min(after, self._listed[0])
            self._versions = sorted(committed_versions(self.bucket, newer_than=start))
            self._listed = (start, self.goal)
        first = bisect_right(self._versions, after)
        return self._versions[first : bisect_right(self._versions, self.goal)]

    def _read_manifests(self, versions: Iterable[int]) -> None:
        unread = [version for version in versions if version not in self._manifests]
        if self.bucket.local or len(unread) < 2:
            for version in unread:
                self.manifest(version)
            return
        with WorkerThreads(READERS, thread_name_prefix="manifest-reader") as pool:
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
            self._note_if_pruned(found)
        except CorruptError as error:
            self._note(error)
            return None
        return found

    def _note_if_pruned(self, manifest: Manifest) -> None:
        if manifest.pruned:
            self._note(
                CorruptError(
                    "retention has pruned this version",
                    hint="ask for a newer one",
                    run=self.bucket.url,
                    version=manifest.version,
                )
            )

    def _listed_compacted(self) -> list[tuple[int | None, int]]:
        """Returns base and target of the compacted deltas that may lie on a route to the goal."""
        if self._compacted is None:
            self._compacted = {}
            self._list_compacted(None if self.held is None else keys.compacted_after(self.held))
        return sorted(
            (name for name in self._compacted if name[1] <= self.goal),
            key=lambda name: (name[1], name[0] or 0),
        )

    def _list_compacted(self, after: str | None) -> None:
        assert self._compacted is not None
        for key in self.bucket.list(keys.COMPACTED, after=after):
            name = keys.compacted_of(key)
            if name is not None and (name[0] is None or name[0] < name[1]):
                self._compacted.setdefault(name, None)

    def _read_one_compacted(self, base: int | None, target: int) -> None:
        assert self._compacted is not None
        if (base, target) in self._read_compacted:
            return
        self._read_compacted.add((base, target))
        try:
            found = read_compacted_delta(self.bucket, self.run, base, target)
            self._compacted[base, target] = found
        except CorruptError as error:
            self._note(error)

    def _note(self, error: CorruptError) -> CorruptError:
        self.failure = self.failure or error
        return error
