"""The parameters of an ``nn.Module`` under the names that they are published by: the placement
that needs no probe.

The published dtype may be narrower than the serving one: bf16 bits are served as float32 on
machines without bf16 arithmetic. Widening is exact, so the published bits can always be read back
from the parameters, and the digest is taken from there and not from any copy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from deltawire.codec import Digest, Patch
from deltawire.engines.affine import AffineMap
from deltawire.engines.layout import WIRE_DTYPES, survey_live
from deltawire.engines.placed import PlacedWeights, Prepared
from deltawire.engines.placement import Placement, Region, fingerprint_of
from deltawire.errors import CorruptError, InputError
from deltawire.sync.mirror import Mirror
from deltawire.wire.run import TensorSpec

_TORCH = {"BF16": torch.bfloat16, "F32": torch.float32}


def published_specs(model: torch.nn.Module, dtype: str) -> list[TensorSpec]:
    """The tensor table of a model whose parameters are all published as ``dtype``, tied ones once,
    in name order.

    Raises `InputError` if the model keeps saved state outside its parameters: that state would
    not reach the workers.
    """
    everything = dict(model.named_parameters(remove_duplicate=False))
    if buffers := sorted(model.state_dict().keys() - everything.keys()):
        raise InputError(f"the model saves {len(buffers)} buffers too, such as {buffers[0]}")
    return sorted(
        (
            TensorSpec(name, tuple(parameter.shape), dtype)
            for name, parameter in model.named_parameters()
        ),
        key=lambda spec: spec.name,
    )


def published_bits(parameter: torch.Tensor, dtype: str) -> torch.Tensor:
    """A parameter rounded to ``dtype``: a contiguous CPU tensor, without a copy if it is one."""
    return parameter.detach().to("cpu", _TORCH[dtype]).contiguous()


def identity(tensors: Sequence[TensorSpec], parameters: Mapping[str, torch.Tensor]) -> Placement:
    """The placement of parameters that lie as the tensors of the same names do, each whole.

    Raises `InputError` if table and parameters differ, or one cannot be served exactly.
    """
    specs = {spec.name: spec for spec in tensors}
    if parameters.keys() != specs.keys():
        odd = sorted(parameters.keys() ^ specs.keys())
        raise InputError(f"model and run name different tensors: {odd[:5]}")
    storages, live, _ = survey_live(parameters)
    numbers = {spec.name: number for number, spec in enumerate(tensors)}
    places = {one.name: one for one in live}
    regions = []
    for name, parameter in parameters.items():
        spec, dtype = specs[name], WIRE_DTYPES.get(parameter.dtype, str(parameter.dtype))
        if tuple(parameter.shape) != spec.shape or not parameter.is_contiguous():
            raise InputError(
                f"tensor {name} is {tuple(parameter.shape)}, the run's is {spec.shape}"
            )
        if spec.dtype not in _TORCH or dtype not in (spec.dtype, "F32"):
            raise InputError(f"tensor {name} cannot be served as {parameter.dtype}")
        if name in places:  # What has no elements lies nowhere.
            place = places[name]
            through = (dtype,) if dtype == spec.dtype else (spec.dtype, dtype)
            whole = AffineMap(0, place.offset, (spec.count,), (1,), (1,))
            regions.append(Region(numbers[name], place.storage, whole, through))
    return Placement(
        fingerprint_of(tensors, parameters, {}),
        list(tensors),
        storages,
        live,
        regions,
        unplaced={},
        uncovered={},
        owned=True,
    )


class LiveWeights:
    """The parameters of one module, by the names in a run's tensor table: `PlacedWeights` over
    their `identity`, of one rank. -1 is the version of what was never loaded.

    Raises `InputError` if table and module differ.
    """

    def __init__(self, model: torch.nn.Module, tensors: Sequence[TensorSpec]) -> None:
        parameters = dict(model.named_parameters())
        self._placed = PlacedWeights(identity(tensors, parameters), parameters)
        self._mirror: Mirror | None = None
        self._staged: Prepared | None = None

    @property
    def version(self) -> int:
        """The version that the parameters hold."""
        return self._placed.version

    @property
    def digest(self) -> Digest:
        """Its digest."""
        return self._placed.share

    def load(self, mirror: Mirror) -> None:
        """Set every parameter from ``mirror``, and attest.

        The mirror is the one that `swap` compares with: whoever moves it does so behind the
        weights. Raises `CorruptError` if the parameters do not hold what was written.
        """
        self._mirror = mirror
        self._placed.load(mirror)
        if self.digest != mirror.digest:
            raise CorruptError("the model does not hold what was loaded", version=mirror.version)

    def stage(self, patches: Mapping[str, Patch], version: int, digest: Digest) -> None:
        """Do beside serving, in any one thread, what `swap` can find done: all but the exchange.
        Raises `ResyncError` if the parameters would not have ``digest``."""
        assert self._mirror is not None, "load first"
        self._staged = self._placed.prepare(patches, self._mirror, version, digest=digest)

    def swap(self, patches: Mapping[str, Patch], version: int, digest: Digest) -> None:
        """Put ``patches`` in, if the parameters will then have ``digest``.

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
