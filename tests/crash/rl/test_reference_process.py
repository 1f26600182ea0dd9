"""A reference in a separate process: killed, restarted, slow, damaged or wrong."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from granted_groups import made_up_group, start_with_groups

from deltawire.config import BuildConfig
from deltawire.errors import CorruptError, InputError
from deltawire.events import Life, Step
from deltawire.export.adapter import open_model
from deltawire.export.models import fetch_model_files, save_model
from deltawire.rl.control.rollout_buffer import BufferedGroup
from deltawire.rl.control.rollout_retention import RolloutRetention
from deltawire.rl.reference import reader as reading
from deltawire.rl.reference.process import GroupScorer, run_reference
from deltawire.rl.reference.reader import ReferenceReader
from deltawire.rl.trainer.trainer import Trainer
from deltawire.rl.trainer.verify_training import verify_training
from deltawire.runtime.event_tail import EventTail
from deltawire.runtime.process import Process, open_run
from deltawire.store import Bucket
from deltawire.train.build import build_model, byte_tokenizer
from deltawire.wire import keys
from deltawire.wire.reference_scores import ReferenceScores, decode_scores, encode_scores
from deltawire.wire.rollouts import LIVE_TASK, BetterAnswer, Group, decode_group

VERSIONS = 3
GROUPS = 2 * VERSIONS


def group(number: int) -> Group:
    return made_up_group(number, failed=(1, 0))


def start(
    folder: Path,
    *,
    mode: str = "process",
    model: str = "",
    made: Callable[[int], Group] = group,
    **loss: Any,
) -> Bucket:
    train = {
        "versions": VERSIONS,
        "groups_per_step": 2,
        "max_staleness": 100,
        "checkpoint_every": 2,
        "optimizer": {"learning_rate": 1e-2},
        "schedule": {"warmup_steps": 1},
        "loss": {"kl": "k2", "kl_coefficient": 0.5, **loss},
    }
    reference = {"mode": mode, "model": model}
    return start_with_groups(folder, groups=GROUPS, train=train, group=made, reference=reference)


@pytest.fixture
def bucket(tmp_path) -> Bucket:
    return start(tmp_path)


def scorer_of(bucket: Bucket) -> GroupScorer:
    torch.set_num_threads(1)
    run, config = open_run(bucket)
    return GroupScorer(Process(bucket, "reference", "reference", supervised=False), run, config)


def trainer_of(bucket: Bucket, *, to: int = VERSIONS) -> Trainer:
    torch.set_num_threads(1)
    run, config = open_run(bucket)
    train = msgspec.structs.replace(config.train, versions=to)
    process = Process(bucket, "trainer", "trainer", supervised=False)
    with fetch_model_files(bucket, run) as folder:
        model = open_model(Path(folder), config.train.adapter)
    return Trainer(process, run, msgspec.structs.replace(config, train=train), model)


def scored(bucket: Bucket) -> list[str]:
    return bucket.list(keys.REFERENCES)


def penalties(bucket: Bucket) -> list[float]:
    return [event.kl for event in EventTail(bucket).read() if isinstance(event, Step)]


def test_a_trainer_trains_with_the_scores_and_recomputes_with_them(bucket, tmp_path):
    assert scorer_of(bucket).round() == GROUPS
    trainer = trainer_of(bucket)
    trainer.loop()
    trainer.process.events.flush()
    assert verify_training(bucket).exact
    (tmp_path / "here").mkdir()
    same = start(tmp_path / "here", mode="sleeping")
    there = trainer_of(same)
    there.loop()
    there.process.events.flush()
    assert penalties(bucket) == pytest.approx(penalties(same), rel=1e-3, abs=1e-6)
    assert penalties(bucket)[0] == pytest.approx(0, abs=1e-6)
    assert penalties(bucket)[-1] > 1e-4


@pytest.mark.drills
def test_better_answers_are_scored_too(tmp_path):
    """Training with the scores is training with the model, and is recomputed from them."""

    def paired(number: int) -> Group:
        made = group(number)
        trajectories = [
            t if t.cause or place % 2 else replace(
                t, episode=place, better=BetterAnswer(t.tokens_T[::-1][:4].copy(), 0.5)
            )
            for place, t in enumerate(made.trajectories)
        ]  # fmt: skip
        return replace(made, task=LIVE_TASK, trajectories=trajectories)

    losses: dict[str, list[float]] = {}
    for mode in ("process", "sleeping"):
        loss = {"kl": "none", "advantage": "given", "preference": {"kind": "dpo", "beta": 1.0}}
        folder = tmp_path / mode
        folder.mkdir()
        bucket = start(folder, mode=mode, made=paired, **loss)
        if mode == "process":
            assert scorer_of(bucket).round() == GROUPS
            scores = read_scores(bucket, scored(bucket)[0])
            assert len(scores.logprobs) > len(paired(0).trajectories)
        trainer = trainer_of(bucket)
        trainer.loop()
        trainer.process.events.flush()
        assert verify_training(bucket).exact
        losses[mode] = [e.loss for e in EventTail(bucket).read() if isinstance(e, Step)]
    assert losses["process"] == pytest.approx(losses["sleeping"], rel=1e-3, abs=1e-6)


def read_scores(bucket: Bucket, key: str) -> ReferenceScores:
    data = bucket.get(key, limit=1 << 20)
    assert data is not None
    return decode_scores(data, run=bucket.url, key=key)


def test_a_killed_reference_scores_nothing_twice(bucket, monkeypatch):
    """Death between two creates, and after a create whose answer was lost."""
    first = scorer_of(bucket)
    honest, calls = first.logprobs, []

    class Killed(BaseException):
        pass

    def until_killed(one):
        if len(calls) == 3:
            raise Killed
        calls.append(one.task)
        return honest(one)

    first.logprobs = until_killed
    with pytest.raises(Killed):
        first.round()
    kept = {key: bucket.get(key, limit=1 << 20) for key in scored(bucket)}
    assert len(kept) == 3
    second = scorer_of(bucket)
    again, more = second.logprobs, []
    second.logprobs = lambda one: more.append(one.task) or again(one)
    assert second.round() == GROUPS - 3
    assert not set(calls) & set(more)
    assert second.round() == 0
    assert {key: bucket.get(key, limit=1 << 20) for key in kept} == kept


def test_the_trainer_waits_and_says_so(bucket, monkeypatch):
    monkeypatch.setattr(reading, "SAID_AFTER_S", 0.0)
    trainer = trainer_of(bucket)
    thread = threading.Thread(target=trainer.loop)
    thread.start()
    try:
        deadline = time.monotonic() + 120
        said: list[Life] = []
        while not said and time.monotonic() < deadline:
            time.sleep(0.05)
            said = [
                event
                for event in EventTail(bucket).read()
                if isinstance(event, Life) and "waiting for the reference" in event.detail
            ]
        assert "2 of 2 groups have no log-probabilities" in said[0].detail
        assert trainer.version == 0
        scorer_of(bucket).round()
    finally:
        if not scored(bucket):
            trainer.process.stop()
        thread.join(120)
    assert trainer.version == VERSIONS


def test_a_waiting_trainer_stops_when_asked(bucket):
    trainer = trainer_of(bucket)
    thread = threading.Thread(target=trainer.loop)
    thread.start()
    time.sleep(0.3)
    trainer.process.stop()
    thread.join(120)
    assert not thread.is_alive()
    assert trainer.version == 0
    scorer_of(bucket).round()
    successor = trainer_of(bucket)
    successor.loop()
    assert successor.version == VERSIONS


def test_the_process_ends_with_the_run(bucket):
    process = Process(bucket, "reference", "reference", supervised=False)
    trainer = trainer_of(bucket)  # Models are loaded one after the other: libraries set globals.
    thread = threading.Thread(target=run_reference, args=(process,))
    with process.registered():
        thread.start()
        deadline = time.monotonic() + 120
        while len(scored(bucket)) < GROUPS and time.monotonic() < deadline:
            time.sleep(0.05)
        assert thread.is_alive()
        trainer.loop()
        thread.join(120)
        assert not thread.is_alive()
    assert len(scored(bucket)) == GROUPS


FAULTS = {
    "another run": {"run": "0" * 32},
    "another group": {"sequence": 4},
    "other bytes": {"group": "0" * 32},
    "the model": {"model": "0" * 32},
    "number of trajectories": {"logprobs": [b""] * 3},
    "number of tokens": {"logprobs": [bytes(24), bytes(24), bytes(24), bytes(20)]},
}


@pytest.mark.parametrize("fault", FAULTS)
def test_scores_of_something_else_are_refused(bucket, fault):
    run, _ = open_run(bucket)
    scorer_of(bucket).round()
    key = keys.reference("w0", 0)
    honest = decode_scores(bucket.get(key, limit=1 << 20), run="r", key=key)
    values = {name: getattr(honest, name) for name in honest.__struct_fields__}
    bucket.put(key, encode_scores(ReferenceScores(**{**values, **FAULTS[fault]}), key=key))
    data = bucket.get(keys.rollout("w0", 0), limit=1 << 20)
    one = BufferedGroup(0, decode_group(data, run="r", key="k"), honest.group)
    with pytest.raises(CorruptError, match=fault):
        ReferenceReader(bucket, run, model=run.digest).read([one])


def test_a_flipped_bit_and_what_is_no_logprob_are_refused():
    scores = ReferenceScores(
        run="1" * 32, worker="w", sequence=0, group="2" * 32, model="3" * 32, logprobs=[bytes(8)]
    )
    data = encode_scores(scores, key="k")
    assert decode_scores(data, run="r", key="k") == scores
    with pytest.raises(CorruptError, match="seal"):
        decode_scores(data.replace(b'"w"', b'"v"'), run="r", key="k")
    for bits in (b"123", np.float32([0.5]).tobytes(), np.float32([np.nan]).tobytes()):
        wrong = msgspec.structs.replace(scores, logprobs=[bits])
        with pytest.raises(CorruptError, match=r"whole number of float32|not finite or is above 0"):
            decode_scores(encode_scores(wrong, key="k"), run="r", key="k")


def test_a_failed_trajectory_has_no_scores_and_damaged_groups_are_left_out(bucket):
    bucket.put(keys.rollout("w0", 3), b"damaged")
    assert scorer_of(bucket).round() == GROUPS - 1
    key = keys.reference("w0", 1)
    scores = decode_scores(bucket.get(key, limit=1 << 20), run="r", key=key)
    assert [len(bits) for bits in scores.logprobs] == [0, 24, 24, 24]
    assert bucket.get(keys.reference("w0", 3), limit=1 << 20) is None


def test_scores_go_with_their_groups(bucket):
    scorer_of(bucket).round()
    trainer_of(bucket).loop()
    run, _ = open_run(bucket)
    assert RolloutRetention(bucket, run, keep=1).trim(newest=3, oldest_checkpoint=3) == 4
    assert scored(bucket) == [keys.reference("w0", number) for number in (4, 5)]


def test_a_teacher_is_a_model_directory(tmp_path):
    sizes = BuildConfig(hidden_size=32, layers=1, head_size=16, feed_forward_size=48, context=64)
    save_model(build_model(sizes, seed=7), byte_tokenizer(), tmp_path / "teacher")
    bucket = start(tmp_path, model=str(tmp_path / "teacher"), policy_coefficient=0.0)
    scorer_of(bucket).round()
    trainer = trainer_of(bucket)
    trainer.loop()
    trainer.process.events.flush()
    found = penalties(bucket)
    assert found[0] > 1e-3, "the teacher is another model"
    assert verify_training(bucket).exact

    other = msgspec.structs.replace(sizes, vocabulary=300)
    save_model(build_model(other, seed=7), byte_tokenizer(), tmp_path / "other")
    (tmp_path / "x").mkdir()
    wrong = start(tmp_path / "x", model=str(tmp_path / "other"))
    with pytest.raises(InputError, match="vocabulary of 300"):
        scorer_of(wrong)
