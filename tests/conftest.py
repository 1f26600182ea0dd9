"""Small models and tokenizers that the tests of the upper layers share."""

import os

# Read by torch when it is first imported; the codec's tests never import it.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import copy

import pytest


def sharpen(model, seed=0):
    """Give a fresh model weights large enough that its distributions are far from uniform."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.25, generator=generator)
    return model.eval()


@pytest.fixture(scope="session")
def _qwen3():
    from deltawire.config import BuildConfig
    from deltawire.train.build import build_model

    sizes = BuildConfig(hidden_size=32, layers=2, head_size=16, feed_forward_size=48, context=128)
    return sharpen(build_model(sizes, seed=0))


@pytest.fixture
def tiny(_qwen3):
    """A Qwen3 of two layers with a byte vocabulary, float32, of the test's own."""
    return copy.deepcopy(_qwen3)


@pytest.fixture(scope="session")
def byte_tokenizer():
    """The project's own tokenizer."""
    from deltawire.train.build import byte_tokenizer

    return byte_tokenizer()


@pytest.fixture(scope="session")
def sharp():
    """`sharpen`, for models that a test makes itself."""
    return sharpen


@pytest.fixture(scope="session")
def make_group():
    """A small finished group: ``make_group(worker, versions)`` with one version a trajectory."""
    import numpy as np

    from deltawire.wire.rollouts import Group, Trajectory

    def make(worker, versions, *, task="t", temperature=1.0):
        trajectories = [
            Trajectory(
                np.array([7, 8], np.int32),
                np.array([-1.0, -0.5], np.float32),
                np.array([version, version], np.int32),
                np.ones(2, np.uint8),
                1.0,
                "stop",
            )
            for version in versions
        ]
        return Group(worker, "n", task, temperature, np.array([1], np.int32), trajectories)

    return make
