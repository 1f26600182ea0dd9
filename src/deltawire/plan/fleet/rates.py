"""Measured rates of the work that moves a version: what ``deltawire bench hops`` writes.

Work of the processor is linear in the stored values and in the values that changed, in seconds of
one core. Memory-bound work (the copy) is in bytes a second of the whole machine, because more
threads do not make it faster.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from deltawire.errors import InputError

MAX_BYTES = 1 << 20
"""Largest file of rates that is read."""

Positive = Annotated[float, msgspec.Meta(gt=0, le=1e15)]
NotNegative = Annotated[float, msgspec.Meta(ge=0, le=1e15)]
Share = Annotated[float, msgspec.Meta(gt=0, le=1)]
Precision = Literal["bf16", "fp8"]
BYTES: dict[Precision, int] = {"bf16": 2, "fp8": 1}
"""Bytes of a stored value."""


class CoreCost(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Seconds of one core for each stored value, and for each value that changed.

    Example::

        CoreCost(per_value_s=8e-10, per_change_s=2e-8).seconds(10**9, 10**7)
    """

    per_value_s: NotNegative
    per_change_s: NotNegative

    def seconds(self, values: float, changes: float) -> float:
        """Returns seconds of one core."""
        return values * self.per_value_s + changes * self.per_change_s


FREE = CoreCost(0.0, 0.0)
"""Work that takes no time."""


class CodedSize(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Bits of a delta for each changed value, where this share of the values changed.

    Example::

        CodedSize(share=0.01, bits_per_change=7.0)
    """

    share: Share
    bits_per_change: Positive


class ThreadSpeed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How many times faster so many threads are together than one.

    Example::

        ThreadSpeed(threads=2, speedup=1.8)
    """

    threads: Annotated[int, msgspec.Meta(ge=1, le=4096)]
    speedup: Positive


class CodecRates(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The codec at one precision. Costs include the digest; `sizes` ascend by share.

    Example::

        shipped_rates().codecs["fp8"].bits_per_change(0.0027)
    """

    encode: CoreCost
    decode: CoreCost
    sizes: Annotated[tuple[CodedSize, ...], msgspec.Meta(min_length=1, max_length=64)]

    def bits_per_change(self, share: float) -> float:
        """Interpolates linearly in the logarithm of the share; constant outside the table."""
        points = [(math.log(one.share), one.bits_per_change) for one in self.sizes]
        at = math.log(share)
        if at <= points[0][0]:
            return points[0][1]
        for (left, low), (right, high) in pairwise(points):
            if at <= right:
                return low + (high - low) * (at - left) / (right - left)
        return points[-1][1]


class StoreRates(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One store from this machine: seconds of a small request, bytes a second of a large one.

    ``get_bytes_s`` is that of one connection, ``total_get_bytes_s`` that of several at once.

    Example::

        read_rates(Path("rates.json")).stores["folder"].put_s
    """

    get_s: NotNegative
    put_s: NotNegative
    get_bytes_s: Positive
    put_bytes_s: Positive
    total_get_bytes_s: Positive


class Rates(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Rates of one machine.

    ``speeds`` are those of encoding on more threads than one. ``publish_s`` and ``follow_s`` are
    the costs of a version however small its model is, without the store's. ``quantise_value_s``
    is seconds of one core to make one fp8 code. ``stage_change_s`` and ``swap_change_s`` are those
    of the serving process, for each change, if its weights are in host memory.

    Example::

        rates = shipped_rates()
        print(rates.machine, rates.measured)
    """

    format: Literal[1] = 1
    machine: Annotated[str, msgspec.Meta(max_length=200)]
    measured: Annotated[str, msgspec.Meta(max_length=40)]
    cores: Annotated[int, msgspec.Meta(ge=1, le=4096)]
    speeds: Annotated[tuple[ThreadSpeed, ...], msgspec.Meta(min_length=1, max_length=64)]
    copy_bytes_s: Positive
    digest_bytes_s: Positive
    quantise_value_s: NotNegative
    stage_change_s: NotNegative
    swap_change_s: NotNegative
    mirror_change_s: NotNegative
    publish_s: NotNegative
    follow_s: NotNegative
    codecs: dict[Precision, CodecRates]
    stores: Annotated[dict[str, StoreRates], msgspec.Meta(max_length=64)] = {}

    def speedup(self, threads: float) -> float:
        """Returns how many times faster ``threads`` threads are than one: interpolated, and
        constant above the most that were measured."""
        points = [(1.0, 1.0), *((float(one.threads), one.speedup) for one in self.speeds)]
        for (left, low), (right, high) in pairwise(points):
            if threads <= right:
                return low + (high - low) * max(0.0, threads - left) / (right - left or 1.0)
        return points[-1][1]

    def codec(self, precision: Precision) -> CodecRates:
        """Returns the codec's rates; raises `InputError` if they were not measured."""
        if (found := self.codecs.get(precision)) is None:
            raise InputError(
                f"the file of rates has none for {precision}",
                hint=f"run deltawire bench hops --precisions {precision}",
            )
        return found


def encode_rates(rates: Rates) -> bytes:
    """Encodes rates as indented JSON."""
    return msgspec.json.format(msgspec.json.encode(rates), indent=1) + b"\n"


def read_rates(path: Path) -> Rates:
    """Reads what ``deltawire bench hops --out`` wrote.

    Raises `InputError` if it cannot be read, is too large, or has wrong fields.
    """
    try:
        with path.open("rb") as opened:
            raw = opened.read(MAX_BYTES + 1)
    except OSError as failure:
        raise InputError(f"cannot read {path}: {failure.strerror or failure}") from None
    if len(raw) > MAX_BYTES:
        raise InputError(f"{path} is larger than {MAX_BYTES:,} bytes, so it is no file of rates")
    try:
        return msgspec.json.decode(raw, type=Rates)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as failure:
        raise InputError(
            f"{path} is not a file of rates: {failure}",
            hint=f"make it with deltawire bench hops --out {path}",
        ) from None


@lru_cache(maxsize=1)
def shipped_rates() -> Rates:
    """Returns rates measured on the machine that the file names, for plans without a file."""
    return read_rates(Path(__file__).with_name("rates.json"))


def fit_cost(rows: Sequence[tuple[float, float, float]]) -> CoreCost:
    """Fits ``seconds = values·a + changes·b`` to rows of (values, changes, seconds).

    Least squares of relative errors, neither cost below 0. At least two rows, of different shares.
    """
    # Weighted normal equations; each row is divided by its seconds.
    scaled = [(values / seconds, changes / seconds) for values, changes, seconds in rows]
    vv = sum(v * v for v, _ in scaled)
    vc = sum(v * c for v, c in scaled)
    cc = sum(c * c for _, c in scaled)
    v1, c1 = sum(v for v, _ in scaled), sum(c for _, c in scaled)
    determinant = vv * cc - vc * vc
    per_value = (v1 * cc - c1 * vc) / determinant if determinant else v1 / vv
    per_change = (c1 * vv - v1 * vc) / determinant if determinant else 0.0
    if per_change < 0:
        per_value, per_change = v1 / vv, 0.0
    if per_value < 0:
        per_value, per_change = 0.0, c1 / cc
    return CoreCost(per_value, per_change)
