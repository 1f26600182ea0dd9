"""Accelerators as data: memory, bandwidth, links and FLOPs, each with its source."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from deltawire.errors import InputError

MAX_BYTES = 1 << 20
"""Largest table of accelerators that is read."""

RESERVED_GIB = 3.0
"""Memory of each accelerator that a step cannot use: driver context, communication buffers and
matrix workspaces. An assumption; it is not part of the memory model's peak."""

Amount = Annotated[float, msgspec.Meta(gt=0, le=1e6)]
Device = Literal["", "cpu", "cuda", "mps"]


class Accelerator(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One kind of accelerator and the node it sits in. Rates are per accelerator, one direction."""

    name: Annotated[str, msgspec.Meta(pattern="^[a-z0-9][a-z0-9.-]{0,31}$")]
    memory_gib: Amount
    bandwidth_gb_s: Amount
    bf16_tflops: Amount
    """Dense."""
    link_gb_s: Amount
    """Within a node."""
    network_gb_s: Amount
    """Between nodes."""
    host_link_gb_s: Amount
    per_node: Annotated[int, msgspec.Meta(ge=1, le=1024)]
    host_memory_gib_per_node: Amount
    source: Annotated[str, msgspec.Meta(min_length=1, max_length=500)]
    verified: bool
    """False if a number is from memory and was not looked up."""
    device: Device = ""
    """The torch device for a rank on it; if empty, the run's configuration decides."""
    utilization: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.4
    """Share of peak FLOPs that a training step reaches: for A100 and Hopper, fitted to published
    figures (docs/SHAPES.md), otherwise assumed."""

    @property
    def spanning_gb_s(self) -> float:
        """The rate of a rank's part in a collective over whole nodes: a ring enters and leaves each
        node once, over the network links of all its accelerators."""
        return min(self.link_gb_s, self.per_node * self.network_gb_s)

    @property
    def usable_bytes(self) -> float:
        """Bytes that a training step may use."""
        return max(0.0, self.memory_gib - RESERVED_GIB) * 2**30

    @property
    def host_bytes(self) -> float:
        """Host bytes per accelerator, less a tenth for the system and for loading."""
        return 0.9 * self.host_memory_gib_per_node / self.per_node * 2**30


Table = Annotated[list[Accelerator], msgspec.Meta(min_length=1, max_length=1000)]


def decode_accelerators(raw: bytes, *, where: str) -> dict[str, Accelerator]:
    """Decodes a JSON list of accelerators, by name.

    Raises `InputError`, naming ``where``, for too many bytes, wrong or unknown fields and names
    that occur twice.
    """
    if len(raw) > MAX_BYTES:
        raise InputError(f"{where} has {len(raw):,} bytes; at most {MAX_BYTES:,} are read")
    try:
        table = msgspec.json.decode(raw, type=Table)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as failure:
        raise InputError(
            f"{where} is not a table of accelerators: {failure}",
            hint="see docs/SHAPES.md for the fields",
        ) from None
    named = {accelerator.name: accelerator for accelerator in table}
    if len(named) != len(table):
        raise InputError(f"{where} names an accelerator twice")
    return named


@lru_cache(maxsize=1)
def shipped_accelerators() -> dict[str, Accelerator]:
    """Returns the accelerators that deltawire ships, by name."""
    file = Path(__file__).with_name("accelerators.json")
    return decode_accelerators(file.read_bytes(), where=str(file))


def read_accelerators(path: Path | None = None) -> dict[str, Accelerator]:
    """Returns the shipped accelerators and those of a file, which take precedence.

    Raises `InputError` if the file cannot be read or is not a table.
    """
    shipped = shipped_accelerators()
    if path is None:
        return dict(shipped)
    try:
        with path.open("rb") as opened:
            raw = opened.read(MAX_BYTES + 1)
    except OSError as failure:
        raise InputError(f"cannot read {path}: {failure.strerror or failure}") from None
    return {**shipped, **decode_accelerators(raw, where=str(path))}


def accelerator_named(name: str, table: dict[str, Accelerator]) -> Accelerator:
    """Returns one accelerator. Raises `InputError` with the known names if there is none."""
    if (found := table.get(name)) is None:
        raise InputError(
            f"no accelerator is called {name!r}",
            hint=f"known: {', '.join(sorted(table))}; or pass a table with --accelerators",
        )
    return found
