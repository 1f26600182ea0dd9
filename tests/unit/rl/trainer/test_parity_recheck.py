"""Parity is measured at a steady rate where the trainer is the bottleneck."""

import copy
import threading

import msgspec
import numpy as np
import pytest
import torch

from deltawire.config import RunConfig
from deltawire.parity import BatchParity, parity_event
from deltawire.parity.divergence import NO_DIVERGENCE, Divergence
from deltawire.rl.trainer.parity_recheck import STARVED_STEPS, ParityRecheck
from deltawire.train.batch import collate
from deltawire.train.parallel import open_mesh, shard_model
from deltawire.train.policy import token_logprobs
from deltawire.wire.rollouts import Group, Trajectory

LAG = 3
"""Each group is sampled by the version that is this much older than the trained one."""

STEPS = 60


def config_of(**parity):
    config = RunConfig(name="slow")
    train = msgspec.structs.replace(config.train, max_staleness=LAG + 1)
    return msgspec.structs.replace(
        config, train=train, parity=msgspec.structs.replace(config.parity, **parity)
    )


@torch.no_grad()
def sampled(model, version, *, error=0.0, changes_at=None):
    """A group as a worker at ``version`` stores it; the tail may be of the next version."""
    rng = np.random.default_rng(version)
    trajectories = []
    for place in range(4):
        versions = np.full(12, version, np.int32)
        if changes_at is not None:
            versions[changes_at:] += 1
        tokens = rng.integers(0, 256, 12, np.int32)
        zeros, ones = np.zeros(12, np.float32), np.ones(12, np.uint8)
        trajectories.append(Trajectory(tokens, zeros, versions, ones, float(place % 2), "stop"))
    group = Group("w0", "n", f"t{version}", 1.0, np.array([1, 2, 3], np.int32), trajectories)
    logprobs_NC = token_logprobs(model, collate([group])).numpy()
    for trajectory, logprobs_C in zip(trajectories, logprobs_NC, strict=True):
        trajectory.logprobs_T[:] = logprobs_C + error
        if changes_at is not None:
            trajectory.logprobs_T[changes_at:] += 7.0  # Of other weights: it must not count.
    return group


def step(model, version):
    """Weights move so far that other versions' differ visibly."""
    generator = torch.Generator().manual_seed(version)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.05)


class Slow:
    """A trainer that is the bottleneck: no batch holds tokens of the version it trains."""

    def __init__(self, model, config, **settings):
        self.now = 0.0
        self.faults = []
        self.model = model
        self.recheck = ParityRecheck(
            model, config, report=self.faults.append, clock=lambda: self.now
        )
        self.groups = {0: sampled(model, 0, **settings)}
        self.settings = settings
        self.figures = []

    def run(self, steps, *, numeric=NO_DIVERGENCE):
        first = len(self.figures) + 1
        for version in range(first, first + steps):
            step(self.model, version)
            self.groups[version] = sampled(self.model, version, **self.settings)
            batch = [self.groups[max(0, version - 1 - LAG)]]
            parity = BatchParity(numeric, NO_DIVERGENCE)
            self.figures.append(self.recheck.observe(parity, batch, version=version))
            if self.recheck._pending:  # A test without a clock: it is finished by the next step.
                self.recheck._pending[1].exception()
            self.now += 1.0
        return self.judged

    @property
    def judged(self):
        return [(n + 1, one) for n, one in enumerate(self.figures) if one.numeric.tokens]


@pytest.fixture
def slow(tiny):
    made = []

    def make(settings=None, **parity):
        made.append(Slow(tiny, config_of(**{"recheck_share": 1.0, **parity}), **(settings or {})))
        return made[-1]

    yield make
    for one in made:
        one.recheck.close()


def test_parity_is_judged_at_a_steady_rate(slow):
    judged = slow().run(STEPS)
    at = [version for version, _ in judged]
    assert at[0] <= STARVED_STEPS + LAG + 3
    assert max(np.diff([*at, STEPS])) <= LAG + 4
    assert len(judged) >= STEPS // (LAG + 4)
    for version, parity in judged:
        assert version - LAG - 2 <= parity.numeric_version <= version - LAG - 1
        assert parity.numeric.tokens == 4 * 12
        # The same weights and the same arithmetic: nothing remains of the policy's changes.
        assert parity.numeric.largest_gap == 0.0
        assert parity.warnings == parity.stopped == ()


def test_without_it_nothing_is_judged(slow):
    assert slow(recheck_share=0.0).run(STEPS) == []


