"""PPO of RLlib, with the callback that publishes its modules: every version is what it trained."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from outage_clock import OutageClock

from deltawire.errors import InputError, RetryError
from deltawire.placement.layout import TORCH_DTYPES
from deltawire.store import Bucket, RetryingBucket, RetryPolicy, open_bare_bucket
from deltawire.sync import (
    find_run,
    load_mirror,
    newest_version,
    open_publisher,
    read_manifest,
    read_run,
)
from deltawire.sync.follow.mirror import rows_of
from deltawire.sync.publish.commit import STEP_RECORD
from deltawire.testing.faulty import FaultyBucket

pytestmark = [pytest.mark.drills, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    pytest.importorskip("gymnasium")
    ray = pytest.importorskip("ray")
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield ray
    ray.shutdown()


@pytest.fixture
def config(ray: Any) -> Any:
    """PPO that samples and learns in this process."""
    from ray.rllib.algorithms.ppo import PPOConfig

    config = PPOConfig().environment("CartPole-v1").env_runners(num_env_runners=0)
    return config.training(train_batch_size_per_learner=64, minibatch_size=32, num_epochs=2)


def weights_at(bucket: Bucket, version: int) -> dict[str, torch.Tensor]:
    run = read_run(bucket)
    mirror = load_mirror(bucket, run, at=version)
    return {
        spec.name: torch.from_numpy(rows_of(mirror, spec))
        .view(TORCH_DTYPES[spec.dtype])
        .view(spec.shape)
        .clone()
        for spec in run.tensors
    }


def trained(algorithm: Any, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    state = algorithm.learner_group.get_weights()["default_policy"]
    return {name: torch.as_tensor(value).to(dtype, copy=True) for name, value in state.items()}


def same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> bool:
    return found.keys() == wanted.keys() and all(
        torch.equal(found[name], wanted[name]) for name in wanted
    )


def test_each_version_is_what_the_algorithm_trained_and_a_run_is_continued(
    config: Any, tmp_path: Path
) -> None:
    from deltawire.rllib import Publish

    config.callbacks(callbacks_class=partial(Publish, str(tmp_path), every=2))
    algorithm = config.build_algo()
    try:
        states = [trained(algorithm)]
        for _ in range(4):
            algorithm.train()
            states.append(trained(algorithm))
        algorithm.callbacks[0].close()
    finally:
        algorithm.stop()
    bucket = open_bare_bucket(str(tmp_path))
    run = read_run(bucket)
    for version, iteration in enumerate((0, 2, 4)):
        assert same(weights_at(bucket, version), states[iteration])
        manifest = read_manifest(bucket, run, version)
        assert manifest is not None
        assert manifest.metadata.get(STEP_RECORD, 0) == iteration
    assert not same(states[4], states[2])

    config.callbacks(callbacks_class=partial(Publish, str(tmp_path), module="default_policy"))
    again = config.copy(copy_frozen=False).build_algo()
    try:
        again.train()
        again.callbacks[0].close()
        assert same(weights_at(bucket, 3), trained(again))
    finally:
        again.stop()


@pytest.mark.long
def test_rounded_weights_are_published_as_what_they_are(config: Any, tmp_path: Path) -> None:
    from deltawire.rllib import Publish

    config.callbacks(callbacks_class=partial(Publish, str(tmp_path), dtype="bfloat16"))
    algorithm = config.build_algo()
    try:
        algorithm.train()
        algorithm.callbacks[0].close()
        wanted = trained(algorithm, torch.bfloat16)
    finally:
        algorithm.stop()
    assert same(weights_at(open_bare_bucket(str(tmp_path)), 1), wanted)


def test_a_module_that_is_not_there_is_named_beside_those_that_are(
    config: Any, tmp_path: Path
) -> None:
    from deltawire.rllib import Publish

    config.callbacks(callbacks_class=partial(Publish, str(tmp_path), module="pilot"))
    with pytest.raises(InputError, match="no module 'pilot'; it has default_policy"):
        config.build_algo()
    assert find_run(open_bare_bucket(str(tmp_path))) is None


def test_wrong_options_are_refused_at_once(ray: Any) -> None:
    from deltawire.rllib import Publish

    with pytest.raises(InputError, match="every = 0"):
        Publish("bucket", every=0)
    with pytest.raises(InputError, match="no dtype 'bf17'"):
        Publish("bucket", dtype="bf17")


class _Store:
    """A store in memory that a test takes away, and the clock of a publisher that waits for it."""

    def __init__(self) -> None:
        self.bucket = FaultyBucket(open_bare_bucket("memory://"))
        self.clock = OutageClock(0, None)

    def open(self, _url: str, tensors: Any, **options: Any) -> Any:
        policy = RetryPolicy(retries=1, sleep=lambda _: None)
        publisher = open_publisher(RetryingBucket(self.bucket, policy), tensors, **options)
        publisher.outage.clock = self.clock
        publisher.outage.wait = self.clock.wait  # type: ignore[method-assign]
        return publisher


@pytest.mark.parametrize("seconds", [5, pytest.param(300, marks=pytest.mark.long)])
def test_training_goes_on_while_the_store_is_away_at_each_iteration(
    config: Any, monkeypatch: pytest.MonkeyPatch, seconds: int
) -> None:
    import deltawire.rllib as module

    store = _Store()
    monkeypatch.setattr(module, "open_publisher", store.open)
    config.callbacks(callbacks_class=partial(module.Publish, "memory://"))
    algorithm = config.build_algo()
    try:
        for _ in range(3):
            store.bucket.fail(times=None)
            store.clock.start(seconds, store.bucket.heal)
            algorithm.train()
        publisher = algorithm.callbacks[0]._publisher
        superseded = publisher.outage.superseded
        algorithm.callbacks[0].close()
        wanted = trained(algorithm)
    finally:
        algorithm.stop()
    bucket = store.bucket
    newest = newest_version(bucket)
    assert newest is not None
    assert newest == 3 - superseded
    assert same(weights_at(bucket, newest), wanted)
    manifest = read_manifest(bucket, read_run(bucket), newest)
    assert manifest is not None
    assert manifest.metadata[STEP_RECORD] == 3


@pytest.mark.long
def test_an_outage_beyond_its_limit_ends_the_training(
    config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import deltawire.rllib as module

    store = _Store()
    monkeypatch.setattr(module, "open_publisher", store.open)
    callback = partial(module.Publish, "memory://", max_outage=60.0)
    config.callbacks(callbacks_class=callback)
    algorithm = config.build_algo()
    try:
        store.bucket.fail(times=None)
        algorithm.train()
        with pytest.raises(RetryError, match="max_outage is 60"):
            algorithm.callbacks[0]._publisher.flush()
        store.bucket.heal()
        algorithm.train()
        algorithm.callbacks[0].close()
        wanted = trained(algorithm)
    finally:
        algorithm.stop()
    assert same(weights_at(store.bucket, 1), wanted)
