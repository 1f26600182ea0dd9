"""Runs that publish quantized weights: crashes, resuming, what samplers compute, and pulling."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from granted_groups import start_with_groups
from packed_run import TRAIN, VERSIONS, train

from deltawire.cli.main import main
from deltawire.codec import Digest, diff
from deltawire.config import BuildConfig, parse_config
from deltawire.config.exporters import quantizing
from deltawire.config.served import samples_quantized
from deltawire.errors import CorruptError, InputError
from deltawire.export.adapter import open_model
from deltawire.export.models import fetch_model_files
from deltawire.export.quantized import serve_quantized
from deltawire.export.source import digest_of, open_source
from deltawire.placement.live import LiveWeights
from deltawire.rl.trainer.resume import resume
from deltawire.rl.trainer.verify_training import verify_training
from deltawire.runtime.process import open_run
from deltawire.store import Bucket
from deltawire.sync import load_mirror, read_manifest
from deltawire.wire import keys


def start(folder: Path, exporter: str, **train: object) -> Bucket:
    sizes = BuildConfig(
        hidden_size=64, layers=1, head_size=16, feed_forward_size=160, vocabulary=300, context=64
    )
    folder.mkdir(exist_ok=True)
    settings = TRAIN | {"exporter": exporter} | train
    return start_with_groups(folder, groups=VERSIONS, train=settings, sizes=sizes)


def opened(bucket: Bucket):
    run, config = open_run(bucket)
    with fetch_model_files(bucket, run) as folder:
        return run, config, open_model(Path(folder), config.train.adapter)


@pytest.mark.parametrize(
    "exporter",
    ["fp8-block", pytest.param("int4-g32", marks=[pytest.mark.drills, pytest.mark.long])],
)
def test_after_crashes_the_same_bits(tmp_path, exporter):
    """Scales of a version depend on those before it, and a process that begins again has them."""
    whole = train(start(tmp_path / "a", exporter))
    assert len(set(whole)) > 1
    bucket = start(tmp_path / "b", exporter)
    for version in (1, 2):
        train(bucket, to=version, die=True)
    assert train(bucket) == whole
    assert verify_training(bucket).exact
    assert main(["fsck", bucket.url]) == 0


def test_scales_that_only_the_published_version_knows_are_continued(tmp_path):
    """A trainer that chose its own scales would publish other bits."""
    bucket = start(tmp_path / "a", "fp8-block")
    train(bucket, to=2)
    run, config, model = opened(bucket)
    state = resume(bucket, run, config, model, newest=2)
    assert state.version == 2
    source = state.masters.source
    mirror = load_mirror(bucket, run, at=2)
    name = next(iter(source.continued()))
    doubled = mirror.copy()
    # One power of two more in a float32 is 1 more in its exponent: bit 23.
    doubled.tensors[name] = doubled.tensors[name] + (1 << 23)
    source.continue_from(doubled)
    assert digest_of(source) != mirror.digest
    source.continue_from(mirror)
    assert digest_of(source) == mirror.digest


@pytest.mark.parametrize("exporter", quantizing())
def test_samplers_hold_and_swap_the_published_bits(tmp_path, exporter):
    bucket = start(tmp_path / "a", exporter)
    train(bucket)
    run, _, model = opened(bucket)
    served = serve_quantized(model, exporter).eval()
    live = LiveWeights(served, run.tensors)
    mirror = load_mirror(bucket, run, at=0)
    live.load(mirror)
    before = served(torch.arange(8)[None]).logits.detach()
    newest = load_mirror(bucket, run)
    patches = {n: diff(bits, newest.tensors[n]) for n, bits in mirror.tensors.items()}
    live.swap({n: p for n, p in patches.items() if len(p)}, newest.version, newest.digest)
    digest = Digest.from_hex(read_manifest(bucket, run, VERSIONS).digest)
    assert live.attest() == digest
    _, _, plain = opened(bucket)
    open_source(exporter, plain).restore(newest)
    ids = torch.arange(8)[None]
    with torch.no_grad():
        assert torch.equal(served(ids).logits, plain.eval()(ids).logits)
        assert not torch.equal(served(ids).logits, before)


def test_without_a_checkpoint_the_trainer_does_not_continue_from_rounded_weights(tmp_path):
    bucket = start(tmp_path / "a", "fp8-block")
    assert bucket.get(keys.checkpoint_commit(0), limit=1 << 20) is not None
    bucket.delete(keys.checkpoint_commit(0))
    run, config, model = opened(bucket)
    with pytest.raises(CorruptError, match="no checkpoint at or before version 0") as caught:
        resume(bucket, run, config, model, newest=0)
    assert "keeps the checkpoint of version 0" in str(caught.value)


def test_the_first_step_is_of_the_models_own_weights(tmp_path):
    """Masters are those of the model's directory, not the dequantized ones of version 0."""
    bucket = start(tmp_path / "a", "int4-g32")
    run, config, model = opened(bucket)
    masters = resume(bucket, run, config, model, newest=0).masters
    _, _, plain = opened(bucket)
    open_source("int4-g32", plain).restore(load_mirror(bucket, run, at=0))
    name = "model.layers.0.mlp.up_proj.weight"
    own, rounded = (one.state_dict()[name] for one in (masters.model, plain))
    assert 0.02 < float((own - rounded).norm() / own.norm()) < 0.2


def test_pulled_directories_state_their_scheme(tmp_path, capsys):
    bucket = start(tmp_path / "a", "fp8-block")
    train(bucket)
    out = tmp_path / "pulled"
    assert main(["pull", bucket.url, str(out)]) == 0
    config = json.loads((out / "config.json").read_bytes())
    assert config["quantization_config"]["weight_block_size"] == [128, 128]
    assert config["dtype"] == "bfloat16"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"adapter": {"kind": "lora", "targets": ["q_proj"]}}, "cannot publish an adapter"),
        ({"loss": {"ratio_base": "old"}, "max_staleness": 1}, "the loss does not correct for"),
    ],
)
def test_settings_that_contradict_quantized_exports_are_refused(change, message):
    raw = {"name": "x", "model": {"path": "x"}, "train": {"exporter": "fp8-block"} | change}
    with pytest.raises(InputError, match=message):
        parse_config(raw, source="test")


def test_a_correction_makes_the_old_policy_a_base_again():
    loss = {"ratio_base": "old", "corrections": [{"level": "token", "high": 2.0}]}
    raw = {"name": "x", "model": {"path": "x"}, "train": {"exporter": "mxfp4", "loss": loss}}
    assert samples_quantized(parse_config(raw, source="test"))
