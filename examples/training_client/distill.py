# ruff: noqa: T201
"""On-policy distillation: `python examples/training_client/distill.py MODEL RUN_URL TEACHER_URL`.

The student answers, the teacher scores each of its tokens, and the student moves against the
reverse KL divergence: the advantage of a token is log p(teacher) − log p(student).
"""

import statistics
import sys

from deltawire import train
from deltawire.store import open_bucket
from deltawire.sync import read_run

PROMPTS = ("abc>", "bca>", "cab>", "aab>", "bbc>", "cca>")


def datum(prompt: list[int], sequence, scores: list[float]) -> train.Datum:
    """A completion whose advantages are the teacher's scores minus the student's."""
    tokens, before = prompt + sequence.tokens, [0.0] * (len(prompt) - 1)
    pairs = zip(scores[len(prompt) :], sequence.logprobs, strict=True)
    return train.Datum(
        train.ModelInput.from_ints(tokens[:-1]),
        {
            "target_tokens": tokens[1:],
            "logprobs": before + sequence.logprobs,
            "advantages": before + [teacher - student for teacher, student in pairs],
        },
    )


def main(model: str, run_url: str, teacher_url: str, steps: int = 80) -> list[float]:
    """Trains, and returns the mean reverse KL divergence of each step, in nats an answer."""
    bucket = open_bucket(teacher_url)
    divergences = []
    with (
        train.SamplingClient(bucket, read_run(bucket), kind="inflight") as teacher,
        train.TrainingClient.create(run_url, model) as client,
    ):
        student = client.create_sampling_client(0, kind="inflight", max_lag=0)
        prompts = [train.ModelInput.from_ints(client.get_tokenizer().encode(p)) for p in PROMPTS]
        params = train.SamplingParams(max_tokens=4)
        for _ in range(steps):
            groups = [(prompt, student.sample(prompt, 16, params)) for prompt in prompts]
            drawn = [(p.to_ints(), one) for p, group in groups for one in group.result().sequences]
            scores = [teacher.compute_logprobs(p + one.tokens) for p, one in drawn]
            data = [datum(p, one, s.result()) for (p, one), s in zip(drawn, scores, strict=True)]
            client.forward_backward(data, "importance_sampling")
            client.optim_step(train.AdamParams(learning_rate=5e-3))
            client.save_weights_for_sampler().result()
            gaps = [-sum(one.loss_fn_inputs["advantages"]) for one in data]
            divergences.append(statistics.fmean(gaps))
            print(f"version {client.version}: reverse KL {divergences[-1]:.3f} nats an answer")
    return divergences


if __name__ == "__main__":
    main(*sys.argv[1:4])
