"""Types of scored sequences, and the interface of an engine that scores them.

Shapes: P prompt tokens and T drawn tokens of one sequence; S = P + T − 1 positions are read.
L decoder layers, H hidden size; of a model with experts, M expert layers and K chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

Precision = Literal["float32", "bfloat16"]


@dataclass(frozen=True)
class DrawnSequence:
    """A prompt and the tokens drawn after it, as token ids."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]

    @property
    def read(self) -> list[int]:
        """Returns the tokens that are read: all except the last."""
        return [*self.prompt, *self.tokens[:-1]]


@dataclass(frozen=True)
class Scores:
    """Scores of one sequence: log-probabilities float64[T], and details if an engine has them.

    The details are the hidden states before the first decoder layer and after each, float32[L + 1,
    S, H], and the expert choices, int32[S, M, K].
    """

    logprobs_T: NDArray[np.float64]
    hidden_LSH: Tensor | None = None
    routes_SMK: NDArray[np.int32] | None = None


class Scorer(Protocol):
    """An engine that scores sequences."""

    @property
    def name(self) -> str:
        """The engine's name as it was requested."""
        ...

    @property
    def precision(self) -> Precision:
        """The precision of its arithmetic."""
        ...

    def score(
        self,
        sequences: Sequence[DrawnSequence],
        *,
        layers: bool = False,
        feed: Sequence[Scores] | None = None,
        replay: Sequence[Scores] | None = None,
    ) -> list[Scores]:
        """Scores every sequence.

        With ``layers``, hidden states are returned. With ``feed``, each decoder layer gets the
        input that it had there instead of what this engine computed, which shows each layer's own
        error. With ``replay``, the expert choices made there are used. Raises `InputError` if an
        engine cannot do so.
        """
        ...

    def draw(
        self, prompts: Sequence[tuple[int, ...]], *, count: int, seed: int
    ) -> list[DrawnSequence]:
        """Draws ``count`` tokens after each prompt, at temperature 1."""
        ...
