"""The registry of engines that score given tokens: one module and one line in `SCORERS`.

An engine is named by a word and options, such as ``transformers:sdpa:bf16`` or
``transformers:eager:float32:decode``. All engines score the same sequences, one at a time and
without padding, so that only arithmetic differs. The module has::

    WORDS: dict[str, tuple[str, ...]]       # the words that each of its options may be
    READS_FOLDER: bool                      # needs the weights on disk, for another process
    def open_scorer(
        spec: ScorerSpec, model: Any, folder: Path | None, *, device: torch.device | None
    ) -> Scorer: ...
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deltawire.errors import InputError
from deltawire.parity.scores import Precision, Scorer

if TYPE_CHECKING:
    import torch

SCORERS = {
    "sglang": "deltawire.parity.sglang_scorer",
    "transformers": "deltawire.parity.transformers_scorer",
    "vllm": "deltawire.parity.vllm_scorer",
}
"""Scorers by the first word of an engine's name."""

PRECISIONS: dict[str, Precision] = {
    "float32": "float32",
    "fp32": "float32",
    "bfloat16": "bfloat16",
    "bf16": "bfloat16",
}


@dataclass(frozen=True)
class ScorerSpec:
    """The parsed name of an engine: its kind, and the word of each option that was given."""

    name: str
    kind: str
    options: Mapping[str, str]

    @property
    def precision(self) -> Precision:
        """The precision of its arithmetic, float32 by default."""
        return PRECISIONS[self.options.get("precision", "float32")]

    @property
    def reads_folder(self) -> bool:
        """True if the engine reads the weights from a model directory."""
        return bool(_module(self.kind).READS_FOLDER)


def parse_spec(text: str) -> ScorerSpec:
    """Parses an engine's name; raises `InputError` naming the invalid word."""
    kind, *words = text.split(":")
    if kind not in SCORERS:
        raise InputError(
            f"{text!r}: there is no engine {kind!r}", hint=f"use one of {', '.join(SCORERS)}"
        )
    allowed: dict[str, tuple[str, ...]] = _module(kind).WORDS
    option_of = {word: option for option, known in allowed.items() for word in known}
    options: dict[str, str] = {}
    for word in words:
        option = option_of.get(word, "")
        if not option or option in options:
            fault = "occurs twice" if option else "is not known here"
            choices = "; ".join(" or ".join(known) for known in allowed.values())
            raise InputError(
                f"{text!r}: {word!r} {fault}", hint=f"after {kind}, use any of: {choices}"
            )
        options[option] = word
    return ScorerSpec(text, kind, options)


def open_scorer(
    spec: ScorerSpec, model: Any, folder: Path | None, *, device: torch.device | None = None
) -> Scorer:
    """Opens an engine on a copy of the weights: ``model`` is float32, and ``folder`` holds the same
    weights on disk for engines that read them there. ``device`` is the one that engines in this
    process compute on, by default the model's. Raises `InputError`."""
    opened: Scorer = _module(spec.kind).open_scorer(spec, model, folder, device=device)
    return opened


def _module(kind: str) -> Any:
    return importlib.import_module(SCORERS[kind])
