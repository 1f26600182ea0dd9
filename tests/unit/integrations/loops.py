"""Trainers and engines of other frameworks, small: their interfaces at the commits that
`tests/clients/client_registry.py` names, without what computes."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import msgspec
import torch

from benchmarks.attest.engines import drawn, fleet, load
from deltawire.engines.live_digests import answer_of
from deltawire.engines.live_parts import METHOD


class Policy(torch.nn.Module):
    """A trainer's model in float32, with the tensors of the engine's checkpoint."""

    def __init__(self, seed=1):
        super().__init__()
        for name, tensor in drawn(seed).items():
            self.register_parameter(name, torch.nn.Parameter(tensor.float()))

    def step(self):
        """Changes all weights."""
        with torch.no_grad():
            for held in self.parameters():
                held.add_(0.05 * torch.randn_like(held))

    def served(self):
        """The weights as an engine gets them."""
        return {name: held.detach().bfloat16() for name, held in self.named_parameters()}


class SmallEngine:
    """An engine of two ranks with vLLM's ``collective_rpc``; ``drops`` are tensors that its updates
    leave out."""

    def __init__(self, weights, drops=()):
        self.modules = fleet(2, weights)
        self.drops = drops

    def update(self, weights):
        kept = {name: held for name, held in weights.items() if name not in self.drops}
        for module in self.modules:
            load(module, kept)

    def collective_rpc(self, method, timeout=None, args=(), kwargs=None):
        assert method == METHOD
        assert not kwargs
        return [
            msgspec.to_builtins(answer_of(module, args[0], rank))
            for rank, module in enumerate(self.modules)
        ]


class Actor:
    """An actor of Ray that holds ``held``, called in this process."""

    def __init__(self, held):
        call = lambda function, *arguments: function(held, *arguments)  # noqa: E731
        setattr(self, "__ray_call__", SimpleNamespace(remote=call))  # noqa: B010


def pretend(monkeypatch, name, **members):
    """Puts a module in the place of one that is not installed, and its packages."""
    parts = name.split(".")
    for count in range(1, len(parts) + 1):
        path = ".".join(parts[:count])
        module = ModuleType(path)
        module.__path__ = []
        if count == len(parts):
            module.__dict__.update(members)
        monkeypatch.setitem(sys.modules, path, module)
        if count > 1:
            setattr(sys.modules[".".join(parts[: count - 1])], parts[count - 1], module)
    return sys.modules[name]
