"""Engines that could serve other weights than the run's without a digest showing it are refused."""

from types import SimpleNamespace

import pytest
import torch

from deltawire.engines.following import parameter_sums
from deltawire.engines.following.refusals import refuse_changed, refuse_unreached
from deltawire.engines.vllm.refusals import refuse_configuration
from deltawire.errors import InputError
from deltawire.placement.placement import probe
from deltawire.wire.run import TensorSpec


class Experts(torch.nn.Module):
    def __init__(self):
        super().__init__()
        rng = torch.Generator().manual_seed(3)
        self.w13 = torch.nn.Parameter(torch.randn(4, 6, 5, generator=rng).bfloat16())
        self.w2 = torch.nn.Parameter(torch.randn(4, 5, 3, generator=rng))
        self.scale = torch.nn.Parameter(torch.ones(()))


def exchange_halves(model):
    """As `swap_w13_to_w31` of vLLM's FlashInfer experts: same shape, same bits, another order."""
    model.w13.data = torch.cat([model.w13.data[:, 3:], model.w13.data[:, :3]], dim=1)


def shuffle_in_place(model):
    model.w2.data.copy_(model.w2.data[torch.tensor([1, 0, 2, 3])])


def transpose(model):
    model.w2 = torch.nn.Parameter(model.w2.data.transpose(1, 2).contiguous())


def quantise(model):
    model.w13 = torch.nn.Parameter(model.w13.data.to(torch.float8_e4m3fn), requires_grad=False)


def flip_one_bit(model):
    model.w13.data.view(torch.int16)[3, 5, 4] ^= 1


def pack(model):
    del model.w2


@pytest.mark.parametrize(
    ("process", "name", "how"),
    [
        (exchange_halves, "w13", "different bits, or in a different order"),
        (shuffle_in_place, "w2", "different bits, or in a different order"),
        (transpose, "w2", r"became \[4, 3, 5\] of float32"),
        (quantise, "w13", r"became \[4, 6, 5\] of float8_e4m3fn"),
        (flip_one_bit, "w13", "different bits, or in a different order"),
        (pack, "w2", "was removed"),
    ],
)
def test_weights_that_do_not_stay_as_loaded_are_refused(process, name, how):
    model = Experts()
    before = parameter_sums.parameter_sums(model)
    process(model)
    found = parameter_sums.differences(before, parameter_sums.parameter_sums(model))
    assert found.keys() == {name}
    with pytest.raises(InputError, match=f"{name} .*{how}"):
        refuse_changed(found, engine="vLLM", hint="")


def test_weights_moved_to_other_memory_count_as_loaded():
    model = Experts()
    before = parameter_sums.parameter_sums(model)
    model.w13 = torch.nn.Parameter(model.w13.data.clone())
    # As the rows of a wider memory: as padded weights lie.
    wide = torch.zeros(4, 5, 7)
    wide[..., :3] = model.w2.data
    model.w2 = torch.nn.Parameter(wide[..., :3])
    model.scale.data.fill_(0.5)  # A scale that vLLM works out itself.
    found = parameter_sums.differences(before, parameter_sums.parameter_sums(model))
    assert found == {}
    refuse_changed(found, engine="vLLM", hint="")


def test_a_move_to_another_device_is_not_taken_for_other_bits():
    """The sums of a CPU and of other devices differ for the same bits."""
    model = Experts()
    model.__dict__["_deltawire_loaded"] = parameter_sums.parameter_sums(model)
    before = {
        name: held._replace(device="cuda", sum=held.sum + 1)
        for name, held in parameter_sums.parameter_sums(model).items()
    }
    found = parameter_sums.differences(before, parameter_sums.parameter_sums(model))
    assert all("moved to cpu" in how for how in found.values())
    untouched, updated = parameter_sums.since_loading(model)
    assert untouched
    assert not updated
    model.__dict__["_deltawire_loaded"] = before
    assert parameter_sums.since_loading(model) == ([], False)


