"""An episode of several turns records one choice per position, from its first reading."""

import asyncio
import copy

import families
import numpy as np
import pytest
import torch

from deltawire.chat.text import Text
from deltawire.config import BuildConfig
from deltawire.engines.routers import Routers
from deltawire.engines.transformers import TransformersEngine
from deltawire.envs import Environment, Turn
from deltawire.parity.router_replay import route_shape
from deltawire.parity.routes import unpack_routes
from deltawire.rl.rollout.episode import run_episode
from deltawire.rl.rollout.episode_types import EpisodeLimits
from deltawire.train.build import build_model
from deltawire.wire.rollouts import Group, decode_group, encode_group


class Talk(Environment):
    """Asks, answers twice, and asks again."""

    def __init__(self):
        self.turns = 0

    async def reset(self):
        return Turn("what is it?")

    async def step(self, action):
        self.turns += 1
        return Turn(f"no, again ({self.turns})", reward=0.5, done=self.turns > 2)

    def solved(self, total_reward):
        return False


@pytest.fixture(scope="module")
def model(sharp):
    sizes = BuildConfig(
        family="qwen3_moe",
        hidden_size=32,
        layers=2,
        head_size=16,
        feed_forward_size=24,
        experts=8,
        context=256,
    )
    return sharp(build_model(sizes, seed=0))


def play(model, byte_tokenizer, *, context=200, on_full="end"):
    engine = TransformersEngine(
        model, stop_tokens=[], slots=2, capacity=context, seed=3, record_routes=True
    )

    async def run():
        playing = asyncio.ensure_future(
            run_episode(
                engine,
                Talk(),
                Text(byte_tokenizer),
                temperature=1.0,
                limits=EpisodeLimits(9, 4, context, on_full=on_full),
            )
        )
        while not playing.done():
            await engine.advance()
        return await playing

    return asyncio.run(run())


@pytest.mark.parametrize(("context", "on_full"), [(200, "end"), (48, "drop")])
def test_each_position_is_recorded_once(model, byte_tokenizer, context, on_full):
    episode = play(model, byte_tokenizer, context=context, on_full=on_full)
    assert len(episode.trajectories) == (1 if on_full == "end" else 2)
    routers = Routers(model)
    shape = route_shape(routers)
    group = Group("w", "n", "t", 1.0, np.array(episode.prompt, np.int32), episode.trajectories)
    back = decode_group(encode_group(group), run="r", key="k")
    for t in back.trajectories:
        ids = np.concatenate([back.prompt_of(t), t.tokens_T])
        found = unpack_routes(t.routes, shape, positions=len(ids) - 1)
        # The text that the environment wrote last was never read.
        read = np.flatnonzero(t.mask_T)[-1] + len(back.prompt_of(t))
        assert (found[read:] == -1).all()
        with torch.no_grad(), routers.recorded() as choices:
            model(input_ids=torch.from_numpy(ids[:-1]).long()[None], use_cache=False)
        for layer in range(shape.layers):
            own = np.sort(choices[layer].numpy()[:read])
            assert np.array_equal(np.sort(found[:read, layer]), own)


def test_a_turn_keeps_how_it_was_first_read(model, byte_tokenizer):
    """A second reading of the same tokens, by weights that were swapped in between, is not what
    their log-probabilities came from."""
    changing = copy.deepcopy(model)
    before = play(changing, byte_tokenizer).trajectories[0]
    first_turn = int(np.flatnonzero(before.mask_T == 0)[0])

    class Swapping(Talk):
        async def step(self, action):
            with torch.no_grad():
                for router in Routers(changing).by_layer:
                    router.module.weight.neg_()
            return await super().step(action)

    engine = TransformersEngine(
        changing, stop_tokens=[], slots=2, capacity=200, seed=3, record_routes=True
    )

    async def run():
        limits = EpisodeLimits(9, 2, 200)
        text = Text(byte_tokenizer)
        playing = asyncio.ensure_future(
            run_episode(engine, Swapping(), text, temperature=1.0, limits=limits)
        )
        while not playing.done():
            await engine.advance()
        return await playing

    swapped = asyncio.run(run())
    shape = route_shape(Routers(changing))
    one, two = (
        unpack_routes(t.routes, shape, positions=len(swapped.prompt) + len(t.tokens_T) - 1)
        for t in (before, swapped.trajectories[0])
    )
    same = len(swapped.prompt) + first_turn - 1
    assert np.array_equal(one[:same], two[:same])
    assert not np.array_equal(one[same : same + 9], two[same : same + 9])


def test_the_families_list_is_used():
    assert set(families.QUICK) | set(families.CACHED) <= set(families.FAMILIES)
