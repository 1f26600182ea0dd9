"""Changes that versions made to the weights: by tensor and by layer, and the routes of their
readers.

The size of a delta by tensor is in its piece table, which is small. The share that changed and the
norm of the update are in the delta itself, and decoding that takes the weights it builds on: they
are measured for models up to `MAX_MEASURED_BYTES`, on request, with one mirror that moves along.
"""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from deltawire.codec import ITEMSIZE
from deltawire.errors import CorruptError, InputError
from deltawire.store import Bucket
from deltawire.sync import Subscriber, committed_versions, load_mirror, read_manifest
from deltawire.sync.chain.payloads import read_payload
from deltawire.sync.chain.route_finder import RouteFinder
from deltawire.wire.run import Run

MAX_MEASURED_BYTES = 1 << 30
MAX_MEASURED_VERSIONS = 48
MAX_MAPPED_VERSIONS = 96
MAX_KEPT = 256
MAX_TENSORS = 20_000

Measure = Literal["bits", "share", "norm"]

_LAYER = re.compile(r"(?:^|\.)(?:layers?|h|blocks?)\.(\d{1,5})\.(.+)\Z", re.DOTALL)


class TensorChange(msgspec.Struct, frozen=True, kw_only=True):
    """The change that a version made to one tensor.

    ``bytes`` is its share of the delta, ``bits`` the same for each element. ``changed`` elements
    have other bits, ``norm`` is the Euclidean norm of new minus old values and ``relative`` the
    same over the norm of the old values; all three are None unless the delta was measured, the
    norms also for integers and 8-bit floats.
    """

    name: str
    layer: int | None
    part: str
    shape: list[int]
    dtype: str
    count: int
    bytes: int
    bits: float
    changed: int | None = None
    norm: float | None = None
    relative: float | None = None


class VersionChange(msgspec.Struct, frozen=True, kw_only=True):
    """A version's delta by tensor, in the order of the run's table."""

    version: int
    base: int | None
    bytes: int
    measured: bool
    measurable: bool
    tensors: list[TensorChange]
    left_out: int


class LayerMap(msgspec.Struct, frozen=True, kw_only=True):
    """One value for each layer and version; None where a version has no delta. ``rows`` are the
    layers, from the first, then tensors outside of layers."""

    measure: Measure
    versions: list[int]
    rows: list[str]
    values: list[list[float | None]]


class RouteStep(msgspec.Struct, frozen=True, kw_only=True):
    """A delta, compacted delta or anchor that a reader fetches."""

    kind: str
    base: int | None
    target: int
    bytes: int


class RouteView(msgspec.Struct, frozen=True, kw_only=True):
    """The cheapest way of a reader at ``held`` (None: from nothing) to ``goal``; ``error`` says why
    there is none."""

    held: int | None
    goal: int
    bytes: int
    steps: list[RouteStep]
    error: str = ""


class _Measured(msgspec.Struct, frozen=True):
    changed: dict[str, int]
    norm: dict[str, tuple[float, float]]
    """Norms of the update and of the old values."""


