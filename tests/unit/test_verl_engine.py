"""verl's checkpoint engine, driven by the calls that verl's manager and workers make (from its
source); verl itself is a double that has only the registry and the base class."""

import asyncio
import importlib
import sys
import time
import types
from types import SimpleNamespace

import pytest
import torch
from outage_clock import OutageClock

from deltawire.errors import InputError, RetryError
from deltawire.store import RetryingBucket, RetryPolicy, open_bare_bucket
from deltawire.sync import read_manifest, read_run
from deltawire.sync.maintain.fsck import check_run
from deltawire.testing.faulty import FaultyBucket

TRAINERS, ROLLOUTS = 2, 2


@pytest.fixture
def registry(monkeypatch):
    """``verl.checkpoint_engine.base`` as far as a custom backend sees it, with the engine in it."""

    class CheckpointEngine:
        pass

    class CheckpointEngineRegistry:
        engines = {}  # noqa: RUF012

        def register(name):  # noqa: N805 - as verl has it
            def wrapper(cls):
                CheckpointEngineRegistry.engines[name] = cls
                return cls

            return wrapper

        @classmethod
        def new(cls, backend, *args, **kwargs):
            return cls.engines[backend](*args, **kwargs)

    base = types.ModuleType("verl.checkpoint_engine.base")
    base.CheckpointEngine = CheckpointEngine
    base.CheckpointEngineRegistry = CheckpointEngineRegistry
    for name in ("verl", "verl.checkpoint_engine"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "verl.checkpoint_engine.base", base)
    monkeypatch.delitem(sys.modules, "deltawire.verl", raising=False)
    importlib.import_module("deltawire.verl")
    yield CheckpointEngineRegistry
    sys.modules.pop("deltawire.verl")


def weights(step):
    generator = torch.Generator().manual_seed(0)
    found = {
        "model.embed_tokens.weight": torch.randn(12, 8, generator=generator),
        "model.norm.weight": torch.ones(8),
        "model.scale": torch.tensor(1.0),
    }
    found["model.norm.weight"] += step
    return found


def workers(registry, run, **options):
    """As verl makes them: one of the trainer's is the master, rollouts are told nothing of it."""
    kwargs = {"bucket_size": 1 << 20, "run": run, **options}
    trainers = [registry.new("deltawire", is_master=n == 0, **kwargs) for n in range(TRAINERS)]
    return trainers, [registry.new("deltawire", **kwargs) for _ in range(ROLLOUTS)]


def update(registry, trainers, rollouts, step):
    """One `CheckpointEngineManager.update_weights`: what each rollout worker received."""
    metadata = [engine.prepare() for engine in [*trainers, *rollouts]]
    topology = registry.engines["deltawire"].build_topology(TRAINERS, ROLLOUTS, metadata)
    for engines, kwargs in zip((trainers, rollouts), topology, strict=True):
        for number, engine in enumerate(engines):
            engine.init_process_group(**{name: values[number] for name, values in kwargs.items()})

    async def receive(engine):
        return {name: tensor.clone() async for name, tensor in engine.receive_weights()}

    async def everything():
        sending = [engine.send_weights(iter(weights(step).items()), step) for engine in trainers]
        return (await asyncio.gather(*sending, *map(receive, rollouts)))[TRAINERS:]

    found = asyncio.run(everything())
    for engine in [*trainers, *rollouts]:
        engine.finalize()
    return found


def test_rollout_workers_get_the_version_that_is_being_sent(registry, tmp_path):
    url = str(tmp_path / "run")
    trainers, rollouts = workers(registry, url)
    for step in range(3):
        for received in update(registry, trainers, rollouts, step):
            expected = {n: t.to(torch.bfloat16) for n, t in weights(step).items()}
            assert received.keys() == expected.keys()
            assert all(torch.equal(received[name], expected[name]) for name in expected)
    trainers[0].close()
    # A restarted trainer continues the run; new replicas join it.
    trainers, rollouts = workers(registry, url)
    (received, _) = update(registry, trainers, rollouts, 3)
    assert torch.equal(received["model.norm.weight"], torch.full((8,), 4.0, dtype=torch.bfloat16))
    trainers[0].close()
    bucket = open_bare_bucket(url)
    run = read_run(bucket)
    steps = [read_manifest(bucket, run, version).metadata["global_step"] for version in range(4)]
    assert steps == [0, 1, 2, 3]
    assert check_run(bucket).faults == []


