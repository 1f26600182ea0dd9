"""Scores sequences with an offline SGLang.

SGLang draws with the seed of its start, not of a request: `draw` gives other tokens each time.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from deltawire.engines.sglang.server import CPU
from deltawire.errors import InputError
from deltawire.parity.offline_engine import MODEL_SHARE, WORDS, OfflineEngine

__all__ = ["READS_FOLDER", "WORDS", "SglangScorer", "open_scorer"]

READS_FOLDER = True


class SglangScorer(OfflineEngine):
    """An offline SGLang engine."""

    engine = "SGLang"

    def _start(self, folder: Path) -> None:
        on_cpu = not torch.cuda.is_available()
        if on_cpu:
            os.environ["SGLANG_USE_CPU_ENGINE"] = "1"  # Read when it is first imported.
        try:
            from sglang import Engine
            from sglang.srt.server_args import prepare_server_args
        except ImportError as error:
            raise InputError(
                f"{self.name}: SGLang is not installed here ({error})",
                hint="run deltawire of .venv-sglang, which make engines builds",
            ) from error
        arguments = [
            "--model-path", str(folder), "--dtype", self.precision, "--skip-tokenizer-init",
            "--disable-radix-cache", "--grammar-backend", "none", "--log-level", "error",
            "--mem-fraction-static", str(MODEL_SHARE), *(CPU if on_cpu else ()),
        ]  # fmt: skip
        self._engine: Any = Engine(server_args=prepare_server_args(arguments))

    def _drawn(self, prompts: list[list[int]], *, count: int, seed: int) -> list[list[int]]:
        del seed
        made = self._generate(prompts, count=count, temperature=1.0)
        return [answer["output_ids"] for answer in made]

    def _prompt_logprobs(self, inputs: list[list[int]]) -> list[list[float]]:
        starts = [0] * len(inputs)
        made = self._generate(
            inputs, count=1, temperature=0.0, return_logprob=True, logprob_start_len=starts
        )
        logprobs = []
        for ids, answer in zip(inputs, made, strict=True):
            entries = answer["meta_info"]["input_token_logprobs"]
            if [token for _, token, *_ in entries] != ids:
                raise InputError(f"{self.name} does not score every token of its prompt")
            logprobs.append([logprob for logprob, *_ in entries[1:]])
        return logprobs

    def _generate(
        self, prompts: list[list[int]], *, count: int, temperature: float, **options: Any
    ) -> list[Any]:
        sampling = {"max_new_tokens": count, "temperature": temperature, "ignore_eos": True}
        made: list[Any] = self._engine.generate(
            input_ids=prompts, sampling_params=sampling, **options
        )
        return made


open_scorer = SglangScorer.open
