"""Pulled directories of quantized runs, loaded by transformers: the values that samplers hold."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, CompressedTensorsConfig, FineGrainedFP8Config

from deltawire.cli.main import main
from deltawire.config import BuildConfig, parse_config
from deltawire.export.models import empty_model, save_model
from deltawire.export.source import open_source
from deltawire.rl.trainer.bootstrap import start_run
from deltawire.store import open_bucket
from deltawire.sync import load_mirror, read_run
from deltawire.train.build import build_model, byte_tokenizer

pytestmark = pytest.mark.drills


def pulled(folder: Path, exporter: str):
    """A pulled directory of version 0, and the model with the values that samplers compute with."""
    sizes = BuildConfig(hidden_size=128, layers=1, head_size=32, feed_forward_size=256, context=64)
    save_model(build_model(sizes, seed=0), byte_tokenizer(), folder / "model")
    bucket = open_bucket(str(folder / "bucket"), create=True)
    raw = {
        "name": "quantized",
        "model": {"path": str(folder / "model")},
        "train": {"exporter": exporter},
    }
    start_run(bucket, parse_config(raw, source="test"), folder / "model")
    assert main(["pull", bucket.url, str(folder / "pulled")]) == 0
    served = empty_model(folder / "pulled")
    open_source(exporter, served).restore(load_mirror(bucket, read_run(bucket)))
    return folder / "pulled", served


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("exporter", ["fp8-block", "fp8-block-f32-ct", "int4-g32", "mxfp4"])
def test_transformers_dequantizes_what_samplers_hold(tmp_path, exporter):
    folder, served = pulled(tmp_path, exporter)
    stored = FineGrainedFP8Config if exporter == "fp8-block" else CompressedTensorsConfig
    how = stored(dequantize=True)
    model, report = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, quantization_config=how, output_loading_info=True
    )
    assert not report["missing_keys"]
    assert not report["mismatched_keys"]
    ids = torch.arange(12)[None]
    with torch.no_grad():
        ours = served.bfloat16().eval()(ids).logits.float()
        theirs = model.eval()(ids).logits.float()
    assert float((ours - theirs).abs().max()) < 0.01 * float(ours.abs().max())
