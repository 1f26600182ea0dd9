"""The weights of an ``nn.Module`` under the names that they are published by: the placement that
needs no probe.

What is published is what a checkpoint saves: parameters, and saved (persistent) buffers, as the
router biases of DeepSeek-V3 and GLM-4 that balance the load of experts. Parameters are published
in one dtype, buffers in their own, since no master stands behind them.

The published dtype may be narrower than the serving one: bf16 bits are served as float32 on
machines without bf16 arithmetic. Widening is exact, so the published bits can always be read back
from the parameters, and the digest is taken from there and not from any copy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from deltawire.codec import Digest, Patch
from deltawire.errors import CorruptError, InputError
from deltawire.placement.affine import AffineMap
from deltawire.placement.layout import WIRE_DTYPES, survey_live
from deltawire.placement.placed import PlacedWeights, Prepared
from deltawire.placement.placement import Placement, Region, fingerprint_of
from deltawire.sync.follow.mirror import Mirror
from deltawire.wire.run import TensorSpec


def identity(tensors: Sequence[TensorSpec], weights: Mapping[str, torch.Tensor]) -> Placement:
    """The placement of weights that lie as the tensors of the same names do, each whole.

    Raises `InputError` if table and weights differ, or one cannot be served exactly.
    """
    specs = {spec.name: spec for spec in tensors}
    if weights.keys() != specs.keys():
        odd = sorted(weights.keys() ^ specs.keys())
        raise InputError(f"model and run name different tensors: {odd[:5]}")
    storages, live, _ = survey_live(weights)
    numbers = {spec.name: number for number, spec in enumerate(tensors)}
    places = {one.name: one for one in live}
    regions = []
    for name, weight in weights.items():
        spec, dtype = specs[name], WIRE_DTYPES.get(weight.dtype, str(weight.dtype))
        if tuple(weight.shape) != spec.shape or not weight.is_contiguous():
            raise InputError(f"tensor {name} is {tuple(weight.shape)}, the run's is {spec.shape}")
        if dtype != spec.dtype and (spec.dtype, dtype) != ("BF16", "F32"):
            raise InputError(
                f"tensor {name} is published as {spec.dtype} and cannot be served as {weight.dtype}"
            )
        if name in places:  # What has no elements lies nowhere.
            place = places[name]
            through = (dtype,) if dtype == spec.dtype else (spec.dtype, dtype)
            whole = AffineMap(0, place.offset, (spec.count,), (1,), (1,))
            regions.append(Region(numbers[name], place.storage, whole, through))
    return Placement(
        fingerprint_of(tensors, weights, {}),
        list(tensors),
        storages,
        live,
        regions,
        unplaced={},
        uncovered={},
        owned=True,
    )


def saved_buffers(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Returns the buffers that a checkpoint of the model holds, by name, shared ones once."""
    saved = model.state_dict().keys()
    return {name: buffer for name, buffer in model.named_buffers() if name in saved}


def module_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Returns what is published of a model, as it lies in the model: parameters, tied ones once,
    and saved buffers."""
    return {**dict(model.named_parameters()), **saved_buffers(model)}


class LiveWeights:
    """The weights of one module, by the names in a run's tensor table: `PlacedWeights` over their
    `identity`, of one rank. -1 is the version of what was never loaded.

    Raises `InputError` if table and module differ.
    """

    def __init__(self, model: torch.nn.Module, tensors: Sequence[TensorSpec]) -> None:
        weights = module_tensors(model)
        self._placed = PlacedWeights(identity(tensors, weights), weights)
        self._mirror: Mirror | None = None
        self._staged: Prepared | None = None

    @property
    def version(self) -> int:
        """The version that the weights hold."""
        return self._placed.version

    @property
    def digest(self) -> Digest:
        """Its digest."""
        return self._placed.share

    def load(self, mirror: Mirror) -> None:
        """Set every weight from ``mirror``, and attest.

        The mirror is the one that `swap` compares with: whoever moves it does so behind the
        weights. Raises `CorruptError` if the model does not hold what was written.
        """
        self._mirror = mirror
        self._placed.load(mirror)
        if self.digest != mirror.digest:
            raise CorruptError("the model does not hold what was loaded", version=mirror.version)

    def stage(self, patches: Mapping[str, Patch], version: int, digest: Digest) -> None:
        """Do beside serving, in any one thread, what `swap` can find done: all but the exchange.
        Raises `ResyncError` if the weights would not have ``digest``."""
        assert self._mirror is not None, "load first"
        self._staged = self._placed.prepare(patches, self._mirror, version, digest=digest)

    def swap(self, patches: Mapping[str, Patch], version: int, digest: Digest) -> None:
        """Put ``patches`` in, if the weights will then have ``digest``.

        Else, or if the live bits are not what they should be, `ResyncError` is raised, and the old
        ones stay or go back: the weights are never left at anything but one version.
        """
        wanted, staged = (self.version, version, digest), self._staged
        if staged is None or (staged.base, staged.version, staged.share) != wanted:
            self.stage(patches, version, digest)
            staged = self._staged
        assert staged is not None
        self._staged = None
        self._placed.swap(staged)

    def attest(self) -> Digest:
        """The digest of all live bits, by one pass over them. Raises `CorruptError` if they hold
        what was never published."""
        return self._placed.attest()
