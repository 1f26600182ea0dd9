"""Optimizers, groups and schedules: held to torch's own, to plain loops, and to the bit."""

import math

import pytest
import torch

from deltawire.config import OptimizerConfig, ParameterGroup, ScheduleConfig, TrainConfig
from deltawire.errors import CorruptError, InputError
from deltawire.train.masters import MasterWeights, vocabulary_parameters
from deltawire.train.optimizer import open_optimizer, rate_factor, rules_of
from deltawire.train.optimizer.muon import orthogonalize

SHAPES = {
    "embed.weight": (12, 6),
    "layers.0.mlp.weight": (8, 6),
    "layers.0.mlp.bias": (8,),
    "layers.0.norm.weight": (6,),
    "layers.1.experts.down": (3, 6, 9),
    "layers.1.tall.weight": (16, 4),
    "layers.1.norm.weight": (6,),
    "head.weight": (12, 6),
}
VOCABULARY = {"embed.weight", "head.weight"}


def drawn(seed, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    return {n: torch.randn(s, generator=generator) * scale for n, s in SHAPES.items()}


def trained(config, steps=4, first=1, state=None, parameters=None):
    parameters = drawn(0) if parameters is None else parameters
    optimizer = open_optimizer(parameters, config, not_matrices=VOCABULARY)
    if state is not None:
        optimizer.restore(state)
    for step in range(first, first + steps):
        optimizer.step(drawn(step, 0.1), step)
    return parameters, optimizer


def config_of(kind="adamw", offload="none", **settings):
    optimizer = OptimizerConfig(kind=kind, learning_rate=1e-2, weight_decay=0.1, **settings)
    schedule = ScheduleConfig(warmup_steps=2)
    return TrainConfig(optimizer=optimizer, schedule=schedule, offload=offload)


def equal(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[k], right[k]) for k in left)


def plain_orthogonal(matrix):
    """The iteration as its author wrote it, on one matrix in bf16."""
    x = matrix.bfloat16()
    if matrix.shape[0] > matrix.shape[1]:
        x = x.T
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x.T if matrix.shape[0] > matrix.shape[1] else x


def test_a_muon_step_is_the_plain_one():
    """Each matrix of a stack by itself, momentum with Nesterov's look ahead, decay before."""
    parameters, _ = trained(config_of("muon"), steps=3)
    slow, momenta = drawn(0), {}
    for step in (1, 2, 3):
        rate = 1e-2 * min(1.0, step / 2)
        for name, drawn_gradient in drawn(step, 0.1).items():
            if name in VOCABULARY or drawn_gradient.ndim < 2:
                continue
            single = drawn_gradient.ndim == 2
            stack = slow[name][None] if single else slow[name]
            gradient = drawn_gradient[None] if single else drawn_gradient
            for number in range(len(stack)):
                kept = momenta.setdefault((name, number), torch.zeros_like(gradient[number]))
                kept.mul_(0.95).add_(gradient[number], alpha=0.05)
                ahead = gradient[number] * 0.05 + kept * 0.95
                stack[number] *= 1 - rate * 0.1
                scale = 0.2 * math.sqrt(max(ahead.shape))
                stack[number] -= rate * scale * plain_orthogonal(ahead).float()
    for name, parameter in parameters.items():
        if name not in VOCABULARY and parameter.ndim > 1:
            moved = slow[name] - drawn(0)[name]
            error = (parameter - slow[name]).norm() / moved.norm()
            assert float(error) < 0.05, name  # The iterations amplify bf16's rounding.


@pytest.mark.parametrize("scale", ["original", "match_rms_adamw"])
def test_a_matrix_moves_as_with_torchs_muon(scale):
    """To the bit: a new release of torch with another step is noticed."""
    ours, _ = trained(config_of("muon", muon_scale=scale))
    names = ["layers.0.mlp.weight", "layers.1.tall.weight"]
    theirs = [drawn(0)[name].requires_grad_() for name in names]
    muon = torch.optim.Muon(theirs, lr=1.0, weight_decay=0.1, adjust_lr_fn=scale)
    for step in range(1, 5):
        for name, parameter in zip(names, theirs, strict=True):
            parameter.grad = drawn(step, 0.1)[name]
        muon.param_groups[0]["lr"] = 1e-2 * min(1.0, step / 2)
        muon.step()
    for name, parameter in zip(names, theirs, strict=True):
        assert torch.equal(ours[name], parameter.detach())


def test_what_is_no_matrix_moves_as_with_adamw():
    muon, adamw = trained(config_of("muon"))[0], trained(config_of())[0]
    for name, shape in SHAPES.items():
        by_adamw = name in VOCABULARY or len(shape) == 1
        assert torch.equal(muon[name], adamw[name]) == by_adamw, name


