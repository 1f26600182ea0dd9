"""Measures deltas of quantized models after real optimizer steps, as their exporters publish them.

A random model of one layer (3.4M parameters in matrices of 512 x 512 to 1536 x 512, standard
deviation 0.02) takes `SETTLE` steps of policy gradient with Adam on seeded groups, so that the
moments are those of a running job. Then one more step is published: in bf16, and by every scheme of
`deltawire.export.quantized`. A share is the bytes of a delta's payloads over those of the tensors,
of quantized matrices only: codes, scales and shapes, as they lie in a checkpoint.

``by_elements`` is the same delta coded element by element, without contexts for 4-bit codes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from benchmarks.training.keys import Measured, Options
from benchmarks.training.seeded_groups import seeded_group
from deltawire import codec
from deltawire.config import BuildConfig, RunConfig, parse_config
from deltawire.config.exporters import quantizing
from deltawire.export.source import WeightSource, open_source
from deltawire.train.build import build_model
from deltawire.train.masters import MasterWeights
from deltawire.train.step import train_step

RATES: Final = {"3e6": 3e-6, "1e6": 1e-6}
SETTLE: Final = 32
GROUPS, EPISODES, TOKENS = 8, 8, 12
SIZES: Final = BuildConfig(
    hidden_size=512, layers=1, head_size=64, feed_forward_size=1536, context=64
)


def measure(options: Options) -> Measured:
    """Returns the share of an fp8 model that a step at each learning rate sends."""
    details = {name: _after_a_step(rate, options.seed) for name, rate in RATES.items()}
    return Measured(
        {f"fp8_share_{name}": rows["fp8-block"]["share"] for name, rows in details.items()},
        details,
    )


def _after_a_step(rate: float, seed: int) -> dict[str, dict[str, Any]]:
    config = _config(rate)
    torch.manual_seed(seed)
    model = build_model(SIZES, seed=seed)
    masters = MasterWeights(model, config.train)
    for step in range(SETTLE):
        _step(masters, config, seed, step)
    sources = {name: open_source(name, model) for name in ("bf16", *quantizing())}
    before = {name: _held(source) for name, source in sources.items()}
    _step(masters, config, seed, SETTLE)
    return {name: _row(before[name], _held(source)) for name, source in sources.items()}


def _config(rate: float) -> RunConfig:
    raw = {
        "name": "quantized",
        "model": {"path": "made-here"},
        "train": {
            "groups_per_step": GROUPS,
            "optimizer": {"learning_rate": rate},
            "schedule": {"warmup_steps": 10},
        },
    }
    return parse_config(raw, source="bench")


def _step(masters: MasterWeights, config: RunConfig, seed: int, step: int) -> None:
    first = (seed * 1000 + step) * GROUPS
    groups = [
        seeded_group(first + one, tokens=TOKENS, episodes=EPISODES, prompt=(1, 2, 3))
        for one in range(GROUPS)
    ]
    train_step(masters, groups, config, version=0)


def _held(source: WeightSource) -> dict[str, Tensor]:
    """Returns copies of the published tensors of linear layers."""
    tensors = source.tensors()
    return {name: one.clone() for name, one in tensors.items() if "_proj.weight" in name}


def _row(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> dict[str, Any]:
    """Returns shares, and bits a change, of what differs between two versions."""
    sent = elementwise = size = changed = codes = 0
    for name, old in before.items():
        dtype, new = codec.dtype_of(old), after[name]
        columns = old.shape[-1] if old.ndim > 1 else 0
        coded = codec.encode_named(name, old, new, dtype=dtype, columns=columns)
        size += old.nbytes
        if not coded.changed:  # A publisher sends nothing of such a range.
            continue
        sent += len(coded.payload)
        elementwise += len(codec.encode(old, new, dtype=dtype, columns=columns))
        changed += _changed_codes(name, old, new)
    for name, old in before.items():
        codes += _count(name, old)
    return {
        "share": sent / size,
        "by_elements": elementwise / size,
        "changed": changed / codes,
        "bits_a_change": 8 * sent / max(changed, 1),
        "bits_a_change_by_elements": 8 * elementwise / max(changed, 1),
    }


def _count(name: str, tensor: Tensor) -> int:
    """Returns the number of weights that a tensor holds: none for scales and shapes."""
    if name.endswith("_packed"):
        return 2 * tensor.nbytes
    return tensor.numel() if name.endswith(".weight") else 0


def _changed_codes(name: str, old: Tensor, new: Tensor) -> int:
    first, second = (codec.bits_of(one).view(np.uint8) for one in (old, new))
    if name.endswith("_packed"):
        moved = first ^ second
        return int(np.count_nonzero(moved & 15) + np.count_nonzero(moved >> 4))
    if name.endswith(".weight"):
        return int((codec.bits_of(old) != codec.bits_of(new)).sum())
    return 0