def test_wrong_arithmetic_crosses_the_limits(slow):
    judged = slow({"error": 0.5}).run(20)
    assert judged
    for _, parity in judged:
        assert parity.numeric.largest_gap == pytest.approx(0.5, abs=1e-5)
        assert any(crossing.name == "k3" for crossing in parity.warnings)
        event = parity_event(parity, process="trainer", at=0.0, version=9, names=[])
        assert event.numeric_version == parity.numeric_version
        assert event.numeric.tokens == 48


def test_only_tokens_of_the_kept_version_count(slow):
    for _, parity in slow({"changes_at": 5}).run(20):
        assert parity.numeric.tokens == 4 * 5
        assert parity.numeric.largest_gap == 0.0


def test_a_trainer_that_waits_for_groups_keeps_no_copy(slow):
    one = slow()
    fresh = Divergence(0.0, 0.0, 0.0, 1.0, tokens=100)
    one.run(20, numeric=fresh)
    assert one.recheck._copy is None
    assert all(parity.numeric is fresh for parity in one.figures)
    one.run(20)
    assert one.judged[-1][1].numeric_version is not None


def test_the_share_of_time_is_held(slow):
    """A step takes 1 s, each measurement 3 s more."""
    one = slow(recheck_share=0.1)
    score = one.recheck._score

    def slowly(*args):
        one.now += 3.0
        return score(*args)[0], 3.0

    one.recheck._score = slowly
    judged = one.run(STEPS)
    assert len(judged) >= 2
    assert 3.0 * len(judged) <= 0.1 * one.now + 3.0


def test_weights_are_copied_not_shared_except_frozen_ones(slow, tiny):
    frozen = tiny.get_input_embeddings().weight.requires_grad_(False)
    before = copy.deepcopy(tiny.state_dict())
    one = slow()
    one.recheck._keep(0)
    with torch.no_grad():
        for parameter in tiny.parameters():
            if parameter.requires_grad:
                parameter.add_(1.0)
    kept = one.recheck._copy.state_dict()
    assert all(torch.equal(kept[name], before[name]) for name in before)
    assert one.recheck._copy.get_input_embeddings().weight is frozen
    assert not one.recheck._copy.training


def test_it_draws_no_random_number(slow, tiny):
    """Dropout of the trainer stays the same: a step is computed again to the same bits."""
    tiny.train()
    one = slow()
    one.run(STARVED_STEPS + 1)
    torch.manual_seed(5)
    state = torch.get_rng_state()
    one.recheck._score([one.groups[0]], 0)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_measurement_that_fails_is_reported_and_ends_no_training(slow, monkeypatch):
    one = slow()
    monkeypatch.setattr(one.recheck, "_score", lambda *_: 1 // 0)
    assert one.run(30) == []
    assert len(one.faults) == 1
    assert "by zero" in one.faults[0]
    assert one.recheck._copy is None


def test_it_waits_for_no_measurement(slow, monkeypatch):
    one, go = slow(), threading.Event()
    score = one.recheck._score
    monkeypatch.setattr(one.recheck, "_score", lambda *args: (go.wait(60), score(*args))[1])
    monkeypatch.setattr(one.recheck, "_finished", lambda: None)
    for version in range(1, 20):
        step(one.model, version)
        one.groups[version] = sampled(one.model, version)
        batch = [one.groups[max(0, version - 1 - LAG)]]
        one.recheck.observe(BatchParity(NO_DIVERGENCE, NO_DIVERGENCE), batch, version=version)
    assert not one.recheck._pending[1].done()
    go.set()
    monkeypatch.undo()
    one.recheck._pending[1].result()
    parity = BatchParity(NO_DIVERGENCE, NO_DIVERGENCE)
    assert one.recheck.observe(parity, [], version=20).numeric.largest_gap == 0.0


def test_a_sharded_model_is_not_measured_and_the_run_says_so(tiny):
    config = config_of()
    model = copy.deepcopy(tiny)
    shard_model(model, open_mesh(config.train, torch.device("cpu"), sharded=True))
    said = []
    recheck = ParityRecheck(model, config, report=said.append)
    assert [line.partition(":")[0] for line in said] == [
        "parity.recheck_share = 0.02 has no effect"
    ]
    recheck.close()
    off = ParityRecheck(model, config_of(recheck_share=0.0), report=said.append)
    parity = BatchParity(NO_DIVERGENCE, NO_DIVERGENCE)
    assert off.observe(parity, [], version=1) is parity
    off.close()
    assert len(said) == 1, "it was switched off"
