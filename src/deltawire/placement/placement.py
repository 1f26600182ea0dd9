"""Where the elements of a checkpoint lie in an engine's live tensors.

Nobody tells: the engine's own loader is run once on tensors without memory, and what it copies
where is written down (`probe`). The result is a table of affine maps that says of every live
element which checkpoint element it holds, and lists what it cannot say.

Words: a *storage* is the memory of one or several live tensors, by the name of the first of them;
a *region* is an affine map from a checkpoint tensor into a storage. A region *counts* if the
digest of its rank takes its elements in: of copies of an element only one may.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Annotated, Any

import msgspec
import torch
from msgspec import Meta
from torch import Tensor

from deltawire import codec
from deltawire.errors import CorruptError, InputError
from deltawire.placement.affine import (
    AffineMap,
    Box,
    Cover,
    NotAffineError,
    boxes_of,
    chain_of,
    join,
    row_major,
    simplify,
)
from deltawire.placement.layout import (
    TORCH_DTYPES,
    WIRE_DTYPES,
    DtypeName,
    Index,
    LiveTensor,
    Name,
    Sizes,
    Storage,
    address_range,
    require_same,
    survey_live,
)
from deltawire.placement.tracing import Copied, LiveMemory, Memory, Mixed, Tracer, Write
from deltawire.wire.run import TensorSpec

LoadWeights = Callable[[Iterable[tuple[str, Tensor]]], object]
"""An engine's loader: takes names and tensors as a checkpoint has them."""

MAX_PLACEMENT_BYTES = 256 << 20
MAX_REGIONS = 1 << 21
MAX_ATTEMPTS = 64
"""So often the loader is run again without the tensors that it failed on."""


class Region(msgspec.Struct, frozen=True, array_like=True):
    """``map`` leads from checkpoint tensor number ``tensor`` to storage number ``storage``.

    ``dtypes`` are those that a value goes through, the published one first and the live one last;
    one alone means that bits are moved as they are.
    """

    tensor: Index
    storage: Index
    map: AffineMap
    dtypes: Annotated[tuple[DtypeName, ...], Meta(min_length=1, max_length=8)]
    counts: bool = True

    @property
    def exact(self) -> bool:
        """Whether the published bits can be read back from the live ones."""
        return len(self.dtypes) == 1 or self.widened

    @property
    def widened(self) -> bool:
        """Whether bf16 bits are the upper half of float32 ones."""
        return self.dtypes == ("BF16", "F32")


class Share(msgspec.Struct, frozen=True, array_like=True):
    """Elements of a checkpoint tensor, from ``start`` on: no live ones, or none that can be
    read back, for which a rank answers by its mirror."""

    tensor: Index
    start: Index
    shape: Sizes
    strides: Sizes


class Placement(msgspec.Struct, frozen=True, dict=True):
    """One rank's table.

    ``unplaced`` names the tensors whose way into live memory is more than copying, and why: they
    are loaded whole by the engine's loader, and cannot be read back. ``uncovered`` counts, by live
    tensor, elements that no checkpoint element was copied to. ``believed`` are elements of the
    model that no rank can read back and that this rank counts from its mirror.
    """

    fingerprint: Name
    tensors: list[TensorSpec]
    storages: list[Storage]
    live: list[LiveTensor]
    regions: Annotated[list[Region], Meta(max_length=MAX_REGIONS)]
    unplaced: dict[Name, str]
    uncovered: dict[Name, int]
    believed: list[Share] = []
    owned: bool = False
    """Whether `ownership` has said which regions count."""

    @cached_property
    def by_tensor(self) -> dict[str, list[Region]]:
        """The regions of each checkpoint tensor."""
        found: dict[str, list[Region]] = {}
        for region in self.regions:
            found.setdefault(self.tensors[region.tensor].name, []).append(region)
        return found

    def wanted(self) -> dict[str, tuple[int, int] | None]:
        """The tensors, and of each the rows, that this rank needs: what `sync.load_mirror` takes
        as ``wanted``."""
        spans: dict[int, tuple[int, int]] = {}

        def need(tensor: int, start: int, stop: int) -> None:
            low, high = spans.get(tensor, (start, stop))
            spans[tensor] = (min(low, start), max(high, stop))

        for region in self.regions:
            need(region.tensor, region.map.source, region.map.source + region.map.source_extent)
        for share in self.believed:
            whole = AffineMap(share.start, 0, share.shape, share.strides, share.strides)
            need(share.tensor, share.start, share.start + whole.source_extent)
        for number, spec in enumerate(self.tensors):
            if spec.name in self.unplaced:
                need(number, 0, spec.count)
        return {
            self.tensors[number].name: _rows(self.tensors[number], *span)
            for number, span in sorted(spans.items())
        }

    def check(self, live: Mapping[str, Tensor]) -> None:
        """Raises `InputError` if ``live`` is not laid out as when this table was made."""
        storages, tensors, _ = survey_live(live)
        if storages != self.storages or tensors != self.live:
            raise InputError("the live tensors are not those of the placement", hint="probe again")


