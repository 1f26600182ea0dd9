"""Judges a dump of sampled log-probabilities by a model, and prints what is wrong with it."""

from __future__ import annotations

import collections
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console

from deltawire.display import safe_line
from deltawire.launch.branches.version_names import VersionName
from deltawire.parity.dump import DumpModel, DumpReport, examine
from deltawire.parity.dump_rows import read_dump
from deltawire.placement.device import resolve_device
from deltawire.rl.evaluate.parity_sources import Source, open_source
from deltawire.runtime.trusted import ReaderTrust


def examine_dump(
    location: str,
    dump: str,
    *,
    version: int | None,
    also: Sequence[str],
    device: str,
    trust: ReaderTrust,
) -> DumpReport:
    """Judges the rows of the file ``dump`` by the model at ``location``, in float32.

    ``also`` are models, or versions of runs, that may explain rows. Raises `InputError` for a
    model or a file that cannot be read.
    """
    where = resolve_device(device)

    def others() -> Iterator[DumpModel]:
        for text in also:
            name = VersionName.parse(text)
            number = name.open(trust)[2] if name.tag else name.version
            yield scoring(open_source(name.location, version=number, trust=trust), text, where)

    path = Path(dump)
    if path.is_file():  # Not a pipe: damage is found before the model is loaded.
        collections.deque(read_dump(path), maxlen=0)
    source = open_source(location, version=version, trust=trust)
    return examine(read_dump(path), scoring(source, source.name, where), others)


def scoring(source: Source, name: str, device: torch.device) -> DumpModel:
    """Returns the model of a source as a judge of dumps."""
    model: Any = source.model.to(device).eval()

    @torch.no_grad()
    def logits(prompt: Sequence[int], tokens: Sequence[int]) -> NDArray[np.float32]:
        ids = torch.tensor([[*prompt, *tokens[:-1]]], device=device)
        found: NDArray[np.float32] = model(input_ids=ids).logits[0].float().cpu().numpy()
        return found[len(prompt) - 1 :]

    vocabulary = int(model.get_input_embeddings().num_embeddings)
    tokenizer = source.tokenizer
    text_config = model.config.get_text_config()
    return DumpModel(
        name,
        logits,
        vocabulary,
        None if tokenizer is None else tokenizer.decode,
        frozenset() if tokenizer is None else _special(tokenizer),
        getattr(text_config, "max_position_embeddings", None),
    )


def _special(tokenizer: Any) -> frozenset[int]:
    """Returns the ids that decoding leaves out with ``skip_special_tokens``."""
    added = tokenizer.added_tokens_decoder
    return frozenset(tokenizer.all_special_ids) | {one for one in added if added[one].special}


def print_dump(report: DumpReport, console: Console) -> None:
    """Prints what is wrong, and the mean gap."""
    for cause, rows in report.wrong_rows.items():
        line = f"{cause}: {rows} of {report.rows} rows, first row {report.first_rows[cause]}; "
        console.print(safe_line(line + report.texts[cause]), markup=False)
    if report.unjudged:
        console.print(f"{report.unjudged} of {report.rows} rows have no token that counts")
    gap = "" if report.mean_gap is None else f", mean gap {report.mean_gap:.4f} nats"
    verdict = "sound" if report.sound else "not sound"
    formats = ", ".join(report.formats)
    line = f"{report.rows} rows ({formats}), {report.tokens} tokens against {report.model}: "
    console.print(safe_line(f"{line}{verdict}{gap}"), markup=False)
