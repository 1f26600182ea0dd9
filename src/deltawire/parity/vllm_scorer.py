"""Scores sequences with an offline vLLM, through the log-probabilities of prompt tokens.

Only the log-probability of each given token is requested, so an answer is as long as its sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from deltawire.errors import InputError
from deltawire.parity.scorers import PRECISIONS, ScorerSpec
from deltawire.parity.scores import DrawnSequence, Precision, Scores

WORDS = {"precision": tuple(PRECISIONS)}
READS_FOLDER = True

MODEL_SHARE = 0.5
"""The share of an accelerator's memory to use; the other engine may be on it too."""


def open_scorer(
    spec: ScorerSpec, model: Any, folder: Path | None, *, device: Any = None
) -> VllmScorer:
    """Opens the scorer on the weights in ``folder``, where vLLM chooses the device. Raises
    `InputError`."""
    del model, device
    if folder is None:
        raise InputError("vllm needs a model directory, and this model has none")
    return VllmScorer(spec.name, folder, spec.precision)


class VllmScorer:
    """An offline vLLM engine on a model directory. Raises `InputError` if there is no vLLM."""

    def __init__(self, name: str, folder: Path, precision: Precision) -> None:
        try:
            import vllm  # type: ignore[import-not-found, unused-ignore]
        except ImportError as error:
            raise InputError(
                f"{name}: vLLM is not installed here ({error})", hint="pip install vllm"
            ) from error
        self.name = name
        self.precision = precision
        self._vllm: Any = vllm
        try:
            self._llm: Any = vllm.LLM(
                model=str(folder),
                dtype=precision,
                enforce_eager=True,
                skip_tokenizer_init=True,
                enable_prefix_caching=False,
                gpu_memory_utilization=MODEL_SHARE,
            )
        except Exception as error:  # Whatever it is, the caller must choose another engine.
            first = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise InputError(f"{name}: vLLM does not serve {folder}: {first[:300]}") from error

    def draw(
        self, prompts: Sequence[tuple[int, ...]], *, count: int, seed: int
    ) -> list[DrawnSequence]:
        """See `deltawire.parity.scores.Scorer`."""
        sampling = self._vllm.SamplingParams(
            temperature=1.0, max_tokens=count, seed=seed, ignore_eos=True, detokenize=False
        )
        made = self._generate([list(prompt) for prompt in prompts], sampling)
        pairs = zip(prompts, made, strict=True)
        return [DrawnSequence(prompt, tuple(one.outputs[0].token_ids)) for prompt, one in pairs]

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
        sampling = self._vllm.SamplingParams(
            temperature=0.0, max_tokens=1, prompt_logprobs=0, ignore_eos=True, detokenize=False
        )
        inputs = [[*sequence.prompt, *sequence.tokens] for sequence in sequences]
        found = []
        for ids, one, sequence in zip(
            inputs, self._generate(inputs, sampling), sequences, strict=True
        ):
            start = len(sequence.prompt)
            entries = one.prompt_logprobs[start:]
            values = [
                entry[token].logprob for entry, token in zip(entries, ids[start:], strict=True)
            ]
            found.append(Scores(np.array(values, np.float64)))
        return found

    def _generate(self, prompts: list[list[int]], sampling: Any) -> list[Any]:
        requests = [{"prompt_token_ids": prompt} for prompt in prompts]
        made: list[Any] = self._llm.generate(requests, sampling, use_tqdm=False)
        return made
