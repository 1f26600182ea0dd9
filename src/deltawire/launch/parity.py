"""Compares two engines on the same weights and prompts."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from deltawire.dashboard.pictures import check_suffix
from deltawire.errors import InputError
from deltawire.parity.comparison import Comparison, compare
from deltawire.parity.scorers import open_scorer, parse_spec
from deltawire.placement.device import resolve_device
from deltawire.rl.evaluate.parity_sources import (
    fitting,
    open_source,
    random_prompts,
    read_prompts,
)
from deltawire.runtime.trusted import ANY, ReaderTrust

_LIMITS = {"count": (1, 4096), "length": (1, 1 << 20), "tokens": (1, 1 << 20)}


@dataclass(frozen=True, kw_only=True)
class ParityOptions:
    """The two engines, their prompts, and what is compared; see ``deltawire parity --help``."""

    left: str
    right: str
    version: int | None = None
    prompts: str = ""
    count: int = 8
    length: int = 32
    tokens: int = 64
    seed: int = 0
    layers: bool = False
    tolerance: float | None = None
    replay: bool = False
    plot: str = ""
    device: str = "auto"


def compare_engines(
    location: str, options: ParityOptions, trust: ReaderTrust = ANY
) -> tuple[Comparison, str]:
    """Draws tokens with the left engine and scores them with both.

    Returns the comparison and the name of the model, and writes the plot if one is asked for.
    """
    device = resolve_device(options.device)
    specs = [parse_spec(options.left), parse_spec(options.right)]
    for name, (low, high) in _LIMITS.items():
        if not low <= getattr(options, name) <= high:
            raise InputError(f"--{name} must be from {low} to {high}")
    if options.plot:
        check_suffix(Path(options.plot))
    source = open_source(location, version=options.version, trust=trust)
    vocabulary = int(source.model.get_input_embeddings().num_embeddings)
    if options.prompts:
        path = Path(options.prompts)
        prompts = read_prompts(path, source.tokenizer, vocabulary=vocabulary)
    else:
        prompts = random_prompts(
            vocabulary, count=options.count, length=options.length, seed=options.seed
        )
    fitting(prompts, tokens=options.tokens, model=source.model)
    with ExitStack() as stack:
        on_disk = any(spec.reads_folder for spec in specs)
        folder = stack.enter_context(source.folder()) if on_disk else None
        left, right = (open_scorer(spec, source.model, folder, device=device) for spec in specs)
        found = compare(
            left,
            right,
            left.draw(prompts, count=options.tokens, seed=options.seed),
            layers=options.layers or bool(options.plot),
            replay=options.replay,
            tolerance=options.tolerance,
        )
    if options.plot:
        from deltawire.dashboard.parity_plot import plot_layers

        plot_layers(found, source.name, Path(options.plot))
    return found, source.name
