"""Reusing a conversation's cache changes how much is read, and nothing else.

Random conversations, interleaved in few slots, some cancelled, weights swapped in between: each
turn's tokens are those of an engine that reads every prompt from its beginning.
"""

import asyncio
import random

import pytest
import torch

from deltawire.engines.base import Sampling
from deltawire.engines.transformers import TransformersEngine

CAPACITY = 96


def engine_of(model, slots, *, reuse):
    return TransformersEngine(
        model, stop_tokens=[7], slots=slots, capacity=CAPACITY, reuse=reuse, version=1
    )


def generate_one(engine, prompt, sampling):
    """An answer, with nothing else running meanwhile."""
    done = []
    engine.submit(prompt, sampling, done.append)
    while not done:
        engine.step()
    return done[0]


async def converse(engine, plain, number, seed, check):
    """One conversation; each answer equals that of an engine without reuse, at the same weights."""
    rng = random.Random(f"{seed} {number}")
    tokens = [rng.randrange(8, 250) for _ in range(rng.randrange(1, 9))]
    for _ in range(rng.randrange(1, 6)):
        sampling = Sampling(rng.randrange(1, 6), 0.0)
        if len(tokens) + sampling.max_tokens > CAPACITY:
            return
        version = engine.version
        waiting = asyncio.ensure_future(engine.generate(tokens, sampling))
        if rng.random() < 0.15:
            await asyncio.sleep(0)
            waiting.cancel()
            continue
        got = await waiting
        if engine.version == version:
            expected = generate_one(plain, tokens, sampling)
            check(got, expected)
        tokens = [*tokens, *got.tokens, *(rng.randrange(8, 250) for _ in range(rng.randrange(4)))]
        for _ in range(rng.randrange(4)):
            await asyncio.sleep(0)


@pytest.mark.parametrize("seed", range(6))
def test_reuse_never_changes_an_answer(tiny, seed):
    rng = random.Random(seed)
    slots = rng.choice([1, 2, 3, 5, 9])
    compared = []

    def check(got, expected):
        assert got.tokens == expected.tokens
        assert got.logprobs == pytest.approx(expected.logprobs, abs=2e-4)
        compared.append(got)

    async def run():
        engine = engine_of(tiny, slots, reuse=True)
        plain = engine_of(tiny, 1, reuse=False)
        talks = asyncio.gather(*(converse(engine, plain, n, seed, check) for n in range(12)))
        steps = 0
        while not talks.done():
            await engine.advance()
            steps += 1
            if steps % 40 == 0:
                with torch.no_grad():
                    tiny.lm_head.weight.mul_(1.01)
                engine.version += 1
        await talks
        assert engine.active == 0
        assert len(engine._parked) <= slots

    asyncio.run(run())
    assert len(compared) > 10


def turns(model, *, slots=4, swap=False, reuse=True):
    """Two turns of three conversations; how many tokens of prompts were computed."""

    async def run():
        engine = engine_of(model, slots, reuse=reuse)
        prompts = [[10 + n] * 20 for n in range(3)]
        for _ in range(2):
            tasks = [asyncio.ensure_future(engine.generate(p, Sampling(4, 0.0))) for p in prompts]
            while not all(task.done() for task in tasks):
                await engine.advance()
            drawn = [task.result().tokens for task in tasks]
            prompts = [[*p, *d, 5, 6] for p, d in zip(prompts, drawn, strict=True)]
            engine.version += swap
        return engine.tokens_read, sum(map(len, drawn))

    return asyncio.run(run())


def test_a_next_turn_reads_only_new_tokens(tiny):
    read, _ = turns(tiny)
    assert read == 3 * 20 + 3 * 3  # the last token drawn, and the two after it


def test_another_versions_cache_is_not_reused(tiny):
    read, _ = turns(tiny, swap=True)
    assert read == turns(tiny, reuse=False)[0] == 3 * 20 + 3 * 26


def test_parked_slots_are_dropped_for_new_requests(tiny):
    read, _ = turns(tiny, slots=1)
    assert read >= 3 * 20 + 2 * 26
