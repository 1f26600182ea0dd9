"""Runs of quantized weights whose codes vLLM's kernels for CPUs repack are refused by name."""

import pytest
from engine import Engine

from deltawire.cli.main import main
from deltawire.config import BuildConfig, parse_config
from deltawire.export.models import save_model
from deltawire.export.new_run import load_start, publish_start
from deltawire.store import open_bucket
from deltawire.train.build import build_model, byte_tokenizer

pytestmark = pytest.mark.filterwarnings("default")

SIZES = {"hidden_size": 256, "layers": 2, "head_size": 64, "feed_forward_size": 256, "context": 256}


@pytest.mark.parametrize(
    ("exporter", "name"),
    [("fp8-block", r"down_proj\.weight holds different bits"), ("int4-g32", "weight_packed")],
)
def test_codes_that_vllm_repacks_are_refused_by_name(tmp_path, exporter, name):
    model = build_model(BuildConfig(**SIZES), seed=0)
    save_model(model, byte_tokenizer(), tmp_path / "model")
    bucket = open_bucket(str(tmp_path / "bucket"), create=True)
    raw = {
        "name": "quantized",
        "model": {"path": str(tmp_path / "model")},
        "train": {"exporter": exporter},
    }
    config = parse_config(raw, source="test")
    start = load_start(config, tmp_path / "model")
    publish_start(bucket, config, tmp_path / "model", start)
    assert main(["pull", bucket.url, str(tmp_path / "pulled")]) == 0
    with pytest.raises(Exception, match=rf"vLLM changed weights for its kernels.*{name}"):
        Engine(tmp_path / "pulled", run=bucket.url)