def test_orthogonal_directions_have_singular_values_near_one():
    stack = torch.randn(4, 24, 16, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(orthogonalize(stack).float())
    assert float(values.min()) > 0.6
    assert float(values.max()) < 1.3


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_states_on_the_host_give_the_same_bits(kind):
    """Also when a run changes the place of its states on resume."""
    here, resident = trained(config_of(kind))
    there, streamed = trained(config_of(kind, offload="optimizer"))
    assert equal(here, there)
    assert equal(resident.state(), streamed.state())
    state = {name: tensor.clone() for name, tensor in resident.state().items()}
    copies = [{name: tensor.clone() for name, tensor in here.items()} for _ in range(2)]
    for offload, copy in zip(("optimizer", "none"), copies, strict=True):
        trained(config_of(kind, offload=offload), first=5, state=state, parameters=copy)
    assert equal(*copies)
    assert not equal(copies[0], here)


@pytest.mark.parametrize("offload", ["none", "optimizer"])
def test_a_parameter_without_a_gradient_stays(offload):
    parameters = drawn(0)
    optimizer = open_optimizer(parameters, config_of(offload=offload))
    gradients = {**drawn(1), "layers.0.mlp.bias": None}
    optimizer.step(gradients, 1)
    assert torch.equal(parameters["layers.0.mlp.bias"], drawn(0)["layers.0.mlp.bias"])
    assert not torch.equal(parameters["embed.weight"], drawn(0)["embed.weight"])
    assert int(optimizer.state()["adam/step/layers.0.mlp.bias"]) == 0
    assert int(optimizer.state()["adam/step/embed.weight"]) == 1


def test_another_optimizers_state_is_refused():
    _, optimizer = trained(config_of("muon"))
    state = trained(config_of())[1].state()
    with pytest.raises(CorruptError, match=r"muon/momentum/layers\.0\.mlp\.weight"):
        optimizer.restore(state)


def test_biases_of_stacked_experts_are_no_matrices():
    """gpt-oss has one bias vector for each expert, in two dimensions."""
    stacks = {"experts.down_proj": torch.ones(4, 3, 2), "experts.down_proj_bias": torch.ones(4, 3)}
    rules = rules_of(stacks, OptimizerConfig(kind="muon", weight_decay=0.2))
    assert [(rule.kind, rule.weight_decay) for rule in rules.values()] == [
        ("muon", 0.2),
        ("adamw", 0.0),
    ]


def test_groups_replace_what_they_set():
    groups = [
        ParameterGroup(names=r"layers\.1\..*norm", weight_decay=0.5),
        ParameterGroup(names="norm|tall", learning_rate=0.0, kind="adamw"),
    ]
    rules = rules_of(
        drawn(0),
        OptimizerConfig(kind="muon", learning_rate=0.1, weight_decay=0.2, groups=groups),
        not_matrices=VOCABULARY,
    )
    found = {name: (r.kind, r.learning_rate, r.weight_decay) for name, r in rules.items()}
    assert found == {
        "embed.weight": ("adamw", 0.1, 0.2),
        "layers.0.mlp.weight": ("muon", 0.1, 0.2),
        "layers.0.mlp.bias": ("adamw", 0.1, 0.0),
        "layers.0.norm.weight": ("adamw", 0.0, 0.0),
        "layers.1.experts.down": ("muon", 0.1, 0.2),
        "layers.1.tall.weight": ("adamw", 0.0, 0.2),
        "layers.1.norm.weight": ("adamw", 0.1, 0.5),
        "head.weight": ("adamw", 0.1, 0.2),
    }
    every = rules_of(drawn(0), OptimizerConfig(weight_decay=0.2, decay_all=True))
    assert {rule.weight_decay for rule in every.values()} == {0.2}


@pytest.mark.parametrize(
    ("group", "said"),
    [
        (ParameterGroup(names="lm_head"), "no parameter takes it"),
        (ParameterGroup(names="norm", kind="muon"), "1 dimensions"),
    ],
)
def test_groups_that_do_not_fit_the_model_are_refused(group, said):
    with pytest.raises(InputError, match=said):
        rules_of(drawn(0), OptimizerConfig(groups=[group]))


def test_embeddings_and_head_are_known(tiny):
    assert vocabulary_parameters(tiny) == {"model.embed_tokens.weight"}


def test_muon_trains_a_model_and_resumes(tiny):
    config = config_of("muon", offload="optimizer")
    masters = MasterWeights(tiny, config)
    for number, parameter in enumerate(tiny.parameters()):
        parameter.grad = torch.full_like(parameter, 0.1 * (number + 1))
    assert masters.step() > 0
    labels = {name.split("/")[0] for name in masters.state()}
    assert labels == {"steps", "master", "adam", "muon"}


SCHEDULES = {
    "constant": (ScheduleConfig(warmup_steps=4), {1: 0.25, 4: 1, 5: 1, 10**6: 1}),
    "no warm-up": (ScheduleConfig(warmup_steps=0), {1: 1, 2: 1}),
    "linear": (
        ScheduleConfig(kind="linear", warmup_steps=10, steps=110, floor=0.1),
        {5: 0.5, 10: 1, 60: 0.55, 110: 0.1, 500: 0.1},
    ),
    "cosine": (
        ScheduleConfig(kind="cosine", warmup_steps=0, steps=100),
        {25: (1 + math.cos(math.pi / 4)) / 2, 50: 0.5, 100: 0, 101: 0},
    ),
    "wsd": (
        ScheduleConfig(kind="wsd", warmup_steps=10, steps=100, decay_steps=20),
        {5: 0.5, 10: 1, 80: 1, 90: 0.5, 100: 0, 101: 0},
    ),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_are_functions_of_the_step(name):
    config, wanted = SCHEDULES[name]
    assert {step: rate_factor(config, step) for step in wanted} == pytest.approx(wanted)
    factors = [rate_factor(config, step) for step in range(1, 130)]
    peak = factors.index(max(factors))
    assert factors[:peak] == sorted(factors[:peak])
    assert factors[peak:] == sorted(factors[peak:], reverse=True)
