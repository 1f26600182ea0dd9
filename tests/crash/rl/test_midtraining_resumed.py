"""A mid-training run that dies continues to the bits of one that did not."""

from __future__ import annotations

import json
import re
import shutil
from math import exp
from pathlib import Path

import pytest
import torch

from deltawire.cli.main import main
from deltawire.config import BuildConfig, checkpoints, parse_config
from deltawire.dashboard.report import page
from deltawire.dashboard.series import series
from deltawire.dashboard.state import RunState
from deltawire.dashboard.summary import summarize
from deltawire.errors import CorruptError
from deltawire.events import HeldoutLoss, Step
from deltawire.export.models import empty_model, fetch_model_files, save_model
from deltawire.launch.watching import continuing_words
from deltawire.rl.trainer.bootstrap import start_run
from deltawire.rl.trainer.midtraining import Midtrainer
from deltawire.runtime.event_tail import EventTail
from deltawire.runtime.fleet import read_trainer
from deltawire.runtime.process import Process, open_run
from deltawire.store import Bucket, open_bucket
from deltawire.sync import read_history, read_manifest, read_run
from deltawire.train.build import build_model, byte_tokenizer
from deltawire.train.checkpoint_folders import checkpoint_versions
from deltawire.wire.ledger import CommitMetadata

VERSIONS = 7


