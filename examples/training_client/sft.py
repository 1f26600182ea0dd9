# ruff: noqa: T201
"""Supervised fine-tuning: `python examples/training_client/sft.py MODEL_DIR RUN_URL`.

Teaches the model to spell words backward; only the answers are weighted.
"""

import random
import sys

from deltawire.train import AdamParams, Datum, ModelInput, SamplingParams, TrainingClient

LETTERS = "abc"


def example(tokenizer, word: str) -> Datum:
    """A prompt and its answer, shifted by one; the prompt's tokens have no weight."""
    prompt, answer = tokenizer.encode(f"{word}>"), tokenizer.encode(f"{word[::-1]}\n")
    tokens = prompt + answer
    weights = [0.0] * (len(prompt) - 1) + [1.0] * len(answer)
    return Datum(
        ModelInput.from_ints(tokens[:-1]), {"target_tokens": tokens[1:], "weights": weights}
    )


def main(model: str, run_url: str, steps: int = 250) -> float:
    """Trains, and returns the share of held-out words that are answered right."""
    draw = random.Random(0)
    words = ["".join(draw.choices(LETTERS, k=3)) for _ in range(16 * steps)]
    with TrainingClient.create(run_url, model) as client:
        tokenizer = client.get_tokenizer()
        for step in range(steps):
            batch = [example(tokenizer, word) for word in words[16 * step : 16 * step + 16]]
            loss = client.forward_backward(batch, "cross_entropy")
            client.optim_step(AdamParams(learning_rate=3e-3))
            if step % 25 == 24:
                nats = loss.result().metrics["loss:sum"] / (16 * 4)
                print(f"step {step + 1}: {nats:.3f} nats a token")
        sampler = client.save_weights_and_get_sampling_client()
        greedy = SamplingParams(max_tokens=4, temperature=0.0)
        tests = words[:50]
        answers = [
            sampler.sample(ModelInput.from_ints(tokenizer.encode(f"{word}>")), 1, greedy)
            for word in tests
        ]
        texts = [tokenizer.decode(one.result().sequences[0].tokens) for one in answers]
    right = sum(text == f"{word[::-1]}\n" for word, text in zip(tests, texts, strict=True))
    print(f"version {client.version}: {right} of {len(tests)} words spelled backward")
    return right / len(tests)


if __name__ == "__main__":
    main(*sys.argv[1:3])
