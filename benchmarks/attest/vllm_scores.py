"""Teacher-forces stored sequences with vLLM; run by vLLM's Python, without deltawire.

Reads a model and ``tokens.npy`` from the folder in the first argument, writes ``scores.npy``.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np


def main(folder: Path) -> None:
    """Stores the log-probability of each token after the first, float64[sequences, tokens]."""
    from vllm import LLM, SamplingParams

    tokens = np.load(folder / "tokens.npy", allow_pickle=False)
    engine = LLM(
        str(folder),
        skip_tokenizer_init=True,
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=256,
        kv_cache_memory_bytes=256 << 20,
        enable_prefix_caching=False,
        seed=0,
    )
    asked = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    prompts = [{"prompt_token_ids": row.tolist()} for row in tokens]
    found = []
    for row, output in zip(tokens, engine.generate(prompts, asked, use_tqdm=False), strict=True):
        given = output.prompt_logprobs[1:]
        pairs = zip(row[1:], given, strict=True)
        found.append([step[int(token)].logprob for token, step in pairs])
    np.save(folder / "scores.npy", np.array(found, np.float64))
    engine.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
