"""A loss of one's own: only from a module that the machine trusts, and held to its contract."""

import pytest
import torch

from deltawire.config import LossConfig, parse_config
from deltawire.config.machine import TRUSTED
from deltawire.errors import InputError
from deltawire.train.loss import LossInputs, Totals, policy_loss, surrogate_named

TOTALS = Totals(6, 2, 3)


@pytest.fixture(autouse=True)
def forgotten():
    surrogate_named.cache_clear()
    yield
    surrogate_named.cache_clear()


@pytest.fixture
def inputs():
    torch.manual_seed(0)
    logprobs = -torch.rand(2, 3)
    mask, advantages = torch.ones(2, 3), torch.tensor([1.0, -1.0])
    return LossInputs(logprobs, logprobs + 0.3, advantages, mask, torch.arange(2))


def test_a_module_that_is_not_trusted_is_not_imported(inputs):
    with pytest.raises(InputError, match="code of module antigravity"):
        policy_loss(LossConfig(surrogate="antigravity:loss"), inputs, TOTALS)


def test_a_trusted_function_is_the_loss(inputs, monkeypatch):
    monkeypatch.setenv(TRUSTED, "own_losses")
    own = policy_loss(LossConfig(surrogate="own_losses:like_ppo"), inputs, TOTALS)
    theirs = policy_loss(LossConfig(surrogate="ppo"), inputs, TOTALS)
    assert float(own.loss) == float(theirs.loss)
    assert own.clipped == theirs.clipped > 0
    plain = policy_loss(LossConfig(surrogate="own_losses:plain"), inputs, TOTALS)
    sampling = policy_loss(LossConfig(surrogate="importance_sampling"), inputs, TOTALS)
    assert float(plain.loss) == float(sampling.loss)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("raises", "own_losses:raises raised ZeroDivisionError: no data"),
        ("scalar", "own_losses:scalar did not return one loss a token"),
        ("missing", "cannot load train.loss.surrogate own_losses:missing"),
    ],
)
def test_a_function_that_breaks_the_contract_is_named(inputs, monkeypatch, function, message):
    monkeypatch.setenv(TRUSTED, "own_losses")
    with pytest.raises(InputError, match=message):
        policy_loss(LossConfig(surrogate=f"own_losses:{function}"), inputs, TOTALS)


@pytest.mark.parametrize("name", ["own_losses:", ":f", "own losses:f", "a:b:c", "a;b:c"])
def test_what_is_no_function_is_no_surrogate(name):
    raw = {"name": "x", "train": {"loss": {"surrogate": name}}}
    with pytest.raises(InputError, match="there is no surrogate"):
        parse_config(raw, source="s")