def _rows(spec: TensorSpec, start: int, stop: int) -> tuple[int, int] | None:
    if not spec.shape or (start == 0 and stop == spec.count):
        return None
    width = spec.count // spec.shape[0]
    return start // width, -(-stop // width)


def fingerprint_of(
    tensors: Sequence[TensorSpec], live: Mapping[str, Tensor], about: Mapping[str, Any]
) -> str:
    """What a cached table must have been made for: the run's tensors, the layout of the live ones,
    and whatever else the engine knows ``about`` itself (class, configuration, parallel layout)."""
    storages, held, _ = survey_live(live)
    outline = (list(tensors), storages, held, sorted((k, repr(v)) for k, v in about.items()))
    return hashlib.sha256(msgspec.json.encode(outline)).hexdigest()


def encode_placement(placement: Placement) -> bytes:
    """A table as JSON, for a cache."""
    return msgspec.json.encode(placement)


def decode_placement(data: bytes, *, fingerprint: str) -> Placement:
    """A cached table. Raises `CorruptError` if it is damaged, or another one's."""
    if len(data) > MAX_PLACEMENT_BYTES:
        raise CorruptError(f"a placement of {len(data)} bytes")
    try:
        found = msgspec.json.decode(data, type=Placement)
    except (msgspec.DecodeError, RecursionError) as error:
        raise CorruptError(f"a damaged placement: {str(error)[:200]}") from error
    if found.fingerprint != fingerprint:
        raise CorruptError("the placement of another model", hint="probe again")
    if fault := _fault(found):
        raise CorruptError(f"a damaged placement: {fault}")
    return found


def _fault(found: Placement) -> str:
    for region in found.regions:
        if region.tensor >= len(found.tensors) or region.storage >= len(found.storages):
            return "a region of nothing"
        spec, storage = found.tensors[region.tensor], found.storages[region.storage]
        if fault := _map_fault(region.map, spec.count, storage.elements):
            return f"a region of {spec.name} {fault}"
        if any(name not in TORCH_DTYPES for name in region.dtypes):
            return f"a region of {spec.name} of unknown dtype"
        if region.dtypes[0] != spec.dtype:
            return f"a region of {spec.name} of another dtype"
        last = region.dtypes[-1]
        if codec.ITEMSIZE[last] != codec.ITEMSIZE.get(storage.dtype, 0):
            return f"a region of {spec.name} of another width than its storage"
    for share in found.believed:
        if share.tensor >= len(found.tensors):
            return "a share of nothing"
        whole = AffineMap(share.start, 0, share.shape, share.strides, share.strides)
        if fault := _map_fault(whole, found.tensors[share.tensor].count, 1 << 48):
            return f"a share that {fault}"
    return ""


