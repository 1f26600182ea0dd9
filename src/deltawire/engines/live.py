"""The live parameters of an ``nn.Module``, patched in place and attested by digest.

The published dtype may be narrower than the serving one: bf16 bits are served as float32 on
machines without bf16 arithmetic. Widening is exact, so the published bits can always be read back
from the parameters, and the digest is taken from there and not from any copy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from deltawire import codec
from deltawire.codec import Digest, Patch
from deltawire.errors import CorruptError, InputError, ResyncError
from deltawire.wire.run import TensorSpec

_TORCH = {"BF16": torch.bfloat16, "F32": torch.float32}
_HALF = np.uint32(16)
_LOWER = np.uint32(0xFFFF)
_CARRIER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


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


class LiveWeights:
    """The parameters of one module, by the names in a run's tensor table.

    Raises `InputError` if table and module differ.
    """

    def __init__(
        self, model: torch.nn.Module, tensors: Sequence[TensorSpec], *, version: int, digest: Digest
    ) -> None:
        self.version = version
        self.digest = digest
        self._specs = {spec.name: spec for spec in tensors}
        self._parameters = dict(model.named_parameters())
        if self._parameters.keys() != self._specs.keys():
            odd = sorted(self._parameters.keys() ^ self._specs.keys())
            raise InputError(f"model and run name different tensors: {odd[:5]}")
        for name, parameter in self._parameters.items():
            spec = self._specs[name]
            if tuple(parameter.shape) != spec.shape or not parameter.is_contiguous():
                raise InputError(
                    f"tensor {name} is {tuple(parameter.shape)}, the run's is {spec.shape}"
                )
            if spec.dtype not in _TORCH or (
                parameter.dtype not in (_TORCH[spec.dtype], torch.float32)
            ):
                raise InputError(f"tensor {name} cannot be served as {parameter.dtype}")

    @torch.no_grad()
    def load(self, tensors: Mapping[str, NDArray[np.unsignedinteger]]) -> None:
        """Set every parameter from its published bits."""
        for name, bits in tensors.items():
            self._write(name, None, bits)

    @torch.no_grad()
    def swap(self, patches: Mapping[str, Patch], version: int, digest: Digest) -> None:
        """Scatter ``patches`` and attest that the live bits now have ``digest``.

        If they do not, the old bits go back and `ResyncError` is raised: the weights are never
        left at anything but one version.
        """
        undo: dict[str, Patch] = {}
        reached = self.digest
        try:
            for name, patch in patches.items():
                old = self._read(name, patch.positions)
                undo[name] = Patch(patch.positions, old)
                self._write(name, patch.positions, patch.bits)
                landed = Patch(patch.positions, self._read(name, patch.positions))
                reached = reached + codec.digest_patch(name, landed, old)
            if reached != digest:
                raise ResyncError(
                    f"the live weights' digest is {reached.hex()}, not {digest.hex()}",
                    version=version,
                )
        except BaseException:
            for name, patch in undo.items():
                self._write(name, patch.positions, patch.bits)
            raise
        self.version, self.digest = version, digest

    @torch.no_grad()
    def attest(self) -> Digest:
        """The digest of all live bits, by one pass over them."""
        return codec.digest_model({name: self._read(name, None) for name in self._specs})

    def _widened(self, name: str) -> bool:
        """Whether bf16 bits are served as the upper half of float32 ones."""
        return self._parameters[name].dtype != _TORCH[self._specs[name].dtype]

    def _carrier(self, name: str) -> torch.Tensor:
        """The parameter's own memory as flat integers."""
        parameter = self._parameters[name]
        return parameter.detach().view(_CARRIER[parameter.element_size()]).view(-1)

    def _read(self, name: str, positions: NDArray[np.int64] | None) -> codec.Bits:
        """Published bits, at ``positions`` or all, read from the live parameter.

        On the CPU NumPy indexes the parameter's own memory, several times faster than torch.
        """
        carrier = self._carrier(name)
        if carrier.device.type == "cpu":
            live = carrier.numpy()
            live = live if positions is None else live[positions]
        elif positions is None:
            live = carrier.cpu().numpy()
        else:
            live = carrier[torch.from_numpy(positions).to(carrier.device)].cpu().numpy()
        bits = live.view(f"u{live.itemsize}")
        if not self._widened(name):
            return bits
        if (bits & _LOWER).any():
            raise CorruptError(f"tensor {name} holds bits that were never published")
        return (bits >> _HALF).astype(np.uint16)

    def _write(self, name: str, positions: NDArray[np.int64] | None, published: codec.Bits) -> None:
        bits = published.astype(np.uint32) << _HALF if self._widened(name) else published
        carrier = self._carrier(name)
        place = slice(None) if positions is None else positions
        signed = np.ascontiguousarray(bits).view(f"i{bits.itemsize}")
        if carrier.device.type == "cpu":
            carrier.numpy()[place] = signed
        else:
            values = torch.from_numpy(signed).to(carrier.device)
            index = place if isinstance(place, slice) else torch.from_numpy(place).to(values.device)
            carrier[index] = values