@pytest.fixture(scope="module")
def begun(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("midtrain")
    rows = "".join(json.dumps({"text": f"number {n} " * (n % 5 + 1)}) + "\n" for n in range(11))
    (folder / "docs.jsonl").write_text(rows)
    rows = "".join(json.dumps({"text": f"other {n} " * (n % 3 + 1)}) + "\n" for n in range(5))
    (folder / "other.jsonl").write_text(rows)
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
            "heldout": {
                "every": 2,
                "streams": [{"name": "other", "path": str(folder / "other.jsonl")}],
            },
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


def train(
    bucket: Bucket,
    *,
    to: int = VERSIONS,
    die: bool = False,
    stop: bool = False,
    **settings: object,
) -> list[str]:
    import msgspec

    torch.manual_seed(len(bucket.list("")))  # Nothing may depend on what was drawn before.
    torch.set_num_threads(1)
    run, config = open_run(bucket)
    config = msgspec.structs.replace(
        config, train=msgspec.structs.replace(config.train, versions=to, **settings)
    )
    process = Process(bucket, "trainer", "trainer", supervised=False)
    with fetch_model_files(bucket, run) as folder:
        model = empty_model(Path(folder))
    trainer = Midtrainer(process, run, config, model)
    if die:
        trainer._finish = trainer.publisher.close  # type: ignore[method-assign]
    if stop:
        process.stop()
    trainer.loop()
    process.events.flush()
    assert not trainer.rank.diverged
    run = read_run(bucket)
    found = [read_manifest(bucket, run, 0), *read_history(bucket, run)]
    return [manifest.digest for manifest in found]


def losses(bucket: Bucket) -> dict[int, float | None]:
    """The held-out loss by version; measurements of one version agree to the bit."""
    found: dict[int, float | None] = {}
    for event in EventTail(bucket).read(everything=True):
        if isinstance(event, HeldoutLoss):
            assert found.setdefault(event.version, event.total.loss) == event.total.loss
            assert event.sources == {"other": event.total}
    return found


@pytest.fixture(scope="module")
def whole(begun, tmp_path_factory) -> Bucket:
    place = tmp_path_factory.mktemp("whole") / "bucket"
    shutil.copytree(begun / "bucket", place)
    found = open_bucket(str(place))
    assert len(set(train(found))) == VERSIONS + 1
    return found


@pytest.fixture
def uninterrupted(whole) -> list[str]:
    run = read_run(whole)
    return [read_manifest(whole, run, 0).digest, *(m.digest for m in read_history(whole, run))]


def test_the_held_out_loss_is_in_every_view(whole, capsys) -> None:
    found = losses(whole)
    assert sorted(found) == [0, 2, 4, 6, 7]
    assert found[7] < found[0]
    folder = whole.url.removeprefix("file://")
    assert main(["status", folder, "--json"]) == 0
    status = json.loads(capsys.readouterr().out)
    assert (status["heldout_loss"], status["heldout_loss_version"]) == (found[7], 7)
    source = status["heldout_sources"]["other"]
    assert (source["loss"], source["documents"]) == (found[7], 5)
    assert source["perplexity"] == status["heldout_perplexity"] == pytest.approx(exp(found[7]))
    assert main(["status", folder]) == 0
    assert "held-out loss at version 7" in capsys.readouterr().out
    state = RunState()
    state.add(EventTail(whole).read(everything=True))
    curve = series(state, ["heldout/loss", "heldout/source/other"], points=100)
    expected = [found.get(version) for version in curve.versions]
    assert curve.columns == {"heldout/loss": expected, "heldout/source/other": expected}
    summary = summarize(
        state, workers=[], wall_s=1.0, bound=1, target_versions=7, name="mid", seed=0
    )
    assert summary.heldout_loss is not None
    assert summary.heldout_loss.curve == sorted(found.items())
    html = page(summary, state)
    assert "<h2>Held-out loss</h2>" in html
    assert "<h2>Held-out accuracy</h2>" not in html
    assert "Held-out loss" in str(heads_of(html))


def heads_of(html: str) -> list[str]:
    return re.findall(r"<dt>([^<]*)</dt>", html)


def test_a_lost_measurement_is_made_again(bucket, whole, monkeypatch) -> None:
    """The newest version is committed, and the trainer dies before it measures it."""
    with monkeypatch.context() as patched:
        patched.setattr(Midtrainer, "_measure_if_due", lambda self: None)
        train(bucket, to=4, die=True)
    assert losses(bucket) == {}
    train(bucket, to=5, die=True)
    expected = losses(whole)
    # Version 5 was the last of that start; versions 0 and 2 were measured by nobody.
    found = losses(bucket)
    assert sorted(found) == [4, 5]
    assert found[4] == expected[4]


def test_measuring_changes_no_bit(begun, tmp_path, uninterrupted, monkeypatch) -> None:
    shutil.copytree(begun / "bucket", tmp_path / "bucket")
    monkeypatch.setattr(Midtrainer, "_measure_if_due", lambda self: None)
    assert train(open_bucket(str(tmp_path / "bucket"))) == uninterrupted


@pytest.mark.parametrize("crashes", [(2,), (4,), (1, 3, 5)])
def test_after_a_crash_the_same_bits_and_the_same_documents(
    bucket, whole, uninterrupted, crashes
) -> None:
    for version in crashes:
        train(bucket, to=version, die=True)
    assert train(bucket) == uninterrupted
    # A start that ends earlier has another last version.
    found = losses(bucket)
    assert {version: found[version] for version in losses(whole)} == losses(whole)
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


def test_a_short_run_of_a_large_model_ends_without_a_checkpoint_and_continues(
    bucket, uninterrupted, monkeypatch
) -> None:
    monkeypatch.setattr(checkpoints, "SMALL_BYTES", 0)
    train(bucket, to=2)
    assert checkpoint_versions(bucket) == []
    assert "computes 2 steps again" in continuing_words(bucket, 2)
    train(bucket, to=5, checkpoint_every=1000, final_checkpoint="always")
    assert checkpoint_versions(bucket) == [5]
    assert continuing_words(bucket, 5) == ""
    assert "computes 1 step again" in continuing_words(bucket, 6)
    assert train(bucket) == uninterrupted  # Longer than `checkpoint_every`: it stores its state.
    assert checkpoint_versions(bucket) == [5, VERSIONS]


def test_whether_the_end_of_a_run_stores_its_state(bucket, monkeypatch) -> None:
    train(bucket, to=1, final_checkpoint="never")
    assert checkpoint_versions(bucket) == []
    train(bucket, to=1, final_checkpoint="auto")  # A small state costs nothing.
    assert checkpoint_versions(bucket) == [1]
    monkeypatch.setattr(checkpoints, "SMALL_BYTES", 0)
    train(bucket, to=2, die=True)
    train(bucket, stop=True, final_checkpoint="never")  # Stopped, so about to be continued.
    assert checkpoint_versions(bucket) == [1, 2]


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
