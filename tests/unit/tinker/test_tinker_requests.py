"""The server's verbs without HTTP: order, retries, wrong input, adapters, sampling in flight."""

import asyncio
import json
import types

import numpy as np
import pytest
import tinker_requests as ask
from tinker_serving import make_model

from deltawire.errors import InputError
from deltawire.store import open_bucket
from deltawire.sync import load_mirror, newest_version, read_run
from deltawire.tinker import models, rest
from deltawire.tinker.samplers import SamplerOptions
from deltawire.tinker.server import ExpiredError, TinkerOptions, TinkerServer
from deltawire.tinker.state import MissingError

SAMPLING = SamplerOptions(context=64, slots=4, engines=1)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("models"))


def serve(url, model, run, **options):
    """Runs ``run(server, model's id)`` against a server on ``url``."""

    async def main():
        bucket = open_bucket(str(url), create=True)
        found = TinkerServer(bucket, TinkerOptions(directory=model, sampling=SAMPLING, **options))
        await found.start()
        try:
            session = (await found.create_session(b"{}"))["session_id"]
            return await run(found, session)
        finally:
            await found.close()

    return asyncio.run(main())


async def created(found, session, number=0, **lora):
    future = await found.submit("create_model", ask.create_model(session, number, **lora))
    answer = await ask.result_of(found, future)
    assert answer.kind == "json", answer
    return json.loads(answer.body)["model_id"]


def test_work_is_done_in_order_and_once(tmp_path, model):
    async def run(found, session):
        name = await created(found, session)
        bodies = {
            1: ("forward_backward", ask.forward_backward(name, 1)),
            2: ("forward_backward", ask.forward_backward(name, 2)),
            3: ("optim_step", ask.optim_step(name, 3)),
            4: ("forward_backward", ask.forward_backward(name, 4)),
            5: ("optim_step", ask.optim_step(name, 5)),
        }
        futures = {n: await found.submit(*bodies[n]) for n in (5, 2, 4, 3, 1)}
        again = [await found.submit(*bodies[n]) for n in (3, 1, 3)]
        assert [one["request_id"] for one in again] == [f"{name}:{n}" for n in (3, 1, 3)]
        steps = [json.loads((await ask.result_of(found, futures[n])).body) for n in (3, 5)]
        assert [one["metrics"]["step:max"] for one in steps] == [1, 2]
        # Answers can be asked for again, and the first chunk saw the same weights as the second.
        first = await ask.result_of(found, futures[1])
        assert first.body == (await ask.result_of(found, futures[2])).body
        assert first.body != (await ask.result_of(found, futures[4])).body
        with pytest.raises(InputError, match=r"seq_id 3 of .* was used for another request"):
            await found.submit("optim_step", ask.optim_step(name, 3, rate=0.5))
        with pytest.raises(InputError, match="was used for another request"):
            await found.submit("forward_backward", ask.forward_backward(name, 5))
        with pytest.raises(InputError, match="there is no request"):
            await found.retrieve(f"{name}:77")
        with pytest.raises(InputError, match="numbers count from 1"):
            await found.submit("optim_step", ask.optim_step(name, -2))

    serve(tmp_path / "b", model, run)


@pytest.mark.parametrize("call", ["save_weights_external", "a_call_of_the_next_sdk"])
def test_a_call_that_is_not_there_uses_its_number(tmp_path, model, call):
    async def run(found, session):
        name = await created(found, session)
        body = json.dumps({"model_id": name, "seq_id": 1, "path": "x"}).encode()
        answer = await ask.result_of(found, await found.refuse(call, body))
        assert (answer.kind, answer.category) == ("error", "user")
        assert f"this server has no call '{call}'".encode() in answer.body
        later = await found.submit("forward_backward", ask.forward_backward(name, 2))
        assert (await ask.result_of(found, later)).kind == "proto"
        for numberless in (b"{}", b"\x00", body.replace(b'"seq_id": 1', b'"seq_id": 0')):
            with pytest.raises(InputError, match="this server has no call"):
                await found.refuse(call, numberless)
        return name

    async def again(found, session):
        del session
        later = await found.submit("forward_backward", ask.forward_backward(name, 3))
        assert (await ask.result_of(found, later)).kind == "proto"

    name = serve(tmp_path / "b", model, run)
    serve(tmp_path / "b", model, again)


