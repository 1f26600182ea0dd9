"""The embedded engine as a replica of runs that hold only weights: `open_publisher` made them."""

import asyncio
import json
from contextlib import asynccontextmanager
from types import SimpleNamespace

import aiohttp
import peft
import pytest
import torch
from aiohttp.test_utils import TestServer

import deltawire
from deltawire.config import BuildConfig
from deltawire.errors import CorruptError, InputError
from deltawire.export.models import save_model
from deltawire.export.weights_only import CONTEXT, settings_of_weights
from deltawire.live.gateway.embedded_replica import open_replica
from deltawire.runtime.process import Process
from deltawire.runtime.trusted import trusted
from deltawire.store import open_bucket
from deltawire.sync import read_run
from deltawire.train.build import build_model, byte_tokenizer
from deltawire.trl.gathered import GatheredWriter

KEY = "upstream"
ASK = {"model": "run", "prompt": "Hi", "temperature": 0, "max_tokens": 4}


def tiny_model():
    settings = BuildConfig(hidden_size=32, layers=1, head_size=16, feed_forward_size=48, context=96)
    return build_model(settings, seed=3).to(torch.bfloat16)


def changed(model):
    """The model, with other weights wherever it is trained."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter))
    return model


@asynccontextmanager
async def served(bucket):
    """Functions that return a replica's status, as gateways ask for it, and an answer of it."""
    process = Process(trusted(bucket), "replica", "worker", supervised=False)
    replica = await asyncio.to_thread(open_replica, process, token=KEY)
    server = TestServer(replica.app())
    await server.start_server()
    serving = asyncio.create_task(replica.serve())
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {KEY}"}) as session:

        async def ask(**more):
            url = str(server.make_url("/v1/completions"))
            async with session.post(url, json={**ASK, **more}) as answer:
                return answer.status, await answer.json()

        async def status():
            url = str(server.make_url("/collective_rpc"))
            async with session.post(url, json={"method": "deltawire_status"}) as answer:
                return (await answer.json())["results"][0]

        try:
            yield status, ask
        finally:
            process.stop()
            await serving
            await server.close()


async def reached(status, version):
    """The digest that the replica states once it holds the version."""
    async with asyncio.timeout(60):
        while (found := await status())["version"] != version:
            await asyncio.sleep(0.02)
    return found["digest"]


def test_a_run_of_open_publisher_is_served_and_followed(tmp_path):
    save_model(tiny_model(), byte_tokenizer(), tmp_path / "model")
    bucket = open_bucket(str(tmp_path / "run"), create=True)
    model = tiny_model()
    tensors = deltawire.tensors_of(model)
    with deltawire.open_publisher(bucket, tensors, directory=tmp_path / "model") as publisher:

        async def scenario():
            async with served(bucket) as (status, ask):
                first = await reached(status, 0)
                assert first == publisher.digest.hex()
                code, answer = await ask()
                assert code == 200, answer
                assert 1 <= answer["usage"]["completion_tokens"] <= 4
                await asyncio.to_thread(
                    publisher.publish, deltawire.tensors_of(changed(model)), wait=True
                )
                second = await reached(status, 1)
                assert second == publisher.digest.hex() != first
                refused, _ = await ask(max_tokens=97)
                assert refused == 400

        asyncio.run(scenario())


def test_an_adapter_apart_from_its_base_is_served_unmerged(tmp_path):
    bucket = open_bucket(str(tmp_path / "run"), create=True)
    lora = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"])
    model = peft.get_peft_model(tiny_model(), lora)
    writer = GatheredWriter(
        bucket.url, model, tokenizer=byte_tokenizer(), dtype="bfloat16", metadata={},
        adapter="separate",
    )  # fmt: skip
    tokenizer = byte_tokenizer()

    async def scenario():
        async with served(bucket) as (status, ask):
            await reached(status, 0)
            writer.publish(changed(model), {})
            await asyncio.to_thread(writer.close)
            await reached(status, 1)
            return await ask()

    code, answer = asyncio.run(scenario())
    assert code == 200, answer
    held = read_run(bucket)
    assert any(".lora_A." in spec.name for spec in held.tensors)
    # The engine computes in float32 with the published values, as this does.
    asked = tokenizer(ASK["prompt"], return_tensors="pt")
    expected = model.bfloat16().float().generate(**asked, max_new_tokens=4, do_sample=False)
    expected = expected[0, asked["input_ids"].shape[1] :]
    text = tokenizer.decode(expected, skip_special_tokens=True)
    assert answer["choices"][0]["text"] == text


def run_with(bucket, **files):
    """A run that carries these files; nothing else of it is read."""
    from deltawire.sync.chain.objects import put_blob
    from deltawire.wire.run import ModelFile

    held = []
    for name, content in files.items():
        ref = put_blob(
            bucket, content if isinstance(content, bytes) else json.dumps(content).encode()
        )
        held.append(ModelFile(f"{name}.json", ref.hash, ref.bytes))
    return SimpleNamespace(model_files=held, name="run")


LORA = {
    "peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["v_proj", "q_proj"],
    "bias": "none", "use_dora": False, "rank_pattern": {}, "alpha_pattern": {"q_proj": 4},
}  # fmt: skip


def test_the_model_s_own_settings_are_used():
    bucket = open_bucket("memory://")
    plain = settings_of_weights(bucket, run_with(bucket, config={"max_position_embeddings": 2048}))
    assert (plain.rollout.context, plain.rollout.max_tokens) == (2048, 2048)
    assert plain.train.adapter.kind == "none"
    nested = run_with(bucket, config={"text_config": {"max_position_embeddings": 64}})
    assert settings_of_weights(bucket, nested).rollout.context == 64
    unsaid = run_with(bucket, config={"max_position_embeddings": "long"}, adapter_config=LORA)
    found = settings_of_weights(bucket, unsaid)
    assert found.rollout.context == CONTEXT
    adapter = found.train.adapter
    assert (adapter.kind, adapter.rank, adapter.alpha) == ("lora", 8, 16.0)
    assert (adapter.targets, adapter.alpha_pattern) == (["q_proj", "v_proj"], {"q_proj": 4.0})


@pytest.mark.parametrize(
    "wrong",
    [
        {"use_dora": True},
        {"modules_to_save": ["lm_head"]},
        {"peft_type": "IA3"},
        {"target_modules": ".*q_proj"},
        {"r": 0},
    ],
)
def test_an_adapter_that_cannot_be_served_is_refused(wrong):
    bucket = open_bucket("memory://")
    run = run_with(bucket, config={}, adapter_config={**LORA, **wrong})
    with pytest.raises(InputError, match="cannot serve this adapter"):
        settings_of_weights(bucket, run)


def test_a_run_without_a_readable_configuration_is_refused():
    bucket = open_bucket("memory://")
    with pytest.raises(InputError, match=r"no config\.json"):
        settings_of_weights(bucket, run_with(bucket))
    for damaged in (b"{", b"[]"):
        with pytest.raises(CorruptError, match=r"config\.json is not"):
            settings_of_weights(bucket, run_with(bucket, config=damaged))