class WeightChanges:
    """Reads the deltas of one run; any thread may ask, one is answered at a time."""

    def __init__(self, bucket: Bucket, run: Run) -> None:
        self._bucket = bucket
        self._run = run
        self._lock = threading.Lock()
        self._sizes: OrderedDict[int, tuple[int | None, dict[str, int]]] = OrderedDict()
        self._measured: OrderedDict[int, _Measured] = OrderedDict()
        self._subscriber: Subscriber | None = None
        self.bytes_full = sum(spec.count * ITEMSIZE[spec.dtype] for spec in run.tensors)

    @property
    def measurable(self) -> bool:
        """True if the model is small enough to be held here."""
        return self.bytes_full <= MAX_MEASURED_BYTES

    def change(self, version: int, *, measure: bool) -> VersionChange:
        """Returns a version's delta by tensor; with ``measure`` it is decoded.

        Raises `InputError` for a version without a delta, or a model too large to be measured, and
        `CorruptError` for a damaged one.
        """
        with self._lock:
            base, sizes = self._sizes_of(version)
            if base is None:
                raise InputError(f"version {version} has no delta", hint="choose a later version")
            measured = self._measure(version) if measure else self._measured.get(version)
        named = [layer_and_part(spec.name) for spec in self._run.tensors]
        order = sorted(
            range(len(named)), key=lambda at: (-1 if named[at][0] is None else named[at][0], at)
        )
        tensors = [self._change(at, named[at], sizes, measured) for at in order[:MAX_TENSORS]]
        return VersionChange(
            version=version,
            base=base,
            bytes=sum(sizes.values()),
            measured=measured is not None,
            measurable=self.measurable,
            tensors=tensors,
            left_out=len(named) - len(tensors),
        )

    def _change(
        self,
        at: int,
        named: tuple[int | None, str],
        sizes: dict[str, int],
        measured: _Measured | None,
    ) -> TensorChange:
        spec = self._run.tensors[at]
        size = sizes.get(spec.name, 0)
        norm, old = measured.norm.get(spec.name, (None, None)) if measured else (None, None)
        return TensorChange(
            name=spec.name,
            layer=named[0],
            part=named[1],
            shape=list(spec.shape),
            dtype=spec.dtype,
            count=spec.count,
            bytes=size,
            bits=8 * size / spec.count if spec.count else 0.0,
            changed=measured.changed.get(spec.name, 0) if measured else None,
            norm=norm,
            relative=norm / old if norm is not None and old else None,
        )

    def layers(
        self,
        measure: Measure,
        *,
        last: int | None,
        count: int,
        known: Sequence[int] | None = None,
    ) -> LayerMap:
        """Returns a value for each layer of ``count`` versions up to ``last``: bits an element, the
        share that changed, or the norm of the update over that of the weights.

        ``bits`` are read of versions at equal distances; the others of versions in a row, since
        each is decoded on the one before. ``known`` are the committed versions, in order, where
        they were listed before. Raises `InputError` for a model too large for that.
        """
        known = committed_versions(self._bucket) if known is None else known
        known = [version for version in known if version > 0]
        known = [version for version in known if last is None or version <= last]
        if measure == "bits":
            count = min(count, MAX_MAPPED_VERSIONS)
            stride = max(1, -(-len(known) // count))
            versions = known[::-1][::stride][::-1]
        else:
            versions = known[-min(count, MAX_MEASURED_VERSIONS) :]
        rows, members = self._rows()
        columns: list[list[float | None]] = []
        for version in versions:
            with self._lock:
                columns.append(self._column(version, measure, members))
        return LayerMap(
            measure=measure,
            versions=versions,
            rows=rows,
            values=[[column[row] for column in columns] for row in range(len(rows))],
        )

    def _rows(self) -> tuple[list[str], list[list[int]]]:
        groups: dict[tuple[int, str], list[int]] = {}
        for at, spec in enumerate(self._run.tensors):
            layer, part = layer_and_part(spec.name)
            key = (1 << 30, part.split(".")[0]) if layer is None else (layer, f"layer {layer}")
            groups.setdefault(key, []).append(at)
        ordered = sorted(groups)[:512]
        return [name for _, name in ordered], [groups[key] for key in ordered]

    def _column(
        self, version: int, measure: Measure, members: list[list[int]]
    ) -> list[float | None]:
        tensors = self._run.tensors
        try:
            base, sizes = self._sizes_of(version)
            if base is None:
                return [None] * len(members)
            measured = self._measure(version) if measure != "bits" else None
        except CorruptError:
            return [None] * len(members)
        column: list[float | None] = []
        for row in members:
            names = [tensors[at].name for at in row]
            count = sum(tensors[at].count for at in row)
            if not count:
                column.append(None)
            elif measured is None:
                column.append(8 * sum(sizes.get(name, 0) for name in names) / count)
            elif measure == "share":
                column.append(sum(measured.changed.get(name, 0) for name in names) / count)
            else:
                found = [measured.norm[name] for name in names if name in measured.norm]
                old = sum(before**2 for _, before in found) ** 0.5
                column.append(sum(norm**2 for norm, _ in found) ** 0.5 / old if old else None)
        return column

    def _sizes_of(self, version: int) -> tuple[int | None, dict[str, int]]:
        """The base of a version's delta, and the bytes of each tensor in it."""
        if version not in self._sizes:
            manifest = read_manifest(self._bucket, self._run, version)
            if manifest is None:
                raise InputError(f"the run has no version {version}")
            sizes: dict[str, int] = {}
            base = None
            if manifest.delta is not None:
                base = manifest.base
                payload = read_payload(self._bucket, self._run, manifest, manifest.delta)
                for piece in payload.pieces:
                    name = self._run.tensors[piece.tensor].name
                    sizes[name] = sizes.get(name, 0) + piece.length
            _keep(self._sizes, version, (base, sizes))
        return self._sizes[version]

    def _measure(self, version: int) -> _Measured:
        if version in self._measured:
            return self._measured[version]
        if not self.measurable:
            raise InputError(
                f"the model has {self.bytes_full / 1e9:.1f} GB; deltas are measured up to "
                f"{MAX_MEASURED_BYTES / 1e9:.1f} GB",
                hint="the sizes by tensor need no measurement",
            )
        base = self._sizes_of(version)[0]
        assert base is not None
        held = self._subscriber
        if held is None or held.mirror.version != base:
            mirror = load_mirror(self._bucket, self._run, at=base)
            held = self._subscriber = Subscriber(self._bucket, self._run, mirror)
        update = held.prepare_to(version)
        found = _Measured({}, {})
        if update is not None:
            dtypes = {spec.name: spec.dtype for spec in self._run.tensors}
            for name, patch in update.patches.items():
                old = held.mirror.tensors[name]
                found.changed[name] = int((old[patch.positions] != patch.bits).sum())
                before = values_of(old[patch.positions], dtypes[name])
                after = values_of(patch.bits, dtypes[name])
                whole = values_of(old, dtypes[name])
                if before is not None and after is not None and whole is not None:
                    found.norm[name] = (
                        float(np.linalg.norm((after - before).astype(np.float64))),
                        float(np.sqrt(np.square(whole, dtype=np.float64).sum())),
                    )
            held.commit(update)
        _keep(self._measured, version, found)
        return found


def values_of(bits: NDArray[Any], dtype: str) -> NDArray[np.float32] | NDArray[np.float64] | None:
    """Returns the numbers that bits spell, None for a dtype other than 16-, 32- and 64-bit
    floats."""
    match dtype:
        case "BF16":
            return (bits.astype(np.uint32) << 16).view(np.float32)
        case "F16":
            return bits.view(np.float16).astype(np.float32)
        case "F32":
            return bits.view(np.float32)
        case "F64":
            return bits.view(np.float64)
        case _:
            return None


def find_route(bucket: Bucket, run: Run, *, held: int | None, goal: int) -> RouteView:
    """Returns the cheapest route from ``held`` to ``goal``."""
    if held is not None and held >= goal:
        return RouteView(held=held, goal=goal, bytes=0, steps=[])
    finder = RouteFinder(bucket, run, held=held, goal=goal)
    route = finder.find()
    if route is None:
        return RouteView(held=held, goal=goal, bytes=0, steps=[], error=finder.error().message)
    return RouteView(
        held=held,
        goal=goal,
        bytes=route.bytes,
        steps=[
            RouteStep(kind=edge.kind, base=edge.base, target=edge.target, bytes=edge.bytes)
            for edge in route.edges
        ],
    )


def layer_and_part(name: str) -> tuple[int | None, str]:
    """Returns the layer of a tensor and its name in it; None and the name outside of layers."""
    found = _LAYER.search(name)
    if found is None:
        return None, name.removeprefix("model.")
    return int(found[1]), found[2]


def _keep(cache: OrderedDict[int, Any], version: int, value: Any) -> None:
    cache[version] = value
    while len(cache) > MAX_KEPT:
        cache.popitem(last=False)
