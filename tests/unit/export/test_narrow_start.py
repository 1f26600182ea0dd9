"""A model that is loaded only to be published is not widened, and version 0 has the same bits."""

import pytest
import torch

from deltawire.config import BuildConfig, run_config
from deltawire.export.models import holds_only_bf16, save_model
from deltawire.export.new_run import load_start
from deltawire.export.source import digest_of
from deltawire.train.build import build_model, byte_tokenizer


@pytest.fixture(scope="module", params=["qwen3", "qwen3_moe"])
def directory(tmp_path_factory, request):
    sizes = BuildConfig(family=request.param, hidden_size=64, layers=2, feed_forward_size=96)
    path = tmp_path_factory.mktemp("model") / "bf16"
    save_model(build_model(sizes, seed=1), byte_tokenizer(), path)
    return path


def config(directory, kind, **train):
    values = {"name": "x", "model": {"path": str(directory)}}
    return run_config(values | {"train": {"adapter": {"kind": kind}, **train}}, url="")


@pytest.mark.parametrize("kind", ["none", "lora"])
def test_the_digest_is_that_of_the_widened_model(directory, kind):
    assert holds_only_bf16(directory)
    wide, source = load_start(config(directory, kind), directory)
    narrow, same = load_start(config(directory, kind), directory, to_publish=True)
    assert {p.dtype for p in wide.parameters()} == {torch.float32}
    base = {p.dtype for name, p in narrow.named_parameters() if "lora_" not in name}
    assert base == {torch.bfloat16}
    assert same.specs() == source.specs()
    assert digest_of(same) == digest_of(source)


def test_other_exporters_compute_from_float32(directory):
    narrow, _ = load_start(config(directory, "none", exporter="f32"), directory, to_publish=True)
    assert {p.dtype for p in narrow.parameters()} == {torch.float32}


def test_a_directory_with_one_float32_tensor_is_widened(directory, tmp_path):
    from safetensors.torch import load_file, save_file

    for file in directory.iterdir():
        if file.suffix != ".safetensors":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(next(directory.glob("*.safetensors")))
    tensors["model.norm.weight"] = tensors["model.norm.weight"].float() * 1.0001
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    assert not holds_only_bf16(tmp_path)
    model, _ = load_start(config(tmp_path, "none"), tmp_path, to_publish=True)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
