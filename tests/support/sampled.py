"""Groups that the embedded engine samples from a small model."""

import numpy as np

from deltawire.engines.base import Sampling
from deltawire.engines.transformers import TransformersEngine
from deltawire.wire.rollouts import Group, Trajectory


def sampled_groups(model, temperature):
    engine = TransformersEngine(
        model, stop_tokens=range(0, 256, 16), slots=5, capacity=64, seed=2, version=4
    )
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 256, n).astype(np.int32) for n in (3, 17, 8)]
    done = {number: [] for number in range(len(prompts))}
    for number, prompt in enumerate(prompts):
        for _ in range(4):
            engine.submit(prompt.tolist(), Sampling(20, temperature), done[number].append)
    while engine.active:
        engine.step()
    return [
        Group(
            "w",
            "n",
            "t",
            temperature,
            prompt,
            [
                Trajectory(
                    np.array(c.tokens, np.int32),
                    np.array(c.logprobs, np.float32),
                    np.array(c.versions, np.int32),
                    np.ones(len(c.tokens), np.uint8),
                    0.0,
                    c.finish,
                )
                for c in done[number]
            ],
        )
        for number, prompt in enumerate(prompts)
    ]