def _map_fault(found: AffineMap, sources: int, targets: int) -> str:
    sizes = {len(found.shape), len(found.source_strides), len(found.target_strides)}
    numbers = (
        found.source, found.target, *found.shape, *found.source_strides, *found.target_strides
    )  # fmt: skip
    if len(sizes) != 1 or len(found.shape) > 16 or min(numbers) < 0 or max(numbers) > 1 << 48:
        return "is not a map"
    if simplify_or_none(found) != [found]:
        return "is not in its simplest form"
    if found.source + found.source_extent > sources:
        return "reaches outside of the tensor"
    if found.target + found.target_extent > targets:
        return "reaches outside of the storage"
    return ""


def simplify_or_none(found: AffineMap) -> list[AffineMap] | None:
    """As `affine.simplify`, None where that raises."""
    try:
        return simplify(found)
    except NotAffineError:
        return None


def probe(
    load_weights: LoadWeights,
    tensors: Sequence[TensorSpec],
    live: Mapping[str, Tensor],
    *,
    about: Mapping[str, Any] | None = None,
) -> Placement:
    """Find out where ``load_weights`` puts the elements of a checkpoint of ``tensors``.

    ``live`` are the engine's tensors by name, parameters and buffers. No live bit is changed and
    nothing is moved. Raises `InputError` if the loader fails for a reason that leaving tensors out
    does not mend, or replaces live tensors by others.
    """
    storages, held, flats = survey_live(live)
    failed: dict[int, str] = {}
    for _ in range(MAX_ATTEMPTS):
        memories = [
            Memory(flat.dtype, number, flat, real=True) for number, flat in enumerate(flats)
        ]
        ranges = [address_range(flat) for flat in flats]
        tracer = Tracer(memories, LiveMemory(ranges).find)
        current: list[int] = []
        try:
            with torch.no_grad(), tracer:
                load_weights(_stream(tensors, failed, tracer, current))
        except Exception as error:  # a loader raises whatever it likes
            blamed = (set(tracer.touched) or set(current)) - failed.keys()
            if not blamed:
                raise InputError(f"the model's loader fails: {_first_line(error)}") from error
            _blame(blamed, failed, tensors, f"the loader fails: {_first_line(error)}")
            continue
        finally:
            require_same(live, held, flats)
        table = _Table(tensors, storages, held, memories)
        return table.finish(tracer, failed, fingerprint_of(tensors, live, about or {}))
    raise InputError(f"the model's loader fails on more than {MAX_ATTEMPTS} kinds of tensors")


def _stream(
    tensors: Sequence[TensorSpec], failed: Mapping[int, str], tracer: Tracer, current: list[int]
) -> Iterator[tuple[str, Tensor]]:
    for number, spec in enumerate(tensors):
        if number in failed:
            continue
        tensor = torch.empty(spec.shape, dtype=TORCH_DTYPES[spec.dtype], device="meta")
        tracer.watch(tensor, number)
        current[:] = [number]
        tracer.touched = frozenset()
        yield spec.name, tensor


def _blame(
    blamed: set[int], failed: dict[int, str], tensors: Sequence[TensorSpec], why: str
) -> None:
    """Leave out what a loader failed on; if it failed on its like before, all of the kind."""
    kinds = {_kind(tensors[number].name) for number in failed}
    repeated = {_kind(tensors[number].name) for number in blamed} & kinds
    for number, spec in enumerate(tensors):
        if number in blamed or _kind(spec.name) in repeated:
            failed.setdefault(number, why)


def _kind(name: str) -> str:
    """A tensor's name without its numbers."""
    return ".".join("#" if part.isdecimal() else part for part in name.split("."))


