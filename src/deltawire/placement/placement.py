"""Finds where the elements of a checkpoint lie in an engine's live tensors.

`probe` runs the engine's own loader once on tensors without memory and records what it copies
where. The result is a table of affine maps that gives, for every live element, the checkpoint
element that it holds, and lists those for which that is unknown.

Terms: a *storage* is the memory of one or several live tensors, named after the first of them; a
*region* is an affine map from a checkpoint tensor into a storage. A region *counts* if its elements
are part of its rank's digest: of several copies of an element, exactly one may count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from types import MappingProxyType

import msgspec
import torch
from torch import Tensor

from deltawire import codec
from deltawire.errors import InputError
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
    LiveTensor,
    Storage,
    address_range,
    describe_live,
    require_same,
)
from deltawire.placement.tracing import Copied, LiveMemory, Mixed, TracedMemory, Tracer, Write
from deltawire.wire.run import TensorSpec

LoadWeights = Callable[[Iterable[tuple[str, Tensor]]], object]
"""An engine's loader, which takes names and tensors as in a checkpoint."""

MAX_REGIONS = 1 << 21
MAX_ATTEMPTS = 64
"""How often the loader is run again without the tensors that it failed on."""


WIDENINGS = {("BF16", "F32"), ("F16", "F32")}
"""Conversions whose result holds all of the published bits."""


class Region(msgspec.Struct, frozen=True, array_like=True):
    """An affine map from checkpoint tensor number ``tensor`` to storage number ``storage``.

    ``dtypes`` are those that a value is converted through, from the published to the live one; a
    single one means that bits are copied unchanged. The converted value is multiplied by ``scale``.
    """

    tensor: int
    storage: int
    map: AffineMap
    dtypes: tuple[str, ...]
    counts: bool = True
    scale: float = 1.0

    @property
    def exact(self) -> bool:
        """Returns whether the published bits can be read back from the live ones."""
        return self.scale == 1.0 and (len(self.dtypes) == 1 or self.dtypes in WIDENINGS)

    @property
    def widened(self) -> bool:
        """Returns whether bf16 is served as float32, whose upper halves are the published bits."""
        return self.dtypes == ("BF16", "F32")


class MirroredRange(msgspec.Struct, frozen=True, array_like=True):
    """Elements of a checkpoint tensor, from ``start`` on, that have no live copy which can be read
    back; a rank counts them from its mirror."""

    tensor: int
    start: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class Placement(msgspec.Struct, frozen=True, dict=True):
    """The table of one rank.

    ``unplaced`` names the tensors that the loader does not only copy, with the reason: they are
    loaded whole with the engine's loader, and cannot be read back. ``uncovered`` counts, by live
    tensor, the elements that no checkpoint element is copied to. ``mirrored`` are elements that no
    rank can read back and that this rank counts from its mirror.
    """

    tensors: list[TensorSpec]
    storages: list[Storage]
    live: list[LiveTensor]
    regions: list[Region]
    unplaced: dict[str, str]
    uncovered: dict[str, int]
    mirrored: list[MirroredRange] = []
    assigned: bool = False
    """True once `assign_ownership` has decided which regions count."""

    @cached_property
    def by_tensor(self) -> dict[str, list[Region]]:
        """The regions of each checkpoint tensor, by its name."""
        found: dict[str, list[Region]] = {}
        for region in self.regions:
            found.setdefault(self.tensors[region.tensor].name, []).append(region)
        return found

    def wanted(self) -> dict[str, tuple[int, int] | None]:
        """Returns the tensors that this rank needs, and the rows of each (None: all), as
        `sync.load_mirror` takes them."""
        spans: dict[int, tuple[int, int]] = {}

        def need(tensor: int, start: int, stop: int) -> None:
            low, high = spans.get(tensor, (start, stop))
            spans[tensor] = (min(low, start), max(high, stop))

        for region in self.regions:
            need(region.tensor, region.map.source, region.map.source + region.map.source_extent)
        for share in self.mirrored:
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
        """Raises `InputError` if ``live`` is not laid out as when it was probed."""
        storages, tensors, _ = describe_live(live)
        if storages != self.storages or tensors != self.live:
            raise InputError(
                "the live tensors are not laid out as the placement says", hint="probe again"
            )


