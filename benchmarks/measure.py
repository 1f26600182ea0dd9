"""Measures one coding on some pairs, in a separate process.

The process is separate because the vector path is chosen when the codec is loaded, and because peak
memory is counted per process. It is pinned to as many processors as the coding may use threads. It
also measures the limits of memory next to each coding, so that ratios are comparable although the
load of the machine changes.

``python -m benchmarks.measure CODEC PAIR …`` prints one JSON line per pair.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from statistics import median
from typing import Any, Final

import msgspec
import numpy as np

from benchmarks.limits import Limits, timed
from benchmarks.memory import measure_peak
from benchmarks.ours import Anchor, Delta, digest_all
from benchmarks.pairs import Bf16Bits, Pair, load_pair
from benchmarks.peers import PEERS, Format, Weights, open_peer
from benchmarks.peers.container import size_of
from deltawire import _native
from deltawire.errors import InputError

DIGEST: Final = "digest"
SIMD_VARIABLE: Final = "DELTAWIRE_SIMD"


class Measured(msgspec.Struct, kw_only=True):
    """One coding on one pair. Times are medians of ``encodes`` and ``decodes`` repeats, seconds;
    None where they do not apply. ``error`` says why there are no figures."""

    codec: str
    pair: str
    used_by: str = ""
    simd: str = ""
    threads: int = 1
    elements: int = 0
    changed: int = 0
    model_bytes: int = 0
    payload_bytes: int | None = None
    encode_s: float | None = None
    decode_s: float | None = None
    encodes: int = 0
    decodes: int = 0
    encode_extra_bytes: int | None = None
    decode_extra_bytes: int | None = None
    memory_method: str = ""
    read_both_s: float = 0.0
    copy_one_s: float = 0.0
    lossless: bool | None = None
    error: str = ""

    @property
    def bits_per_change(self) -> float | None:
        """Payload bits for each weight that changed."""
        if self.payload_bytes is None or not self.changed:
            return None
        return 8 * self.payload_bytes / self.changed

    @property
    def ratio(self) -> float | None:
        """How many times smaller than the model the payload is."""
        return self.model_bytes / self.payload_bytes if self.payload_bytes else None

    @property
    def share(self) -> float | None:
        """The payload as a share of the model."""
        return None if self.payload_bytes is None else self.payload_bytes / self.model_bytes

    @property
    def encode_gbs(self) -> float | None:
        """Encoding speed, GB of model a second."""
        return self.model_bytes / self.encode_s / 1e9 if self.encode_s else None

    @property
    def decode_gbs(self) -> float | None:
        """Speed of decoding and applying, GB of model a second."""
        return self.model_bytes / self.decode_s / 1e9 if self.decode_s else None

    @property
    def read_gbs(self) -> float:
        """Reading base and target, GB of model (of one of them) a second."""
        return self.model_bytes / self.read_both_s / 1e9 if self.read_both_s else 0.0

    @property
    def copy_gbs(self) -> float:
        """Copying the model, GB of it a second."""
        return self.model_bytes / self.copy_one_s / 1e9 if self.copy_one_s else 0.0


DERIVED: Final = (
    "bits_per_change",
    "ratio",
    "share",
    "encode_gbs",
    "decode_gbs",
    "read_gbs",
    "copy_gbs",
)


def plain(row: Measured) -> dict[str, Any]:
    """The measurements and the figures derived from them, as plain values."""
    return {**msgspec.to_builtins(row), **{name: getattr(row, name) for name in DERIVED}}


def measure(name: str, pair: Pair, *, threads: int, repeats: int, seconds: float) -> Measured:
    """Measures coding ``name`` on ``pair``: peaks of memory first, by one pass each way, then
    times.

    ``seconds`` bounds the repeats each way; the first pass is not bounded.
    """
    old = {key: tensor.old for key, tensor in pair.tensors.items()}
    new = {key: tensor.new for key, tensor in pair.tensors.items()}
    row = Measured(
        codec=name,
        pair=pair.name,
        threads=threads,
        elements=pair.elements,
        changed=pair.changed,
        model_bytes=pair.bytes,
        simd=_vector_path(name),
    )
    limits = Limits(old, new)
    limits.measure(repeats, seconds)
    if name == DIGEST:
        row.used_by = Delta.used_by
        _, peak = measure_peak(lambda: digest_all(new))
        row.encode_extra_bytes, row.memory_method = peak.extra_bytes, peak.method
        taken = timed(lambda: digest_all(new), repeats=repeats, seconds=seconds)
        row.encode_s, row.encodes = median(taken), len(taken)
        limits.measure(repeats, seconds)
        row.read_both_s, row.copy_one_s = limits.medians()
        return row
    coding = open_coding(name, threads)
    row.used_by = coding.used_by
    payload = _measure_encode(row, coding, old, new, repeats, seconds)
    limits.measure(repeats, seconds)
    _measure_decode(row, coding, payload, old, new, repeats, seconds)
    limits.measure(repeats, seconds)
    row.read_both_s, row.copy_one_s = limits.medians()
    return row


def _vector_path(name: str) -> str:
    """The vector path that deltawire's own codings take; raises InputError if that is not the one
    asked for. Peers have none."""
    if name in PEERS:
        return ""
    asked = os.environ.get(SIMD_VARIABLE)
    if asked and asked != _native.simd():
        raise InputError(f"the codec does not take its {asked} path here, but {_native.simd()}")
    return _native.simd()


def open_coding(name: str, threads: int) -> Format:
    """deltawire's delta or anchor coding, or a peer's; raises InputError as `open_peer` does."""
    if name == Delta.name:
        return Delta(threads)
    return Anchor(threads) if name == Anchor.name else open_peer(name)


def _measure_encode(
    row: Measured, coding: Format, old: Weights, new: Weights, repeats: int, seconds: float
) -> bytes:
    parts, peak = measure_peak(lambda: coding.encode(old, new))
    row.payload_bytes = size_of(parts)
    row.encode_extra_bytes, row.memory_method = peak.extra_bytes, peak.method
    payload = b"".join(parts)
    del parts
    taken = timed(lambda: coding.encode(old, new), repeats=repeats, seconds=seconds)
    row.encode_s, row.encodes = median(taken), len(taken)
    return payload


def _measure_decode(
    row: Measured,
    coding: Format,
    payload: bytes,
    old: Weights,
    new: Weights,
    repeats: int,
    seconds: float,
) -> None:
    weights: Weights = {}

    def prepare() -> None:
        for key, bits in old.items():
            held = weights.get(key)
            if held is not None and held.flags.writeable and held.shape == bits.shape:
                np.copyto(held, bits)
            else:
                weights[key] = bits.copy()

    def decode() -> None:
        coding.decode(payload, weights)

    prepare()
    _, peak = measure_peak(decode)
    row.decode_extra_bytes = peak.extra_bytes
    row.lossless = _same(weights, new)
    taken = timed(decode, repeats=repeats, seconds=seconds, prepare=prepare)
    row.decode_s, row.decodes = median(taken), len(taken)
    row.lossless = row.lossless and _same(weights, new)
    if not row.lossless:
        row.error = "decodes to other bits than the target's"


def _same(left: dict[str, Bf16Bits], right: dict[str, Bf16Bits]) -> bool:
    return left.keys() == right.keys() and all(
        np.array_equal(bits, right[name]) for name, bits in left.items()
    )


def _pin(threads: int) -> None:
    """Pins to the last processors, because interrupts prefer the first."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[-threads:])


def main() -> int:
    """Measures each pair named and prints it at once."""
    parser = argparse.ArgumentParser()
    parser.add_argument("codec")
    parser.add_argument("pairs", nargs="+")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--repeats", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    arguments = parser.parse_args()
    _pin(arguments.threads)
    settings: dict[str, Any] = {
        key: getattr(arguments, key) for key in ("threads", "repeats", "seconds")
    }
    for path in arguments.pairs:
        try:
            row = measure(arguments.codec, load_pair(Path(path)), **settings)
        except Exception as error:  # a peer can raise anything; the other pairs continue
            row = Measured(
                codec=arguments.codec,
                pair=Path(path).stem,
                threads=arguments.threads,
                simd=os.environ.get(SIMD_VARIABLE, ""),
                error=f"{type(error).__name__}: {error}"[:300],
            )
        sys.stdout.write(msgspec.json.encode(row).decode() + "\n")
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
