"""verl's own manager and worker groups on CPUs, with replicas that are attested after each update.

Needs an environment with verl (`scripts/client_environment.sh`).
"""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from attested_server import Server

from deltawire.errors import StoppedError

base = pytest.importorskip("verl.checkpoint_engine.base", reason="verl is not installed")
pytestmark = [
    pytest.mark.drills,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]

MODULE = "deltawire.integrations.verl"
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def workers():
    """The module of the workers, with Ray running."""
    import ray

    path = os.pathsep.join(
        [str(ROOT / "tests" / "support"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    )
    ray.init(
        address="local",
        num_cpus=6,
        include_dashboard=False,
        log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}},
    )
    import verl_attested

    yield verl_attested
    ray.shutdown()


def test_one_line_of_verl_s_configuration_compares_its_replicas(
    workers, caplog, monkeypatch, request
):
    import ray

    server = workers.Server.remote()
    trainer = workers.trainers(2, server)
    asked = lambda method, args: ray.get(server.answers.remote(method, args))  # noqa: E731
    front = Server(SimpleNamespace(collective_rpc=asked))
    request.addfinalizer(front.close)
    replica = SimpleNamespace(server_address=front.address, workers=[])
    config = SimpleNamespace(backend="naive", custom_backend_module=MODULE)
    manager = base.CheckpointEngineManager(config, trainer, [replica])
    check = type(manager).update_weights._deltawire_check
    for step in range(3):
        trainer.train(step)
        assert manager.update_weights(global_steps=step) == {}
        assert check.last[front.address].equal
    assert not [one for one in caplog.records if one.name.startswith("deltawire")]

    ray.get(server.drop.remote(("norm",)))
    trainer.train(3)
    manager.update_weights(global_steps=3)
    assert "in 1 of 12 tensors: norm" in caplog.text
    monkeypatch.setattr(check, "on_mismatch", "stop")
    trainer.train(4)
    with pytest.raises(StoppedError, match="norm"):
        manager.update_weights(global_steps=4)
