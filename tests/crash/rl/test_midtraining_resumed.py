"""A mid-training run that dies continues to the bits of one that did not."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from deltawire.cli.main import main
from deltawire.config import BuildConfig, parse_config
from deltawire.errors import CorruptError
from deltawire.events import Step
from deltawire.export.models import empty_model, fetch_model_files, save_model
from deltawire.rl.trainer.bootstrap import start_run
from deltawire.rl.trainer.midtraining import Midtrainer
from deltawire.runtime.event_tail import EventTail
from deltawire.runtime.fleet import read_trainer
from deltawire.runtime.process import Process, open_run
from deltawire.store import Bucket, open_bucket
from deltawire.sync import read_history, read_manifest, read_run
from deltawire.train.build import build_model, byte_tokenizer
from deltawire.wire.ledger import CommitMetadata

VERSIONS = 7


@pytest.fixture(scope="module")
def begun(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("midtrain")
    rows = "".join(json.dumps({"text": f"number {n} " * (n % 5 + 1)}) + "\n" for n in range(11))
    (folder / "docs.jsonl").write_text(rows)
    sizes = BuildConfig(hidden_size=32, layers=1, head_size=16, feed_forward_size=48, context=64)
    model = build_model(sizes, seed=0)
    model.config.attention_dropout = 0.3
    save_model(model, byte_tokenizer(), folder / "model")
    config = {
        "name": "mid",
        "model": {"path": str(folder / "model")},
        "midtrain": {
            "streams": [{"path": str(folder / "docs.jsonl")}],
            "tokens_per_step": 120,
            "sequence_length": 32,
        },
        "train": {
            "versions": VERSIONS,
            "checkpoint_every": 3,
            "dropout": True,
            "optimizer": {"learning_rate": 1e-2},
            "schedule": {"warmup_steps": 1},
        },
    }
    bucket = open_bucket(str(folder / "bucket"), create=True)
    start_run(bucket, parse_config(config, source="test"), folder / "model")
    return folder


@pytest.fixture
def bucket(begun, tmp_path) -> Bucket:
    shutil.copytree(begun / "bucket", tmp_path / "bucket")
    return open_bucket(str(tmp_path / "bucket"))


def train(bucket: Bucket, *, to: int = VERSIONS, die: bool = False) -> list[str]:
    import msgspec

    torch.manual_seed(len(bucket.list("")))  # Nothing may depend on what was drawn before.
    torch.set_num_threads(1)
    run, config = open_run(bucket)
    config = msgspec.structs.replace(
        config, train=msgspec.structs.replace(config.train, versions=to)
    )
    process = Process(bucket, "trainer", "trainer", supervised=False)
    with fetch_model_files(bucket, run) as folder:
        model = empty_model(Path(folder))
    trainer = Midtrainer(process, run, config, model)
    if die:
        trainer._finish = trainer.publisher.close  # type: ignore[method-assign]
    trainer.loop()
    process.events.flush()
    assert not trainer.rank.diverged
    run = read_run(bucket)
    found = [read_manifest(bucket, run, 0), *read_history(bucket, run)]
    return [manifest.digest for manifest in found]


@pytest.fixture(scope="module")
def uninterrupted(begun, tmp_path_factory) -> list[str]:
    place = tmp_path_factory.mktemp("whole") / "bucket"
    shutil.copytree(begun / "bucket", place)
    found = train(open_bucket(str(place)))
    assert len(set(found)) == VERSIONS + 1
    return found


@pytest.mark.parametrize("crashes", [(2,), (4,), (1, 3, 5)])
def test_after_a_crash_the_same_bits_and_the_same_documents(bucket, uninterrupted, crashes) -> None:
    for version in crashes:
        train(bucket, to=version, die=True)
    assert train(bucket) == uninterrupted
    status = read_trainer(bucket)
    assert (status.phase, status.version) == ("finished", VERSIONS)
    run = read_run(bucket)
    positions = [
        CommitMetadata.of(m.metadata, run="", version=m.version).position
        for m in read_history(bucket, run)
    ]
    assert positions == sorted(set(positions))
    steps = [event for event in EventTail(bucket).read() if isinstance(event, Step)]
    assert {step.version for step in steps} == set(range(1, VERSIONS + 1))
    last = {step.version: step.loss for step in steps}
    assert last[VERSIONS] < last[1]


def test_other_documents_are_not_taken_for_those_that_were_trained_on(
    begun, bucket, tmp_path
) -> None:
    train(bucket, to=4, die=True)
    whole = (begun / "docs.jsonl").read_text()
    try:
        (begun / "docs.jsonl").write_text(json.dumps({"text": "x" * 20}) + "\n")
        with pytest.raises(CorruptError, match="are not those that were trained on"):
            train(bucket)
    finally:
        (begun / "docs.jsonl").write_text(whole)
    assert len(train(bucket)) == VERSIONS + 1


def test_commands_on_a_run_of_documents(bucket, capsys, tmp_path) -> None:
    train(bucket)
    folder = bucket.url.removeprefix("file://")
    assert main(["status", folder, "--json"]) == 0
    status = json.loads(capsys.readouterr().out)
    assert (status["phase"], status["version"], status["target"]) == ("finished", 7, 7)
    assert status["loss"] > 0
    assert main(["replay", folder]) == 2
    assert "no groups to compute its steps from" in capsys.readouterr().err
    toml = tmp_path / "rl.toml"
    toml.write_text('name = "x"\n[model.build]\nlayers = 1\n')
    assert main(["midtrain", str(toml)]) == 2
    assert "has no [midtrain] section" in capsys.readouterr().err
    toml.write_text(toml.read_text() + '[midtrain]\n[[midtrain.streams]]\npath = "x"\n')
    assert main(["run", str(toml)]) == 2
    assert "start it with deltawire midtrain" in capsys.readouterr().err
