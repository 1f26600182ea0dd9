"""The losses of pairs, and KTO, against the functions of TRL's trainers on the same numbers."""

from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch

from deltawire.config import KtoConfig, LossConfig, PreferenceConfig
from deltawire.train.loss import LossInputs, Totals, policy_loss
from deltawire.train.loss.preference import PairInputs, preference_loss

pytest.importorskip("trl")
pytestmark = pytest.mark.drills
# Importing TRL's trainers takes about 7 s.

PAIRS, TOKENS = 5, 9


class Accelerator:
    device = torch.device("cpu")

    def gather_for_metrics(self, tensor):
        return tensor

    gather = gather_for_metrics


class Recorded(torch.nn.Module):
    """A model that returns recorded log-probabilities, by the names that TRL reads."""

    def __init__(self, logprobs):
        super().__init__()
        self.logprobs = logprobs

    def forward(self, labels, **_):
        shown = torch.where(labels[:, 1:] == -100, 0.0, self.logprobs)
        nothing = torch.zeros_like(self.logprobs)
        return SimpleNamespace(
            log_probs=shown, entropy=nothing, mean_logits=nothing, is_top1=nothing.bool()
        )


def numbers(seed, rows):
    """Policy and reference log-probabilities, and a mask, float64[rows, TOKENS]."""
    generator = torch.Generator().manual_seed(seed)
    ours = -3 * torch.rand(rows, TOKENS, generator=generator, dtype=torch.float64)
    frozen = ours + torch.randn(rows, TOKENS, generator=generator, dtype=torch.float64)
    lengths = torch.randint(1, TOKENS + 1, (rows, 1), generator=generator)
    mask = (torch.arange(TOKENS) < lengths).double()
    return ours, frozen, mask


def trainer_of(frozen, **members):
    """The members of a trainer of TRL that its loss reads."""
    return SimpleNamespace(
        model=Recorded(frozen), ref_model=Recorded(frozen), accelerator=Accelerator(),
        args=SimpleNamespace(gradient_checkpointing_kwargs=None), aux_loss_enabled=False,
        _metrics={"train": defaultdict(list)}, _total_train_tokens=0, _tp_size=1, **members,
    )  # fmt: skip


def inputs_of(mask):
    first = torch.zeros(len(mask), 1)
    whole = torch.cat([first, mask], 1).long()
    return {"input_ids": whole, "attention_mask": torch.ones_like(whole), "completion_mask": whole}


def patched(monkeypatch, module):
    from contextlib import nullcontext

    monkeypatch.setattr(module, "disable_gradient_checkpointing", lambda *_: nullcontext())
    monkeypatch.setattr(module, "is_peft_model", lambda _: False)


@pytest.mark.parametrize(
    ("kind", "name", "beta"),
    [
        ("dpo", "sigmoid", 0.1),
        ("dpo_norm", "sigmoid_norm", 2.0),
        ("ipo", "ipo", 0.5),
        ("supervised", "sft", 0.1),
    ],
)
def test_pairs_have_the_loss_and_the_gradient_of_trl(monkeypatch, kind, name, beta):
    from trl.trainer import dpo_trainer

    patched(monkeypatch, dpo_trainer)
    ours, frozen, mask = numbers(1, 2 * PAIRS)
    if kind == "supervised":  # TRL's weighs tokens, not answers: the same for equal lengths.
        mask = torch.ones_like(mask)
    theirs = ours.clone().requires_grad_()
    trainer = trainer_of(
        frozen, loss_types=[name], loss_weights=[1.0], beta=beta, ld_alpha=None,
        precompute_ref_logps=False, f_divergence_type="reverse_kl", label_smoothing=0.0,
        use_weighting=False,
    )  # fmt: skip
    loss = dpo_trainer.DPOTrainer._compute_loss(trainer, Recorded(theirs), inputs_of(mask), False)
    loss.backward()
    if name in ("ipo", "sigmoid_norm"):
        lengths = inputs_of(mask)["completion_mask"].sum(1)
        assert torch.equal(lengths.double(), mask.sum(1))
    own = ours.clone().requires_grad_()
    found = preference_loss(
        PreferenceConfig(kind=kind, beta=beta), pairs_of(own, frozen, mask), totals(PAIRS)
    )
    found.backward()
    assert found.item() == pytest.approx(loss.item(), rel=1e-12)
    assert torch.allclose(own.grad, theirs.grad, rtol=1e-9, atol=1e-15)


def test_simpo_has_the_loss_of_trl():
    from trl.experimental.cpo.cpo_trainer import CPOTrainer

    ours, _, mask = numbers(2, 2 * PAIRS)
    means = (ours * mask).sum(1) / mask.sum(1)
    trainer = SimpleNamespace(
        alpha=0.0, beta=2.0, simpo_gamma=0.7, label_smoothing=0.0, loss_type="simpo",
        accelerator=Accelerator(),
    )  # fmt: skip
    losses, *_ = CPOTrainer.cpo_loss(trainer, *means.chunk(2))
    config = PreferenceConfig(kind="simpo", beta=2.0, margin=0.7)
    found = preference_loss(config, pairs_of(ours, None, mask), totals(PAIRS))
    assert found.item() == pytest.approx(losses.mean().item(), rel=1e-12)


def test_kto_has_the_loss_and_the_gradient_of_trl(monkeypatch):
    """TRL estimates the reference point by other answers; here both get the same."""
    from trl.trainer import kto_trainer

    patched(monkeypatch, kto_trainer)
    ours, frozen, mask = numbers(3, 6)
    labels = torch.tensor([True, False, True, True, False, False])
    point = 0.4
    theirs = ours.clone().requires_grad_()
    trainer = trainer_of(
        frozen, loss_type="kto", beta=0.3, desirable_weight=1.0, undesirable_weight=1.5,
        precompute_ref_logps=False, calculate_KL=True,
    )  # fmt: skip
    policy = Recorded(theirs)
    trainer._compute_kl_logps = lambda model, _: torch.full((6,), point * (model is policy))
    batch = {**inputs_of(mask), "label": labels}
    loss = kto_trainer.KTOTrainer._compute_loss(trainer, policy, batch, False)
    loss.backward()
    own = ours.clone().requires_grad_()
    kto = KtoConfig(beta=0.3, desirable_weight=1.0, undesirable_weight=1.5)
    config = LossConfig(
        surrogate="kto", advantage="given", aggregation="seq_mean_token_mean", kto=kto
    )
    signs = torch.where(labels, 1.0, -1.0).double()
    inputs = LossInputs(
        own, ours, signs, mask, torch.arange(6), reference_NC=frozen, reference_point=point
    )
    found = policy_loss(config, inputs, totals(6)).loss
    found.backward()
    assert found.item() == pytest.approx(loss.item(), rel=1e-6)  # TRL's point is a float32.
    assert torch.allclose(own.grad, theirs.grad, rtol=1e-6, atol=1e-12)


def pairs_of(ours, frozen, mask):
    """Pairs whose better answers come first, as TRL has them."""
    better = torch.cat([torch.ones(PAIRS), torch.zeros(PAIRS)]).double()
    return PairInputs(
        ours, mask * (1 - better[:, None]), mask * better[:, None], better,
        torch.arange(PAIRS).repeat(2), frozen,
    )  # fmt: skip


def totals(count):
    return Totals(tokens=1.0, sequences=count, horizon=1)
