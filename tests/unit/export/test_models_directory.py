"""Model directories: round trips, and errors that name the fault."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from deltawire.config import BuildConfig
from deltawire.errors import CorruptError, InputError
from deltawire.export.models import (
    CARRIED,
    check_directory,
    empty_model,
    load_model,
    load_tokenizer,
    read_files,
    save_model,
    stop_tokens,
    write_files,
)
from deltawire.train.build import BYTES, END, PAD, build_model, is_built


def untied():
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=264,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=1,
            num_attention_heads=2,
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=256,
        )
    )


@pytest.fixture
def directory(tiny, byte_tokenizer, tmp_path):
    save_model(tiny, byte_tokenizer, tmp_path / "model")
    return tmp_path / "model"


def rounded(model):
    return {name: p.detach().to(torch.bfloat16).float() for name, p in model.named_parameters()}


@pytest.mark.parametrize("family", ["tiny", "untied"])
def test_save_and_load_keep_the_rounded_bits(family, request, byte_tokenizer, tmp_path):
    model = untied() if family == "untied" else request.getfixturevalue(family)
    save_model(model, byte_tokenizer, tmp_path)
    again, expected = load_model(tmp_path), rounded(model)
    found = dict(again.named_parameters())
    assert found.keys() == expected.keys()
    for name, parameter in found.items():
        assert parameter.dtype == torch.float32
        assert torch.equal(parameter, expected[name]), name
    tied = again.lm_head.weight is again.model.embed_tokens.weight
    assert tied == (family == "tiny")
    assert is_built(tmp_path)
    assert not is_built(tmp_path / "nothing")


def test_weights_are_stored_as_bf16_and_tied_ones_once(directory):
    stored = load_file(directory / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}
    assert "lm_head.weight" not in stored
    assert len(stored) == len(list(load_model(directory).named_parameters()))


def test_an_empty_model_with_the_weights_is_the_model(directory):
    model, empty = load_model(directory), empty_model(directory)
    assert empty.lm_head.weight is empty.model.embed_tokens.weight
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, parameter in empty.named_parameters():
            assert parameter.dtype == torch.float32
            parameter.copy_(parameters[name])
    ids = torch.tensor([[5, 200, 17, 3]])
    assert torch.equal(model.eval()(ids).logits, empty.eval()(ids).logits)


def test_files_travel_without_weights(directory, tmp_path):
    files = read_files(directory)
    assert {"config.json", "tokenizer.json"} <= files.keys() <= set(CARRIED)
    other = tmp_path / "other"
    other.mkdir()
    write_files(files, other)
    assert read_files(other) == files
    settings = [
        model.config.to_diff_dict() for model in (empty_model(other), load_model(directory))
    ]
    assert settings[0] == settings[1]
    assert load_tokenizer(other).encode("aé") == [97, 0xC3, 0xA9]


@pytest.mark.parametrize(
    "name",
    [
        "../config.json",
        "/etc/passwd",
        "modeling_evil.py",
        "model.safetensors",
        "sub/config.json",
        "CONFIG.JSON",
        "config.json\n",
        "",
        "..",
        "x" * 10_000,
    ],
)
def test_unlisted_names_are_never_written(name, tmp_path):
    folder = tmp_path / "inner"
    folder.mkdir()
    with pytest.raises(CorruptError) as caught:
        write_files({name: b"{}"}, folder)
    assert len(str(caught.value).splitlines()) == 1
    assert len(str(caught.value)) < 200
    assert [*tmp_path.rglob("*")] == [folder]


def change_config(directory, **changes):
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def no_directory(directory):
    return directory / "missing"


def no_config(directory):
    (directory / "config.json").unlink()


def no_weights(directory):
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")


def garbage(directory):
    (directory / "model.safetensors").write_bytes(b"\x20" + bytes(7) + b"not json at all")


def empty_file(directory):
    (directory / "model.safetensors").write_bytes(b"")


def cut(directory):
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def own_code(directory):
    change_config(directory, auto_map={"AutoModelForCausalLM": "evil.Model"})
    (directory / "evil.py").write_text("raise SystemExit('this must never run')")


def own_code_of_an_unknown_type(directory):
    own_code(directory)
    change_config(directory, model_type="evil", auto_map={"AutoConfig": "evil.Config"})


def unknown_type(directory):
    change_config(directory, model_type="no-such-model")


def config_is_no_json(directory):
    (directory / "config.json").write_text('{"model_type": ')


def config_is_no_text(directory):
    (directory / "config.json").write_bytes(b"\xff\xfe\x00")


def config_is_a_list(directory):
    (directory / "config.json").write_text("[]")


def rewrite(directory, change):
    path = directory / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def lacks_a_tensor(directory):
    rewrite(directory, lambda tensors: tensors.pop("model.norm.weight"))


def holds_another_shape(directory):
    rewrite(directory, lambda tensors: tensors.update({"model.norm.weight": torch.ones(8)}))


FAULTS = {
    no_directory: "no model directory",
    no_config: "no config.json",
    no_weights: "has no weights.*safetensors",
    garbage: "cannot load the model",
    empty_file: "cannot load the model",
    cut: "cannot load the model",
    own_code: "from outside the library",
    own_code_of_an_unknown_type: "from outside the library",
    unknown_type: "no-such-model",
    config_is_no_json: "config.json cannot be read",
    config_is_no_text: "config.json cannot be read",
    config_is_a_list: "not a JSON object",
    lacks_a_tensor: "model.norm.weight",
    holds_another_shape: "model.norm.weight",
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_bad_directories_are_one_line_errors(fault, directory):
    path = fault(directory) or directory
    with pytest.raises(InputError, match=FAULTS[fault]) as caught:
        load_model(path)
    assert len(str(caught.value).splitlines()) == 1
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize(
    "fault", [own_code, own_code_of_an_unknown_type, unknown_type, config_is_no_json, no_config]
)
def test_a_carried_config_is_checked_too(fault, directory):
    fault(directory)
    with pytest.raises(InputError) as caught:
        empty_model(directory)
    assert len(str(caught.value).splitlines()) == 1


def test_check_directory_needs_no_library(directory):
    check_directory(directory)
    no_weights(directory)
    with pytest.raises(InputError):
        check_directory(directory)


def test_a_damaged_tokenizer_is_an_input_error(directory):
    (directory / "tokenizer.json").write_text('{"version": "1.0", "model": 7}')
    with pytest.raises(InputError, match="cannot load the tokenizer") as caught:
        load_tokenizer(directory)
    assert len(str(caught.value).splitlines()) == 1


def test_stop_tokens_come_from_all_configurations(directory, byte_tokenizer):
    """A worker builds its model from the configuration only, and must stop where a loaded model
    would: instruct models name their turn's end in generation_config.json only."""
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 5]}))
    for model in (load_model(directory), empty_model(directory)):
        assert stop_tokens(model, byte_tokenizer) == [5, 9, BYTES]