def _rows(spec: TensorSpec, start: int, stop: int) -> tuple[int, int] | None:
    if not spec.shape or (start == 0 and stop == spec.count):
        return None
    width = spec.count // spec.shape[0]
    return start // width, -(-stop // width)


def probe(
    load_weights: LoadWeights,
    tensors: Sequence[TensorSpec],
    live: Mapping[str, Tensor],
    *,
    aliases: Mapping[str, str] = MappingProxyType({}),
) -> Placement:
    """Finds where ``load_weights`` puts the elements of a checkpoint of ``tensors``.

    ``live`` are the engine's parameters and buffers by name. ``aliases`` are further names of tied
    tensors, under which the loader is offered them too: an engine may know another name than the
    one that the run stores. No live bit changes and no data is copied. Raises `InputError` if the
    loader still fails with the offending tensors left out, or replaces live tensors by others.
    """
    storages, held, flats = describe_live(live)
    offered, stored = _with_aliases(tensors, aliases)
    failed: dict[int, str] = {}
    for _ in range(MAX_ATTEMPTS):
        memories = [
            TracedMemory(flat.dtype, number, flat, real=True) for number, flat in enumerate(flats)
        ]
        ranges = [address_range(flat) for flat in flats]
        tracer = Tracer(memories, LiveMemory(ranges).find)
        current: list[int] = []
        try:
            with torch.no_grad(), tracer:
                load_weights(_stream(offered, failed, tracer, current))
        except Exception as error:  # a loader may raise any error
            blamed = (set(tracer.touched) or set(current)) - failed.keys()
            if not blamed:
                raise InputError(f"the model's loader fails: {_first_line(error)}") from error
            _blame(blamed, failed, offered, f"the loader fails: {_first_line(error)}")
            continue
        finally:
            require_same(live, held, flats)
        table = _Table(offered, stored, storages, held, memories)
        return table.finish(tracer, failed)
    raise InputError(f"the model's loader fails on more than {MAX_ATTEMPTS} kinds of tensors")


def _with_aliases(
    tensors: Sequence[TensorSpec], aliases: Mapping[str, str]
) -> tuple[list[TensorSpec], list[int]]:
    """Returns the tensors and then each alias as a tensor, and for each the number of the tensor
    that is stored."""
    numbers = {spec.name: number for number, spec in enumerate(tensors)}
    offered, stored = list(tensors), list(range(len(tensors)))
    for alias, name in aliases.items():
        if name in numbers:
            spec = tensors[numbers[name]]
            offered.append(TensorSpec(alias, spec.shape, spec.dtype))
            stored.append(numbers[name])
    return offered, stored


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
    """Leaves out the tensors that the loader failed on; if it failed on a similar one before, all
    tensors of that kind."""
    kinds = {_kind(tensors[number].name) for number in failed}
    repeated = {_kind(tensors[number].name) for number in blamed} & kinds
    for number, spec in enumerate(tensors):
        if number in blamed or _kind(spec.name) in repeated:
            failed.setdefault(number, why)


def _kind(name: str) -> str:
    """Returns a tensor's name without its numbers."""
    return ".".join("#" if part.isdecimal() else part for part in name.split("."))


