"""The rows of a run as tables, one a pair."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from rich.table import Table

from benchmarks.measure import Measured

_HEADINGS = (
    "coding",
    "used by",
    "bits/change",
    "of model",
    "× smaller",
    "encode GB/s",
    "of limit",
    "decode GB/s",
    "of limit",
    "memory, encode",
    "memory, decode",
)


def label(row: Measured) -> str:
    """The coding with its vector path and threads, where those distinguish rows."""
    words = " ".join(word for word in (row.codec, row.simd) if word)
    return words if row.threads == 1 else f"{words}, {row.threads} threads"


def tables(rows: Sequence[Measured]) -> list[Table]:
    """A table for each pair, in the order in which they were measured."""
    return [
        _table(pair, [row for row in rows if row.pair == pair])
        for pair in dict.fromkeys(row.pair for row in rows)
    ]


def _table(pair: str, rows: list[Measured]) -> Table:
    good = [row for row in rows if row.elements]
    table = Table(title=_title(pair, good), caption=_caption(good), title_justify="left")
    for number, heading in enumerate(_HEADINGS):
        table.add_column(heading, justify="left" if number < 2 else "right", no_wrap=number != 1)
    for row in rows:
        table.add_row(*_cells(row), style="red" if row.error else None)
    return table


def _title(pair: str, rows: list[Measured]) -> str:
    if not rows:
        return pair
    first = rows[0]
    return (
        f"{pair}: {first.elements:,} weights, {first.model_bytes / 1e6:,.0f} MB, "
        f"{first.changed / max(first.elements, 1):.2%} changed"
    )


def _caption(rows: list[Measured]) -> str:
    single = [row for row in rows if row.threads == 1 and row.read_both_s]
    if not single:
        return ""
    read = median(row.read_gbs for row in single)
    copy = median(row.copy_gbs for row in single)
    traced = any(row.memory_method == "traced" for row in rows)
    return (
        "GB of model a second, on as many processors as threads. The limit: reading base and "
        f"target and nothing else, one thread, {read:.2f}; copying one of them, {copy:.2f}; each "
        "row is compared with the limit measured in its own process. Extra memory is the peak "
        "above the operands, as a share of the model, the result included."
        + (" Memory: traced allocations only." if traced else "")
    )


def _cells(row: Measured) -> list[str]:
    if row.error:
        return [label(row), row.used_by, f"error: {row.error}"]
    return [
        label(row),
        row.used_by,
        _number(row.bits_per_change, "{:.2f}"),
        _number(row.share, "{:.3%}"),
        _number(row.ratio, "{:.2f}"),
        _number(row.encode_gbs, "{:.3f}"),
        _share(row.encode_gbs, row.read_gbs),
        _number(row.decode_gbs, "{:.3f}"),
        _share(row.decode_gbs, row.read_gbs),
        _memory(row.encode_extra_bytes, row.model_bytes),
        _memory(row.decode_extra_bytes, row.model_bytes),
    ]


def _number(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)


def _share(speed: float | None, limit: float) -> str:
    return "" if speed is None or not limit else f"{speed / limit:.0%}"


def _memory(extra: int | None, whole: int) -> str:
    return "" if extra is None or not whole else f"{extra / 1e6:,.1f} MB {extra / whole:>6.1%}"
