"""The training client: its verbs, on a tiny model and a folder as the bucket."""

import asyncio

import numpy as np
import pytest
import torch

from deltawire.config import BuildConfig, parse_config
from deltawire.errors import FencedError, InputError
from deltawire.export.models import save_model
from deltawire.store import open_bucket
from deltawire.sync import load_mirror, read_run
from deltawire.train import AdamParams, Datum, ModelInput, SamplingParams, TrainingClient
from deltawire.train.build import build_model, byte_tokenizer

SIZES = BuildConfig(hidden_size=32, layers=2, head_size=16, feed_forward_size=48, context=128)
RATE = AdamParams(learning_rate=1e-2)


@pytest.fixture(scope="module")
def model_directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    save_model(build_model(SIZES, seed=1), byte_tokenizer(), path)
    return path


@pytest.fixture
def url(tmp_path):
    return str(tmp_path / "bucket")


def datum(text, **inputs):
    tokens = list(text.encode())
    targets = tokens[1:]
    inputs = {"target_tokens": targets, "weights": [1.0] * len(targets)} | inputs
    return Datum(ModelInput.from_ints(tokens[:-1]), inputs)


def held(url, version=None):
    bucket = open_bucket(url)
    mirror = load_mirror(bucket, read_run(bucket), at=version)
    return {name: np.array(bits) for name, bits in mirror.tensors.items()}


def same(left, right):
    return left.keys() == right.keys() and all(np.array_equal(left[k], right[k]) for k in left)


def test_a_supervised_loop_learns_publishes_and_samples(url, model_directory):
    data = [datum("abcabcabc"), datum("xyzxyz")]
    with TrainingClient.create(url, model_directory) as client:
        before = client.forward(data, "cross_entropy").result()
        assert len(before.loss_fn_outputs) == 2
        assert before.loss_fn_outputs[0]["logprobs"].shape == (8,)
        for _ in range(40):
            client.forward_backward(data, "cross_entropy")
            client.optim_step(RATE)
        after = client.forward(data, "cross_entropy").result()
        assert after.metrics["loss:sum"] < before.metrics["loss:sum"] / 10
        sampler = client.save_weights_and_get_sampling_client()
        assert client.version == sampler.version == 1
        answer = sampler.sample(
            ModelInput.from_ints(list(b"abcab")), 3, SamplingParams(max_tokens=4, temperature=0.0)
        ).result()
        assert [one.tokens for one in answer.sequences] == [list(b"cabc")] * 3
        assert {v for one in answer.sequences for v in one.versions} == {1}
        # The sampler and the trainer agree on what a token's probability is.
        scores = sampler.compute_logprobs(ModelInput.from_ints(list(b"abcabcabc"))).result()
        assert scores[0] is None
        trained = after.loss_fn_outputs[0]["logprobs"].tolist()
        assert scores[1:] == pytest.approx(trained, abs=1e-4)
    assert same(held(url), held(url, 1))


def test_gradients_add_up_and_a_failed_call_adds_nothing(url, model_directory):
    data = [datum("hello there"), datum("general"), datum("kenobi!")]
    with TrainingClient.create(url, model_directory) as client:
        for part in data:
            client.forward_backward([part], "cross_entropy")

        def broken(_data, logprobs):
            return torch.stack([one.sum() for one in logprobs]), {}

        with pytest.raises(InputError, match="scalar"):
            client.forward_backward_custom(data, broken).result()
        norm = client.optim_step(RATE).result().metrics["grad_norm:mean"]
        parts = client.save_state().result()
    other = url + "2"
    with TrainingClient.create(other, model_directory) as client:
        client.forward_backward(data, "cross_entropy")
        whole = client.optim_step(RATE).result().metrics["grad_norm:mean"]
        assert norm == pytest.approx(whole, rel=1e-5)
    assert parts.version == 1


