"""Exporters publish and restore exact bits, and a new one needs a module and a line."""

import copy
import json
from pathlib import Path

import msgspec
import pytest
import torch
from transformers import AutoConfig

from deltawire.config import OptimizerConfig, RunConfig, TrainConfig, parse_config
from deltawire.config.exporters import EXPORTERS, Exporter
from deltawire.errors import InputError
from deltawire.export.models import empty_model, fetch_model_files, save_model
from deltawire.export.source import bits_of, digest_of, open_source
from deltawire.rl.trainer.bootstrap import start_run
from deltawire.rl.trainer.resume import resume
from deltawire.store import open_bucket
from deltawire.sync import load_mirror, open_publisher, read_run
from deltawire.train.build import byte_tokenizer
from deltawire.train.masters import MasterWeights

CONFIG: RunConfig = parse_config({"name": "run", "model": {"path": "x"}}, source="s")


def stepped(masters, seed):
    generator = torch.Generator().manual_seed(seed)
    for parameter in masters.model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    masters.step()


def same(left, right):
    return left.keys() == right.keys() and all((left[k] == right[k]).all() for k in left)


@pytest.mark.parametrize("exporter", sorted(EXPORTERS.keys() - {"int4-g32", "mxfp4"}))
def test_a_source_is_published_and_restored_to_the_bit(tmp_path, tiny, exporter):
    bucket = open_bucket(str(tmp_path))
    masters = MasterWeights(
        tiny, TrainConfig(optimizer=OptimizerConfig(learning_rate=1e-2), exporter=exporter)
    )
    source = masters.source
    names = [spec.name for spec in source.specs()]
    assert names == sorted(names)
    assert set(names) == source.tensors().keys()
    publisher = open_publisher(bucket, source.tensors(), specs=source.specs())
    for seed in range(2):
        stepped(masters, seed)
        publisher.publish(source.tensors())
    publisher.close()
    assert publisher.digest == digest_of(source)
    other = copy.deepcopy(tiny)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.fill_(7.0)
    again = open_source(exporter, other)
    again.restore(load_mirror(bucket, read_run(bucket)))
    assert same(bits_of(again), bits_of(source))


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_float16_refuses_parameters_that_are_not_finite_and_takes_such_buffers(tiny, value):
    tiny.register_buffer("mask", torch.tensor([0.0, value], dtype=torch.float16))
    assert "mask" in open_source("f16", tiny).tensors()
    with torch.no_grad():
        next(tiny.parameters()).view(-1)[0] = value
    with pytest.raises(InputError, match="which float16 cannot hold"):
        open_source("f16", tiny).tensors()


def test_an_unknown_exporter_is_named(tiny):
    with pytest.raises(InputError, match="no exporter 'fp3'") as caught:
        open_source("fp3", tiny)
    assert "bf16" in str(caught.value)


def test_restoring_another_models_version_is_refused(tmp_path, tiny):
    bucket = open_bucket(str(tmp_path))
    open_publisher(bucket, {"other": torch.zeros(3)}).close()
    with pytest.raises(InputError):
        open_source("bf16", tiny).restore(load_mirror(bucket, read_run(bucket)))


def test_a_new_exporter_is_a_module_and_a_line(tmp_path, tiny, monkeypatch):
    """From the start of a run to resuming it, with an exporter that publishes int8 codes."""
    monkeypatch.setitem(EXPORTERS, "int8", Exporter("int8_exporter:Int8Weights"))
    config = msgspec.structs.replace(
        CONFIG,
        train=msgspec.structs.replace(
            CONFIG.train, exporter="int8", optimizer=OptimizerConfig(learning_rate=0.5)
        ),
    )
    save_model(tiny, byte_tokenizer(), tmp_path / "model")
    bucket = open_bucket(str(tmp_path / "bucket"), create=True)
    run = start_run(bucket, config, tmp_path / "model")
    assert {spec.dtype for spec in run.tensors} == {"I8", "F32"}
    with fetch_model_files(bucket, run) as folder:
        model = empty_model(Path(folder))
    state = resume(bucket, run, config, model, newest=0)
    version_0 = load_mirror(bucket, run, at=0)
    assert same(bits_of(state.masters.source), version_0.tensors)
    before = digest_of(state.masters.source)
    assert before == version_0.digest
    stepped(state.masters, 0)
    assert digest_of(state.masters.source) != before


def test_the_configuration_states_the_published_dtype(tmp_path, tiny):
    """Readers that load with ``dtype="auto"`` would convert a bf16 version to float32 otherwise."""
    tiny.config.parts = {"torch_dtype": "float32", "quantized": {"dtype": "int8"}}
    save_model(tiny, byte_tokenizer(), tmp_path / "model")
    written = json.loads((tmp_path / "model" / "config.json").read_bytes())
    assert written["dtype"] == "bfloat16"
    path = tmp_path / "model" / "config.json"
    path.write_text(json.dumps({**written, "torch_dtype": "float32", "dtype": "float32"}))
    for exporter, dtype in (("bf16", "bfloat16"), ("f16", "float16"), ("f32", "float32")):
        train = msgspec.structs.replace(CONFIG.train, exporter=exporter)
        bucket = open_bucket(str(tmp_path / exporter), create=True)
        run = start_run(bucket, msgspec.structs.replace(CONFIG, train=train), tmp_path / "model")
        with fetch_model_files(bucket, run) as folder:
            config = json.loads((Path(folder) / "config.json").read_bytes())
            assert AutoConfig.from_pretrained(folder).dtype == getattr(torch, dtype)
        assert "torch_dtype" not in config
        assert config["parts"] == {"dtype": dtype, "quantized": {"dtype": "int8"}}
