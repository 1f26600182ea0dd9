"""Mid-training, and training against a reference process, over two ranks."""

import json
import shutil

import pytest
from rank_runs import begin, digests, metadata_of

from benchmarks.training.rank_runs import Start, run_starts
from deltawire.config import parse_config
from deltawire.events import HeldoutLoss, Step
from deltawire.rl.reference.process import GroupScorer
from deltawire.rl.trainer.bootstrap import start_run
from deltawire.runtime.event_tail import EventTail
from deltawire.runtime.fleet import read_trainer
from deltawire.runtime.process import Process, open_run
from deltawire.store import open_bucket


def losses(bucket):
    steps = [event for event in EventTail(bucket).read() if isinstance(event, Step)]
    return {step.version: step.loss for step in steps}


def heldout(bucket):
    events = [event for event in EventTail(bucket).read() if isinstance(event, HeldoutLoss)]
    return {event.version: event.total.loss for event in events}


@pytest.fixture(scope="module")
def documents(tmp_path_factory):
    """A run of mid-training at version 0, whose model lies where that of a run of groups does."""
    folder = tmp_path_factory.mktemp("documents")
    begin(folder, versions=1)
    rows = "".join(json.dumps({"text": f"number {n} " * (n % 5 + 1)}) + "\n" for n in range(11))
    (folder / "docs.jsonl").write_text(rows)
    config = {
        "name": "mid",
        "model": {"path": str(folder / "model")},
        "midtrain": {
            "streams": [{"path": str(folder / "docs.jsonl")}],
            "tokens_per_step": 120,
            "sequence_length": 32,
            "heldout": {
                "every": 2,
                "streams": [{"name": "same", "path": str(folder / "docs.jsonl")}],
            },
        },
        "train": {
            "versions": 5,
            "checkpoint_every": 2,
            "max_tokens_per_batch": 64,
            "optimizer": {"learning_rate": 1e-2},
            "schedule": {"warmup_steps": 1},
        },
    }
    bucket = open_bucket(str(folder / "documents"), create=True)
    start_run(bucket, parse_config(config, source="test"), folder / "model")
    return folder / "documents"


def test_two_ranks_train_on_the_same_documents_and_resume_exactly(documents, tmp_path):
    found, measured = {}, {}
    for name, starts in {
        "alone": [Start(ranks=1)],
        "both": [Start()],
        "killed": [Start(rank=1, point="gradients", version=4), Start()],
    }.items():
        shutil.copytree(documents, tmp_path / name)
        bucket = open_bucket(str(tmp_path / name))
        run_starts(bucket, starts)
        assert read_trainer(bucket).phase == "finished"
        measured[name] = heldout(bucket)
        found[name] = (digests(bucket), [one.position for one in metadata_of(bucket)])
        if len(starts) == 1:  # Events of the last moments die with a rank that is killed.
            record = losses(bucket)
            assert record[5] < record[1]
            found[name, "losses"] = [record[version] for version in range(1, 6)]
    assert found["killed"] == found["both"]
    assert found["alone"][1] == found["both"][1], "the same documents"
    assert sorted(measured["alone"]) == sorted(measured["both"]) == [0, 2, 4, 5]
    assert measured["killed"] == measured["both"], "to the bit, each due version once"
    for version, loss in measured["alone"].items():
        assert measured["both"][version] == pytest.approx(loss, abs=1e-4)
    assert found["alone", "losses"] == pytest.approx(found["both", "losses"], abs=1e-4)


def test_two_ranks_train_against_a_reference_process(tmp_path):
    """Every rank reads the log-probabilities that the process has stored."""
    folder = tmp_path / "process"
    folder.mkdir()
    loss = {"kl": "k2", "kl_coefficient": 0.5}
    bucket = begin(folder, versions=3, loss=loss, reference={"mode": "process"})
    run, config = open_run(bucket)
    process = Process(bucket, "reference", "reference", supervised=False)
    assert GroupScorer(process, run, config).round() == 6
    shutil.copytree(folder / "bucket", tmp_path / "alone")
    alone = open_bucket(str(tmp_path / "alone"))
    run_starts(bucket, [Start(rank=0, point="committed", version=2), Start()])
    run_starts(alone, [Start(ranks=1)])
    assert read_trainer(bucket).version == 3
    assert losses(bucket)[3] == pytest.approx(losses(alone)[3], abs=1e-4)
