"""verl's own manager of checkpoint engines, worker groups and rollout workers, on CPUs, with
deltawire's engine.

Needs an environment with verl (`scripts/client_environment.sh`). Replaced is what computes: the
trainer's ranks send made-up weights, and the rollout's server stores what it receives.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from deltawire.store import open_bucket
from deltawire.sync import read_manifest, read_run
from deltawire.sync.maintain.fsck import check_run

base = pytest.importorskip("verl.checkpoint_engine.base", reason="verl is not installed")
pytestmark = [
    pytest.mark.drills,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]

TRAINERS, ROLLOUTS, STEPS = 2, 1, 3


@pytest.fixture(scope="module")
def workers():
    """The module of verl's workers, with Ray running."""
    import ray
    import verl_workers

    path = os.pathsep.join(
        [str(Path(verl_workers.__file__).parent), os.environ.get("PYTHONPATH", "")]
    )
    ray.init(
        address="local",
        num_cpus=2 * (TRAINERS + ROLLOUTS),
        include_dashboard=False,
        log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}},
    )
    yield verl_workers
    ray.shutdown()


def test_the_manager_of_verl_updates_its_rollout_workers_through_a_run(workers, tmp_path):
    options = {"run": str(tmp_path / "run"), "timeout_s": 120.0}
    folder = tmp_path / "received"
    folder.mkdir()
    trainer = workers.trainers(TRAINERS, options)
    rollout = workers.rollouts(ROLLOUTS, options, str(folder))
    replica = workers.Replica(rollout.workers)
    config = SimpleNamespace(backend=workers.BACKEND, custom_backend_module=workers.MODULE)
    manager = base.CheckpointEngineManager(config, trainer, [replica])
    for step in range(STEPS):
        manager.update_weights(global_steps=step)
        received = torch.load(folder / f"{step}.pt", weights_only=True)
        expected = {name: value.bfloat16() for name, value in workers.weights(step).items()}
        assert received.keys() == expected.keys()
        assert all(torch.equal(received[name], expected[name]) for name in expected)
    assert replica.calls[0] == "abort_all_requests"
    assert replica.calls[-1] == "resume_generation"
    bucket = open_bucket(options["run"])
    run = read_run(bucket)
    versions = range(STEPS)
    steps = [read_manifest(bucket, run, version).metadata["global_step"] for version in versions]
    assert steps == list(versions)
    assert check_run(bucket).faults == []


def test_the_engine_has_every_method_of_verl_s_interface():
    import deltawire.verl

    engine = base.CheckpointEngineRegistry.get("deltawire")
    assert issubclass(engine, base.CheckpointEngine)
    assert not engine.__abstractmethods__
    assert engine.wire_format == "named_tensors"
    assert deltawire.verl.BucketCheckpointEngine is engine
