"""Buffers that a checkpoint saves are weights like any other: the biases by which DeepSeek-V3 and
GLM-4 keep their experts' loads even, which no optimizer moves and which decide who is asked."""

from __future__ import annotations

import copy

import families
import pytest
import torch

from deltawire import codec
from deltawire.config import OptimizerConfig, TrainConfig
from deltawire.errors import CorruptError, InputError, ResyncError
from deltawire.export.cast import CastWeights
from deltawire.export.models import empty_model, load_model, load_tokenizer, save_model, serve_as
from deltawire.export.source import bits_of
from deltawire.placement.live import LiveWeights, saved_buffers
from deltawire.store import open_bucket
from deltawire.sync import Mirror, Publisher, Subscriber, create_run, load_mirror
from deltawire.train.build import byte_tokenizer
from deltawire.train.masters import MasterWeights
from deltawire.wire.run import Run

BIAS = "e_score_correction_bias"
TOKENS = torch.randint(0, 64, (4, 12), generator=torch.Generator().manual_seed(7))


def tiny(family):
    model = families.build(family, seed=3).eval()
    for name, bias in saved_buffers(model).items():
        assert name.endswith(BIAS)
        bias.copy_(torch.randn(bias.shape, generator=torch.Generator().manual_seed(1)) * 1e-3)
    return model


def masters_of(model):
    return MasterWeights(
        model, TrainConfig(versions=9, optimizer=OptimizerConfig(learning_rate=1e-3))
    )


def published(bucket, masters):
    """A run of the model as it is, and its publisher."""
    specs = masters.source.specs()
    bits = bits_of(masters.source)
    digest = codec.digest_model(bits)
    run = create_run(
        bucket, Run(id="ab" * 16, name="biased", created_at=0.0, tensors=specs, digest=digest.hex())
    )
    mirror = Mirror({name: array.copy() for name, array in bits.items()}, -1, codec.ZERO)
    publisher = Publisher(bucket, run, mirror, epoch=0, compaction_strides=())
    publisher.publish(masters.source.tensors())
    publisher.flush()
    return run, publisher


def log_probabilities(model):
    with torch.no_grad():
        return model(TOKENS, use_cache=False).logits.float().log_softmax(-1)


def balance(model, rate=0.05):
    """DeepSeek-V3's rule: a bias goes up where fewer tokens went than on average, else down."""
    for bias in saved_buffers(model).values():
        load = torch.arange(len(bias)).roll(int(bias.sum() * 1e4) % len(bias)).float()
        bias.add_(rate * torch.sign(load.mean() - load))


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_biases_reach_the_server_and_take_effect(family, precision):
    bucket = open_bucket("memory://")
    masters = masters_of(tiny(family))
    run, publisher = published(bucket, masters)
    assert {spec.dtype for spec in run.tensors if spec.name.endswith(BIAS)} == {"F32"}
    served = serve_as(copy.deepcopy(masters.model), precision)
    mirror = load_mirror(bucket, run)
    live = LiveWeights(served, run.tensors)
    live.load(mirror)
    subscriber = Subscriber(bucket, run, mirror)
    seen = [log_probabilities(masters.model)]
    for version in range(1, 4):
        before = {name: bias.clone() for name, bias in saved_buffers(masters.model).items()}
        balance(masters.model)
        assert all((bias != before[n]).any() for n, bias in saved_buffers(masters.model).items())
        publisher.publish(masters.source.tensors())
        publisher.flush()
        update = subscriber.prepare()
        live.swap(update.patches, update.version, update.digest)
        subscriber.commit(update)
        assert (live.version, live.attest()) == (version, publisher.digest)
        for name, bias in saved_buffers(served).items():
            assert torch.equal(bias, saved_buffers(masters.model)[name])
        seen.append(log_probabilities(masters.model))
        if precision == "float32":
            assert torch.equal(log_probabilities(served), seen[-1])
    assert not torch.equal(seen[0], seen[-1]), "other experts were asked"
    changed = [name for name in update.patches if len(update.patches[name])]
    assert changed
    assert all(name.endswith(BIAS) for name in changed)


