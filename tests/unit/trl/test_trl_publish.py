"""TRL's own trainers, with `Publish` among their callbacks."""

import json
import logging

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

pytest.importorskip("trl")

from tiny_trainers import SETTINGS, Recorder, rows, sft, tiny_model, tokenizer

import deltawire
from deltawire import codec
from deltawire.cli.main import main
from deltawire.engines.vllm.adapter_names import adapter_tensors, layer_of, slot_flags
from deltawire.engines.vllm.adapter_slot import read_settings
from deltawire.errors import InputError, RetryError
from deltawire.store import RetryingBucket, RetryPolicy, open_bare_bucket
from deltawire.sync import (
    Checkout,
    committed_versions,
    load_mirror,
    read_manifest,
    read_run,
)
from deltawire.sync.maintain.fsck import check_run
from deltawire.testing.faulty import FaultyBucket
from deltawire.trl import Publish

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning"),
]


@pytest.fixture(autouse=True)
def _quiet(caplog):
    caplog.set_level(logging.ERROR)


def steps_of(url):
    """The trainer's step of each version."""
    bucket = open_bare_bucket(url)
    run = read_run(bucket)
    return [
        read_manifest(bucket, run, version).metadata["global_step"]
        for version in committed_versions(bucket)
    ]


def held(url, version):
    """The bits of a version, by name."""
    bucket = open_bare_bucket(url)
    return load_mirror(bucket, read_run(bucket), at=version).tensors


def same(url, version, tensors):
    found = held(url, version)
    assert found.keys() == tensors.keys()
    return all(
        (codec.bits_of(tensor, "BF16").reshape(-1) == found[name]).all()
        for name, tensor in tensors.items()
    )


