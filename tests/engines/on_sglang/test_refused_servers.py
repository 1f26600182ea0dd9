"""A server that cannot follow its run ends with the reason, and serves nothing before that."""

import os
import signal
from pathlib import Path

import psutil
import pytest
from server import START_WITHIN_S, Server
from shapes import Trainer, build

from deltawire.store import open_bucket

pytestmark = pytest.mark.filterwarnings("default")

PLANT = """
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

def register():
    import sglang.srt.managers.schedule_batch as module
    del module.Req.init_next_round_input  # As in a version that has renamed it.
"""


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trainer")
    bucket = open_bucket(str(folder / "bucket"), create=True)
    trainer = Trainer(bucket, build("qwen3", folder / "model"), anchor_every=10)
    yield trainer
    trainer.close()


def ended(server):
    """The log of a server that ended by itself, without having answered."""
    with server.folder:
        code = server.process.wait(START_WITHIN_S)
        assert not Path(server.path).exists() or code != 0
        said = server.log.read_text(errors="replace")
        server.end()
    assert code != 0
    return said


def test_a_run_of_another_model_is_refused_by_name(trainer, tmp_path):
    other = build("llama", tmp_path / "other")
    said = ended(Server(other, "--load-format", "dummy", run=trainer.publisher.bucket.url))
    assert "cannot load the run's tensors into its model" in said


def test_a_bucket_without_a_run_is_refused_by_name(trainer, tmp_path):
    (tmp_path / "empty").mkdir()
    said = ended(Server(trainer.model, "--load-format", "dummy", run=str(tmp_path / "empty")))
    assert "run.json" in said or "no run" in said


def test_a_version_without_a_hook_s_target_ends_before_it_serves(trainer, tmp_path):
    information = tmp_path / "plants" / "aaa_planting-0.dist-info"
    information.mkdir(parents=True)
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: aaa-planting\nVersion: 0\n")
    (information / "entry_points.txt").write_text(
        "[sglang.srt.plugins]\naaa = aaa_planting:register\n"
    )
    (tmp_path / "plants" / "aaa_planting.py").write_text(PLANT)
    said = ended(
        Server(
            trainer.model, "--load-format", "dummy", run=trainer.publisher.bucket.url,
            plants=tmp_path / "plants",
        )
    )  # fmt: skip
    assert "init_next_round_input" in said


def test_a_killed_scheduler_ends_the_server_and_a_new_one_serves_the_newest(trainer):
    run = trainer.publisher.bucket.url
    with Server(trainer.model, "--load-format", "dummy", run=run) as server:
        assert server.status()["version"] == trainer.version
        (scheduler,) = (
            child
            for child in psutil.Process(server.process.pid).children(recursive=True)
            if "scheduler" in " ".join(child.cmdline())
        )
        os.kill(scheduler.pid, signal.SIGKILL)
        assert server.process.wait(120) != 0
    version = trainer.publish()
    with Server(trainer.model, "--load-format", "dummy", run=run) as server:
        status = server.status()
        assert status["version"] == version
        assert status["digest"] == trainer.publisher.digest.hex()
        assert server.answer([1, 2, 3]).spans == ((str(version), 0, 12),)
