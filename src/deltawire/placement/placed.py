"""Loads live weights through a placement, patches them in place, and attests what they hold.

    prepare   any thread, while serving: checkpoint positions become positions in live storages;
              old bits come from the mirror, new ones from the patch, both converted to the live
              dtype; all is copied to the device. Memory: proportional to the changes.
    swap      between two steps: live bits must be the mirror's; scatter; read back; they must be
              the patch's. Otherwise everything is undone.

The subscriber has verified the mirror and the patch against the manifest, so bitwise equality with
them proves at least as much about the changed elements as a digest would. `prepare` also returns
the rank's share of the model's digest after the swap; the shares of all ranks must add up to the
manifest's digest before any rank swaps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray
from torch import Tensor

from deltawire import codec
from deltawire.codec import Bits, Digest, Patch
from deltawire.errors import BugError, CorruptError, InputError, ResyncError
from deltawire.placement.affine import AffineMap, row_major
from deltawire.placement.elements import (
    CARRIER,
    array_of,
    canonical_nans,
    chunks,
    decode_bits,
    digest_part,
    encode_bits,
    equal_bits,
    locate,
    tensor_of,
)
from deltawire.placement.layout import TORCH_DTYPES, describe_live
from deltawire.placement.moves import Move, Part
from deltawire.placement.moves import stage as stage_moves
from deltawire.placement.on_device import LiveDigest, kernels_of, on_host
from deltawire.placement.placement import (
    LoadWeights,
    MirroredRange,
    Placement,
    Region,
    assign_ownership,
)
from deltawire.sync.follow.mirror import Mirror


@dataclass(frozen=True, slots=True)
class Prepared:
    """A staged step from ``base`` to ``version``.

    ``share`` is this rank's share of the model's digest after it, ``mirrored`` the part of that
    which cannot be read back from live memory. ``dense`` holds the base and the target of tensors
    that go through the engine's loader.
    """

    base: int
    version: int
    share: Digest
    mirrored: Digest
    moves: list[Move]
    dense: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)

    @property
    def changes(self) -> int:
        """The number of live elements that change, without those of dense tensors."""
        return sum(move.changes for move in self.moves)

    @property
    def bytes(self) -> int:
        """The bytes allocated for it."""
        staged = sum(move.bytes for move in self.moves)
        return staged + sum(t.nbytes for pair in self.dense.values() for t in pair)


class PlacedWeights:
    """The live tensors of one rank, at ``version``; -1 if they hold none.

    ``load_weights`` is the engine's loader, for tensors that the placement could not place. Raises
    `InputError` if ``live`` is not laid out as when it was probed.

    Example::

        weights = PlacedWeights(probe(loader, run.tensors, live, aliases=run.aliases), live)
        weights.load(mirror)
        weights.swap(weights.prepare(update.patches, mirror, update.version, digest=update.digest))
    """

    def __init__(
        self,
        placement: Placement,
        live: Mapping[str, Tensor],
        *,
        load_weights: LoadWeights | None = None,
    ) -> None:
        placement.check(live)
        if not placement.assigned:
            placement = assign_ownership([placement])[0]
        if placement.unplaced and load_weights is None:
            name, why = next(iter(placement.unplaced.items()))
            raise InputError(f"tensor {name} needs the model's loader: {why}")
        self.placement = placement
        self.version = -1
        self._live = codec.ZERO
        self._mirrored = codec.ZERO
        self._load_weights = load_weights
        self._specs = {spec.name: spec for spec in placement.tensors}
        self._flats = [flat.view(CARRIER[flat.element_size()]) for flat in describe_live(live)[2]]
        self._mirrored_ranges: dict[str, list[MirroredRange]] = {}
        for share in placement.mirrored:
            name = placement.tensors[share.tensor].name
            self._mirrored_ranges.setdefault(name, []).append(share)

    @property
    def share(self) -> Digest:
        """This rank's share of the model's digest, as of the last load or swap."""
        return self._live + self._mirrored

    @property
    def mirrored(self) -> Digest:
        """The part of `share` that cannot be read back from live memory."""
        return self._mirrored

    @torch.no_grad()
    def load(self, mirror: Mirror) -> None:
        """Sets every placed element from ``mirror``, others with the engine's loader, and attests.

        Raises `InputError` if the mirror does not hold what this rank needs, `CorruptError` if the
        live memory does not hold what was written.
        """
        self.version = -1
        for name in self.placement.unplaced:
            self._load_dense({name: _dense(self._specs[name], _whole(mirror, name, self._specs))})
        for region, part in self._parts():
            self._set(region, part, mirror)
        self.adopt(mirror)

    def _set(self, region: Region, part: AffineMap, mirror: Mirror) -> None:
        name = self.placement.tensors[region.tensor].name
        bits = encode_bits(_gather(mirror, name, part), region.dtypes, region.scale)
        self._view(region, part).copy_(tensor_of(bits).view(part.shape))

    @torch.no_grad()
    def adopt(self, mirror: Mirror) -> None:
        """Accepts live tensors that were loaded in another way as the mirror's version.

        Compares every placed element, whichever rank counts it. Raises `CorruptError` naming the
        first tensor that differs.
        """
        self.version = -1
        self.verify(mirror)
        for region, part in self._parts():
            if not region.exact:  # Its NaNs may differ from those that a swap writes.
                self._set(region, part, mirror)
        self._mirrored = self._digest_mirrored(mirror)
        self._live = self._attest_live()
        self.version = mirror.version

    @torch.no_grad()
    def verify(self, mirror: Mirror) -> None:
        """Compares every placed element with ``mirror``, copies and converted ones included. Raises
        `CorruptError` naming the first tensor that differs."""
        for region, part in self._parts():
            name = self.placement.tensors[region.tensor].name
            expected = encode_bits(_gather(mirror, name, part), region.dtypes, region.scale)
            found = self._view(region, part).contiguous().view(-1)
            if not region.exact:
                values = found.view(TORCH_DTYPES[region.dtypes[-1]])
                found = canonical_nans(values).view(found.dtype)
            if not equal_bits(found, tensor_of(expected)):
                raise CorruptError(
                    f"the live weights of {name} differ from the mirror's", version=mirror.version
                )

    @torch.no_grad()
    def count_nonzero(self, name: str) -> int:
        """Counts the placed elements of the live tensor ``name`` whose bits are not all zero."""
        live = next(one for one in self.placement.live if one.name == name)
        first = live.offset
        last = first + sum((n - 1) * s for n, s in zip(live.shape, live.strides, strict=True))
        return sum(
            int(self._view(region, region.map).count_nonzero())
            for region in self.placement.regions
            if region.storage == live.storage and first <= region.map.target <= last
        )

    def attest(self) -> Digest:
        """Recomputes this rank's share in one pass over the live bits that it counts.

        Elements that cannot be read back (`Placement.mirrored`) are added from the mirror's last
        statement. Raises `CorruptError` if live bits were never published.
        """
        return self._attest_live() + self._mirrored

    @torch.no_grad()
    def _attest_live(self) -> Digest:
        total = codec.ZERO
        on_devices: dict[torch.device, LiveDigest] = {}
        for region in self.placement.regions:
            if not region.counts:
                continue
            name, flat = self.placement.tensors[region.tensor].name, self._flats[region.storage]
            if on_host(flat):
                for part in chunks(region.map):
                    total += self._digest_on_host(name, region, part)
                continue
            if flat.device not in on_devices:
                regions = len(self.placement.regions)
                on_devices[flat.device] = LiveDigest(flat.device, regions, kernels_of(flat.device))
            on_devices[flat.device].add(name, region, flat)
        return sum((digest.total() for digest in on_devices.values()), total)

    def _digest_on_host(self, name: str, region: Region, part: AffineMap) -> Digest:
        found = self._view(region, part).contiguous().view(-1)
        bits = decode_bits(array_of(found), region.dtypes)
        if bits is None:
            raise CorruptError(f"tensor {name} holds bits that were never published")
        return digest_part(name, part, bits)

    def prepare(
        self,
        patches: Mapping[str, Patch],
        mirror: Mirror,
        version: int,
        *,
        digest: Digest | None = None,
    ) -> Prepared:
        """Stages the step from the mirror's version, which must be the live one, to ``version``.

        Changes no weights, and may run while serving. ``patches`` hold positions counted from each
        tensor's first element; those that this rank does not hold are ignored. ``digest`` is the
        whole model's, for an engine of one rank; several ranks must add up their shares. Raises
        `ResyncError` if the mirror is at another version than the live weights, or the result
        would not have ``digest``.
        """
        if mirror.version != self.version:
            raise ResyncError(
                f"the live weights are at version {self.version}, the mirror at {mirror.version}",
                version=version,
            )
        stage = _Stage(len(self._flats))
        mirrored = codec.ZERO
        dense: dict[str, tuple[Tensor, Tensor]] = {}
        for name, whole in patches.items():
            regions = self.placement.by_tensor.get(name, [])
            shares = self._mirrored_ranges.get(name, [])
            if not regions and not shares and name not in self.placement.unplaced:
                continue
            patch, old = _held(mirror, name, whole)
            for region in regions:
                stage.add(name, region, patch, old)
            for own in shares:
                inside, _ = locate(_range_map(own), patch.positions)
                mirrored += _change(name, patch, old, inside)
            if name in self.placement.unplaced:
                base = _whole(mirror, name, self._specs)
                target = base.copy()
                target[patch.positions] = patch.bits
                spec = self._specs[name]
                dense[name] = (_dense(spec, base), _dense(spec, target))
        names = [storage.name for storage in self.placement.storages]
        moves = stage_moves(stage.parts, names, self._flats)
        share = self.share + stage.change + mirrored
        if digest is not None and share != digest:
            raise ResyncError(
                f"the live weights' digest would be {share.hex()}, not {digest.hex()}",
                version=version,
            )
        return Prepared(self.version, version, share, self._mirrored + mirrored, moves, dense)

    @torch.no_grad()
    def swap(self, prepared: Prepared) -> None:
        """Applies a prepared step, between two steps of the engine.

        If live bits are not the mirror's before, or not the patch's afterwards, keeps or restores
        the old bits and raises `ResyncError`: the weights always hold exactly one version. If even
        restoring fails, ``version`` is -1.
        """
        if prepared.base != self.version:
            raise ResyncError(
                f"prepared for version {prepared.base}, the live weights are at {self.version}",
                version=prepared.version,
            )
        self.version = -1
        begun: list[Move] = []
        try:
            if prepared.dense:
                self._load_dense({name: new for name, (_, new) in prepared.dense.items()})
            self._exchange(prepared.moves, begun)
        except BaseException:
            if prepared.dense:
                self._load_dense({name: old for name, (old, _) in prepared.dense.items()})
            for move in begun:
                move.restore_old()
            self.version = prepared.base
            raise
        self._mirrored = prepared.mirrored
        self._live = prepared.share - prepared.mirrored
        self.version = prepared.version

    def _exchange(self, moves: Sequence[Move], begun: list[Move]) -> None:
        """Applies all moves, recording in ``begun`` those that may have changed live bits. Raises
        `ResyncError` if live bits are not the old ones before, or not the new ones afterwards."""
        for move in moves:
            self._apply(move, begun)

    def _apply(self, move: Move, begun: list[Move]) -> None:
        begun.append(move)  # Record it first: a signal may interrupt the exchange.
        try:
            move.exchange()
        except ResyncError:
            begun.pop()  # It changed nothing.
            raise

    def _load_dense(self, tensors: Mapping[str, Tensor]) -> None:
        if self._load_weights is None:
            raise BugError("there is no loader for tensors that were not placed")
        self._load_weights(iter(tensors.items()))

    def _digest_mirrored(self, mirror: Mirror) -> Digest:
        total = codec.ZERO
        for name, shares in self._mirrored_ranges.items():
            for share in shares:
                for part in chunks(_range_map(share)):
                    total += digest_part(name, part, _gather(mirror, name, part))
        return total

    def _parts(self) -> Iterator[tuple[Region, AffineMap]]:
        for region in self.placement.regions:
            for part in chunks(region.map):
                yield region, part

    def _view(self, region: Region, part: AffineMap) -> Tensor:
        """Returns the live elements of a part of a region, in checkpoint order."""
        flat = self._flats[region.storage]
        return flat.as_strided(part.shape, part.target_strides, part.target)


class _Stage:
    """Collects the changes of each storage."""

    def __init__(self, storages: int) -> None:
        self.change = codec.ZERO
        self.parts: list[list[Part]] = [[] for _ in range(storages)]

    def add(self, name: str, region: Region, patch: Patch, old: Bits) -> None:
        """Adds the changes of a patch that lie in ``region``."""
        inside, index = locate(region.map, patch.positions)
        if not index.size:
            return
        self.parts[region.storage].append(
            (
                index,
                encode_bits(old[inside], region.dtypes, region.scale),
                encode_bits(patch.bits[inside], region.dtypes, region.scale),
            )
        )
        if region.counts:
            self.change += _change(name, patch, old, inside)


def _change(name: str, patch: Patch, old: Bits, inside: slice | NDArray[np.intp]) -> Digest:
    part = Patch(
        np.ascontiguousarray(patch.positions[inside]), np.ascontiguousarray(patch.bits[inside])
    )
    return codec.digest_patch(name, part, np.ascontiguousarray(old[inside]))


def _range_map(share: MirroredRange) -> AffineMap:
    return AffineMap(share.start, 0, share.shape, share.strides, row_major(share.shape))


def _gather(mirror: Mirror, name: str, part: AffineMap) -> Bits:
    """Returns the mirror's bits at the source positions of ``part``, uint[N]."""
    held = mirror.find(name, part.source, part.source_extent)
    if held is None:
        raise InputError(f"the mirror does not hold the part of {name} that is served")
    strides = tuple(stride * held.itemsize for stride in part.source_strides)
    return np.ascontiguousarray(as_strided(held, part.shape, strides)).reshape(-1)


def _held(mirror: Mirror, name: str, patch: Patch) -> tuple[Patch, Bits]:
    """Returns the part of a patch that the mirror holds, and the mirror's bits there."""
    bits = mirror.tensors.get(name)
    if bits is None:
        raise InputError(f"the mirror does not hold {name}")
    start = mirror.starts.get(name, 0)
    first, last = np.searchsorted(patch.positions, (start, start + bits.size))
    if (first, last) != (0, len(patch)):
        patch = Patch(patch.positions[first:last], patch.bits[first:last])
    taken: Bits = bits[patch.positions - start] if start else bits[patch.positions]
    return patch, taken


def _whole(mirror: Mirror, name: str, specs: Mapping[str, Any]) -> Bits:
    bits = mirror.find(name, 0, specs[name].count)
    if bits is None:
        raise InputError(f"the mirror does not hold all of {name}")
    return bits


def _dense(spec: Any, bits: Bits) -> Tensor:
    """Returns a checkpoint tensor with its own memory."""
    return tensor_of(bits.copy()).view(TORCH_DTYPES[spec.dtype]).view(spec.shape)
