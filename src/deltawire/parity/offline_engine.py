"""Scores sequences with an engine that serves a model directory in this process, through the
log-probabilities of prompt tokens. `vllm_scorer` and `sglang_scorer` are what each engine is asked.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np

from deltawire.errors import InputError
from deltawire.parity.scorers import PRECISIONS, ScorerSpec
from deltawire.parity.scores import DrawnSequence, Precision, Scores

WORDS = {"precision": tuple(PRECISIONS)}

MODEL_SHARE = 0.5
"""The share of an accelerator's memory to use; the other engine may be on it too."""


class OfflineEngine(ABC):
    """An engine on a model directory. Raises `InputError` if it is not installed here, or does not
    serve the model."""

    engine: ClassVar[str]
    """The engine's name, as people write it."""

    def __init__(self, name: str, folder: Path, precision: Precision) -> None:
        self.name = name
        self.precision = precision
        try:
            self._start(folder)
        except InputError:
            raise
        except Exception as error:  # Whatever it is, the caller must choose another engine.
            first = (str(error).strip().splitlines() or [type(error).__name__])[0]
            fault = f"{name}: {self.engine} does not serve {folder}: {first[:300]}"
            raise InputError(fault) from error

    @classmethod
    def open(cls, spec: ScorerSpec, model: Any, folder: Path | None, *, device: Any = None) -> Self:
        """Opens the scorer on the weights in ``folder``, where the engine chooses the device.
        Raises `InputError`."""
        del model, device
        if folder is None:
            raise InputError(f"{spec.name} needs a model directory, and this model has none")
        return cls(spec.name, folder, spec.precision)

    @abstractmethod
    def _start(self, folder: Path) -> None:
        """Starts the engine; raises `InputError` if it is not installed here."""

    @abstractmethod
    def _drawn(self, prompts: list[list[int]], *, count: int, seed: int) -> Sequence[Sequence[int]]:
        """Returns ``count`` tokens after each prompt, at temperature 1."""

    @abstractmethod
    def _prompt_logprobs(self, inputs: list[list[int]]) -> Sequence[Sequence[float]]:
        """Returns, for each input, the log-probability of each token but the first, in nats."""

    def draw(
        self, prompts: Sequence[tuple[int, ...]], *, count: int, seed: int
    ) -> list[DrawnSequence]:
        """See `deltawire.parity.scores.Scorer`."""
        drawn = self._drawn([list(prompt) for prompt in prompts], count=count, seed=seed)
        pairs = zip(prompts, drawn, strict=True)
        return [DrawnSequence(prompt, tuple(tokens)) for prompt, tokens in pairs]

    def score(
        self,
        sequences: Sequence[DrawnSequence],
        *,
        layers: bool = False,
        feed: Sequence[Scores] | None = None,
        replay: Sequence[Scores] | None = None,
    ) -> list[Scores]:
        """See `deltawire.parity.scores.Scorer`."""
        if layers or feed is not None or replay is not None:
            raise InputError(
                f"{self.name} provides log-probabilities only",
                hint="compare layers and expert choices between two transformers engines",
            )
        logprobs = self._prompt_logprobs([[*one.prompt, *one.tokens] for one in sequences])
        return [
            Scores(np.array(values[len(sequence.prompt) - 1 :], np.float64))
            for values, sequence in zip(logprobs, sequences, strict=True)
        ]