def test_an_oversize_chunk_is_refused_at_once(tmp_path, model):
    async def run(found, session):
        name = await created(found, session)
        many = ask.forward_backward(name, 2, texts=[ask.TEXT] * 1025)
        future = await found.submit("forward_backward", many)
        answer = await found.retrieve(future["request_id"], hold_s=0)  # Number 1 never came.
        assert (answer.kind, answer.category) == ("error", "user")
        assert b"a chunk of 1025 data; the client config allows 1024" in answer.body
        big = ask.forward_backward(name, 3, texts=[ask.TEXT * 60_000] * 2)
        future = await found.submit("forward_backward", big)
        answer = await found.retrieve(future["request_id"], hold_s=0)
        assert b"the client config allows 5000000" in answer.body

    serve(tmp_path / "b", model, run)


def test_a_number_that_never_comes_is_told(tmp_path, model, monkeypatch):
    monkeypatch.setattr(models, "GAP_S", 0.2)

    async def run(found, session):
        name = await created(found, session)
        future = await found.submit("optim_step", ask.optim_step(name, 4))
        answer = await ask.result_of(found, future)
        assert answer.category == "user"
        assert b"seq_id 1" in answer.body
        later = await found.submit("forward_backward", ask.forward_backward(name, 5))
        assert (await ask.result_of(found, later)).kind == "proto"

    serve(tmp_path / "b", model, run)


def test_unknown_options_are_refused(tmp_path, model):
    async def run(found, session):
        name = await created(found, session)
        odd = json.dumps({"model_id": name, "seq_id": 1, "adam_params": {"nesterov": True}})
        future = await found.submit("optim_step", odd.encode())
        assert b"nesterov" in (await ask.result_of(found, future)).body
        message = ask.schema.parse("ForwardBackwardRequest", ask.forward_backward(name, 2))
        unknown = message.SerializeToString() + b"\x98\x06\x01"  # Field 99.
        future = await found.submit("forward_backward", unknown)
        assert b"does not know" in (await ask.result_of(found, future)).body
        with pytest.raises(InputError, match="there is no session"):
            await found.submit("create_model", ask.create_model("0" * 32))
        with pytest.raises(InputError, match="there is no model"):
            await found.submit("optim_step", ask.optim_step("nobody", 1))

    serve(tmp_path / "b", model, run)


def test_stable_reinforce_is_the_loss_that_the_server_was_started_with(tmp_path, model):
    def datum(name, number, loss):
        message = ask.schema.parse("ForwardBackwardRequest", ask.forward_backward(name, number))
        message.loss_fn = loss
        for one in message.data:
            count = one.loss_fn_inputs["weights"].shape[0]
            del one.loss_fn_inputs["weights"]
            ask.add_tensor(one, "logprobs", np.full(count, -2.0, np.float32))
            ask.add_tensor(one, "advantages", np.linspace(-1, 1, count, dtype=np.float32))
            one.loss_fn_input_spans.add().sampled_tokens.sequence_id = "s"
        return message.SerializeToString()

    async def run(found, session):
        assert "computes ppo for" in (await found.create_session(b"{}"))["info_message"]
        name = await created(found, session)
        bodies = []
        for number, loss in enumerate(("stable_reinforce", "ppo", "importance_sampling"), 1):
            future = await found.submit("forward_backward", datum(name, number, loss))
            answer = await ask.result_of(found, future)
            assert answer.kind == "proto", answer.body
            bodies.append(answer.body)
        assert bodies[0] == bodies[1] != bodies[2]

    serve(tmp_path / "b", model, run, stable_reinforce="ppo")


def test_sessions_have_new_ids_and_end(tmp_path, model):
    async def run(found, session):
        others = {(await found.create_session(b"{}"))["session_id"] for _ in range(20)}
        assert len(others | {session}) == 21
        await found.finish_session(session, "success")
        with pytest.raises(InputError, match="is finished"):
            await found.submit("create_model", ask.create_model(session))

    serve(tmp_path / "b", model, run)


def test_a_checkpoint_ends_with_its_ttl(tmp_path, model, monkeypatch):
    async def run(found, session):
        name = await created(found, session)
        for number in (1, 3):
            await found.submit("forward_backward", ask.forward_backward(name, number))
            await found.submit("optim_step", ask.optim_step(name, number + 1))
        future = await found.submit("save_weights", ask.save(name, 5, "short", ttl_seconds=3600))
        path = json.loads((await ask.result_of(found, future)).body)["path"]
        assert (await found.rest.weights_info(path))["base_model"] == "org/tiny"
        listed = (await found.rest.checkpoints(name))["checkpoints"]
        assert [one["tinker_path"] for one in listed] == [path]
        later = types.SimpleNamespace(time=lambda: real() + 3601, monotonic=models.time.monotonic)
        real = models.time.time
        monkeypatch.setattr(rest, "time", later)
        monkeypatch.setattr(models, "time", later)
        with pytest.raises(InputError, match="expired"):
            await found.rest.weights_info(path)
        assert (await found.rest.checkpoints(name))["checkpoints"] == []
        future = await found.submit("save_weights", ask.save(name, 6, "later"))
        await ask.result_of(found, future)  # A save removes what has expired.
        assert len(found.state.saves(name)) == 1
        too_short = await found.submit("save_weights", ask.save(name, 7, "x", ttl_seconds=5))
        assert b"ttl_seconds is 5" in (await ask.result_of(found, too_short)).body

    serve(tmp_path / "b", model, run)