def test_an_sft_run_is_published_step_by_step(tmp_path, capsys):
    url = str(tmp_path / "run")
    recorder = Recorder()
    trainer = sft(tmp_path / "out", Publish(url), recorder)
    assert trainer.model.dtype == torch.float32
    trainer.train()
    assert steps_of(url) == [0, 1, 2, 3]
    for version in range(4):
        assert same(url, version, recorder.at[version]), f"version {version} has other bits"
    assert not same(url, 2, recorder.at[3])
    bucket = open_bare_bucket(url)
    run = read_run(bucket)
    assert {spec.dtype for spec in run.tensors} == {"BF16"}
    names = {spec.name for spec in run.tensors}
    assert "model.embed_tokens.weight" in names, "the name that checkpoints have"
    assert "lm_head.weight" not in names, "tied: published once"
    assert check_run(bucket).faults == []

    with Checkout(bucket, run, tmp_path / "pulled") as checkout:
        checkout.bring_to(3)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "pulled")
    assert loaded.dtype == torch.bfloat16
    assert torch.equal(loaded.lm_head.weight, recorder.at[3]["model.embed_tokens.weight"])
    text = AutoTokenizer.from_pretrained(tmp_path / "pulled")("number 1")
    assert text["input_ids"] == tokenizer()("number 1")["input_ids"]

    capsys.readouterr()
    assert main(["log", url, "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)["versions"]
    assert [row["global_step"] for row in listed] == [3, 2, 1, 0]
    assert main(["log", url]) == 0
    assert "step 3" in capsys.readouterr().out


def test_a_resumed_run_goes_on_from_the_weights_that_it_resumed(tmp_path):
    url = str(tmp_path / "run")
    saving = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    sft(tmp_path / "out", Publish(url), **saving).train()
    assert steps_of(url) == [0, 1, 2, 3, 4]
    # Killed after step 4, resumed from the checkpoint of step 2: its weights are the next version.
    recorder = Recorder()
    again = sft(tmp_path / "out", Publish(url), recorder, **saving)
    again.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-2"))
    assert steps_of(url) == [0, 1, 2, 3, 4, 2, 3, 4]
    assert same(url, 5, recorder.at[2])
    assert all((held(url, 5)[n] == held(url, 2)[n]).all() for n in held(url, 2))
    assert same(url, 7, recorder.at[4])
    # Resumed where the run is: nothing to publish but the new step.
    last = sft(tmp_path / "out", Publish(url), **saving | {"max_steps": 5})
    last.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-4"))
    assert steps_of(url) == [0, 1, 2, 3, 4, 2, 3, 4, 5]
    assert check_run(open_bare_bucket(url)).faults == []


def test_every_few_steps_and_the_last(tmp_path):
    url = str(tmp_path / "run")
    sft(tmp_path / "out", Publish(url, every=2), max_steps=5).train()
    assert steps_of(url) == [0, 2, 4, 5]


def test_a_lora_is_added_to_the_base_which_keeps_its_bits(tmp_path):
    """In bf16, merging and taking the adapter out again would round the base."""
    url = str(tmp_path / "run")
    model = tiny_model().to(torch.bfloat16)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"])
    trainer = sft(tmp_path / "out", Publish(url), model=model, peft_config=config)
    trainer.train()
    after = {
        name.replace(".base_layer.", "."): tensor
        for name, tensor in trainer.model.get_base_model().state_dict().items()
        if ".lora_" not in name
    }
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before), "the base has changed"
    assert steps_of(url) == [0, 1, 2, 3]
    plain = {name: t for name, t in before.items() if name != "lm_head.weight"}
    assert same(url, 0, plain), "an adapter that is still zero changes nothing"
    moved = {n for n in plain if not (held(url, 3)[n] == held(url, 0)[n]).all()}
    assert moved == {n for n in plain if "q_proj" in n or "down_proj" in n}
    layer = trainer.model.get_base_model().model.layers[0].self_attn.q_proj
    delta = layer.lora_B["default"].weight.float() @ layer.lora_A["default"].weight.float() * 2
    expected = (layer.base_layer.weight.float() + delta).to(torch.bfloat16)
    found = codec.bits_of(expected.detach(), "BF16").reshape(-1)
    assert (held(url, 3)["model.layers.0.self_attn.q_proj.weight"] == found).mean() > 0.99


def test_a_grpo_run_is_published(tmp_path):
    from trl import GRPOConfig, GRPOTrainer

    url = str(tmp_path / "run")
    recorder = Recorder()
    trainer = GRPOTrainer(
        tiny_model(),
        reward_funcs=lambda completions, **_: [float(len(text)) for text in completions],
        args=GRPOConfig(
            output_dir=str(tmp_path / "out"), max_steps=2, num_generations=2, learning_rate=1e-2,
            max_completion_length=4, **SETTINGS,
        ),
        train_dataset=rows().rename_column("text", "prompt"),
        processing_class=tokenizer(),
        callbacks=[Publish(url), recorder],
    )  # fmt: skip
    trainer.train()
    assert steps_of(url) == [0, 1, 2]
    assert same(url, 2, recorder.at[2])


def test_an_fp32_trainer_does_not_continue_a_bf16_run(tmp_path):
    url = str(tmp_path / "run")
    deltawire.open_publisher(url, deltawire.tensors_of(tiny_model())).close()
    trainer = sft(tmp_path / "out", Publish(url, dtype=None))
    with pytest.raises(InputError, match="has dtype BF16, these tensors F32") as refused:
        trainer.train()
    assert "bfloat16" in str(refused.value)
    assert len(committed_versions(open_bare_bucket(url))) == 1


def test_wrong_places_and_intervals_are_refused(tmp_path):
    with pytest.raises(InputError, match="location, not a"):
        Publish(open_bare_bucket("memory://"))
    with pytest.raises(InputError, match="every=0"):
        Publish("runs/x", every=0)
    (tmp_path / "file").write_text("")
    trainer = sft(tmp_path / "out", Publish(str(tmp_path / "file" / "run")))
    with pytest.raises(InputError, match="as a bucket"):
        trainer.train()


def test_wrappers_that_hide_the_parameters_are_refused():
    class FullyShardedDataParallel(torch.nn.Linear):
        pass

    from deltawire.export.tensors import unwrapped

    with pytest.raises(InputError, match="FSDP version 1"):
        unwrapped(FullyShardedDataParallel(2, 2))
    partitioned = torch.nn.Linear(2, 2)
    partitioned.weight.ds_id = 0
    with pytest.raises(InputError, match="ZeRO stage 3"):
        unwrapped(partitioned)
    compiled, module = torch.nn.Sequential(), torch.nn.Linear(2, 2)
    compiled._orig_mod = module  # As `torch.compile` wraps it.
    assert unwrapped(compiled) is module


def test_an_unknown_option_is_refused_before_a_run_is_made(tmp_path):
    url = str(tmp_path / "run")
    for options in ({"bogus": 1}, {"bogus": 1, "sharded": True}, {"epoch": 3}, {"directory": "x"}):
        with pytest.raises(InputError, match="there is no option"):
            Publish(url, **options)
    with pytest.raises(InputError, match="retain=-1"):
        Publish(url, retain=-1)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("dtype", ["bfloat16", None])
def test_the_configuration_states_the_dtype_of_the_weights(tmp_path, dtype):
    url = str(tmp_path / "run")
    sft(tmp_path / "out", Publish(url, dtype=dtype), max_steps=1).train()
    bucket = open_bare_bucket(url)
    run = read_run(bucket)
    with Checkout(bucket, run, tmp_path / "pulled") as checkout:
        checkout.bring_to(1)
    stated = json.loads((tmp_path / "pulled" / "config.json").read_text())["dtype"]
    assert stated == (dtype or "float32")


class Away(TrainerCallback):
    """Takes the store away after a step, and brings it back after another, or at the end."""

    def __init__(self, bucket, step, back):
        self.bucket, self.step, self.back = bucket, step, back
        self.logs = []

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            self.bucket.fail(times=None)
        if state.global_step == self.back:
            self.bucket.heal()

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.logs.append(logs)


@pytest.mark.parametrize(("step", "back"), [(1, 3), (2, 3), (2, None)])
def test_training_goes_on_while_the_store_is_away(tmp_path, monkeypatch, step, back):
    bucket = FaultyBucket(open_bare_bucket(str(tmp_path / "run"), create=True))
    monkeypatch.setattr(
        "deltawire.sync.publish.sources.open_bucket",
        lambda *_, **__: RetryingBucket(bucket, RetryPolicy(retries=0)),
    )
    away, recorder = Away(bucket, step, back), Recorder()
    publish = Publish("unused")
    if back is None:  # Until the trainer waits for its last version.
        real = publish._close
        monkeypatch.setattr(publish, "_close", lambda: (bucket.heal(), real()))
    trainer = sft(tmp_path / "out", away, publish, recorder, max_steps=4, logging_steps=1)
    trainer.train()
    url = str(tmp_path / "run")
    newest = committed_versions(open_bare_bucket(url))[-1]
    assert same(url, newest, recorder.at[4])
    assert steps_of(url)[-1] == 4
    assert any("deltawire/outage_s" in one for one in trainer.state.log_history)


def test_an_outage_beyond_its_limit_ends_the_training(tmp_path, monkeypatch):
    bucket = FaultyBucket(open_bare_bucket(str(tmp_path / "run"), create=True))
    monkeypatch.setattr(
        "deltawire.sync.publish.sources.open_bucket",
        lambda *_, **__: RetryingBucket(bucket, RetryPolicy(retries=0)),
    )
    publish = Publish("unused", max_outage=0.0)
    with pytest.raises(RetryError):
        sft(tmp_path / "out", Away(bucket, 1, None), publish, max_steps=4).train()
    bucket.heal()
    publish._close()


def test_an_adapter_is_published_apart_from_its_base(tmp_path):
    url = str(tmp_path / "run")
    lora = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    publish = Publish(url, adapter="separate", anchor_every=2)
    trainer = sft(tmp_path / "out", publish, peft_config=lora, max_steps=3)
    trainer.train()
    bucket = open_bare_bucket(url)
    run = read_run(bucket)
    specs = adapter_tensors(run.tensors)
    assert slot_flags(run.tensors)[3:5] == ["--max-lora-rank", "8"]
    assert {layer_of(spec.name).rpartition(".")[2] for spec in specs} == {"q_proj", "v_proj"}
    settings = read_settings(bucket, run)
    assert (settings["r"], settings["peft_type"], settings["inference_mode"]) == (4, "LORA", True)
    first, last = held(url, 0), held(url, 3)
    names = {spec.name for spec in specs}
    assert all((first[n] == last[n]).all() for n in first.keys() - names), "the base is frozen"
    assert any((first[n] != last[n]).any() for n in names)
    assert check_run(bucket).faults == []
    sizes = [read_manifest(bucket, run, version).delta.bytes for version in (1, 2, 3)]
    assert max(sizes) < sum(2 * spec.count for spec in specs) + 1000
    pulled = tmp_path / "pulled"
    with Checkout(bucket, run, pulled) as checkout:
        checkout.bring_to(3)
    loaded = peft.PeftModel.from_pretrained(tiny_model(), pulled)
    found = peft.get_peft_model_state_dict(loaded, save_embedding_layers=False)
    wanted = peft.get_peft_model_state_dict(trainer.model, save_embedding_layers=False)
    assert found.keys() == wanted.keys() == names
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor.bfloat16().float()), name


def test_what_cannot_be_published_apart_is_refused(tmp_path):
    url = str(tmp_path / "run")
    with pytest.raises(InputError, match="'apart'"):
        Publish(url, adapter="apart")
    with pytest.raises(InputError, match="by rows"):
        Publish(url, adapter="separate", sharded=True)
    with pytest.raises(InputError, match="no adapter"):
        sft(tmp_path / "out", Publish(url, adapter="separate")).train()
    saved = peft.LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["norm"])
    with pytest.raises(InputError, match="trained whole next to the adapter"):
        sft(tmp_path / "out", Publish(url, adapter="separate"), peft_config=saved).train()
    assert not (tmp_path / "run").exists()
