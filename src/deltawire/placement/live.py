"""Serves a run's weights from an ``nn.Module`` whose tensors have the published names.

The published tensors are those that a checkpoint saves: parameters and persistent buffers, such as
the router biases of DeepSeek-V3 and GLM-4 that balance the load of experts.

The published dtype may be narrower than the served one: bf16 bits are served as float32 on machines
without bf16 arithmetic. Widening is exact, so the published bits can always be read back from the
parameters; the digest is computed from the parameters and not from a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType

import torch

from deltawire.codec import Digest, Patch
from deltawire.errors import CorruptError, InputError
from deltawire.placement.affine import AffineMap
from deltawire.placement.layout import WIRE_DTYPES, describe_live
from deltawire.placement.placed import PlacedWeights, Prepared
from deltawire.placement.placement import WIDENINGS, Placement, Region
from deltawire.sync.follow.mirror import Mirror
from deltawire.wire.run import TensorSpec

_NAMES = "_deltawire_published_names"
_ONLY = "_deltawire_published_prefix"
_VIEWS = "_deltawire_published_views"


def identity(tensors: Sequence[TensorSpec], weights: Mapping[str, torch.Tensor]) -> Placement:
    """Returns the placement of weights that equal the published tensors of the same names.

    Raises `InputError` if names or shapes differ, or a dtype cannot be served exactly.
    """
    specs = {spec.name: spec for spec in tensors}
    if weights.keys() != specs.keys():
        odd = sorted(weights.keys() ^ specs.keys())
        raise InputError(f"model and run name different tensors: {odd[:5]}")
    storages, live, _ = describe_live(weights)
    numbers = {spec.name: number for number, spec in enumerate(tensors)}
    places = {one.name: one for one in live}
    regions = []
    for name, weight in weights.items():
        spec, dtype = specs[name], WIRE_DTYPES.get(weight.dtype, str(weight.dtype))
        if tuple(weight.shape) != spec.shape or not weight.is_contiguous():
            raise InputError(f"tensor {name} is {tuple(weight.shape)}, the run's is {spec.shape}")
        if dtype != spec.dtype and (spec.dtype, dtype) not in WIDENINGS:
            raise InputError(
                f"tensor {name} is published as {spec.dtype} and cannot be served as {weight.dtype}"
            )
        if name in places:  # A tensor without elements has no place.
            place = places[name]
            through = (dtype,) if dtype == spec.dtype else (spec.dtype, dtype)
            whole = AffineMap(0, place.offset, (spec.count,), (1,), (1,))
            regions.append(Region(numbers[name], place.storage, whole, through))
    return Placement(
        list(tensors),
        storages,
        live,
        regions,
        unplaced={},
        uncovered={},
        assigned=True,
    )


def saved_buffers(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Returns the buffers that a checkpoint of the model holds, by name, shared ones once."""
    saved = model.state_dict().keys()
    return {name: buffer for name, buffer in model.named_buffers() if name in saved}


def module_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Returns a model's published tensors themselves, not copies: parameters, tied ones once, and
    saved buffers. Tensors that `rename_published` renamed have their new names, those that
    `publish_only` leaves out are not among them, and `publish_views` gives views of some.
    """
    names: dict[str, str] = getattr(model, _NAMES, {})
    held = {**dict(model.named_parameters()), **saved_buffers(model)}
    instead, views = getattr(model, _VIEWS, (frozenset(), dict))
    held = {name: one for name, one in held.items() if name not in instead} | views()
    only: str = getattr(model, _ONLY, "")
    published = {names.get(name, name): tensor for name, tensor in held.items()}
    return {name: tensor for name, tensor in published.items() if name.startswith(only)}


def rename_published(model: torch.nn.Module, names: Mapping[str, str]) -> None:
    """Sets the published names of tensors whose names in the module differ, such as those of layers
    that an adapter wraps.
    """
    setattr(model, _NAMES, dict(names))


def published_names(model: torch.nn.Module) -> dict[str, str]:
    """Returns the published name of each of a model's parameters."""
    names: dict[str, str] = getattr(model, _NAMES, {})
    return {name: names.get(name, name) for name, _ in model.named_parameters()}


def publish_only(model: torch.nn.Module, prefix: str) -> None:
    """States that only the tensors whose published names begin so are the run's: the others are
    frozen, and those of another run or line."""
    setattr(model, _ONLY, prefix)


def publish_views(
    model: torch.nn.Module,
    instead: Collection[str],
    views: Callable[[], dict[str, torch.Tensor]],
) -> None:
    """States that views of parameters are published instead of the parameters ``instead``.

    ``views`` returns them by name, over the memory that the module computes with at that time.
    """
    setattr(model, _VIEWS, (frozenset(instead), views))


class LiveWeights:
    """The weights of one module in one process, by the names in a run's tensor table.

    ``version`` is -1 until `load`. ``aliases`` are the run's names of tied tensors; a module may
    have the tensor under any of its names. Raises `InputError` if the table and the module differ.

    Example::

        weights = LiveWeights(model, run.tensors)
        weights.load(mirror)
        weights.swap(update.patches, update.version, update.digest)
    """

    def __init__(
        self,
        model: torch.nn.Module,
        tensors: Sequence[TensorSpec],
        *,
        aliases: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        weights = {aliases.get(name, name): one for name, one in module_tensors(model).items()}
        self._placed = PlacedWeights(identity(tensors, weights), weights)
        self._mirror: Mirror | None = None
        self._staged: Prepared | None = None

    @property
    def version(self) -> int:
        """The version that the weights hold."""
        return self._placed.version

    @property
    def digest(self) -> Digest:
        """The digest of that version."""
        return self._placed.share

    def load(self, mirror: Mirror) -> None:
        """Sets every weight from ``mirror``, and attests.

        `swap` compares with this mirror, so its owner must advance it after each swap. Raises
        `CorruptError` if the model's bits differ from those written.
        """
        self._mirror = mirror
        self._placed.load(mirror)
        if self.digest != mirror.digest:
            raise CorruptError(
                "the model's bits differ from those that were loaded", version=mirror.version
            )

    def stage(self, patches: Mapping[str, Patch], version: int, digest: Digest) -> None:
        """Prepares the next `swap` in any single thread while serving continues. Raises
        `ResyncError` if the weights would not have ``digest``.
        """
        assert self._mirror is not None, "load first"
        self._staged = self._placed.prepare(patches, self._mirror, version, digest=digest)

    def swap(self, patches: Mapping[str, Patch], version: int, digest: Digest) -> None:
        """Applies ``patches`` if the weights will then have ``digest``.

        Otherwise, or if live bits differ from the mirror's, raises `ResyncError` and keeps or
        restores the old bits: the weights always hold exactly one version.
        """
        wanted, staged = (self.version, version, digest), self._staged
        if staged is None or (staged.base, staged.version, staged.share) != wanted:
            self.stage(patches, version, digest)
            staged = self._staged
        assert staged is not None
        self._staged = None
        self._placed.swap(staged)

    def attest(self) -> Digest:
        """Computes the digest in one pass over all live bits. Raises `CorruptError` if some were
        never published."""
        return self._placed.attest()
