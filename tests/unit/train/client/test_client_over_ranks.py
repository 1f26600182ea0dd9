"""The training client over ranks, and with a trainer in other processes."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest
from client_rank import TEXTS, datum, run_script, squares

from deltawire.config import BuildConfig, ModelConfig, RunConfig, TrainConfig
from deltawire.errors import CorruptError, FencedError, InputError
from deltawire.export.models import save_model
from deltawire.store import open_bucket
from deltawire.sync import find_run, newest_version, read_manifest
from deltawire.train import AdamParams, SamplingParams, TrainingClient
from deltawire.train.build import build_model, byte_tokenizer
from deltawire.train.client import host
from deltawire.train.client.hosted import LostTrainerError
from deltawire.train.client.operations import (
    Evaluation,
    Failed,
    decode_answer,
    decode_operation,
    encode,
)

SIZES = BuildConfig(hidden_size=32, layers=2, head_size=16, feed_forward_size=48, context=128)
SMALL = {"max_tokens_per_batch": 24}
LORA = {"adapter": {"kind": "lora", "rank": 4, "targets": ["all-linear"]}}
RATE = AdamParams(learning_rate=1e-3)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    save_model(build_model(SIZES, seed=1), byte_tokenizer(), path)
    return str(path)


def distance(left, right):
    assert left.keys() == right.keys()
    gap = sum(float(np.square(left[k] - right[k], dtype=np.float64).sum()) for k in left)
    whole = sum(float(np.square(right[k], dtype=np.float64).sum()) for k in right)
    return (gap / whole) ** 0.5


def digest(url):
    bucket = open_bucket(url)
    run, newest = find_run(bucket), newest_version(bucket)
    return read_manifest(bucket, run, newest).digest


def step(client, text="hello"):
    client.forward_backward([datum(text), datum("again")], "cross_entropy").result()
    client.optim_step(RATE).result()


def test_two_ranks_compute_what_one_computes(tmp_path, model):
    """Under a launcher: losses, gradients and every kind of call, in several passes."""
    one, gradient = run_script(tmp_path, model, "one", ranks=1, steps=3, train=SMALL)
    two, of_two = run_script(tmp_path, model, "two", ranks=2, steps=3, train=SMALL)
    assert (one["ranks"], two["ranks"]) == (1, 2)
    assert two["version"] == 3
    assert "opened a training client over its ranks before" in two["again"]
    assert distance(of_two, gradient) <= 1e-6
    np.testing.assert_allclose(two["losses"], one["losses"], rtol=1e-4)


@pytest.mark.drills
@pytest.mark.long
@pytest.mark.parametrize("train", [SMALL, LORA], ids=["full", "lora"])
def test_ranks_repeat_to_the_bit(tmp_path, model, train):
    one, gradient = run_script(tmp_path, model, "one", ranks=1, steps=10, train=train)
    two, of_two = run_script(tmp_path, model, "two", ranks=2, steps=10, train=train)
    again, _ = run_script(tmp_path, model, "again", ranks=2, steps=10, train=train)
    assert distance(of_two, gradient) <= 1e-6
    np.testing.assert_allclose(two["losses"], one["losses"], rtol=1e-4)
    assert two["losses"] == again["losses"]
    assert two["digests"] == again["digests"]
    assert len(set(two["digests"])) == 10


@pytest.mark.drills
@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "axis"),
    [
        ("qwen3", "tensor_parallel"),
        ("qwen3", "replicate"),
        ("qwen3_moe", "tensor_parallel"),
        ("qwen3_moe", "expert_parallel"),
    ],
)
def test_every_axis_computes_what_one_rank_computes(tmp_path, family, axis):
    sizes = msgspec.structs.replace(SIZES, family=family, hidden_size=64, experts=4)
    path = tmp_path / "model"
    save_model(build_model(sizes, seed=1), byte_tokenizer(), path)
    one, gradient = run_script(tmp_path, str(path), "one", ranks=1, steps=2, train=SMALL)
    two, of_two = run_script(tmp_path, str(path), "two", ranks=2, steps=2, train=SMALL | {axis: 2})
    assert (two["ranks"], two["version"]) == (2, 2)
    assert distance(of_two, gradient) <= 1e-6
    np.testing.assert_allclose(two["losses"], one["losses"], rtol=1e-5)


def test_a_trainer_in_another_process(tmp_path, model):
    """Every verb through the connection; then the process is killed."""
    url, twin = str(tmp_path / "hosted"), str(tmp_path / "twin")
    data = [datum(one) for one in TEXTS]
    with TrainingClient.create(twin, model) as client:
        plain = client.forward_backward(data, "cross_entropy").result()
        custom = client.forward_backward_custom(data, squares).result()
        client.optim_step(RATE).result()
        client.save_state("one").result()
    client = TrainingClient.create(url, model, hosted=True)
    try:
        found = client.forward_backward(data, "cross_entropy").result()
        assert found.metrics == plain.metrics
        for left, right in zip(found.loss_fn_outputs, plain.loss_fn_outputs, strict=True):
            assert left["logprobs"].equal(right["logprobs"])
        assert client.forward_backward_custom(data, squares).result().metrics == custom.metrics
        client.optim_step(RATE).result()
        saved = client.save_state("one", record={"mine": [1, 2]}).result()
        assert (saved.version, client.version, digest(url)) == (1, 1, digest(twin))
        with pytest.raises(InputError, match="no state of version 7"):
            client.load_state(f"{client.bucket.url}@7").result()
        assert client.load_state(saved).result().path == saved.path
        sampler = client.save_weights_and_get_sampling_client()
        prompt = datum("abc").model_input
        assert sampler.sample(prompt, 2, SamplingParams(max_tokens=3)).result().sequences
        assert sampler.compute_logprobs(prompt).result()[0] is None
        assert client.get_tokenizer().encode("a") == [97]
        os.kill(client._trainer._process.pid, signal.SIGKILL)
        with pytest.raises(LostTrainerError, match=r"signal 9.*lost_state=\"repeat\""):
            client.forward(data, "cross_entropy").result()
        with pytest.raises(LostTrainerError, match="signal 9"):
            client.save_state().result()
    finally:
        client.close(save=False)


@pytest.mark.drills
@pytest.mark.long
def test_a_killed_trainer_is_opened_again(tmp_path, model):
    url = str(tmp_path / "hosted")
    client = TrainingClient.create(url, model, hosted=True)
    try:
        step(client)
        client.save_state("one", record={"mine": [1, 2]}).result()
        step(client, "lost")
        client.save_weights_for_sampler().result()
        os.kill(client._trainer._process.pid, signal.SIGKILL)
        with pytest.raises(LostTrainerError, match="signal 9"):
            step(client)
    finally:
        client.close(save=False)
    published = digest(url)
    with TrainingClient.load(url, lost_state="repeat", hosted=True) as client:
        assert (client.version, client.ranks, client.notice) == (2, 1, "")
        assert client.state_record["mine"] == [1, 2]
        step(client, "lost")
        assert client.save_weights_for_sampler().result().version == 2
    assert digest(url) == published


def test_errors_keep_their_kind_on_the_way():
    error = InputError("no", hint="do", run="r", version=3, key="k")
    told = decode_answer(encode(Failed.of(error))).error()
    assert type(told) is InputError
    assert (str(told), told.version) == (str(error), 3)
    assert type(Failed.of(LostTrainerError("x")).error()).__name__ == "ResyncError"
    assert type(Failed.of(CorruptError("x")).error()) is CorruptError
    told = decode_answer(encode(Failed.of(MemoryError("too large")))).error()
    assert isinstance(told, RuntimeError)
    assert "MemoryError: too large" in str(told)
    with pytest.raises(msgspec.DecodeError):
        decode_operation(encode(Evaluation(logprobs=[], loss=0.0)))


def test_wrong_ranks_are_refused_at_once(tmp_path, model, monkeypatch):
    config = RunConfig(
        name="x", model=ModelConfig(path=model), train=TrainConfig(ranks=2, replicate=2)
    )
    for ranks, reason in ((3, "3 ranks do not divide into replicate = 2"), (0, "ranks is 0")):
        with pytest.raises(InputError, match=reason):
            TrainingClient.create(str(tmp_path / "x"), model, config=config, ranks=ranks)
    url = str(tmp_path / "y")
    TrainingClient.create(url, model).close()
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InputError, match="2 processes that a launcher started, and asks for ranks"):
        TrainingClient.load(url, ranks=4)
    with pytest.raises(InputError, match="asks for hosted=True"):
        TrainingClient.load(url, hosted=True)


def test_a_host_is_not_started_by_hand(monkeypatch, tmp_path):
    with pytest.raises(FileNotFoundError):
        host.main(tmp_path)


@pytest.mark.drills
@pytest.mark.long
def test_a_state_of_two_ranks_opens_on_one_and_back(tmp_path, model):
    url = str(tmp_path / "bucket")
    with TrainingClient.create(url, model, ranks=2) as client:
        assert (client.ranks, client.notice) == (2, "")
        step(client)
        saved = client.save_state(keep=True).result()
        with pytest.raises(InputError, match="no state of version 9"):
            client.load_state(f"{client.bucket.url}@9").result()
        step(client)  # A refused operation did not end the ranks.
    two = digest(url)
    with TrainingClient.load(url, ranks=1) as client:
        assert "saved by 2 ranks, and this trainer has 1 rank" in client.notice
        assert client.version == 2
        client.load_state(saved).result()
        step(client)
        client.save_state().result()
        one = digest(url)
    with TrainingClient.load(url) as client:
        assert (client.ranks, client.version) == (2, 3)
        assert "saved by 1 rank, and this trainer has 2 ranks" in client.notice
        client.load_state(saved).result()
        step(client)
        assert client.save_state().result().version == 4
    assert digest(url) == two
    assert one != ""


@pytest.mark.drills
@pytest.mark.long
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="needs /proc")
def test_the_death_of_a_rank_is_one_error_and_loses_nothing_saved(tmp_path, model):
    url = str(tmp_path / "bucket")
    client = TrainingClient.create(url, model, ranks=2)
    try:
        step(client)
        client.save_state(record={"done": 1}).result()
        step(client, "unsaved")
        client.save_weights_for_sampler().result()
        published = digest(url)
        os.kill(rank_pid(client._trainer._process.pid, 1), signal.SIGKILL)
        with pytest.raises(LostTrainerError, match=r"rank 1 was ended by signal 9"):
            forward_until_it_fails(client)
        with pytest.raises(LostTrainerError, match="rank 1 was ended"):
            client.save_state().result()
    finally:
        client.close(save=False)
    with pytest.raises(InputError, match="optimizer state is that of version 1"):
        TrainingClient.load(url, ranks=1)
    with TrainingClient.load(url, lost_state="repeat") as client:
        assert (client.ranks, client.version, client.state_record["done"]) == (2, 2, 1)
        with pytest.raises(FencedError, match="alive"):
            TrainingClient.load(url)
        step(client, "unsaved")
        assert client.save_weights_for_sampler().result().version == 2
    assert digest(url) == published


def forward_until_it_fails(client):
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        client.forward([datum("x y")], "cross_entropy").result()
        time.sleep(0.05)


def rank_pid(agent, number):
    for child in Path(f"/proc/{agent}/task/{agent}/children").read_text().split():
        raw = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
        if f"RANK={number}".encode() in raw:
            return int(child)
    raise AssertionError(f"no rank {number}")
