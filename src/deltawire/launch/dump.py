"""Judges a dump of sampled log-probabilities by a model, and prints what is wrong with it."""

from __future__ import annotations

import collections
import inspect
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console

from deltawire.display import safe_line
from deltawire.engines.cache_size import available_bytes
from deltawire.launch.branches.version_names import VersionName
from deltawire.parity.dump import TOGETHER, DumpModel, DumpReport, RowLogits, examine
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

    def logits(prompt: Sequence[int], tokens: Sequence[int]) -> RowLogits:
        ids = torch.tensor([[*prompt, *tokens[:-1]]], device=device)
        return read_row(model, ids, len(prompt) - 1)

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
        most_tokens(text_config, available_bytes(device), in_parts=_in_parts(model)),
    )


class PartLogits:
    """The logits of a row, from its position ``first`` on, made slice by slice.

    The decoder has run once. Its output is given to the causal LM again for each slice, so that
    what a family does to logits after the head stays its own.
    """

    def __init__(self, model: Any, ids: torch.Tensor, first: int, output: Any) -> None:
        self._model, self._ids, self._first, self._output = model, ids, first, output

    @torch.no_grad()
    def __getitem__(self, part: slice) -> NDArray[np.float32]:
        """Returns float32[tokens, V]."""
        first, end, _ = part.indices(self._ids.shape[1] - self._first)
        places = torch.arange(first, end, device=self._ids.device) + self._first
        decoder = _causal(self._model).get_decoder()
        decoder.forward = lambda *_, **__: self._output
        try:
            logits = self._model(input_ids=self._ids, logits_to_keep=places).logits
        finally:
            del decoder.forward
        found: NDArray[np.float32] = logits[0].float().cpu().numpy()
        return found


@torch.no_grad()
def read_row(model: Any, ids: torch.Tensor, first: int) -> RowLogits:
    """Returns the logits of int64[1, S] from position ``first`` on."""
    if not _in_parts(model):
        found: NDArray[np.float32] = model(input_ids=ids).logits[0, first:].float().cpu().numpy()
        return found
    held: list[Any] = []
    decoder = _causal(model).get_decoder()
    handle = decoder.register_forward_hook(lambda _module, _given, output: held.append(output))
    try:
        model(input_ids=ids, use_cache=False, logits_to_keep=1)
    finally:
        handle.remove()
    return PartLogits(model, ids, first, held[-1])


def most_tokens(config: Any, available: int, *, in_parts: bool) -> int:
    """Returns for how many tokens of a row there is memory, in float32.

    Counted are eight hidden states and three intermediate ones a token, `TOGETHER` tokens' logits
    on the device, on the host, and three times in float64; and all tokens' logits twice if they are
    not made ``in_parts``. An attention that keeps a value for each pair of tokens needs more.
    """
    vocabulary, hidden = int(config.vocab_size), int(config.hidden_size)
    inner = getattr(config, "intermediate_size", None)
    inner = inner if isinstance(inner, int) else 4 * hidden
    token = 4 * (8 * hidden + 3 * inner) + (0 if in_parts else 2 * 4 * vocabulary)
    logits = vocabulary * (2 * 4 + 3 * 8)
    if available <= TOGETHER * (token + logits):
        return max(available, 0) // (token + logits)
    return (available - TOGETHER * logits) // token


def _causal(model: Any) -> Any:
    """Returns the causal LM within an adapter."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _in_parts(model: Any) -> bool:
    """Returns whether the model can be asked for some tokens' logits only."""
    causal = _causal(model)
    taken = inspect.signature(causal.forward).parameters
    decoder = causal.get_decoder() if hasattr(causal, "get_decoder") else None
    return {"logits_to_keep", "use_cache"} <= taken.keys() and decoder not in (None, causal)


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
