"""``deltawire parity``: two engines on the same weights and prompts, and where they part."""

from __future__ import annotations

import argparse
import json
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from deltawire.errors import InputError
from deltawire.parity.comparison import Comparison, compare
from deltawire.parity.record import finite
from deltawire.parity.scorers import Scorer, open_scorer, parse_spec
from deltawire.rl.evaluate.parity_sources import (
    Source,
    fitting,
    open_source,
    random_prompts,
    read_prompts,
)

EXCEEDED = 3
_LIMITS = {"count": (1, 4096), "length": (1, 1 << 20), "tokens": (1, 1 << 20)}


def parity(arguments: argparse.Namespace) -> int:
    """Compare and print; 3 if ``--limit`` is exceeded."""
    specs = [parse_spec(arguments.left), parse_spec(arguments.right)]
    for name, (low, high) in _LIMITS.items():
        if not low <= getattr(arguments, name) <= high:
            raise InputError(f"--{name} must be from {low} to {high}")
    if arguments.plot:
        from deltawire.dashboard.pictures import check_suffix

        check_suffix(Path(arguments.plot))
    source = open_source(arguments.source, version=arguments.version)
    with ExitStack() as stack:
        external = any(spec.kind != "transformers" for spec in specs)
        folder = stack.enter_context(source.folder()) if external else None
        left, right = (open_scorer(spec, source.model, folder) for spec in specs)
        found = _compare(arguments, source, left, right)
    if arguments.plot:
        from deltawire.dashboard.parity_plot import plot_layers

        plot_layers(found, source.name, Path(arguments.plot))
    if arguments.json:
        Console().print_json(json.dumps(_plain(found, source.name, arguments.limit)))
    else:
        _print(found, source.name, Console())
    exceeded = arguments.limit is not None and not found.divergence.k3 <= arguments.limit
    return EXCEEDED if exceeded else 0


def _compare(
    arguments: argparse.Namespace, source: Source, left: Scorer, right: Scorer
) -> Comparison:
    vocabulary = int(source.model.get_input_embeddings().num_embeddings)
    if arguments.prompts:
        path = Path(arguments.prompts)
        prompts = read_prompts(path, source.tokenizer, vocabulary=vocabulary)
    else:
        prompts = random_prompts(
            vocabulary, count=arguments.count, length=arguments.length, seed=arguments.seed
        )
    fitting(prompts, tokens=arguments.tokens, model=source.model)
    drawn = left.draw(prompts, count=arguments.tokens, seed=arguments.seed)
    return compare(
        left,
        right,
        drawn,
        layers=arguments.layers or bool(arguments.plot),
        replay=arguments.replay,
        tolerance=arguments.tolerance,
    )


def _plain(found: Comparison, source: str, limit: float | None) -> dict[str, Any]:
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


def _print(found: Comparison, source: str, console: Console) -> None:
    table = Table(title=f"{found.left} against {found.right}\n{source}", box=None)
    table.add_column("over the tokens that the left one drew")
    table.add_column("", justify="right")
    if found.replayed is not None:
        table.add_column("experts replayed", justify="right")
    rows = {
        "tokens": "tokens",
        "k1, left to right": "k1",
        "k3, left to right": "k3",
        "k3, right to left": "k3_reverse",
        "k3, names exchanged": "k3_swapped",
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
    table = Table("layer", "drift", "at worst", "of its own", box=None)
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
        console.print("Given the left one's input, no layer does: it adds up on the way.")
    else:
        console.print(f"Given the left one's input, layer {own.number} is the first to do so.")