def test_build_depends_only_on_the_seed():
    config = BuildConfig(hidden_size=32, layers=1, head_size=16, feed_forward_size=24)
    first, again, other = (build_model(config, seed=seed).state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])


def test_sizes_that_do_not_fit_are_input_errors():
    with pytest.raises(InputError, match="head_size"):
        build_model(BuildConfig(hidden_size=33, head_size=16), seed=0)


@given(st.text(max_size=60).filter(lambda text: END not in text and PAD not in text))
def test_a_byte_is_a_token(byte_tokenizer, text):
    tokens = byte_tokenizer.encode(text, add_special_tokens=False)
    assert tokens == list(text.encode())
    assert byte_tokenizer.decode(tokens, skip_special_tokens=True) == text


def test_every_byte_has_its_token(byte_tokenizer):
    text = "".join(chr(code) for code in [*range(0x800), 0x20AC, 0xFFFD, 0x1F600, 0x10FFFF])
    tokens = byte_tokenizer.encode(text, add_special_tokens=False)
    assert tokens == list(text.encode())
    assert byte_tokenizer.decode(tokens) == text
    never_in_utf8 = {0xC0, 0xC1, *range(0xF5, 0x100)}
    assert len(byte_tokenizer) == BYTES + 2
    for byte in never_in_utf8:
        assert byte_tokenizer.decode([byte]) == "\ufffd"


def test_special_tokens_are_skipped(byte_tokenizer):
    assert byte_tokenizer.convert_tokens_to_ids([END, PAD]) == [BYTES, BYTES + 1]
    tokens = [*b"ab", BYTES, *b"c", BYTES + 1]
    assert byte_tokenizer.decode(tokens, skip_special_tokens=True) == "abc"
    assert byte_tokenizer.decode(tokens) == f"ab{END}c{PAD}"


def test_the_tokenizer_reloads_as_any_other(directory):
    again = AutoTokenizer.from_pretrained(directory)
    rng = np.random.default_rng(0)
    for _ in range(20):
        text = rng.bytes(40).decode(errors="replace")
        assert again.encode(text) == list(text.encode())
        assert again.decode(list(text.encode())) == text
    assert (again.eos_token_id, again.pad_token_id) == (BYTES, BYTES + 1)
    assert again.decode([65, BYTES], skip_special_tokens=True) == "A"