class _Table:
    """Makes a placement of what was written into live memory."""

    def __init__(
        self,
        tensors: Sequence[TensorSpec],
        storages: list[Storage],
        held: list[LiveTensor],
        memories: Sequence[Memory],
    ) -> None:
        self.tensors = list(tensors)
        self.storages = storages
        self.held = held
        self.memories = memories
        self.regions: list[Region] = []
        self.unplaced: dict[int, str] = {}

    def finish(self, tracer: Tracer, failed: Mapping[int, str], fingerprint: str) -> Placement:
        """The table."""
        self.unplaced = dict(failed)
        for number, memory in enumerate(self.memories):
            self._read(number, memory)
        placed = {region.tensor for region in self.regions}
        for number in tracer.read - placed:
            self.unplaced.setdefault(number, "the loader reads its value")
        for number, why in tracer.doubtful.items():
            self.unplaced.setdefault(number, why)
        regions = [region for region in self.regions if region.tensor not in self.unplaced]
        if len(regions) > MAX_REGIONS:
            raise InputError(f"the model's weights lie in {len(regions)} regions")
        return Placement(
            fingerprint=fingerprint,
            tensors=self.tensors,
            storages=self.storages,
            live=self.held,
            regions=sorted(regions, key=lambda r: (r.tensor, r.storage, r.map.source)),
            unplaced={self.tensors[n].name: why for n, why in sorted(self.unplaced.items())},
            uncovered=self._count_uncovered(regions),
        )

    def _read(self, number: int, memory: Memory) -> None:
        """The regions of one storage: of what was written twice, the last."""
        inside = [tensor for tensor in self.held if tensor.storage == number]
        preferred = [stride for tensor in inside for stride in tensor.strides]
        chain = chain_of([write.map for write in memory.writes], "target", preferred)
        written, copied = Cover(chain), Cover(chain)
        found: dict[tuple[int, tuple[str, ...]], list[AffineMap]] = {}
        for write in reversed(memory.writes):
            if not write.map.count:
                continue
            origin = write.origin
            try:
                boxes = boxes_of(write.map, chain, "target")
                free = [part for box in boxes for part in written.take(box)]
                self._take(write, free, found, self.storages[number].dtype)
            except NotAffineError as error:
                self._give_up(origin, str(error))
                continue
            if isinstance(origin, Copied):
                for part in free:
                    copied.take(part)
            elif origin.tensors and any(copied.shared(box) for box in boxes):
                raise InputError(
                    f"the model's loader computes with {self._names(origin)} and copies over it in "
                    f"{self.storages[number].name}"
                )
        for (tensor, dtypes), maps in found.items():
            self.regions += [Region(tensor, number, part, dtypes) for part in join(maps)]

    def _take(
        self,
        write: Write,
        free: list[Box],
        found: dict[tuple[int, tuple[str, ...]], list[AffineMap]],
        live_dtype: str,
    ) -> None:
        """Note what of a write was not written over later."""
        origin = write.origin
        if isinstance(origin, Mixed):
            self._give_up(origin, origin.why)
            return
        dtypes = _dtypes(origin, self.tensors[origin.tensor].dtype, live_dtype)
        if dtypes is None:
            self._give_up(origin, f"its bits are taken for others in a {live_dtype} tensor")
            return
        whole = sum(part.count for part in free) == write.map.count
        parts = [write.map] if whole else [part.to_map("target") for part in free]
        simple = [final for part in parts for final in simplify(part)]
        found.setdefault((origin.tensor, dtypes), []).extend(simple)

    def _count_uncovered(self, regions: Sequence[Region]) -> dict[str, int]:
        """How many elements of each live tensor no region leads to."""
        by_storage: dict[int, list[AffineMap]] = {}
        for region in regions:
            by_storage.setdefault(region.storage, []).append(region.map)
        covers: dict[int, Cover] = {}
        found: dict[str, int] = {}
        for tensor in self.held:
            if tensor.storage not in covers:
                maps = by_storage.get(tensor.storage, [])
                chain = chain_of(maps, "target", tensor.strides)
                covers[tensor.storage] = cover = Cover(chain)
                for box in (box for m in maps for box in boxes_of(m, chain, "target")):
                    cover.take(box)
            cover = covers[tensor.storage]
            nowhere = (0,) * len(tensor.shape)
            outline = AffineMap(0, tensor.offset, tensor.shape, nowhere, tensor.strides)
            missing = sum(
                box.count - sum(part.count for part in cover.shared(box))
                for box in boxes_of(outline, cover.chain, "target")
            )
            if missing:
                found[tensor.name] = missing
        return found

    def _names(self, origin: Copied | Mixed) -> str:
        return ", ".join(self.tensors[number].name for number in sorted(origin.tensors)[:3])

    def _give_up(self, origin: Copied | Mixed, why: str) -> None:
        for number in origin.tensors:
            self.unplaced.setdefault(number, why)