def test_runs_checkpoints_and_sessions_are_listed_from_the_bucket(tmp_path, model):
    async def run(found, session):
        first = await created(found, session)
        second = await created(found, session, 1)
        for name, saves in ((first, ("a", "b")), (second, ("c",))):
            for number, save in enumerate(saves, 1):
                future = await found.submit("save_weights", ask.save(name, number, save))
                assert (await ask.result_of(found, future)).kind == "json"
        body = {"session_id": session, "sampling_session_seq_id": 4, "base_model": "org/tiny"}
        await found.create_sampler(json.dumps(body).encode())
        await found.rest.set_ttl(first, "weights", "b", 7200)
        with pytest.raises(InputError, match="ttl_seconds is 5"):
            await found.rest.set_ttl(first, "weights", "b", 5)
        with pytest.raises(MissingError, match="no checkpoint"):
            await found.rest.set_ttl(first, "weights", "z", None)
        return session, first, second

    async def again(found, _):
        listed = await found.rest.training_runs({"limit": "1", "offset": "0"})
        assert [one["training_run_id"] for one in listed["training_runs"]] == [second]
        assert listed["cursor"] == {"offset": 0, "limit": 1, "total_count": 2}
        older = (await found.rest.training_runs({"limit": "9", "offset": "1"}))["training_runs"]
        assert [one["training_run_id"] for one in older] == [first]
        assert older[0]["last_checkpoint"]["checkpoint_id"] == "weights/b"
        assert older[0]["last_checkpoint"]["expires_at"] is not None
        saves = (await found.rest.user_checkpoints({}))["checkpoints"]
        assert [one["checkpoint_id"] for one in saves] == ["weights/c", "weights/b", "weights/a"]
        described = await found.rest.session(session)
        assert sorted(described["training_run_ids"]) == sorted([first, second])
        assert described["sampler_ids"] == [f"{session}:sample:4"]
        assert set((await found.rest.sessions({}))["sessions"]) >= {session}
        for query in ({"limit": "-1"}, {"offset": "x"}, {"project_id": "p"}):
            with pytest.raises(InputError):
                await found.rest.training_runs(query)
        with pytest.raises(MissingError, match="no session"):
            await found.rest.session("0" * 32)

    session, first, second = serve(tmp_path / "b", model, run)
    serve(tmp_path / "b", model, again)


def test_samples_are_drawn_once_and_expire_with_the_server(tmp_path, model):
    async def sampled(found, session):
        body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "org/tiny"}
        opened = await found.create_sampler(json.dumps(body).encode())
        name = opened["sampling_session_id"]
        first = await found.sample(ask.sample(name, 0))
        again = await found.sample(ask.sample(name, 0))
        assert first == again
        answer = await ask.result_of(found, first)
        assert (await ask.result_of(found, again)).body == answer.body
        with pytest.raises(InputError, match="was used for another request"):
            await found.sample(ask.sample(name, 0, num_samples=2))
        return name, first

    async def asked_again(found, session):
        del session
        with pytest.raises(ExpiredError):
            await found.retrieve(first["request_id"])
        answer = await ask.result_of(found, await found.sample(ask.sample(name, 0)))
        assert answer.kind == "proto"  # The sampling session is still there.

    name, first = serve(tmp_path / "b", model, sampled)
    serve(tmp_path / "b", model, asked_again)


def test_snapshots_stay_and_inflight_samplers_follow(tmp_path, model):
    async def run(found, session):
        name = await created(found, session)

        async def step_and_save(number, sampler, kind):
            await found.submit("forward_backward", ask.forward_backward(name, number))
            await found.submit("optim_step", ask.optim_step(name, number + 1))
            body = ask.save_sampler(name, number + 2, sampler, kind=kind)
            future = await found.submit("save_weights_for_sampler", body)
            return json.loads((await ask.result_of(found, future)).body)["sampling_session_id"]

        async def scores(sampler, number):
            future = await found.sample(ask.sample(sampler, number, prompt_logprobs=True))
            answer = await ask.result_of(found, future)
            assert answer.kind == "proto", answer.body
            found_scores = ask.schema.parse("SampleResponse", answer.body).prompt_logprobs
            return np.frombuffer(found_scores, np.float32)[1:].sum()

        pinned = await step_and_save(1, 0, "snapshot")
        following = await step_and_save(4, 1, "inflight")
        old, new = await scores(pinned, 0), await scores(following, 0)
        newest = await step_and_save(7, 2, "inflight")
        newer = await scores(newest, 0)
        assert old < new < newer  # Training makes the text likelier.
        assert await scores(following, 1) == newer
        assert await scores(pinned, 1) == old

    serve(tmp_path / "b", model, run)


