"""A run's adapter is served from a slot of vLLM, or refused by name when the engine starts."""

import numpy as np
import pytest
from drills import prompts
from engine import Engine
from shapes import LAYERS, Trainer, build

from deltawire.errors import InputError
from deltawire.store import open_bucket

pytestmark = pytest.mark.filterwarnings("default")


@pytest.fixture(scope="module")
def trainer(tmp_path_factory, ranks):
    assert ranks == 1, "errors must come from this process"
    folder = tmp_path_factory.mktemp("trainer")
    bucket = open_bucket(str(folder / "bucket"), create=True)
    trainer = Trainer(bucket, build("qwen3", folder / "model"), adapter=True)
    yield trainer
    trainer.close()


@pytest.fixture(scope="module")
def engine(trainer):
    engine = Engine(trainer.model, run=trainer.publisher.bucket.url, adapter=True, follow=False)
    yield engine
    engine.close()


def test_requests_that_name_no_adapter_are_answered_by_the_runs(engine, trainer):
    base = Engine(trainer.model)
    questions = prompts(2)
    answers, without = engine.generate(questions), base.generate(questions)
    assert all(a.tokens != b.tokens for a, b in zip(answers, without, strict=True))
    assert [answer.spans for answer in answers] == [((0, 0, 24),)] * 2


def test_what_lies_in_the_padding_of_a_slot_is_found_and_cleared(engine):
    sound = engine.call("weigh")
    stack = engine.call("plant_in_padding")[0]["stack"]
    found = engine.call("deltawire_attest")[0]
    assert not found["sound"]
    assert f"the padding of the adapter slot {stack} is not zero" in found["ranks"][0]["failure"]
    assert engine.call("weigh") == sound
    assert engine.call("deltawire_attest")[0]["sound"]


def test_log_probabilities_of_prompts_are_refused_with_an_adapter_of_the_head(engine):
    """Two requests that ask for them in one step would end the engine; test_served_over_http.py
    has a server that goes on."""
    from vllm import SamplingParams

    wanted = SamplingParams(prompt_logprobs=1, detokenize=False)
    with pytest.raises(InputError, match="no log-probabilities of prompts with an adapter"):
        engine.llm.generate({"prompt_token_ids": prompts(1)[0]}, wanted, use_tqdm=False)


REFUSED = {
    "no slots": (False, "this vLLM has no slot for one"),
    "a smaller rank": (
        {"max_lora_rank": 1}, r"rank \d is above the engine's, 1: base_model.model.model",
    ),
    "a layer without a slot": (
        {"lora_target_modules": [name for name in LAYERS if name != "down_proj"]},
        r"no adapter layer for \S*down_proj.lora_A.weight, and would drop it",
    ),
    "an embedding without a slot": (
        {"lora_target_modules": [name for name in LAYERS if name != "embed_tokens"]},
        r"no adapter layer for \S*embed_tokens.lora_embedding_A, and would drop it",
    ),
    "a head without a slot": (
        {"lora_target_modules": [name for name in LAYERS if name != "lm_head"]},
        r"no adapter layer for \S*lm_head.lora_A.weight, and would drop it",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_an_engine_that_cannot_hold_the_adapter_does_not_start(trainer, what):
    slots, why = REFUSED[what]
    with pytest.raises(Exception, match=why):
        Engine(trainer.model, run=trainer.publisher.bucket.url, adapter=slots, follow=False)


SETTINGS = {
    "dora": ({"use_dora": True}, "vLLM does not yet support DoRA"),
    "another rank": ({"r": 2}, r"states rank 2 for \S*lora_[AB].weight, which has 4"),
    "no rank": ({"r": None}, "vLLM does not take the run's adapter_config.json"),
}


@pytest.mark.parametrize("what", SETTINGS)
def test_settings_that_are_not_the_adapters_are_refused(tmp_path, monkeypatch, trainer, what):
    import shapes

    changed, why = SETTINGS[what]
    monkeypatch.setitem(shapes.__dict__, "SETTINGS", {**shapes.SETTINGS, **changed})
    bucket = open_bucket(str(tmp_path / "bucket"), create=True)
    monkeypatch.setattr(shapes, "draw_adapter", lambda specs, drawn=trainer: {
        name: drawn.tensors[name] for name in drawn.trained
    })  # fmt: skip
    other = Trainer(bucket, trainer.model, adapter=True)
    try:
        with pytest.raises(Exception, match=why):
            Engine(trainer.model, run=bucket.url, adapter=True, follow=False)
    finally:
        other.close()


def test_an_adapter_of_another_vocabulary_is_refused(tmp_path, monkeypatch, trainer):
    import shapes

    name = "base_model.model.model.embed_tokens.lora_embedding_A"
    drawn = {one: trainer.tensors[one] for one in trainer.trained}
    drawn[name] = np.ascontiguousarray(drawn[name][:, :-4])
    monkeypatch.setattr(shapes, "draw_adapter", lambda specs: drawn)
    bucket = open_bucket(str(tmp_path / "bucket"), create=True)
    other = Trainer(bucket, trainer.model, adapter=True)
    try:
        with pytest.raises(Exception, match=f"{name} is for a vocabulary of 496 tokens.* 500"):
            Engine(trainer.model, run=bucket.url, adapter=True, follow=False)
    finally:
        other.close()


@pytest.mark.parametrize("left", ["lm_head", "embed_tokens"])
def test_a_model_whose_class_takes_no_adapter_there_is_refused(monkeypatch, trainer, left):
    from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM

    monkeypatch.setattr(Qwen3ForCausalLM, "embedding_modules", {left: "the other"})
    other = {"lm_head": "embed_tokens", "embed_tokens": "lm_head"}[left]
    why = rf"vLLM computes no adapter of {other} in Qwen3ForCausalLM: \S*{other}.lora_"
    with pytest.raises(Exception, match=why):
        Engine(trainer.model, run=trainer.publisher.bucket.url, adapter=True, follow=False)


def test_vllm_itself_fails_at_log_probabilities_of_prompts_with_an_adapter_of_the_head(
    tmp_path, trainer
):
    """Once it does not, such requests need not be refused."""
    from vllm import SamplingParams

    own = Engine(trainer.write(tmp_path / "own"), adapter=True)
    wanted = SamplingParams(prompt_logprobs=1, max_tokens=1, detokenize=False)
    questions = [{"prompt_token_ids": question} for question in prompts(2)]
    with pytest.raises(RuntimeError, match="does not broadcast"):
        own.llm.generate(questions, wanted, use_tqdm=False, lora_request=own.adapter)
