"""Runs over packed experts: what is sent, what the sampler computes, and resuming."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from packed_run import VERSIONS, start, train

from deltawire.cli.main import main
from deltawire.errors import InputError
from deltawire.export.adapter import PREFIX, adapter_off, open_model
from deltawire.export.models import fetch_model_files, load_model
from deltawire.export.source import open_source
from deltawire.quantization.dequantize import dequantize
from deltawire.quantization.formats import open_format
from deltawire.rl.trainer.verify_training import verify_training
from deltawire.runtime.process import open_run
from deltawire.store import Bucket
from deltawire.sync import load_mirror, read_manifest


def opened(bucket: Bucket, version: int | None = None):
    run, config = open_run(bucket)
    with fetch_model_files(bucket, run) as folder:
        model = open_model(Path(folder), config.train.adapter)
    open_source("bf16", model).restore(load_mirror(bucket, run, at=version))
    return model.eval()


@pytest.mark.parametrize("shared", [False, True])
def test_only_adapters_change_and_the_base_crosses_once(tmp_path, shared):
    bucket = start(tmp_path / "a", shared_factor=shared)
    assert len(set(train(bucket))) == VERSIONS + 1
    run, _ = open_run(bucket)
    first, last = load_mirror(bucket, run, at=0), load_mirror(bucket, run)
    moved = {
        name for name, bits in last.tensors.items() if not np.array_equal(bits, first.tensors[name])
    }
    adapter = {spec.name for spec in run.tensors if spec.name.startswith(PREFIX)}
    assert moved == adapter
    assert sum(".experts." in name for name in adapter) == 2 * 2 * 2
    whole = sum(one.nbytes for one in first.tensors.values())
    trained = sum(first.tensors[name].nbytes for name in adapter)
    for version in range(1, VERSIONS + 1):
        manifest = read_manifest(bucket, run, version)
        assert manifest.anchor is None
        assert manifest.delta.bytes < trained
    assert trained < whole / 2
    assert verify_training(bucket).exact
    assert main(["fsck", bucket.url]) == 0


def test_after_crashes_the_same_bits(tmp_path):
    whole = train(start(tmp_path / "a"))
    bucket = start(tmp_path / "b")
    for version in (1, 2):
        train(bucket, to=version, die=True)
    assert train(bucket) == whole


def test_without_its_adapter_the_model_is_the_dequantized_base(tmp_path):
    bucket = start(tmp_path / "a")
    train(bucket)
    model = opened(bucket)
    plain = load_model(tmp_path / "a" / "model").eval()
    form = open_format("int4-g32")
    for name, parameter in plain.named_parameters():
        if name.endswith("gate_up_proj"):
            halves = parameter.detach().chunk(2, dim=1)
            made = torch.cat([dequantize(form, form.quantize(one)) for one in halves], dim=1)
            parameter.data.copy_(made)
        elif name.endswith("experts.down_proj"):
            parameter.data.copy_(dequantize(form, form.quantize(parameter.detach())))
    plain.config._experts_implementation = "eager"
    ids = torch.arange(12)[None]
    with torch.no_grad():
        exact = plain(ids).logits
        assert not torch.equal(model(ids).logits, exact)
        with adapter_off(model):
            assert torch.equal(model(ids).logits, exact)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "none"}, "no effect without an adapter"),
        ({"packed": "none", "targets": ["q_proj"], "packed_layers": ["q_proj"]}, "no effect"),
        ({"packed": "int3"}, "packed"),
        ({"packed_layers": ["qproj"]}, "no linear layer"),
    ],
)
def test_settings_that_do_not_fit_are_refused(tmp_path, change, message):
    with pytest.raises(InputError, match=message):
        start(tmp_path / "a", **change)
