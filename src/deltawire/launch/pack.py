"""Packs a model directory, and prints the relative error of each layer."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from deltawire.dashboard.wording import byte_size
from deltawire.display import safe_json
from deltawire.launch.progress import bars


class Packed(msgspec.Struct, frozen=True):
    """A directory that was packed.

    ``native`` counts tensors that were in the format already and kept their codes; ``errors`` is
    the relative error (Frobenius) of each layer that was quantized, ``error`` that of all of them.
    """

    directory: str
    format: str
    bytes: int
    seconds: float
    native: int
    lossless: bool
    error: float
    errors: dict[str, float]


def pack_model(
    source: Path, out: Path, form: str, *, layers: Sequence[str] = (), as_json: bool = False
) -> None:
    """Writes ``source`` to ``out`` packed as ``form``; see `pack_directory`."""
    from deltawire.quantization.packed_directory import pack_directory

    started = time.perf_counter()
    written = 0

    def progress(count: int) -> None:
        nonlocal written
        written += count
        bar.advance(count)

    with bars(hidden=as_json) as bar:
        bar.begin(f"packing {source}")
        report = pack_directory(source, out, form, layers=layers, progress=progress)
        bar.hide()
        totals = [sum(one) for one in zip(*report.squares.values(), strict=True)]
        done = Packed(
            directory=str(out),
            format=form,
            bytes=written,
            seconds=time.perf_counter() - started,
            native=report.native,
            lossless=not report.squares,
            error=math.sqrt(totals[0] / totals[1]) if totals and totals[1] else 0.0,
            errors=report.errors,
        )
        if as_json:
            print(safe_json(done), flush=True)  # noqa: T201
            return
        bar.log(f"{out}: {byte_size(written)} as {form} in {done.seconds:.1f} s")
        if done.native:
            bar.log(f"{done.native} tensors were {form} already and keep their codes: no loss")
        for name, error in done.errors.items():
            bar.log(f"  {error:7.2%}  {name}")
        if done.errors:
            bar.log(f"relative error of all packed weights: {done.error:.2%}")