def test_a_bias_changed_by_other_code_is_found():
    """Like any weight: by the digest, before the next version overwrites it."""
    bucket = open_bucket("memory://")
    masters = masters_of(tiny("deepseek_v3"))
    run, publisher = published(bucket, masters)
    served = copy.deepcopy(masters.model)
    mirror = load_mirror(bucket, run)
    live = LiveWeights(served, run.tensors)
    live.load(mirror)
    bias = next(iter(saved_buffers(served).values()))
    kept = bias.clone()
    bias[0] += 1.0
    assert live.attest() != publisher.digest
    balance(masters.model)
    publisher.publish(masters.source.tensors())
    publisher.flush()
    update = Subscriber(bucket, run, mirror).prepare()
    with pytest.raises(ResyncError):
        live.swap(update.patches, update.version, update.digest)
    bias.copy_(kept)
    live.swap(update.patches, update.version, update.digest)
    assert live.attest() == publisher.digest


def test_a_trainer_checkpoint_holds_buffers():
    masters, other = masters_of(tiny("glm4_moe")), masters_of(families.build("glm4_moe", seed=9))
    balance(masters.model)
    state = {name: tensor.clone() for name, tensor in masters.state().items()}
    other.restore(state)
    assert codec.digest_model(bits_of(other.source)) == codec.digest_model(bits_of(masters.source))
    lost = next(name for name in state if name.startswith("buffer/"))
    with pytest.raises(CorruptError, match=BIAS):
        other.restore({name: tensor for name, tensor in state.items() if name != lost})
    with pytest.raises(CorruptError, match=BIAS):
        other.restore({**state, lost: state[lost].bfloat16()})


def test_a_model_directory_holds_buffers_unrounded(tmp_path):
    """A bias of 1e-3 that is moved by 1e-5 would not move in bf16."""
    model = tiny("glm4_moe")
    save_model(model, byte_tokenizer(), tmp_path)
    again, empty = load_model(tmp_path), empty_model(tmp_path)
    assert load_tokenizer(tmp_path) is not None
    for name, bias in saved_buffers(model).items():
        assert not torch.equal(bias, bias.bfloat16().float())
        assert torch.equal(saved_buffers(again)[name], bias)
        assert saved_buffers(empty)[name].dtype == torch.float32


class Odd(torch.nn.Module):
    """Buffers of many kinds, saved ones and others."""

    def __init__(self, **more):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(3, 5))
        self.register_buffer("frequencies", torch.rand(7))
        self.register_buffer("short", torch.rand(7).half())
        self.register_buffer("seen", torch.tensor(41))
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("scratch", torch.rand(9), persistent=False)
        for name, buffer in more.items():
            self.register_buffer(name, buffer)


def test_buffers_are_published_in_their_own_dtype():
    bucket = open_bucket("memory://")
    masters = masters_of(Odd())
    run, publisher = published(bucket, masters)
    assert {spec.name: spec.dtype for spec in run.tensors} == {
        "weight": "BF16",
        "frequencies": "F32",
        "short": "F16",
        "seen": "I64",
        "mask": "BOOL",
    }
    served = Odd()
    mirror = load_mirror(bucket, run)
    live = LiveWeights(served, run.tensors)
    live.load(mirror)
    masters.model.seen += 1
    masters.model.mask.logical_not_()
    publisher.publish(masters.source.tensors())
    publisher.flush()
    update = Subscriber(bucket, run, mirror).prepare()
    live.swap(update.patches, update.version, update.digest)
    assert live.attest() == publisher.digest
    assert (int(served.seen), served.mask.tolist()) == (42, [False, True, False])
    assert not torch.equal(served.scratch, masters.model.scratch)


def test_unpublishable_state_is_refused_by_name():
    with pytest.raises(InputError, match="turns is torch"):
        CastWeights(Odd(turns=torch.ones(2, dtype=torch.complex64)), "BF16").specs()

    class Secret(Odd):
        def get_extra_state(self):
            return {"anything": 1}

        def set_extra_state(self, state):
            del state

    with pytest.raises(InputError, match="_extra_state, which is neither a parameter nor a buffer"):
        CastWeights(Secret(), "BF16").specs()
    served = Odd()
    served.short = served.short.bfloat16()
    with pytest.raises(InputError, match="short is published as F16 and cannot be served as"):
        LiveWeights(served, CastWeights(Odd(), "BF16").specs())
