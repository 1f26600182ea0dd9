"""deltawire's own codings in the shape of `deltawire.bench.peers.Format`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from deltawire import codec
from deltawire.bench.pairs import DTYPE, Bf16Bits
from deltawire.bench.peers.base import Weights
from deltawire.bench.peers.container import Buffer, as_bytes, as_view, pack, unpack


def _with_threads(function: Callable[..., Any], threads: int) -> dict[str, Any]:
    """``threads`` as a keyword, where the function takes it."""
    taken = inspect.signature(function).parameters
    return {"threads": threads} if "threads" in taken else {}


class Delta:
    """A delta a tensor; decoding is decode and apply, in place."""

    name = "deltawire"
    used_by = "this project"

    def __init__(self, threads: int) -> None:
        self._encode = _with_threads(codec.encode, threads)
        self._decode = _with_threads(codec.decode_patch, threads)

    def encode(self, old: Mapping[str, Bf16Bits], new: Mapping[str, Bf16Bits]) -> list[Buffer]:
        """A payload for each tensor, changed or not."""
        entries = {}
        for name, before in old.items():
            payload = codec.encode(before, new[name], dtype=DTYPE, **self._encode)
            entries[name] = as_bytes(payload)
        return pack(entries)

    def decode(self, payload: Buffer, weights: Weights) -> None:
        """Decodes a tensor's patch, then scatters it."""
        for name, coded in unpack(payload)[0].items():
            base = weights[name]
            patch = codec.decode_patch(as_view(coded), base, dtype=DTYPE, **self._decode)
            codec.apply(patch, base)


class Anchor:
    """Whole models through the entropy coder."""

    name = "anchor"
    used_by = "this project"

    def __init__(self, threads: int) -> None:
        self._encode = _with_threads(codec.encode_full, threads)
        self._decode = _with_threads(codec.decode_full, threads)
        self._dtype = "dtype" in inspect.signature(codec.encode_full).parameters

    def encode(self, old: Mapping[str, Bf16Bits], new: Mapping[str, Bf16Bits]) -> list[Buffer]:
        """Every tensor, whole."""
        del old
        named = {"dtype": DTYPE} if self._dtype else {}
        return pack(
            {
                name: as_bytes(codec.encode_full(bits.reshape(-1), **named, **self._encode))
                for name, bits in new.items()
            }
        )

    def decode(self, payload: Buffer, weights: Weights) -> None:
        """New arrays take the place of the old."""
        for name, coded in unpack(payload)[0].items():
            shape, count = weights[name].shape, weights[name].size
            bits = codec.decode_full(as_view(coded), count, 2, **self._decode)
            weights[name] = bits.astype(np.uint16, copy=False).reshape(shape)


def digest_all(weights: Mapping[str, Bf16Bits], threads: int) -> None:
    """The digest pass over every tensor."""
    named = _with_threads(codec.digest_bits, threads)
    for name, bits in weights.items():
        codec.digest_bits(name, bits.reshape(-1), **named)
