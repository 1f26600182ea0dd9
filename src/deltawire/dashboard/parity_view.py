"""Shows a comparison of two engines: its figures, and layer by layer."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from deltawire.display import safe_line
from deltawire.parity.comparison import Comparison
from deltawire.parity.record import finite


def comparison_values(found: Comparison, source: str, limit: float | None) -> dict[str, Any]:
    """Returns the comparison as plain values, for JSON."""

    def numbers(values: dict[str, Any]) -> dict[str, Any]:
        return {k: finite(v) if isinstance(v, float) else v for k, v in values.items()}

    first, own = found.first_drift, found.first_own
    return {
        "source": source,
        "left": found.left,
        "right": found.right,
        "divergence": numbers(asdict(found.divergence)),
        "replayed": None if found.replayed is None else numbers(asdict(found.replayed)),
        "flipped": list(found.flipped_M),
        "tolerance": found.tolerance,
        "layers": [numbers(asdict(layer)) for layer in found.layers],
        "first_drift": None if first is None else first.number,
        "first_own": None if own is None else own.number,
        "limit": limit,
    }


def print_comparison(found: Comparison, source: str, console: Console) -> None:
    """Prints the comparison as tables."""
    heading = safe_line(f"{found.left} against {found.right}")
    table = Table(title=Text(f"{heading}\n{safe_line(source)}"), box=None)
    table.add_column("over the tokens that the left engine drew")
    table.add_column("", justify="right")
    if found.replayed is not None:
        table.add_column("experts replayed", justify="right")
    rows = {
        "tokens": "tokens",
        "k1, left to right": "k1",
        "k3, left to right": "k3",
        "k3, right to left": "k3_reverse",
        "k3, roles exchanged": "k3_swapped",
        "mean |Δ log p|": "mean_gap",
        "largest |Δ log p|": "largest_gap",
        "largest ratio": "ratio_max",
        "share of extreme ratios": "extreme_share",
        "effective share of samples": "effective_share",
    }
    for label, name in rows.items():
        parts = [found.divergence] + ([found.replayed] if found.replayed else [])
        table.add_row(label, *(f"{getattr(part, name):.4g}" for part in parts))
    if found.flipped_M:
        worst = max(range(len(found.flipped_M)), key=found.flipped_M.__getitem__)
        mean = sum(found.flipped_M) / len(found.flipped_M)
        table.add_row("expert choices flipped, all layers", f"{mean:.3%}")
        table.add_row(f"  in the worst, expert layer {worst}", f"{found.flipped_M[worst]:.3%}")
    console.print(table)
    if found.layers:
        _print_layers(found, console)


def _print_layers(found: Comparison, console: Console) -> None:
    table = Table("layer", "drift", "at worst", "own", box=None)
    for layer in found.layers:
        over = not layer.drift <= found.tolerance
        table.add_row(
            str(layer.number),
            f"{layer.drift:.3g}",
            f"{layer.worst:.3g}",
            f"{layer.own:.3g}",
            style="red" if over else "",
        )
    console.print(table)
    first, own = found.first_drift, found.first_own
    if first is None:
        console.print(f"No layer drifts beyond {found.tolerance:g}.")
        return
    console.print(f"Layer {first.number} is the first to drift beyond {found.tolerance:g}.")
    if own is None:
        console.print("Given the left engine's input, no layer does: small differences accumulate.")
    else:
        console.print(f"Given the left engine's input, layer {own.number} is the first to do so.")
