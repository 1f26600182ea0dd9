# ruff: noqa: T201
"""DPO: `python examples/training_client/dpo.py MODEL_DIR RUN_URL`.

Prefers chosen answers to rejected ones by a loss of the caller's own (arXiv:2305.18290); the
reference is version 0.
"""

import random
import sys

import torch
import torch.nn.functional as F  # noqa: N812

from deltawire.train import AdamParams, Datum, ModelInput, TrainingClient

BETA = 0.5


def datum(tokenizer, prompt: str, answer: str) -> Datum:
    """A prompt and an answer; the weights mark the answer."""
    head, tail = tokenizer.encode(prompt), tokenizer.encode(answer)
    tokens = head + tail
    weights = [0.0] * (len(head) - 1) + [1.0] * len(tail)
    return Datum(
        ModelInput.from_ints(tokens[:-1]), {"target_tokens": tokens[1:], "weights": weights}
    )


def answer_logprobs(data, logprobs) -> torch.Tensor:
    """The log-probability of each answer, [pairs, 2]: chosen, rejected."""
    weights = [torch.tensor(one.loss_fn_inputs["weights"]) for one in data]
    return torch.stack([(w * x).sum() for w, x in zip(weights, logprobs, strict=True)]).view(-1, 2)


def main(model: str, run_url: str, steps: int = 30) -> float:
    """Trains, and returns the share of pairs whose chosen answer gained on the rejected one."""
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdef", k=4)) for _ in range(16)]
    with TrainingClient.create(run_url, model) as client:
        tokenizer = client.get_tokenizer()
        pairs = [(word, word.upper()) for word in words]
        data = [datum(tokenizer, "say: ", text) for pair in pairs for text in pair]
        outputs = client.forward(data, "cross_entropy").result().loss_fn_outputs
        reference = answer_logprobs(data, [one["logprobs"] for one in outputs])

        def dpo(data, logprobs):
            gains = answer_logprobs(data, logprobs) - reference
            margins = BETA * (gains[:, 0] - gains[:, 1])
            return -F.logsigmoid(margins).sum(), {"preferred": (margins > 0).float().mean()}

        for step in range(steps):
            result = client.forward_backward_custom(data, dpo)
            client.optim_step(AdamParams(learning_rate=1e-3)).result()
            print(f"step {step + 1}: loss {result.result().metrics['loss:sum']:.2f}")
        return result.result().metrics["preferred:mean"]


if __name__ == "__main__":
    print(f"preferred: {main(*sys.argv[1:3]):.0%}")
