"""An exporter as a stranger would add one: int8 codes with a power-of-two scale a tensor."""

from __future__ import annotations

import torch

from deltawire.wire.run import TensorSpec


class Int8Weights:
    """Publishes each parameter as ``NAME`` (I8 codes) and ``NAME.scale`` (one F32)."""

    compute_dtype = torch.float32

    def __init__(self, model):
        self._parameters = dict(model.named_parameters())

    def specs(self):
        specs = [TensorSpec(name, tuple(p.shape), "I8") for name, p in self._parameters.items()]
        specs += [TensorSpec(f"{name}.scale", (1,), "F32") for name in self._parameters]
        return sorted(specs, key=lambda spec: spec.name)

    @torch.no_grad()
    def tensors(self):
        found = {}
        for name, parameter in self._parameters.items():
            exponent = torch.ceil(torch.log2(parameter.abs().amax().clamp(min=1e-30) / 127))
            scale = torch.exp2(exponent).reshape(1)
            found[name] = torch.round(parameter / scale).to(torch.int8).contiguous()
            found[f"{name}.scale"] = scale
        return found

    def trained(self):
        return self.tensors()

    @torch.no_grad()
    def restore(self, mirror):
        for name, parameter in self._parameters.items():
            codes = torch.from_numpy(mirror.tensors[name].view("i1").copy())
            scale = torch.from_numpy(mirror.tensors[f"{name}.scale"].view("f4").copy())
            parameter.copy_((codes.float() * scale).view(parameter.shape))