def test_a_batch_in_several_passes_is_the_batch(url, model_directory):
    """The plain twin: each datum through the whole model, padded to nothing, targets gathered."""
    data = [datum("a" + "b" * n) for n in (3, 9, 1, 5)]
    wide = Datum(ModelInput.from_ints([7, 8, 9]), {"target_tokens": [[1, 2], [3, 4], [5, 6]]})
    with TrainingClient.create(url, model_directory) as client:
        whole = client.forward([*data, wide], "cross_entropy").result()
        client._trainer.session.budget = 8
        parts = client.forward([*data, wide], "cross_entropy").result()
        model = client._trainer.session.model
        for one, out, again in zip(
            [*data, wide], whole.loss_fn_outputs, parts.loss_fn_outputs, strict=True
        ):
            ids = torch.tensor([one.model_input.to_ints()])
            logprobs = torch.log_softmax(model(input_ids=ids).logits[0].float(), -1)
            targets = torch.tensor(one.loss_fn_inputs["target_tokens"])
            plain = logprobs.gather(1, targets.reshape(ids.shape[1], -1)).reshape(targets.shape)
            torch.testing.assert_close(out["logprobs"], plain.detach(), rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(again["logprobs"], out["logprobs"], rtol=1e-5, atol=1e-5)


def test_a_step_is_torchs_adamw(url, model_directory):
    """The twin is given the client's gradients, and torch's optimizer with the same parameters."""
    params = AdamParams(
        learning_rate=3e-3, beta1=0.8, beta2=0.9, eps=1e-9, weight_decay=0.1, grad_clip_norm=0.5
    )
    with TrainingClient.create(url, model_directory) as client:
        masters = client._trainer.session.masters
        twin = [one.clone().requires_grad_() for one in masters._masters.values()]
        optimizer = torch.optim.AdamW(twin, lr=3e-3, betas=(0.8, 0.9), eps=1e-9, weight_decay=0.1)
        for text in ("one", "two words"):
            client.forward_backward([datum(text)], "cross_entropy").result()
            for one, parameter in zip(twin, masters.model.parameters(), strict=True):
                one.grad = parameter.grad.clone()
            norm = torch.nn.utils.clip_grad_norm_(twin, 0.5)
            optimizer.step()
            metrics = client.optim_step(params).result().metrics
            assert metrics["grad_norm:mean"] == pytest.approx(float(norm))
            for one, master in zip(twin, masters._masters.values(), strict=True):
                torch.testing.assert_close(one.detach(), master, rtol=1e-6, atol=1e-8)


def test_a_custom_loss_is_exact(url, model_directory):
    """The custom loss −Σ w·x, written by the caller, moves the weights as cross_entropy does."""
    weights = [0.5, 2.0, -1.0, 0.0, 1.0]
    data = [datum("stream", weights=weights)]
    with TrainingClient.create(url, model_directory) as client:
        client.forward_backward(data, "cross_entropy")
        client.optim_step(RATE).result()

    def loss(data, logprobs):
        total = sum(
            -(torch.tensor(one.loss_fn_inputs["weights"]) * x).sum()
            for one, x in zip(data, logprobs, strict=True)
        )
        return total, {"mine": 3.0}

    with TrainingClient.create(url + "2", model_directory) as client:
        out = client.forward_backward_custom(data, loss).result()
        assert out.metrics["mine:mean"] == 3.0
        client.optim_step(RATE).result()
    assert same(held(url), held(url + "2"))


def test_a_loop_that_is_closed_and_loaded_continues_to_the_same_bits(url, model_directory):
    data = [datum("the same bits"), datum("in the end")]

    def steps(client, count):
        for _ in range(count):
            client.forward_backward(data, "cross_entropy")
            client.optim_step(RATE)
            client.save_weights_for_sampler().result()

    with TrainingClient.create(url, model_directory) as client:
        steps(client, 4)
    with TrainingClient.create(url + "2", model_directory) as client:
        steps(client, 2)
    with TrainingClient.load(url + "2") as client:
        assert client.version == 2
        steps(client, 2)
    assert same(held(url), held(url + "2"))


def test_a_state_goes_back_and_to_another_run(url, model_directory):
    data = [datum("there and back")]
    with TrainingClient.create(url, model_directory) as client:
        client.forward_backward(data, "cross_entropy")
        client.optim_step(RATE)
        saved = client.save_state("first").result()
        client.forward_backward(data, "cross_entropy")
        client.optim_step(RATE)
        client.save_weights_for_sampler().result()
        assert not same(held(url), held(url, 1))
        client.load_state(saved).result()
        back = client.save_weights_for_sampler().result()
        assert back.version == 3
        assert same(held(url), held(url, 1))
    with TrainingClient.create(url + "2", model_directory) as client:
        client.load_state(saved).result()
        client.save_state().result()
        with pytest.raises(InputError, match="no state of version"):
            client.load_state(f"{url}@77").result()
        with pytest.raises(InputError, match="RUN_URL@VERSION"):
            client.load_state("nothing").result()
    assert same(held(url + "2"), held(url, 1))


def test_an_inflight_client_follows_and_a_snapshot_does_not(url, model_directory):
    data = [datum("flight")]
    with TrainingClient.create(url, model_directory) as client:
        old = client.save_weights_and_get_sampling_client()
        flying = client.create_sampling_client(0, kind="inflight", max_lag=0)
        client.forward_backward(data, "cross_entropy")
        client.optim_step(RATE)
        client.save_weights_for_sampler().result()
        prompt, params = ModelInput.from_ints(list(b"fl")), SamplingParams(max_tokens=2)
        for sampler, version in ((old, 0), (flying, 1)):
            sequence = sampler.sample(prompt, 1, params).result(60).sequences[0]
            assert sequence.versions == [version] * 2
        stopped = flying.sample(prompt, 1, SamplingParams(max_tokens=64, stop=[*range(256)]))
        assert stopped.result(60).sequences[0].stop_reason == "stop"

        async def both():
            return await asyncio.gather(
                old.sample(prompt, 1, params), flying.compute_logprobs(prompt)
            )

        answer, scores = asyncio.run(both())
        assert len(answer.sequences) == 1
        assert len(scores) == 2


def test_one_trainer_at_a_time(url, model_directory):
    with TrainingClient.create(url, model_directory) as client:
        with pytest.raises(FencedError, match="alive"):
            TrainingClient.load(url)
        client.forward_backward([datum("mine")], "cross_entropy")
        client.optim_step(RATE).result()
        other = TrainingClient.load(url, take_over=True)
        try:
            client._trainer.process.lease.check()
            with pytest.raises(FencedError):
                client.save_weights_for_sampler().result()
        finally:
            other.close()
            client.close(save=False)


def test_a_state_that_was_not_saved_is_not_made_up(url, model_directory):
    client = TrainingClient.create(url, model_directory)
    client.forward_backward([datum("lost")], "cross_entropy")
    client.optim_step(RATE)
    client.save_weights_for_sampler().result()
    client.close(save=False)
    with pytest.raises(InputError, match="newest optimizer state is missing"):
        TrainingClient.load(url)
    with TrainingClient.load(url, lost_state="reset") as client:
        assert client.version == 1


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (list, "list of data is empty"),
        (lambda: [datum("ab", target_tokens=[1, 2])], "shape"),
        (lambda: [Datum(ModelInput.from_ints([1, 2]), {"target_tokens": [1, 5000]})], "not one of"),
        (lambda: [Datum(ModelInput.from_ints([]), {"target_tokens": []})], "0 tokens"),
        (lambda: [Datum("text", {"target_tokens": [1]})], "token ids"),
        (lambda: [datum("ab", weights=["x"])], "not a tensor"),
    ],
)
def test_wrong_data_are_refused_at_once(client, wrong, text):
    with pytest.raises(InputError, match=text):
        client.forward_backward(wrong(), "cross_entropy")


