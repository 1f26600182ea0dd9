"""verl's own manager and worker groups on CPUs, with replicas that are attested after each update.

Needs an environment with verl (`scripts/client_environment.sh`).
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from attested_server import Server
from safetensors.torch import load_file, save_file

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
    trainer = workers.trainers(2, server=server)
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


def checkpoint(folder, seed, **changed):
    """A tiny model of which every tensor is another one than with another seed."""
    from shapes import build

    (file,) = build("qwen3", folder, seed=seed).glob("*.safetensors")
    held = {name: one + seed / 8 if one.ndim == 1 else one for name, one in load_file(file).items()}
    save_file(held | changed, file, metadata={"format": "pt"})
    return file


@pytest.fixture
def steps(monkeypatch):
    """The lines of *Ten minutes to a verified verl run*: variables, and verl's configuration."""
    text = (ROOT / "docs/ATTEST.md").read_text().split("## Ten minutes")[1].split("\n## ")[0]
    for name, value in re.findall(r"(\w+)=(\w+)", re.search("`export (.+?)`", text).group(1)):
        monkeypatch.setenv(name, value)
    for name in ("on_vllm", "followed"):
        monkeypatch.syspath_prepend(str(ROOT / "tests/engines" / name))
    monkeypatch.setenv("VLLM_CPU_CI_ENV", "1")
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return re.search(r"```\n(actor_rollout_ref\S+)\n```", text).group(1)


def test_ten_minutes_to_a_verified_run_on_vllm(workers, steps, caplog, monkeypatch, tmp_path):
    """Step by step as docs/ATTEST.md has them, with ``vllm serve`` as it is as verl's replica."""
    from hydra import compose, initialize_config_dir
    from served import Server as VllmServer
    from verl.utils.config import omega_conf_to_dataclass

    python = Path(os.environ.get("DELTAWIRE_VLLM_PYTHON", ROOT / ".venv-vllm/bin/python"))
    if not python.is_file():
        pytest.skip("NOT TESTED: no .venv-vllm; scripts/setup-engine.sh makes it")
    folder = Path(sys.modules["verl"].__file__).parent / "trainer/config"
    with initialize_config_dir(str(folder), version_base=None):
        found = compose("ppo_trainer", overrides=[steps])
    config = omega_conf_to_dataclass(found.actor_rollout_ref.rollout.checkpoint_engine)
    assert config.custom_backend_module == MODULE
    files = [checkpoint(tmp_path / str(seed), seed) for seed in range(3)]
    stale = {"model.norm.weight": load_file(files[1])["model.norm.weight"]}
    dropped = checkpoint(tmp_path / "dropped", 2, **stale).parent
    with VllmServer(files[0].parent, tmp_path / "log", python=str(python)) as server:
        address = f"127.0.0.1:{server.port}"
        trainer = workers.trainers(2, workers.FileTrainer, url=f"http://{address}")
        replica = SimpleNamespace(server_address=address, workers=[])
        manager = base.CheckpointEngineManager(config, trainer, [replica])
        check = type(manager).update_weights._deltawire_check
        monkeypatch.setattr(check, "on_mismatch", "warn")
        for file in files[:2]:
            trainer.train(str(file), str(file.parent))
            manager.update_weights(global_steps=0)
            assert check.last[address].equal
        assert not [one for one in caplog.records if one.name.startswith("deltawire")]
        trainer.train(str(files[2]), str(dropped))
        manager.update_weights(global_steps=2)
        (record,) = [one for one in caplog.records if one.name.startswith("deltawire")]
        said = record.getMessage()
        assert re.search(
            rf"after an update, {address} holds other weights than update \d+ in 1 of \d+ tensors: "
            r"model\.norm\.weight \(these are the weights of update \d+\)",
            said,
        ), said
        monkeypatch.setattr(check, "on_mismatch", "stop")
        with pytest.raises(StoppedError, match=r"model\.norm\.weight"):
            manager.update_weights(global_steps=3)
