"""Traces a checkpoint loader without letting it copy any data.

The loader gets tensors without memory. Each has its own storage, so the offset, shape and strides
of any view say which checkpoint elements it contains. Every operation is intercepted below
autograd: copies into live tensors are recorded instead of done, copies through the loader's own
buffers are followed, and the result of anything else that is computed from a checkpoint tensor is
marked as mixed. No operation reaches a live tensor's memory.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from deltawire.placement.affine import (
    AffineMap,
    Box,
    NotAffineError,
    boxes_of,
    chain_of,
    intersect,
    row_major,
    simplify,
    subtract,
    through,
)

_aten = torch.ops.aten
_DUPLICATES = (_aten.clone.default, _aten._to_copy.default, _aten.lift_fresh_copy.default)
_FACTORIES = {
    _aten.empty.memory_format,
    _aten.empty_strided.default,
    _aten.zeros.default,
    _aten.ones.default,
    _aten.full.default,
    _aten.empty_like.default,
    _aten.zeros_like.default,
    _aten.ones_like.default,
    _aten.full_like.default,
    _aten.new_empty.default,
    _aten.new_empty_strided.default,
    _aten.new_zeros.default,
    _aten.new_ones.default,
    _aten.new_full.default,
}
_LARGE = 1 << 14
"""A loader's buffers of at least this many elements get no memory."""


@dataclass(frozen=True)
class Copied:
    """Elements of checkpoint tensor number ``tensor``, converted through ``dtypes``."""

    tensor: int
    dtypes: tuple[torch.dtype, ...]

    @property
    def tensors(self) -> frozenset[int]:
        """The tensor as a set, as in `Mixed`."""
        return frozenset({self.tensor})


@dataclass(frozen=True)
class Mixed:
    """A value computed from these checkpoint tensors; from none, it is a constant."""

    tensors: frozenset[int]
    why: str = ""


@dataclass
class Write:
    """One recorded write: ``map`` leads from the checkpoint tensor, if there is one, to flat
    elements of the memory."""

    origin: Copied | Mixed
    map: AffineMap


@dataclass
class TracedMemory:
    """A storage and the writes into it, oldest first.

    ``live`` is its number among the live storages, -1 for the loader's own. ``keep`` references the
    storage, so that its address is not reused.
    """

    dtype: torch.dtype
    live: int
    keep: object
    writes: list[Write] = field(default_factory=list)
    real: bool = False


class LiveMemory:
    """Finds live storages by address: maps byte ranges to storage numbers."""

    def __init__(self, ranges: Sequence[tuple[int, int]]) -> None:
        order = sorted(range(len(ranges)), key=lambda i: ranges[i])
        self._starts = [ranges[i][0] for i in order]
        self._ends = [ranges[i][1] for i in order]
        self._numbers = order

    def find(self, tensor: Tensor) -> int | None:
        """Returns the number of the storage that ``tensor`` lies in; None if it is not live."""
        if tensor.device.type == "meta" or tensor.layout != torch.strided:
            return None
        address = tensor.untyped_storage().data_ptr()
        at = bisect_right(self._starts, address) - 1
        if at < 0 or address >= self._ends[at]:
            return None
        return self._numbers[at]