def test_what_was_updated_is_not_read_a_second_time(monkeypatch):
    """Asking what changed since loading sums only parameters in whose sample nothing changed."""
    model = torch.nn.ModuleDict(
        {
            "moved": torch.nn.Linear(500, 40),
            "kept": torch.nn.Linear(40, 5),
            "one": torch.nn.Linear(300, 300, bias=False),
        }
    )
    model.__dict__["_deltawire_loaded"] = parameter_sums.parameter_sums(model)
    summed = []
    original = parameter_sums._sum_of
    monkeypatch.setattr(
        parameter_sums, "_sum_of", lambda held: summed.append(held.numel()) or original(held)
    )
    assert parameter_sums.since_loading(model) == (
        ["moved.weight", "moved.bias", "kept.weight", "kept.bias", "one.weight"],
        False,
    )
    summed.clear()
    with torch.no_grad():
        model["moved"].weight += 1
        model["moved"].bias += 1
        model["one"].weight[100, 7] += 1  # It is none of the sample.
    assert parameter_sums.since_loading(model) == (["kept.weight", "kept.bias"], True)
    assert summed == [40 * 5, 5, 300 * 300]
    kept = model["kept"].weight.detach()
    wide = torch.zeros(5, 60)
    wide[:, :40] = kept  # The same bits elsewhere, and not contiguous.
    model["kept"].weight = torch.nn.Parameter(wide[:, :40])
    assert parameter_sums.since_loading(model) == (["kept.weight", "kept.bias"], True)
    model["kept"].weight = torch.nn.Parameter(kept.T.contiguous())
    assert parameter_sums.since_loading(model) == (["kept.bias"], True)


def test_the_sum_depends_on_order_within_and_across_chunks(monkeypatch):
    bits = torch.randint(0, 1 << 15, (1000,), dtype=torch.int16)
    whole = parameter_sums._sum_of(bits)
    summed = parameter_sums._sum_on_device(bits)  # As on a GPU.
    monkeypatch.setattr(parameter_sums, "_CHUNK_ELEMENTS", 64)
    assert parameter_sums._sum_on_device(bits) == summed
    for first, second in [(0, 1), (5, 63), (5, 64), (3, 900), (63, 127)]:
        if bits[first] != bits[second]:
            other = bits.clone()
            other[first], other[second] = bits[second], bits[first]
            assert parameter_sums._sum_of(other) != whole
            assert parameter_sums._sum_on_device(other) != summed
    zeros = torch.zeros(10, dtype=torch.bfloat16)
    assert parameter_sums._sum_of(zeros) != parameter_sums._sum_of(-zeros)


def test_unobserved_post_processing_is_refused():
    assert parameter_sums.changes_after_loading(Experts()) is None
    with pytest.raises(InputError, match="was not observed"):
        refuse_changed(parameter_sums.changes_after_loading(Experts()), engine="vLLM", hint="")


class Tower(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.language = torch.nn.Parameter(torch.zeros(4, 4, dtype=torch.bfloat16))
        self.vision = torch.nn.Parameter(torch.zeros(4, 4, dtype=torch.bfloat16))
        self.scale = torch.nn.Parameter(torch.ones((), dtype=torch.bfloat16))
        self.register_buffer("frequencies", torch.zeros(8))

    def load_weights(self, weights):
        for name, given in weights:
            getattr(self, name).data[: len(given)].copy_(given)


@pytest.mark.parametrize(
    ("published", "refused"),
    [
        ({"language": 4, "vision": 4}, False),
        ({"language": 4}, True),
        ({"language": 4, "vision": 2}, False),  # The rest is padding.
    ],
)
def test_parameters_that_the_run_does_not_reach_are_refused(published, refused):
    model = Tower()
    specs = [TensorSpec(name, (rows, 4), "BF16") for name, rows in published.items()]
    live = dict(model.named_parameters()) | dict(model.named_buffers())
    placement = probe(model.load_weights, specs, live)
    if refused:
        with pytest.raises(InputError, match="into the parameter vision"):
            refuse_unreached(placement, model)
    else:
        refuse_unreached(placement, model)


@pytest.mark.parametrize(
    ("parallel", "match"),
    [
        ({"data_parallel_size": 2}, "data-parallel"),
        ({"enable_eplb": True}, "moves between ranks"),
        ({}, None),
    ],
)
def test_parallelism_that_cannot_be_followed_is_refused(parallel, match):
    told = {"data_parallel_size": 1, "enable_eplb": False} | parallel
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(**told), model_config=SimpleNamespace(is_moe=True)
    )
    if match is None:
        refuse_configuration(config)
        return
    with pytest.raises(InputError, match=match):
        refuse_configuration(config)