@pytest.fixture
def away(registry, monkeypatch):
    """A store that tests take away, and the clock of all who wait for it, on either side."""
    import deltawire.verl as module

    bucket = FaultyBucket(open_bare_bucket("memory://"))
    clock = OutageClock(0, None)
    quick = RetryPolicy(retries=1, sleep=lambda _: None)
    monkeypatch.setattr(module, "open_bucket", lambda *_, **__: RetryingBucket(bucket, quick))
    real = module.open_publisher
    # The trainer's first weights open the run in the same bucket.
    monkeypatch.setattr(
        module,
        "open_publisher",
        lambda _, *args, **more: real(RetryingBucket(bucket, quick), *args, **more),
    )

    def look_again(_seconds):
        """Time passes while the trainer waits, and hardly while rollout workers do."""
        time.sleep(0.01)
        clock.now += 0.05

    times = SimpleNamespace(monotonic=clock, sleep=look_again)
    monkeypatch.setattr(module, "time", times)
    return bucket, clock, times


@pytest.mark.parametrize("seconds", [5, 300])
@pytest.mark.parametrize("step", range(1, 4))
def test_both_sides_wait_while_the_store_is_away(registry, away, seconds, step):
    bucket, clock, _ = away
    trainers, rollouts = workers(registry, "memory://", timeout_s=600.0)
    for number in range(4):
        if number == step:
            outage = trainers[0]._publisher.outage
            outage.clock, outage.wait = clock, clock.wait
            bucket.fail(times=None)
            clock.start(seconds, bucket.heal)
        for received in update(registry, trainers, rollouts, number):
            expected = {n: t.to(torch.bfloat16) for n, t in weights(number).items()}
            assert all(torch.equal(received[name], expected[name]) for name in expected)
    assert clock.now >= seconds
    trainers[0].close()
    run = read_run(bucket)
    steps = [read_manifest(bucket, run, version).metadata["global_step"] for version in range(4)]
    assert steps == [0, 1, 2, 3]
    assert check_run(bucket).faults == []


def test_each_side_has_its_limit_for_an_outage(registry, away):
    bucket, clock, times = away
    trainers, rollouts = workers(registry, "memory://", max_outage=60.0, timeout_s=120.0)
    update(registry, trainers, rollouts, 0)
    outage = trainers[0]._publisher.outage
    outage.clock, outage.wait = clock, clock.wait
    trainers[0].prepare()
    rollouts[0].init_process_group(version=1)
    bucket.fail(times=None)
    with pytest.raises(RetryError, match="max_outage is 60"):
        asyncio.run(trainers[0].send_weights(iter(weights(1).items()), 1))
    assert 60 <= clock.now < 120
    clock.now, times.sleep = 0.0, clock.wait

    async def receive():
        return [name async for name, _ in rollouts[0].receive_weights()]

    with pytest.raises(RetryError):
        asyncio.run(receive())
    assert clock.now >= 120
    bucket.heal()
    trainers[0].close()


def test_a_version_that_never_comes_is_an_error(registry, tmp_path):
    _, rollouts = workers(registry, str(tmp_path / "run"), timeout_s=0.1)
    rollouts[0].init_process_group(version=0)

    async def receive():
        return [name async for name, _ in rollouts[0].receive_weights()]

    with pytest.raises(RetryError, match="did not come"):
        asyncio.run(receive())


def test_the_run_must_be_named(registry):
    with pytest.raises(InputError, match="needs the run's location"):
        registry.new("deltawire", bucket_size=1)
