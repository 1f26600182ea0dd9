"""An evaluator measures a candidate and, by a second model, the version that serves."""

import time
from pathlib import Path

import pytest
import torch
from granted_groups import start_with_groups

from deltawire.events import Evaluated, ServingMeasured
from deltawire.export.models import empty_model, fetch_model_files
from deltawire.launch.live import Releaser
from deltawire.rl.evaluate import serving_scores
from deltawire.rl.evaluate.evaluator import run_evaluator
from deltawire.rl.trainer.trainer import Trainer
from deltawire.runtime.event_tail import events_of
from deltawire.runtime.process import Process, open_run
from deltawire.sync import read_manifest

pytestmark = pytest.mark.drills
PROBLEMS = 3


def test_the_gate_compares_a_candidate_with_new_results_of_the_version_that_serves(
    tmp_path, monkeypatch
):
    bucket = start_with_groups(
        tmp_path,
        groups=1,
        train={"versions": 1, "groups_per_step": 1, "max_staleness": 100},
        evaluate={"every": 1, "samples": 2},
        task={"heldout": PROBLEMS},
    )
    torch.set_num_threads(1)
    run, config = open_run(bucket)
    releaser = Releaser(bucket, run, config, by="test")
    assert releaser.step(time.time()).verdict == "serve"
    with fetch_model_files(bucket, run) as folder:
        policy = empty_model(Path(folder))
    Trainer(Process(bucket, "trainer", "trainer", supervised=False), run, config, policy).loop()
    held, opened = [], serving_scores.serve_policy

    def noted(*arguments, **options):
        served, steps = opened(*arguments, **options)
        held.append((served.live.version, served.live.digest.hex()))
        return served, steps

    monkeypatch.setattr(serving_scores, "serve_policy", noted)
    process = Process(bucket, "evaluator", "evaluator", supervised=False)
    run_evaluator(process)
    process.events.flush()
    events = list(events_of(bucket, "evaluator"))
    assert [e.version for e in events if isinstance(e, Evaluated)] == [0, 1]
    again = [e for e in events if isinstance(e, ServingMeasured)]
    assert [(e.version, e.candidate) for e in again] == [(0, 1)], "once for each candidate"
    assert all(len(e.correct) == PROBLEMS for e in again)
    assert held == [(0, read_manifest(bucket, run, 0).digest)], "one model, with its weights"
    assert releaser.step(time.time()).verdict == "gate"
    scores = releaser._scores(time.time())
    assert scores[0]["accuracy"].again == tuple(again[-1].correct)
    assert scores[1]["accuracy"].again == ()
