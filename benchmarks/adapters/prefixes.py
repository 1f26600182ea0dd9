"""``stale_prefix_hits``: prompts continued after an adapter changed, against a fresh engine.

The embedded engine keeps keys and values of finished sequences, and uses them again for prompts
that continue them. After each version of the adapter the same sequences are continued; an answer
whose log-probabilities are not those of an engine without a cache came from stale keys and values.
Without a change of version the cache must be used, or the measurement would prove nothing.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers

from benchmarks.training.keys import Measured, Options
from deltawire.config import AdapterConfig
from deltawire.engines.base import Completion, Sampling
from deltawire.engines.transformers.engine import TransformersEngine
from deltawire.export.adapter import adapted

VERSIONS, PROMPTS, LENGTH = 10, 8, 12
GREEDY = Sampling(max_tokens=4, temperature=0.0)
CLOSE = 1e-4


def measure(options: Options) -> Measured:
    """Continue prompts over versions; count answers from stale and from current caches."""
    torch.manual_seed(options.seed)
    model = _model()
    engine = TransformersEngine(model, stop_tokens=[], slots=32, capacity=256, version=0)
    prompts = [torch.randint(0, 128, (LENGTH,)).tolist() for _ in range(PROMPTS)]
    hits = read = reused = 0
    for version in range(VERSIONS):
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_" in name:
                    parameter.normal_(0, 0.3)
        engine.version = version
        for again in (False, True):  # The second time nothing changed: the cache may be used.
            before = engine.tokens_read
            answers = _answers(engine, prompts)
            fresh = TransformersEngine(
                model, stop_tokens=[], slots=32, capacity=256, version=version, reuse=False
            )
            exact = _answers(fresh, prompts)
            for mine, theirs in zip(answers, exact, strict=True):
                near = all(
                    abs(a - b) < CLOSE for a, b in zip(mine.logprobs, theirs.logprobs, strict=True)
                )
                hits += mine.tokens != theirs.tokens or not near
            if again:
                reused += sum(map(len, prompts)) - (engine.tokens_read - before)
            read += engine.tokens_read - before
            prompts = [
                [*prompt, *mine.tokens, 1] for prompt, mine in zip(prompts, answers, strict=True)
            ]
    if not reused:
        raise RuntimeError("no cached prefix was used, so none could be stale")
    return Measured(
        {"stale_prefix_hits": float(hits)},
        {
            "answers": 2 * VERSIONS * PROMPTS,
            "prompt_tokens_reused": reused,
            "prompt_tokens_read": read,
        },
    )


def _model() -> Any:
    config = transformers.Qwen3Config(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=128,
    )
    auto: Any = transformers.AutoModelForCausalLM
    model = auto.from_config(config, dtype=torch.float32)
    adapter = AdapterConfig(kind="lora", rank=4, targets=["all-linear"])
    return adapted(model, adapter, seed=0).eval()


def _answers(engine: TransformersEngine, prompts: list[list[int]]) -> list[Completion]:
    found: dict[int, Completion] = {}
    for number, prompt in enumerate(prompts):
        engine.submit(prompt, GREEDY, lambda done, number=number: found.update({number: done}))  # type: ignore[misc]
    while engine.active:
        engine.step()
    return [found[number] for number in range(len(prompts))]
