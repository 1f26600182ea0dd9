# ruff: noqa: T201
"""GRPO: `python examples/training_client/grpo.py MODEL_DIR RUN_URL`.

Rewards answers by their share of the letter a. The sampler follows the run through the bucket:
each step publishes a version, which it swaps in between two tokens.
"""

import statistics
import sys

from deltawire.train import AdamParams, Datum, ModelInput, SamplingParams, TrainingClient

GROUP, LENGTH = 16, 8


def datum(prompt: list[int], sequence, advantage: float) -> Datum:
    """A completion with its sampler's log-probabilities; the prompt has no advantage."""
    tokens, before = prompt + sequence.tokens, len(prompt) - 1
    return Datum(
        ModelInput.from_ints(tokens[:-1]),
        {
            "target_tokens": tokens[1:],
            "logprobs": [0.0] * before + sequence.logprobs,
            "advantages": [0.0] * before + [advantage] * len(sequence.tokens),
        },
    )


def main(model: str, run_url: str, steps: int = 30) -> list[float]:
    """Trains, and returns the mean reward of each step."""
    rewards_of_steps = []
    with TrainingClient.create(run_url, model) as client:
        tokenizer = client.get_tokenizer()
        sampler = client.create_sampling_client(0, kind="inflight", max_lag=0)
        prompts = [tokenizer.encode(text) for text in ("once ", "upon ", "time ", "ago ")]
        params = SamplingParams(max_tokens=LENGTH)
        for _ in range(steps):
            groups = [sampler.sample(ModelInput.from_ints(p), GROUP, params) for p in prompts]
            data, rewards = [], []
            for prompt, group in zip(prompts, groups, strict=True):
                drawn = group.result().sequences
                scores = [one.tokens.count(ord("a")) / LENGTH for one in drawn]
                spread = statistics.pstdev(scores) or 1.0
                mean = statistics.fmean(scores)
                data += [
                    datum(prompt, one, (score - mean) / spread)
                    for one, score in zip(drawn, scores, strict=True)
                ]
                rewards += scores
            client.forward_backward(data, "importance_sampling")
            client.optim_step(AdamParams(learning_rate=5e-3))
            client.save_weights_for_sampler().result()
            rewards_of_steps.append(statistics.fmean(rewards))
            print(f"version {client.version}: reward {rewards_of_steps[-1]:.3f}")
    return rewards_of_steps


if __name__ == "__main__":
    main(*sys.argv[1:3])
