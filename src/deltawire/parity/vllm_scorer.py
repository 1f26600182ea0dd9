"""Scores sequences with an offline vLLM.

Only the log-probability of each given token is requested, so an answer is as long as its sequence.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from deltawire.errors import InputError
from deltawire.parity.offline_engine import MODEL_SHARE, WORDS, OfflineEngine

__all__ = ["READS_FOLDER", "WORDS", "VllmScorer", "open_scorer"]

READS_FOLDER = True


class VllmScorer(OfflineEngine):
    """An offline vLLM engine."""

    engine = "vLLM"

    def _start(self, folder: Path) -> None:
        try:
            import vllm  # type: ignore[import-not-found, unused-ignore]
        except ImportError as error:
            raise InputError(
                f"{self.name}: vLLM is not installed here ({error})", hint="pip install vllm"
            ) from error
        self._vllm: Any = vllm
        self._llm: Any = vllm.LLM(
            model=str(folder),
            dtype=self.precision,
            enforce_eager=True,
            skip_tokenizer_init=True,
            enable_prefix_caching=False,
            gpu_memory_utilization=MODEL_SHARE,
        )

    def _drawn(self, prompts: list[list[int]], *, count: int, seed: int) -> list[list[int]]:
        made = self._generate(prompts, temperature=1.0, max_tokens=count, seed=seed)
        return [answer.outputs[0].token_ids for answer in made]

    def _prompt_logprobs(self, inputs: list[list[int]]) -> list[list[float]]:
        made = self._generate(inputs, temperature=0.0, max_tokens=1, prompt_logprobs=0)
        return [
            [
                entry[token].logprob
                for entry, token in zip(answer.prompt_logprobs[1:], ids[1:], strict=True)
            ]
            for ids, answer in zip(inputs, made, strict=True)
        ]

    def _generate(self, prompts: list[list[int]], **options: Any) -> list[Any]:
        sampling = self._vllm.SamplingParams(ignore_eos=True, detokenize=False, **options)
        requests = [{"prompt_token_ids": prompt} for prompt in prompts]
        made: list[Any] = self._llm.generate(requests, sampling, use_tqdm=False)
        return made


open_scorer = VllmScorer.open
