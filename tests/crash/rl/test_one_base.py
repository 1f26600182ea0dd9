"""Trainer, reference and sampler compute over the base that the run states, or stop."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch
from packed_run import start, train

from deltawire.engines.base import EngineRequest
from deltawire.engines.transformers.opening import open_engine
from deltawire.errors import CorruptError, InputError
from deltawire.export.adapter import open_model
from deltawire.export.cast import CastWeights
from deltawire.export.models import fetch_model_files, load_model
from deltawire.export.source import open_source
from deltawire.placement.base_check import check_module
from deltawire.placement.live import LiveWeights, module_tensors
from deltawire.quantization.packing import load_packed, pack_layers
from deltawire.rl.reference.models import load_reference_model
from deltawire.runtime.process import open_run
from deltawire.store import Bucket
from deltawire.sync import load_mirror
from deltawire.sync.chain.base_statement import BaseStatement, read_base

CODES = "model.layers.1.mlp.experts.down_proj.codes"
SCALES = "model.layers.0.mlp.experts.gate_up_proj.scales"


@pytest.fixture(scope="module")
def bucket(tmp_path_factory) -> Bucket:
    bucket = start(tmp_path_factory.mktemp("base") / "a")
    train(bucket, to=1)
    return bucket


def opened(bucket: Bucket):
    run, config = open_run(bucket)
    with fetch_model_files(bucket, run) as folder:
        model = open_model(Path(folder), config.train.adapter)
    open_source("bf16", model).restore(load_mirror(bucket, run))
    return model


@torch.no_grad()
def flip(model, name: str) -> None:
    """Changes one byte of a packed tensor."""
    module_tensors(model)[name].view(-1)[5] += 1


def flip_code(model):
    flip(model, CODES)


def flip_scale(model):
    flip(model, SCALES)


@torch.no_grad()
def swap(model):
    """Exchanges the codes of two layers."""
    held = module_tensors(model)
    first, second = CODES.replace("layers.1", "layers.0"), CODES
    kept = held[first].clone()
    held[first].copy_(held[second])
    held[second].copy_(kept)


@torch.no_grad()
def plain_weight(model):
    """Changes one weight that is not packed, by the smallest step of bf16."""
    weight = module_tensors(model)["model.embed_tokens.weight"]
    weight.view(-1)[7] = torch.nextafter(
        weight.view(-1)[7].bfloat16(), torch.tensor(9.0, dtype=torch.bfloat16)
    ).to(weight.dtype)


FAULTS = {
    "code": (flip_code, f"{CODES} has other bits"),
    "scale": (flip_scale, f"{SCALES} has other bits"),
    "swapped": (swap, f"{CODES.replace('layers.1', 'layers.0')} has other bits"),
    "plain": (plain_weight, "model.embed_tokens.weight has other bits"),
}


def test_run_json_states_the_base_and_all_hold_it(bucket):
    run, config = open_run(bucket)
    statement = read_base(bucket, run)
    assert statement is not None
    assert statement.packed == "int4-g32"
    names = [one.name for one in statement.tensors]
    assert names == [spec.name for spec in run.tensors if "lora" not in spec.name]
    (stated,) = [file.name for file in run.model_files if file.name.startswith("base-")]
    assert stated == f"base-{statement.digest}.json"
    assert len(statement.errors) == 4, "two stacks in each of two layers"
    assert statement.native == 0
    assert all(0.05 < error < 0.15 for error in statement.errors.values())
    check_module(statement, opened(bucket), who="sampler")
    load_reference_model(bucket, run, config)


@pytest.mark.parametrize("fault", FAULTS)
def test_each_planted_fault_is_found_by_name(bucket, fault):
    run, _ = open_run(bucket)
    model = opened(bucket)
    plant, message = FAULTS[fault]
    plant(model)
    with pytest.raises(InputError, match=f"the sampler holds another frozen base .*: {message}"):
        check_module(read_base(bucket, run), model, who="sampler")


def test_a_base_of_another_grid_is_found(bucket):
    """The same weights in MXFP4: the codes have one shape in both, the scales do not."""
    run, _ = open_run(bucket)
    _, config = open_run(bucket)
    folder = Path(config.model.path)
    model = load_model(folder)
    pack_layers(model, "mxfp4")
    load_packed(model, folder)
    message = r"experts\.down_proj\.codes has other bits"
    with pytest.raises(InputError, match=message):
        check_module(read_base(bucket, run), model, who="sampler")
    with torch.no_grad():
        ours, theirs = module_tensors(opened(bucket)), module_tensors(model)
        for name, tensor in theirs.items():
            if name.endswith(".codes") or tensor.is_floating_point():
                tensor.copy_(ours[name])
    message = r"experts\.down_proj\.scales is .* instead of U8\[4, 32, 1, 2\]"
    with pytest.raises(InputError, match=message):
        check_module(read_base(bucket, run), model, who="sampler")


@pytest.mark.parametrize("who", ["trainer", "reference", "sampler"])
def test_each_process_stops_at_another_base(tmp_path, monkeypatch, who):
    bucket = start(tmp_path / "a")
    run, config = open_run(bucket)
    restore = CastWeights.restore

    def restore_another(source, mirror):
        restore(source, mirror)
        flip_code(source._model)

    message = f"the {who} holds another frozen base than the run: {CODES} has other bits"
    if who == "sampler":
        with fetch_model_files(bucket, run) as folder:
            model = open_model(Path(folder), config.train.adapter)
        load = LiveWeights.load

        def load_another(weights, mirror):
            load(weights, mirror)
            flip_code(model)

        monkeypatch.setattr(LiveWeights, "load", load_another)
        with pytest.raises(InputError, match=message):
            open_engine(request_for(bucket, model))
        return
    monkeypatch.setattr(CastWeights, "restore", restore_another)
    begin = {
        "trainer": lambda: train(bucket, to=1),
        "reference": lambda: load_reference_model(bucket, run, config),
    }[who]
    with pytest.raises(InputError, match=message):
        begin()


def request_for(bucket: Bucket, model) -> EngineRequest:
    return EngineRequest(
        bucket=bucket,
        run=open_run(bucket)[0],
        folder=Path(),
        build_model=lambda: model,
        stop_tokens=lambda _: [0],
        slots=1,
        capacity=16,
        precision="float32",
        seed=0,
        threads=1,
    )


def test_a_statement_that_does_not_match_its_name_is_refused(bucket):
    run, _ = open_run(bucket)
    statement = read_base(bucket, run)
    files = [
        msgspec.structs.replace(file, name="base-" + "0" * 32 + ".json")
        if file.name == statement.file_name
        else file
        for file in run.model_files
    ]
    with pytest.raises(CorruptError, match="states another digest"):
        read_base(bucket, msgspec.structs.replace(run, model_files=files))
    assert isinstance(msgspec.json.decode(statement.encode(), type=BaseStatement), BaseStatement)
