"""Keeps optimizer states in device memory, or streams them from host memory.

::

    main stream      update bucket 0 │ update bucket 1 │ update bucket 2 │
    copy stream   in 0 │ in 1        │ out 0, in 2     │ out 1           │ out 2

While a bucket is updated, the next one is on its way to the device and the previous one on its way
back, so at most three buckets of states are on the device. On a GPU host tensors are pinned and
copies run on a separate stream; elsewhere the same copies are made in order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

States = dict[str, dict[str, Tensor]]
"""The states of some parameters, by the parameter's name and the state's."""


class DeviceStates:
    """States that stay on the device of their parameters."""

    def __init__(self) -> None:
        self.held: States = {}

    def add(self, name: str, key: str, like: Tensor) -> None:
        """Makes a state of zeros."""
        self.held.setdefault(name, {})[key] = torch.zeros_like(like)

    def over(self, buckets: Sequence[Sequence[str]]) -> Iterator[States]:
        """Yields the states of each bucket in turn, to be changed in place."""
        for names in buckets:
            yield {name: self.held[name] for name in names}


class HostStates:
    """States that lie in host memory, except while their bucket is updated."""

    def __init__(self) -> None:
        self.held: States = {}
        self._devices: dict[str, torch.device] = {}
        self._streams: dict[torch.device, Any] = {}

    def add(self, name: str, key: str, like: Tensor) -> None:
        """Makes a state of zeros, pinned if a GPU is to read it."""
        pinned = like.device.type == "cuda"
        state = torch.zeros(like.shape, dtype=like.dtype, device="cpu", pin_memory=pinned)
        self.held.setdefault(name, {})[key] = state
        self._devices[name] = like.device

    def over(self, buckets: Sequence[Sequence[str]]) -> Iterator[States]:
        """Yields copies of each bucket's states on the device in turn, and stores them
        afterwards.
        """
        coming = self._fetch(buckets[0]) if buckets else {}
        leaving: States = {}
        for number, names in enumerate(buckets):
            current = coming
            self._await_copies(current)
            coming = self._fetch(buckets[number + 1]) if number + 1 < len(buckets) else {}
            yield current
            leaving = self._store(names, current, after=leaving)
        self._finish()

    def _fetch(self, names: Sequence[str]) -> States:
        found: States = {}
        for name in names:
            device = self._devices[name]
            with self._copying(device):
                found[name] = {
                    key: torch.empty_like(state, device=device).copy_(state, non_blocking=True)
                    for key, state in self.held[name].items()
                }
        return found

    def _await_copies(self, states: States) -> None:
        """Lets the main stream wait for the states, and keeps their memory until it is done."""
        for device, stream in self._streams.items():
            torch.cuda.current_stream(device).wait_stream(stream)
        for name, ones in states.items():
            if self._devices[name].type == "cuda":
                for state in ones.values():
                    state.record_stream(torch.cuda.current_stream(state.device))

    def _store(self, names: Sequence[str], states: States, *, after: States) -> States:
        """Copies a bucket back once it is updated; ``after`` is the bucket before, now released."""
        after.clear()
        for device, stream in self._streams.items():
            stream.wait_stream(torch.cuda.current_stream(device))
        for name in names:
            with self._copying(self._devices[name]):
                for key, state in states[name].items():
                    self.held[name][key].copy_(state, non_blocking=True)
        return states

    def _copying(self, device: torch.device) -> Any:
        if device.type != "cuda":
            return nullcontext()
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return torch.cuda.stream(self._streams[device])

    def _finish(self) -> None:
        """Waits until all states are in host memory: the next reader may be the CPU, for a
        checkpoint.
        """
        for stream in self._streams.values():
            stream.synchronize()
