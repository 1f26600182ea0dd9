"""Scores sequences with an offline SGLang, through the log-probabilities of prompt tokens.

SGLang draws with the seed of its start, not of a request: `draw` gives other tokens each time.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from deltawire.engines.sglang.server import CPU
from deltawire.errors import InputError
from deltawire.parity.scorers import PRECISIONS, ScorerSpec
from deltawire.parity.scores import DrawnSequence, Precision, Scores

WORDS = {"precision": tuple(PRECISIONS)}
READS_FOLDER = True

MODEL_SHARE = "0.5"
"""The share of an accelerator's memory to use; the other engine may be on it too."""


def open_scorer(
    spec: ScorerSpec, model: Any, folder: Path | None, *, device: Any = None
) -> SglangScorer:
    """Opens the scorer on the weights in ``folder``, where SGLang chooses the device. Raises
    `InputError`."""
    del model, device
    if folder is None:
        raise InputError("sglang needs a model directory, and this model has none")
    return SglangScorer(spec.name, folder, spec.precision)


class SglangScorer:
    """An offline SGLang engine on a model directory. Raises `InputError` if there is no SGLang."""

    def __init__(self, name: str, folder: Path, precision: Precision) -> None:
        on_cpu = not torch.cuda.is_available()
        if on_cpu:
            os.environ["SGLANG_USE_CPU_ENGINE"] = "1"  # Read when it is first imported.
        try:
            from sglang import Engine
            from sglang.srt.server_args import prepare_server_args
        except ImportError as error:
            raise InputError(
                f"{name}: SGLang is not installed here ({error})",
                hint="run deltawire of .venv-sglang, which make engines builds",
            ) from error
        self.name = name
        self.precision = precision
        arguments = [
            "--model-path", str(folder), "--dtype", precision, "--skip-tokenizer-init",
            "--disable-radix-cache", "--grammar-backend", "none", "--log-level", "error",
            "--mem-fraction-static", MODEL_SHARE, *(CPU if on_cpu else ()),
        ]  # fmt: skip
        try:
            self._engine: Any = Engine(server_args=prepare_server_args(arguments))
        except Exception as error:  # Whatever it is, the caller must choose another engine.
            first = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise InputError(f"{name}: SGLang does not serve {folder}: {first[:300]}") from error

    def draw(
        self, prompts: Sequence[tuple[int, ...]], *, count: int, seed: int
    ) -> list[DrawnSequence]:
        """See `deltawire.parity.scores.Scorer`; ``seed`` has no effect."""
        del seed
        made = self._generate([list(prompt) for prompt in prompts], count=count, temperature=1.0)
        pairs = zip(prompts, made, strict=True)
        return [DrawnSequence(prompt, tuple(answer["output_ids"])) for prompt, answer in pairs]

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
        inputs = [[*sequence.prompt, *sequence.tokens] for sequence in sequences]
        made = self._generate(inputs, count=1, temperature=0.0, return_logprob=True)
        scores = []
        for ids, answer, sequence in zip(inputs, made, sequences, strict=True):
            entries = answer["meta_info"]["input_token_logprobs"]
            if [token for _, token, *_ in entries] != ids:
                raise InputError(f"{self.name} does not score every token of its prompt")
            values = [logprob for logprob, *_ in entries[len(sequence.prompt) :]]
            scores.append(Scores(np.array(values, np.float64)))
        return scores

    def _generate(
        self, prompts: list[list[int]], *, count: int, temperature: float, **options: Any
    ) -> list[Any]:
        sampling = {"max_new_tokens": count, "temperature": temperature, "ignore_eos": True}
        if options:
            options["logprob_start_len"] = [0] * len(prompts)
        made: list[Any] = self._engine.generate(
            input_ids=prompts, sampling_params=sampling, **options
        )
        return made