class _Table:
    """Builds a placement from the recorded writes into live memory.

    ``tensors`` are those that the loader was offered, ``stored`` the number of the stored tensor
    for each; stored tensors come first.
    """

    def __init__(
        self,
        tensors: Sequence[TensorSpec],
        stored: Sequence[int],
        storages: list[Storage],
        held: list[LiveTensor],
        memories: Sequence[TracedMemory],
    ) -> None:
        self.tensors = list(tensors)
        self.stored = stored
        self.storages = storages
        self.held = held
        self.memories = memories
        self.regions: list[Region] = []
        self.unplaced: dict[int, str] = {}

    def finish(self, tracer: Tracer, failed: Mapping[int, str]) -> Placement:
        """Returns the placement."""
        self.unplaced = dict(failed)
        for number, memory in enumerate(self.memories):
            self._read(number, memory)
        placed = {region.tensor for region in self.regions}
        for number in tracer.read - placed:
            self.unplaced.setdefault(number, "the loader reads its value")
        for number, why in tracer.doubtful.items():
            self.unplaced.setdefault(number, why)
        regions = [region for region in self.regions if region.tensor not in self.unplaced]
        self._resolve_aliases(regions)
        if len(regions) > MAX_REGIONS:
            raise InputError(f"the model's weights are spread over {len(regions)} regions")
        return Placement(
            tensors=self.tensors,
            storages=self.storages,
            live=self.held,
            regions=sorted(regions, key=lambda r: (r.tensor, r.storage, r.map.source)),
            unplaced={self.tensors[n].name: why for n, why in sorted(self.unplaced.items())},
            uncovered=self._count_uncovered(regions),
        )

    def _resolve_aliases(self, regions: list[Region]) -> None:
        """Lets the regions of an alias be those of its tensor, which is placed if they are."""
        count = len(set(self.stored))
        named = {self.stored[region.tensor] for region in regions if region.tensor >= count}
        regions[:] = [
            msgspec.structs.replace(region, tensor=self.stored[region.tensor]) for region in regions
        ]
        self.tensors = self.tensors[:count]
        self.unplaced = {
            number: why
            for number, why in self.unplaced.items()
            if number < count and number not in named
        }

    def _read(self, number: int, memory: TracedMemory) -> None:
        """Adds the regions of one storage; of several writes to one element, the last counts."""
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
        """Records the part of a write that was not overwritten later."""
        origin = write.origin
        if isinstance(origin, Mixed):
            self._give_up(origin, origin.why)
            return
        dtypes = _dtypes(origin, self.tensors[origin.tensor].dtype, live_dtype)
        if dtypes is None:
            self._give_up(origin, f"its bits are reinterpreted in a {live_dtype} tensor")
            return
        whole = sum(part.count for part in free) == write.map.count
        parts = [write.map] if whole else [part.to_map("target") for part in free]
        simple = [final for part in parts for final in simplify(part)]
        found.setdefault((origin.tensor, dtypes), []).extend(simple)

    def _count_uncovered(self, regions: Sequence[Region]) -> dict[str, int]:
        """Returns how many elements of each live tensor no region leads to."""
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
    """Returns the dtypes that a value is converted through; None if its bits are reinterpreted as
    another dtype between two conversions."""
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


def assign_ownership(placements: Sequence[Placement]) -> list[Placement]:
    """Assigns every element of the model to exactly one rank's digest; returns the new tables.

    An element that several ranks hold, or one rank several times, counts where it comes first. One
    that no rank can read back is counted from its mirror by the first rank that holds it, or else
    by rank 0. Raises `InputError` if the tables belong to different runs, or split a tensor in
    incompatible ways.
    """
    if any(placement.tensors != placements[0].tensors for placement in placements):
        raise InputError("the ranks' placements belong to different runs")
    regions: list[list[Region]] = [[] for _ in placements]
    mirrored: list[list[MirroredRange]] = [[] for _ in placements]
    tables = [placement.by_tensor for placement in placements]
    for number, spec in enumerate(placements[0].tensors):
        held = [(rank, r) for rank, table in enumerate(tables) for r in table.get(spec.name, ())]
        try:
            taken = _count_once(spec, held, regions)
            left = _left_over(spec, taken)
        except NotAffineError as error:
            raise InputError(
                f"the ranks split tensor {spec.name} in incompatible ways: {error}"
            ) from error
        holder = held[0][0] if held else 0
        for rank, placement in enumerate(placements):
            if not held and spec.name in placement.unplaced:
                holder = rank
                break
        mirrored[holder] += [
            MirroredRange(number, m.source, m.shape, m.source_strides) for m in left
        ]
    return [
        msgspec.structs.replace(placement, regions=own, mirrored=shares, assigned=True)
        for placement, own, shares in zip(placements, regions, mirrored, strict=True)
    ]


def _count_once(
    spec: TensorSpec, held: Sequence[tuple[int, Region]], regions: list[list[Region]]
) -> Cover:
    """Splits the regions of one tensor into those that count and those that do not."""
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
    """Returns the elements of a tensor that no region counts."""
    if taken.count == spec.count:
        return []
    whole = AffineMap(0, 0, (spec.count,), (1,), (0,))
    free = [part for box in boxes_of(whole, taken.chain, "source") for part in taken.take(box)]
    return _simplified(replace(part, others=part.chain) for part in free)


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {(lines[0] if lines else '')[:200]}"
