"""Caches keys and values of sequences of different lengths, in tensors that grow as needed.

Shapes: N running sequences, R allocated rows, H key/value heads, T allocated positions, D head
size, W positions read at once.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin


class _SlotLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """One layer's keys and values, float[R, H, T, D], written where `SlotCache` says."""

    def __init__(self, cache: SlotCache) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.cache = cache

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        shape = (self.cache.height, key_states.shape[1], self.cache.width)
        self.keys = key_states.new_zeros(*shape, key_states.shape[3])
        self.values = value_states.new_zeros(*shape, value_states.shape[3])
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_args: Any, **_kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None
        assert self.values is not None
        cache = self.cache
        if cache.prefill_sources is not None:
            length = key_states.shape[2]
            first, last = cache.running, cache.running + len(cache.prefill_sources)
            self.keys[first:last, :, :length] = key_states[cache.prefill_sources]
            self.values[first:last, :, :length] = value_states[cache.prefill_sources]
            return key_states, value_states
        if cache.resumed is not None:
            rows = cache.rows[cache.resumed]
            self.keys[rows[:, None], :, cache.positions] = key_states.transpose(1, 2)
            self.values[rows[:, None], :, cache.positions] = value_states.transpose(1, 2)
            return self.keys[rows, :, : cache.span], self.values[rows, :, : cache.span]
        rows, count, span = cache.rows[: cache.running], cache.running, cache.span
        self.keys[rows, :, cache.positions] = key_states[:, :, 0]
        self.values[rows, :, cache.positions] = value_states[:, :, 0]
        return self.keys[:count, :, :span], self.values[:count, :, :span]

    def move(self, source: int, target: int, length: int) -> None:
        if self.keys is not None and self.values is not None:
            self.keys[target, :, :length] = self.keys[source, :, :length]
            self.values[target, :, :length] = self.values[source, :, :length]

    def exchange(self, one: int, other: int, length: int) -> None:
        for states in (self.keys, self.values):
            if states is not None:
                kept = states[one, :, :length].clone()
                states[one, :, :length] = states[other, :, :length]
                states[other, :, :length] = kept

    def resize(self, height: int, width: int, *, head: int, tail: int) -> None:
        """Changes the allocated size; keeps the first ``head`` rows, and the last ``tail`` last."""
        if self.keys is not None and self.values is not None:
            self.keys = _resized(self.keys, height, width, head, tail)
            self.values = _resized(self.values, height, width, head, tail)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        del query_length
        return self.cache.span, 0

    def get_seq_length(self) -> int:
        return self.cache.span

    def get_max_length(self) -> int:
        return self.cache.capacity


def _resized(old: torch.Tensor, height: int, width: int, head: int, tail: int) -> torch.Tensor:
    new = old.new_zeros(height, old.shape[1], width, old.shape[3])
    kept = min(width, old.shape[2])
    new[:head, :, :kept] = old[:head, :, :kept]
    if tail:
        new[-tail:, :, :kept] = old[-tail:, :, :kept]
    return new


class SlotCache(Cache):
    """A key/value cache of ``height`` rows and ``width`` positions, of at most ``slots`` and
    ``capacity``."""

    def __init__(self, layers: int, slots: int, capacity: int, device: torch.device) -> None:
        self.slots = slots
        self.capacity = capacity
        self.height = 0
        self.width = 0
        self.running = 0
        self.span = 0
        self.rows = torch.arange(slots, device=device)
        self.positions = torch.zeros(0, dtype=torch.long, device=device)
        self.prefill_sources: torch.Tensor | None = None
        self.resumed: slice | None = None
        """The rows that continue reading after what they hold, at ``positions`` long[rows, W]."""
        self.slot_layers = [_SlotLayer(self) for _ in range(layers)]
        super().__init__(layers=list(self.slot_layers))

    def resize(self, height: int, width: int, *, head: int, tail: int) -> None:
        """Allocates ``height`` rows of ``width`` positions, one layer after the other, so that no
        more than one layer exists twice."""
        for layer in self.slot_layers:
            layer.resize(height, width, head=head, tail=tail)
        self.height, self.width = height, width

    @property
    def token_bytes(self) -> int | None:
        """The bytes that one token takes over all layers; None before anything was read."""
        total = 0
        for layer in self.slot_layers:
            if layer.keys is None or layer.values is None:
                return None
            for states in (layer.keys, layer.values):
                total += states.shape[1] * states.shape[3] * states.element_size()
        return total


def cache_argument(model: torch.nn.Module) -> str:
    """Returns the name under which ``model``'s forward pass takes its cache.

    transformers 5.24 renamed ``past_key_values`` to ``cache``, one family of models after another,
    and warns about the old name. The signature tells for each model, also for code that a model
    directory brings along.
    """
    # PEFT's wrapper passes what it is given to the model that it wraps.
    wrapped = getattr(model, "get_base_model", None)
    inner = wrapped() if callable(wrapped) else model
    return "cache" if "cache" in inspect.signature(inner.forward).parameters else "past_key_values"