def test_the_head_has_the_adapter_that_recipes_ask_for(tmp_path):
    """tinker's default, ``train_unembed=True``: trained, published, and sampled with."""

    async def run(found, session):
        name = await created(found, session)
        info = await found.model_info(name)
        assert (info["is_lora"], info["lora_rank"]) == (True, 4)
        for number in (1, 3, 5):
            await found.submit("forward_backward", ask.forward_backward(name, number))
            await found.submit("optim_step", ask.optim_step(name, number + 1, rate=3e-2))
        future = await found.submit("save_weights_for_sampler", ask.save_sampler(name, 7, 0))
        await ask.result_of(found, future)
        last = ask.forward_backward(name, 8, forward_only=True)
        future = await found.submit("forward_backward", last)
        trained = ask.logprobs_of(await ask.result_of(found, future))
        sampled = await found.sample(ask.sample(f"{session}:sample:0", 0, prompt_logprobs=True))
        body = (await ask.result_of(found, sampled)).body
        scores = ask.schema.parse("SampleResponse", body).prompt_logprobs
        scores = np.frombuffer(scores, np.float32)[1:]
        np.testing.assert_allclose(scores, trained, atol=1e-5)
        run = read_run(open_bucket(str(tmp_path / "b")))
        names = {one.name for one in run.tensors}
        assert "base_model.model.lm_head.lora_B.weight" in names
        weights = load_mirror(open_bucket(str(tmp_path / "b")), run)
        assert np.any(weights.tensors["base_model.model.lm_head.lora_B.weight"])
        future = await found.submit("save_weights", ask.save(name, 9, "s"))
        path = json.loads((await ask.result_of(found, future)).body)["path"]
        assert (await found.rest.weights_info(path))["train_unembed"] is True
        return name

    serve(tmp_path / "b", make_model(tmp_path, tied=False), run, lora=True)


def test_an_adapter_is_trained_as_asked_for(tmp_path, model):
    async def run(found, session):
        with pytest.raises(InputError, match="ties its unembedding layer to its embedding"):
            await found.submit("create_model", ask.create_model(session))
        name = await created(found, session, 1, train_unembed=False, train_mlp=False)
        info = await found.model_info(name)
        assert (info["is_lora"], info["lora_rank"]) == (True, 4)
        await found.submit("forward_backward", ask.forward_backward(name, 1))
        future = await found.submit("optim_step", ask.optim_step(name, 2))
        assert (
            json.loads((await ask.result_of(found, future)).body)["metrics"]["grad_norm:mean"] > 0
        )
        future = await found.submit("save_weights", ask.save(name, 3, "s"))
        path = json.loads((await ask.result_of(found, future)).body)["path"]
        run = read_run(open_bucket(str(tmp_path / "b")))
        adapters = [one.name for one in run.tensors if "lora_" in one.name]
        assert adapters
        assert all(".self_attn." in one for one in adapters)
        load = {"session_id": session, "model_seq_id": 2, "path": path, "optimizer": True}
        answer = await found.submit("load_weights", json.dumps(load).encode())
        assert (await ask.result_of(found, answer)).kind == "json"
        return name

    serve(tmp_path / "b", model, run, lora=True)

    async def recipe(found, session):
        await created(found, session)  # It asks for an adapter of the head.

    serve(tmp_path / "c", model, recipe, lora=True, frozen_head=True)


def test_a_bucket_of_something_else_is_refused(tmp_path, model):
    async def nothing(found, session):
        pass

    serve(tmp_path / "b", model, nothing)
    assert newest_version(open_bucket(str(tmp_path / "b"))) == 0
    other = make_model(tmp_path)
    (other / "config.json").write_text((other / "config.json").read_text().replace("  ", " "))
    with pytest.raises(InputError, match="served with another model"):
        serve(tmp_path / "b", other, nothing)
    from deltawire.train import TrainingClient

    TrainingClient.create(str(tmp_path / "own"), model).close()
    with pytest.raises(InputError, match="not started by deltawire tinker"):
        serve(tmp_path / "own", model, nothing)
    with pytest.raises(InputError, match="no model directory"):
        serve(tmp_path / "d", tmp_path / "nowhere", nothing)
