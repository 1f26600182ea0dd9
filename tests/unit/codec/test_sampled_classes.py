"""Flags cost as few bits with class sizes that are estimated from a sample as with exact ones."""

import numpy as np
import pytest

from deltawire.codec.delta import layout_of
from deltawire.codec.reference import CERTAIN, CONTEXTS, _flag_odds, classes_of, odds_of

COUNT = 1 << 22
BF16 = layout_of("BF16")


def step(seed, size):
    """Weights of a normal distribution before and after a step, in bf16: most of those near zero
    change, and hardly one of the others."""
    random = np.random.Generator(np.random.SFC64(seed))
    masters = random.standard_normal(COUNT, np.float32) * np.float32(0.02)
    moved = masters + random.standard_normal(COUNT, np.float32) * np.float32(size)
    return [(one.view(np.uint32) >> 16).astype(np.uint16) for one in (masters, moved)]


def bits(yes, no, share):
    """Bits of all decisions of each class if a yes has the odds ``share``."""
    with np.errstate(divide="ignore", invalid="ignore"):
        each = -np.nan_to_num(yes * np.log2(share)) - np.nan_to_num(no * np.log2(1 - share))
    return float(each[yes > 0].sum())


@pytest.mark.parametrize("seed", range(6))
def test_flags_cost_no_more_than_with_exact_sizes(seed):
    before, after = step(seed, 2e-7)
    changed = (before != after).astype(np.int64)
    exponents = before[changed == 1] >> 7 & 255
    classes = classes_of(before, int(exponents.max()), BF16)
    yes = np.bincount(classes[changed == 1], minlength=CONTEXTS).astype(float)
    no = np.bincount(classes, minlength=CONTEXTS) - yes
    odds = np.array([odds_of(level) for level in _flag_odds(classes, changed).levels]) / CERTAIN
    assert 0.001 < changed.mean() < 0.01
    assert bits(yes, no, odds) <= 1.01 * bits(yes, no, yes / np.maximum(yes + no, 1))
