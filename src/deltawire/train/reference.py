"""References of a KL penalty: frozen models that score the policy's tokens.

Three ways, with one interface: the policy without its adapter, a copy kept in host memory, and
log-probabilities that a separate process has written.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from deltawire.config import TrainConfig
from deltawire.export.adapter import adapter_off
from deltawire.train.batch import TokenBatch
from deltawire.train.policy import TrainedPolicy


class Reference(Protocol):
    """The interface of references: log-probabilities that the penalty compares the policy with."""

    def logprobs(self, batch: TokenBatch) -> Tensor:
        """Log-probabilities of the batch's drawn tokens and of better answers, without a gradient:
        float32[N, C], 0 elsewhere."""
        ...


class AdapterOff:
    """The policy itself without its adapter, which takes no further memory. Do not use it while the
    policy's own forward pass is prepared."""

    def __init__(self, model: Any, config: TrainConfig) -> None:
        self._policy = TrainedPolicy.of(model, config)

    @torch.no_grad()
    def logprobs(self, batch: TokenBatch) -> Tensor:
        """See `Reference.logprobs`."""
        model = self._policy.model
        training = [module for module in model.modules() if module.training]
        with adapter_off(model.eval()), self._policy.terms(batch) as terms:
            found = terms.logprobs
        for module in training:
            module.training = True
        return found


class FrozenCopy:
    """A frozen model that stays where it is, such as one that is sharded over ranks."""

    def __init__(self, model: Any, config: TrainConfig) -> None:
        self._policy = TrainedPolicy.of(model, config)

    @torch.no_grad()
    def logprobs(self, batch: TokenBatch) -> Tensor:
        """See `Reference.logprobs`."""
        with self._policy.terms(batch) as terms:
            return terms.logprobs


class SleepingCopy:
    """A frozen model that lies in host memory and is streamed to ``device``, layer by layer.

    While a layer computes, the next one is copied. With the device being the host nothing is
    copied, unless ``streamed`` asks for it.

    Example::

        reference = SleepingCopy(frozen, config.train, device=torch.device("cuda"))
        reference.logprobs(batch)
    """

    def __init__(
        self,
        model: Any,
        config: TrainConfig,
        *,
        device: torch.device,
        streamed: bool | None = None,
    ) -> None:
        model = model.to("cpu").eval().requires_grad_(requires_grad=False)
        self._policy = TrainedPolicy.of(model, config)
        self._streamed = device.type != "cpu" if streamed is None else streamed
        if self._streamed:
            self._layers = _LayerStream(model, device)

    @torch.no_grad()
    def logprobs(self, batch: TokenBatch) -> Tensor:
        """See `Reference.logprobs`."""
        if not self._streamed:
            with self._policy.terms(batch) as terms:
                return terms.logprobs
        with self._layers.awake(), self._policy.terms(batch) as terms:
            return terms.logprobs


class RecordedReference:
    """Log-probabilities that were computed elsewhere, by (index of the group in the step, index of
    the trajectory in its group): float32[T] each."""

    def __init__(self, scores: Mapping[tuple[int, int], NDArray[np.float32]]) -> None:
        self._scores = scores

    def logprobs(self, batch: TokenBatch) -> Tensor:
        """See `Reference.logprobs`."""
        found = torch.zeros(batch.tokens_NC.shape)
        for row, member in enumerate(batch.members_N):
            values = self._scores[member]
            found[row, : len(values)] = torch.from_numpy(values.copy())
        return found.to(batch.tokens_NC.device) * batch.wanted


class _LayerStream:
    """Moves a model's parts to the device when they compute, and back."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._device = device
        self._copier: Any = None
        if device.type == "cuda":
            self._copier = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
        self._layers: list[nn.Module] = list(max(lists, key=len, default=[]))
        inside = {id(p) for layer in self._layers for p in layer.parameters()}
        self._rest = [p for p in model.parameters() if id(p) not in inside]
        self._home = {p: self._at_home(p.data) for p in model.parameters()}
        for parameter, home in self._home.items():
            parameter.data = home
        for buffer_owner in model.modules():
            for name, buffer in list(buffer_owner.named_buffers(recurse=False)):
                setattr(buffer_owner, name, buffer.to(device))
        self._coming: dict[int, list[Tensor]] = {}
        for number, layer in enumerate(self._layers):
            layer.register_forward_pre_hook(self._wake_hook(number))
            layer.register_forward_hook(self._sleep_hook(number))

    def _at_home(self, data: Tensor) -> Tensor:
        return data.pin_memory() if self._copier is not None else data

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Keeps embeddings, norms and the head on the device, and moves each layer there when it is
        called.
        """
        for parameter in self._rest:
            parameter.data = self._copy(self._home[parameter])
        try:
            yield
        finally:
            self._coming.clear()
            for parameter, home in self._home.items():
                parameter.data = home

    def _copy(self, home: Tensor) -> Tensor:
        return torch.empty_like(home, device=self._device).copy_(home, non_blocking=True)

    def _fetch(self, number: int) -> None:
        if number in self._coming or number >= len(self._layers):
            return
        homes = [self._home[p] for p in self._layers[number].parameters()]
        if self._copier is None:
            self._coming[number] = [self._copy(home) for home in homes]
            return
        with torch.cuda.stream(self._copier):
            self._coming[number] = [self._copy(home) for home in homes]

    def _wake_hook(self, number: int) -> Any:
        def wake(layer: nn.Module, _inputs: Any) -> None:
            self._fetch(number)
            if self._copier is not None:
                torch.cuda.current_stream(self._device).wait_stream(self._copier)
            arrived = self._coming.pop(number)
            for parameter, data in zip(layer.parameters(), arrived, strict=True):
                if self._copier is not None:
                    data.record_stream(torch.cuda.current_stream(self._device))
                parameter.data = data
            self._fetch(number + 1)

        return wake

    def _sleep_hook(self, number: int) -> Any:
        del number

        def sleep(layer: nn.Module, _inputs: Any, _result: Any) -> None:
            for parameter in layer.parameters():
                parameter.data = self._home[parameter]

        return sleep