class Tracer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Intercepts all operations of the thread while it is entered."""

    def __init__(
        self, live: Sequence[TracedMemory], find_live: Callable[[Tensor], int | None]
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = live
        self.doubtful: dict[int, str] = {}
        """Checkpoint tensors that were not only copied, and what the loader did with them."""
        self.read: set[int] = set()
        """Checkpoint tensors whose values the loader asked for."""
        self.touched: frozenset[int] = frozenset()
        """Checkpoint tensors of the latest operation."""
        self._find_live = find_live
        self._memories: dict[int, TracedMemory] = {}
        self._values: dict[float | int, AffineMap | None] = {}
        self._value_of: dict[float | int, Copied] = {}
        self._counter = itertools.count(1)

    def watch(self, tensor: Tensor, number: int) -> None:
        """Lets ``tensor`` stand for checkpoint tensor ``number``."""
        count = tensor.numel()
        whole = AffineMap(0, 0, (count,), (1,), (1,))
        memory = self._remember(tensor)
        memory.writes = [Write(Copied(number, (tensor.dtype,)), whole)]

    def _remember(self, tensor: Tensor, *, real: bool = False) -> TracedMemory:
        storage = tensor.untyped_storage()
        memory = TracedMemory(tensor.dtype, -1, storage, real=real)
        self._memories[storage._cdata] = memory
        return memory

    def _memory(self, tensor: Tensor) -> TracedMemory | None:
        """Returns the record of a tensor's storage, live or the loader's; None if there is none."""
        number = self._find_live(tensor)
        if number is not None:
            return self.live[number]
        return self._memories.get(tensor.untyped_storage()._cdata)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Handles one operation; torch calls it."""
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        memories = [self._memory(tensor) for tensor in tensors]
        tracked = [m for m in memories if m is not None and m.live < 0]
        if tracked:
            self.touched = frozenset().union(*(_sources(memory) for memory in tracked))
        written = _written(func, args, kwargs)
        if written:
            return self._write(func, args, kwargs, written, bool(tracked))
        if func in _FACTORIES:
            return self._make(func, args, kwargs)
        if not tracked or _is_view(func):
            return func(*args, **kwargs)
        if func is _aten._unsafe_view.default:
            return func(*args, **kwargs)
        if func in _DUPLICATES:
            return self._duplicate(func, args, kwargs)
        if func is _aten.cat.default:
            return self._gather(func, args, kwargs, stacked=False)
        if func is _aten.stack.default:
            return self._gather(func, args, kwargs, stacked=True)
        if func is _aten.constant_pad_nd.default:
            return self._pad(func, args, kwargs)
        if func is _aten._local_scalar_dense.default:
            return self._read(args[0])
        return self._combine(func, args, kwargs)

    def _write(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        written: list[Tensor],
        tracked: bool,
    ) -> Any:
        """Records an operation that changes tensors in place."""
        targets = [self._memory(tensor) for tensor in written]
        if not tracked and all(memory is None for memory in targets):
            return func(*args, **kwargs)
        if func is _aten.copy_.default:
            self._copy(args[1], args[0])
        elif func in (_aten.fill_.Scalar, _aten.fill_.Tensor) and isinstance(args[1], (int, float)):
            self._fill(args[0], args[1])
        else:
            names = _union(
                self._memory(leaf)
                for leaf in tree_leaves((args, kwargs))
                if isinstance(leaf, Tensor) and not any(leaf is target for target in written)
            )
            names |= _union(m for m in targets if m is not None and m.live < 0)
            for tensor in written:
                self._mark(tensor, Mixed(names, f"the loader calls {func} on it"))
        return written[0] if len(written) == 1 else tuple(written)

    def _copy(self, source: Tensor, target: Tensor) -> None:
        """Records ``target.copy_(source)``."""
        origin = self._memory(source)
        into = self._memory(target)
        if origin is None or origin.live >= 0:
            self._mark(target, Mixed(frozenset()))
            return
        if into is None:
            into = self._remember(target, real=True)
        seen = source.expand(target.shape)
        for write in self._view(seen, origin):
            if isinstance(write.origin, Mixed):
                self._append(into, target, write)
                continue
            copied = _converted(write.origin, source.dtype, target.dtype)
            self._append(into, target, Write(copied, write.map))

    def _view(self, seen: Tensor, memory: TracedMemory) -> list[Write]:
        """Returns what the elements of ``seen`` hold, as maps whose target is the position in a
        walk over ``seen``."""
        read = AffineMap(
            int(seen.storage_offset()),
            0,
            tuple(seen.shape),
            tuple(seen.stride()),
            row_major(seen.shape),
        )
        return _resolve(read, memory, seen)

    def _append(self, into: TracedMemory, target: Tensor, write: Write) -> None:
        """Records ``write``, whose target is the position in a walk over ``target``."""
        origin = write.origin
        if target.dtype.itemsize != into.dtype.itemsize:
            origin = Mixed(origin.tensors, "it is written with another width")
        try:
            for found in _relocate(write.map, target):
                into.writes.append(Write(origin, found))
        except NotAffineError as error:
            self._mark(target, Mixed(origin.tensors, f"it is scattered: {error}"))

    def _mark(self, target: Tensor, origin: Mixed) -> None:
        """Records that all of ``target`` now holds something other than copies."""
        for number in origin.tensors:
            self.doubtful.setdefault(number, origin.why)
        memory = self._memory(target)
        if memory is None:
            memory = self._remember(target, real=True)
        strides = tuple(target.stride())
        nowhere = (0,) * target.dim()
        found = AffineMap(0, int(target.storage_offset()), tuple(target.shape), nowhere, strides)
        memory.writes.append(Write(origin, found))

    def _fill(self, target: Tensor, value: float) -> None:
        """Records a fill with a constant, or with a checkpoint element's value as read before."""
        copied = self._value_of.get(value)
        place = self._values.get(value)
        if copied is None or place is None:
            self._mark(target, Mixed(frozenset()))
            return
        memory = self._memory(target) or self._remember(target, real=True)
        spread = AffineMap(
            place.source, 0, tuple(target.shape), (0,) * target.dim(), row_major(target.shape)
        )
        converted = _converted(copied, copied.dtypes[-1], target.dtype)
        self._append(memory, target, Write(converted, spread))

    def _read(self, tensor: Tensor) -> float | int:
        """Returns a unique value in place of an element's unknown one."""
        memory = self._memory(tensor)
        assert memory is not None
        number = next(self._counter)
        value: float | int = (1 << 40) + number
        if tensor.is_floating_point():
            value = -(2.0**100) * (1 + number * 2.0**-40)
        held = self._view(tensor.reshape(1), memory)
        if len(held) == 1 and isinstance(held[0].origin, Copied):
            self._value_of[value], self._values[value] = held[0].origin, held[0].map
        else:
            self._values[value] = None
        self.read |= _sources(memory)
        return value

    def _make(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """Makes a buffer for the loader, without memory if it is large."""
        made: Tensor = func(*_without_memory(args), **{**kwargs, "device": "meta"})
        like_meta = (
            any(isinstance(arg, Tensor) and arg.device.type == "meta" for arg in args)
            and "device" not in kwargs
        )
        if made.is_floating_point() and (like_meta or made.numel() >= _LARGE):
            self._remember(made)
            return made
        real: Tensor = func(*args, **kwargs)
        return real

    def _duplicate(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """Makes and records a copy, possibly in another dtype or layout."""
        source = args[0]
        kwargs = {name: value for name, value in kwargs.items() if name not in _PLACE}
        made: Tensor = func(_without_memory(source), *args[1:], **kwargs)
        self._remember(made)
        self._copy(source, made)
        return made

    def _gather(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, stacked: bool
    ) -> Tensor:
        """Records ``torch.cat`` or ``torch.stack``."""
        parts = args[0]
        dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
        made: Tensor = func(_without_memory(parts), dim)
        self._remember(made)
        at = 0
        for number, part in enumerate(parts):
            if stacked:
                self._copy(part, made.select(dim, number))
                continue
            if part.dim() == 1 and part.shape[0] == 0:
                continue
            self._copy(part, made.narrow(dim, at, part.shape[dim]))
            at += part.shape[dim]
        return made

    def _pad(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """Records ``F.pad`` with a constant."""
        source, widths = args[0], args[1]
        made: Tensor = func(_without_memory(source), *args[1:], **kwargs)
        self._remember(made)
        self._mark(made, Mixed(frozenset()))
        inner, outer = made, source
        for index in range(len(widths) // 2):
            before, after = widths[2 * index], widths[2 * index + 1]
            dim = source.dim() - 1 - index
            size = source.shape[dim]
            skip = max(0, -before)
            inner = inner.narrow(dim, max(0, before), size + min(0, before) + min(0, after))
            outer = outer.narrow(dim, skip, size + min(0, before) + min(0, after))
        self._copy(outer, inner)
        return made

    def _combine(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Records any other operation on checkpoint tensors: its results hold no copies."""
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        names = _union(self._memory(tensor) for tensor in tensors)
        origin = Mixed(names, f"the loader calls {func} on it")
        for name in names:
            self.doubtful.setdefault(name, origin.why)
        made = func(*_without_memory(args), **_without_memory(kwargs))
        for leaf in tree_leaves(made):
            if isinstance(leaf, Tensor):
                if self._memory(leaf) is None:
                    self._remember(leaf)
                self._mark(leaf, origin)
        return made


_PLACE = ("device", "pin_memory", "non_blocking", "layout")


def _sources(memory: TracedMemory) -> frozenset[int]:
    return frozenset().union(*(write.origin.tensors for write in memory.writes))


def _union(memories: Any) -> frozenset[int]:
    found = [_sources(m) for m in memories if m is not None and m.live < 0]
    return frozenset().union(*found)


def _without_memory(values: Any) -> Any:
    return tree_map_only(Tensor, lambda tensor: tensor.to("meta"), values)


def _converted(origin: Copied, read_as: torch.dtype, written_as: torch.dtype) -> Copied:
    """Returns the origin after a copy between these dtypes; equal dtypes keep the bits."""
    if read_as == written_as:
        return origin
    return Copied(origin.tensor, (*origin.dtypes, read_as, written_as))


def _resolve(read: AffineMap, memory: TracedMemory, seen: Tensor) -> list[Write]:
    """Returns what ``read`` finds in a memory: at each position, the last write."""
    if seen.dtype.itemsize != memory.dtype.itemsize:
        whole = AffineMap(0, 0, read.shape, (0,) * len(read.shape), read.target_strides)
        return [Write(Mixed(_sources(memory), "it is read with another width"), whole)]
    only = memory.writes[0] if len(memory.writes) == 1 else None
    if only is not None and isinstance(only.origin, Copied) and _is_identity(only.map):
        return [Write(only.origin, read)]
    try:
        return _look_up(read, memory.writes)
    except NotAffineError as error:
        whole = AffineMap(0, 0, read.shape, (0,) * len(read.shape), read.target_strides)
        return [Write(Mixed(_sources(memory), f"it is rearranged: {error}"), whole)]


def _is_identity(found: AffineMap) -> bool:
    return (found.source, found.target) == (0, 0) and found.source_strides == found.target_strides


def _look_up(read: AffineMap, writes: Sequence[Write]) -> list[Write]:
    chain = chain_of([*(w.map for w in writes)], "target", read.source_strides)
    left: list[Box] = []
    for part in simplify(read):
        left += boxes_of(part, chain, "source")
    found: list[Write] = []
    for write in reversed(writes):
        for box in _boxes_written(write.map, chain):
            remaining: list[Box] = []
            for wanted in left:
                common = intersect(wanted, box)
                if common is None:
                    remaining.append(wanted)
                    continue
                found.append(Write(write.origin, through(*common)))
                remaining += subtract(wanted, box)
            left = remaining
        if not left:
            break
    unknown = Mixed(frozenset())
    return [*found, *(Write(unknown, box.to_map("source")) for box in left)]


def _boxes_written(found: AffineMap, chain: tuple[int, ...]) -> list[Box]:
    return boxes_of(found, chain, "target") if found.count else []


def _relocate(found: AffineMap, target: Tensor) -> list[AffineMap]:
    """Converts a map onto positions in a walk over ``target`` to one onto its memory."""
    strides = tuple(target.stride())
    if found.shape == tuple(target.shape) and found.target_strides == row_major(target.shape):
        return [
            AffineMap(
                found.source,
                int(target.storage_offset()),
                found.shape,
                found.source_strides,
                strides,
            )
        ]
    walked = row_major(target.shape)
    walk = AffineMap(0, int(target.storage_offset()), tuple(target.shape), walked, strides)
    chain = chain_of([found], "target", walked)
    inner = boxes_of(found, chain, "target")
    maps = []
    for outer in (box for part in simplify(walk) for box in boxes_of(part, chain, "source")):
        for box in inner:
            common = intersect(outer, box)
            if common is not None:
                maps.append(through(*common))
    return maps


def _is_view(func: Any) -> bool:
    returns = func._schema.returns
    return any(r.alias_info is not None and not r.alias_info.is_write for r in returns)


def _written(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Returns the tensors that an operation changes in place."""
    found = []
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[index] if index < len(args) else kwargs.get(argument.name)
        found += [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
    return found
