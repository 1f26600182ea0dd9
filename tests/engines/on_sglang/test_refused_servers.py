"""A server that cannot follow its run ends with the reason, and serves nothing before that."""

from pathlib import Path

import pytest
from server import START_WITHIN_S, Server
from shapes import Trainer, build

from deltawire.store import open_bucket

pytestmark = pytest.mark.filterwarnings("default")


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


def test_a_version_without_a_hook_s_target_ends_before_it_serves(trainer):
    said = ended(
        Server(
            trainer.model, "--load-format", "dummy", run=trainer.publisher.bucket.url,
            plants="renaming:register",
        )
    )  # fmt: skip
    assert "init_next_round_input" in said
