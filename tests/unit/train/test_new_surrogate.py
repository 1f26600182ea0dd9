"""Adds a surrogate as a stranger would: one module, and one line of the registry."""

import textwrap

import pytest
import torch

from deltawire import config as configuration
from deltawire.config import SurrogateTraits, parse_config
from deltawire.train.loss import LossInputs, Totals, policy_loss

MODULE = """
    import torch

    from deltawire.train.loss import ClipBounds, LossInputs, TokenLosses


    def one_sided(inputs: LossInputs, bounds: ClipBounds) -> TokenLosses:
        ratio = inputs.ratio.clamp(max=1 + bounds.high)
        clipped = inputs.ratio > 1 + bounds.high
        return TokenLosses(-ratio * inputs.advantages, clipped)
"""


@pytest.fixture
def one_sided(tmp_path, monkeypatch):
    (tmp_path / "one_sided_loss.py").write_text(textwrap.dedent(MODULE))
    monkeypatch.syspath_prepend(str(tmp_path))
    line = SurrogateTraits("one_sided_loss:one_sided", (0.0, 0.5))
    monkeypatch.setitem(configuration.SURROGATES, "one_sided", line)


def test_a_new_surrogate_is_a_module_and_a_line(one_sided):
    raw = {"name": "run", "train": {"loss": {"surrogate": "one_sided"}}}
    config = parse_config(raw, source="here").train.loss
    logprobs = torch.tensor([[0.1, 3.0]], requires_grad=True)
    inputs = LossInputs(
        logprobs,
        torch.zeros(1, 2),
        torch.ones(1),
        torch.ones(1, 2),
        torch.zeros(1, dtype=torch.long),
    )
    part = policy_loss(config, inputs, Totals(tokens=2.0, sequences=1, horizon=2))
    part.loss.backward()
    assert part.clipped == 0.5
    assert float(part.loss.detach()) == pytest.approx(-(torch.tensor(0.1).exp() + 1.5) / 2)
    assert logprobs.grad[0, 1] == 0.0
    assert logprobs.grad[0, 0] < 0.0
