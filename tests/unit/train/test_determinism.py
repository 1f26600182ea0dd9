"""The trainer's arithmetic repeats to the bit with any number of threads, and drops nothing."""

import copy

import numpy as np
import pytest
import torch

from benchmarks.training.seeded_groups import seeded_group
from deltawire.config import BuildConfig, LossConfig, RunConfig, ScheduleConfig, TrainConfig
from deltawire.train.batch import collate
from deltawire.train.build import build_model
from deltawire.train.masters import MasterWeights
from deltawire.train.policy import token_logprobs
from deltawire.train.reference import SleepingCopy
from deltawire.train.step import deterministic, train_step

PASSES = 8


@pytest.fixture
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def group(number):
    prompt = np.random.default_rng((number, 1)).integers(0, 256, 48)
    return seeded_group(number, episodes=16, prompt=prompt, tokens=8)


@pytest.fixture(scope="module")
def model():
    sizes = BuildConfig(hidden_size=96, layers=2, head_size=32, feed_forward_size=48, context=128)
    return build_model(sizes, seed=0)


@pytest.fixture(scope="module")
def experts():
    sizes = BuildConfig(
        family="qwen3_moe", hidden_size=64, layers=1, feed_forward_size=32, context=128, experts=4
    )
    return build_model(sizes, seed=0)


@pytest.mark.parametrize("threads", [1, 2, 4], indirect=True)
@pytest.mark.parametrize("kind", ["model", "experts"])
def test_gradients_repeat_to_the_bit(threads, kind, request):
    """Thirty-two completions share two prompts, so their gradients meet in the prompts' keys."""
    model = copy.deepcopy(request.getfixturevalue(kind))
    batch = collate([group(0), group(1)])
    seen = set()
    for _ in range(PASSES):
        model.zero_grad()
        with deterministic():
            token_logprobs(model, batch).sum().backward()
        seen.add(b"".join(p.grad.numpy().tobytes() for p in model.parameters()))
    assert len(seen) == 1


@pytest.mark.parametrize("threads", [1, 2, 4], indirect=True)
def test_repeated_rows_have_one_gradient(threads):
    """A sum over equal rows whose order depended on the threads gave up to nine results."""
    rows = torch.arange(2).repeat_interleave(32)
    gradient = torch.randn(64, 5, 48, 32, generator=torch.Generator().manual_seed(0))
    seen = set()
    for _ in range(PASSES):
        states = torch.zeros(2, 5, 48, 32, requires_grad=True)
        with deterministic():
            states[rows].backward(gradient)
        seen.add(states.grad.numpy().tobytes())
    assert len(seen) == 1


@pytest.mark.parametrize("threads", [1, 2, 4], indirect=True)
def test_steps_repeat_to_the_bit(threads, model):
    """The state after three steps is the same whenever they are computed."""
    loss = LossConfig(kl="k3", kl_coefficient=0.1)
    config = RunConfig(
        name="t", train=TrainConfig(schedule=ScheduleConfig(warmup_steps=0), loss=loss)
    )
    seen = set()
    for _ in range(3):
        masters = MasterWeights(copy.deepcopy(model), config.train)
        reference = SleepingCopy(copy.deepcopy(model), config.train, device=torch.device("cpu"))
        for number in range(3):
            train_step(masters, [group(2 * number), group(2 * number + 1)], config,
                       reference=reference)  # fmt: skip
        state = masters.state()
        seen.add(b"".join(state[name].numpy().tobytes() for name in sorted(state)))
    assert len(seen) == 1