def _dtypes(origin: Copied, published: str, live: str) -> tuple[str, ...] | None:
    """The dtypes that a value goes through; None if its bits are taken for another dtype's between
    two conversions."""
    first, *steps = origin.dtypes
    if WIRE_DTYPES[first] != published:
        return None
    passed = [first]
    for read, written in zip(steps[::2], steps[1::2], strict=True):
        if read != passed[-1]:
            return None
        passed.append(written)
    if any(dtype not in WIRE_DTYPES for dtype in passed):
        return None
    names = [WIRE_DTYPES[dtype] for dtype in passed]
    if len(names) > 1 and names[-1] != live:
        return None
    return tuple(names) if codec.ITEMSIZE[names[-1]] == codec.ITEMSIZE[live] else None


def ownership(placements: Sequence[Placement]) -> list[Placement]:
    """The tables of all ranks of one engine, so that every element of the model counts once.

    What several ranks hold, or one rank several times, counts where it comes first. What nobody
    can read back is believed by the first rank that holds it at all, else by the first of all.
    Raises `InputError` if the tables are not of one run, or divide a tensor in ways that have no
    common measure.
    """
    if any(placement.tensors != placements[0].tensors for placement in placements):
        raise InputError("the ranks' placements are of different runs")
    regions: list[list[Region]] = [[] for _ in placements]
    believed: list[list[Share]] = [[] for _ in placements]
    tables = [placement.by_tensor for placement in placements]
    for number, spec in enumerate(placements[0].tensors):
        held = [(rank, r) for rank, table in enumerate(tables) for r in table.get(spec.name, ())]
        try:
            taken = _count_once(spec, held, regions)
            left = _left_over(spec, taken)
        except NotAffineError as error:
            raise InputError(f"tensor {spec.name} is divided strangely: {error}") from error
        holder = held[0][0] if held else 0
        for rank, placement in enumerate(placements):
            if not held and spec.name in placement.unplaced:
                holder = rank
                break
        believed[holder] += [Share(number, m.source, m.shape, m.source_strides) for m in left]
    return [
        msgspec.structs.replace(placement, regions=own, believed=shares, owned=True)
        for placement, own, shares in zip(placements, regions, believed, strict=True)
    ]


def _count_once(
    spec: TensorSpec, held: Sequence[tuple[int, Region]], regions: list[list[Region]]
) -> Cover:
    """Divide the regions of one tensor into those that count and those that do not."""
    chain = chain_of([region.map for _, region in held], "source", row_major(spec.shape))
    cover = Cover(chain)
    for rank, region in held:
        if not region.exact:
            regions[rank].append(msgspec.structs.replace(region, counts=False))
            continue
        boxes = boxes_of(region.map, chain, "source")
        twice = [part for box in boxes for part in cover.shared(box)]
        once = [part for box in boxes for part in cover.take(box)]
        for parts, counts in ((once, True), (twice, False)):
            whole = sum(part.count for part in parts) == region.map.count
            maps = [region.map] if whole else join(_simplified(parts))
            regions[rank] += [msgspec.structs.replace(region, map=m, counts=counts) for m in maps]
    return cover


def _simplified(parts: Iterable[Box]) -> list[AffineMap]:
    return [final for part in parts for final in simplify(part.to_map("source"))]


def _left_over(spec: TensorSpec, taken: Cover) -> list[AffineMap]:
    """The elements of a tensor that nobody counts."""
    if taken.count == spec.count:
        return []
    whole = AffineMap(0, 0, (spec.count,), (1,), (0,))
    free = [part for box in boxes_of(whole, taken.chain, "source") for part in taken.take(box)]
    return _simplified(replace(part, others=part.chain) for part in free)


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {(lines[0] if lines else '')[:200]}"
