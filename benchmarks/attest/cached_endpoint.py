"""A recurrent language model, small and in NumPy, and an endpoint with a prefix cache over it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from deltawire.launch.black_box.judging import Floats, ScoredVersion

VOCABULARY, HIDDEN = 40, 24
Matrices = tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.float32]]


def rounded(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Rounds to the nearest bf16, ties to even."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    bits = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) & np.uint32(
        0xFFFF0000
    )
    return bits.view(np.float32)


class Recurrent:
    """The weights of one version: embedding, recurrence, head."""

    def __init__(self, seed: int, parts: Matrices | None = None) -> None:
        rng = np.random.default_rng(seed)
        shapes = ((VOCABULARY, HIDDEN), (HIDDEN, HIDDEN), (HIDDEN, VOCABULARY))
        drawn = [rng.standard_normal(shape).astype(np.float32) for shape in shapes]
        self.parts: Matrices = parts or (drawn[0], drawn[1] * np.float32(0.25), drawn[2])

    def stepped(self, seed: int, size: float) -> Recurrent:
        """Returns weights after a step of this size."""
        rng = np.random.default_rng(seed)
        moved = [
            part + size * rng.standard_normal(part.shape).astype(np.float32) for part in self.parts
        ]
        return Recurrent(0, (moved[0], moved[1], moved[2]))

    def next_state(
        self, state: NDArray[np.float32], token: int, *, bf16: bool
    ) -> NDArray[np.float32]:
        """Reads one token."""
        embed, turn, _ = self.parts
        moved: NDArray[np.float32] = np.tanh(state @ turn + embed[token])
        return rounded(moved) if bf16 else moved

    def logprobs(self, state: NDArray[np.float32], *, bf16: bool) -> Floats:
        """Returns the log-probability of each token after what was read."""
        logits = state @ self.parts[2]
        wide = (rounded(logits) if bf16 else logits).astype(np.float64)
        found: Floats = wide - np.log(np.exp(wide - wide.max()).sum()) - wide.max()
        return found

    def score(self, tokens: Sequence[int], *, bf16: bool) -> Floats:
        """Returns the log-probability of each token after the first."""
        state, found = np.zeros(HIDDEN, np.float32), []
        for token, following in pairwise(tokens):
            state = self.next_state(state, token, bf16=bf16)
            found.append(self.logprobs(state, bf16=bf16)[following])
        return np.array(found)

    def version(self, name: str) -> ScoredVersion:
        """Returns the weights as a version that endpoints are compared with."""
        return ScoredVersion(
            name,
            lambda tokens: self.score(tokens, bf16=False),
            lambda tokens: self.score(tokens, bf16=True),
        )


class CachedEndpoint:
    """Serves weights in bf16, with a cache of prompts that an update clears or forgets to.

    Example::

        endpoint = CachedEndpoint(weights, clears=True)
        endpoint.update(newer)
    """

    def __init__(self, weights: Recurrent, *, clears: bool, says_tokens: bool = True) -> None:
        self.weights = weights
        self._clears = clears
        self._says_tokens = says_tokens
        self._cache: dict[tuple[int, ...], NDArray[np.float32]] = {}
        self._rng = np.random.default_rng(5)

    def update(self, weights: Recurrent) -> None:
        """Takes new weights."""
        self.weights = weights
        if self._clears:
            self._cache.clear()

    def forced(self, tokens: Sequence[int]) -> Floats:
        """See `deltawire.launch.black_box.judging.ScoredEndpoint`."""
        return self.weights.score(tokens, bf16=True)

    def drawn(self, prompt: Sequence[int], count: int) -> tuple[list[int], Floats] | None:
        """See `deltawire.launch.black_box.judging.ScoredEndpoint`."""
        if not self._says_tokens:
            return None
        key = tuple(prompt)
        if key not in self._cache:
            state = np.zeros(HIDDEN, np.float32)
            for token in prompt:
                state = self.weights.next_state(state, token, bf16=True)
            self._cache[key] = state
        state, tokens, found = self._cache[key], [], []
        for _ in range(count):
            after = self.weights.logprobs(state, bf16=True)
            tokens.append(int((after + self._rng.gumbel(size=VOCABULARY)).argmax()))
            found.append(after[tokens[-1]])
            state = self.weights.next_state(state, tokens[-1], bf16=True)
        return tokens, np.array(found)