def test_an_adapter_is_all_that_moves(url, model_directory):
    raw = {
        "name": "lora",
        "model": {"path": str(model_directory)},
        "train": {"adapter": {"kind": "lora", "rank": 4, "alpha": 8.0}},
    }
    config = parse_config(raw, source="test")
    with TrainingClient.create(url, model_directory, config=config) as client:
        for _ in range(3):
            client.forward_backward([datum("adapter")], "cross_entropy")
            client.optim_step(RATE)
        trained = client.forward([datum("adapter")], "cross_entropy").result()
        sampler = client.save_weights_and_get_sampling_client()
        scores = sampler.compute_logprobs(ModelInput.from_ints(list(b"adapter"))).result()
        expected = trained.loss_fn_outputs[0]["logprobs"].tolist()
        assert scores[1:] == pytest.approx(expected, abs=1e-4)
    before, after = held(url, 0), held(url, 1)
    moved = {name for name in before if not np.array_equal(before[name], after[name])}
    assert moved
    assert all("lora_" in name for name in moved)


def test_wrong_parameters_are_refused_at_once(client):
    with pytest.raises(InputError, match="beta1"):
        client.optim_step(AdamParams(beta1=1.0))
    with pytest.raises(InputError, match="unknown loss"):
        client.forward([datum("ab")], "stable_reinforce")
    sampler = client.save_weights_and_get_sampling_client(context=16)
    prompt = ModelInput.from_ints([1, 2])
    with pytest.raises(InputError, match="context"):
        sampler.sample(prompt, 1, SamplingParams(max_tokens=15))
    with pytest.raises(InputError, match="end tokens"):
        sampler.sample(prompt, 1, SamplingParams(max_tokens=1, stop=[]))
    sampler.close()
    with pytest.raises(InputError, match="closed"):
        sampler.sample(prompt, 1, SamplingParams(max_tokens=1))


@pytest.fixture
def client(url, model_directory):
    with TrainingClient.create(url, model_directory) as client:
        yield client


def test_a_run_that_is_there_is_not_started_again(client, model_directory, tmp_path):
    with pytest.raises(InputError, match="a run exists here already"):
        TrainingClient.create(client.bucket.url, model_directory)
    with pytest.raises(InputError, match="no model directory"):
        TrainingClient.create(str(tmp_path / "b"), tmp_path / "nothing")
