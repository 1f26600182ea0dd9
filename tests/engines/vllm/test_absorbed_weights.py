"""Tensors derived by latent attention: views are reached by swaps, copies are refused."""

import pytest
import torch

from deltawire.engines.vllm.refusals import ABSORBED, refuse_stale_products
from deltawire.errors import InputError
from deltawire.placement.placement import probe
from deltawire.wire.run import TensorSpec

LATENT, HEADS, KEYS, VALUES = 8, 2, 3, 5
SPECS = [TensorSpec("kv_b_proj", (HEADS * (KEYS + VALUES), LATENT), "BF16")]


def products(weight):
    """Keys' [N, P, L] and values' [N, L, V], as vLLM's ``process_weights_after_loading``."""
    split = weight.T.view(LATENT, HEADS, KEYS + VALUES).split([KEYS, VALUES], dim=-1)
    return {"attn.W_UK_T": split[0].permute(1, 2, 0), "attn.W_UV": split[1].transpose(0, 1)}


def probed(weight, made):
    def load_weights(weights):
        for _, given in weights:
            weight.copy_(given)

    return probe(load_weights, SPECS, {"kv_b_proj": weight, **made})


def test_views_of_what_is_loaded_are_reached_by_swaps():
    weight = torch.zeros(SPECS[0].shape, dtype=torch.bfloat16)
    placement = probed(weight, products(weight))
    assert placement.uncovered == {}
    refuse_stale_products(placement)


@pytest.mark.parametrize("copied", ["attn.W_UK_T", "attn.W_UV"])
def test_copies_of_what_is_loaded_are_refused(copied):
    weight = torch.zeros(SPECS[0].shape, dtype=torch.bfloat16)
    made = products(weight)
    made[copied] = made[copied].contiguous()
    with pytest.raises(InputError, match=copied):
        refuse_stale_products(probed(weight, made))


def test_other_derived_weights_are_not_refused():
    weight = torch.zeros(SPECS[0].shape, dtype=torch.bfloat16)
    made = {**products(weight), "attn.k_scale": torch.ones(1)}
    placement = probed(weight, made)
    assert placement.uncovered == {"attn.k_scale": 1}
    assert "k_scale" not in ABSORBED
    refuse_stale_products(placement)
