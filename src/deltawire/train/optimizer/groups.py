"""Assigns each parameter its optimizer, learning rate and weight decay."""

from __future__ import annotations

import re
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from deltawire.config import OptimizerConfig
from deltawire.errors import InputError

_PART = re.compile(r"[._]")


@dataclass(frozen=True)
class Rule:
    """How one parameter is optimized; ``learning_rate`` is before the schedule's factor.

    Example::

        rules = rules_of(parameters, OptimizerConfig(weight_decay=0.1))
        print(rules["model.norm.weight"].weight_decay)
    """

    kind: Literal["adamw", "muon"]
    learning_rate: float
    weight_decay: float


def is_norm_or_bias(name: str) -> bool:
    """Returns whether a part of a parameter's name, between dots and underscores, is ``bias`` or
    holds ``norm``."""
    return any(part == "bias" or "norm" in part for part in _PART.split(name.lower()))


def rules_of(
    parameters: Mapping[str, Tensor],
    config: OptimizerConfig,
    *,
    not_matrices: AbstractSet[str] = frozenset(),
) -> dict[str, Rule]:
    """Returns the rule of each parameter, by name.

    Muon takes whole matrices: 2-D parameters, and 3-D stacks of one matrix per expert. AdamW takes
    the rest, and what only looks like a matrix: ``not_matrices`` (embeddings and the head, whose
    rows are vectors) and biases of experts, one row for each. Norms and
    biases (by name, and everything with one dimension) do not decay, unless ``decay_all``. The
    first group of ``config.groups`` whose pattern is found in a name replaces what it sets.

    Raises `InputError` for a group that matches nothing, or assigns Muon to a parameter that is not
    a matrix.
    """
    found = {}
    used: set[int] = set()
    for name, parameter in parameters.items():
        vector = parameter.ndim < 2 or is_norm_or_bias(name)
        matrix = parameter.ndim in (2, 3) and not vector and name not in not_matrices
        kind: Literal["adamw", "muon"] = "muon" if config.kind == "muon" and matrix else "adamw"
        rate = config.learning_rate
        decay = 0.0 if vector and not config.decay_all else config.weight_decay
        number = next((i for i, g in enumerate(config.groups) if re.search(g.names, name)), None)
        if number is not None:
            group = config.groups[number]
            used.add(number)
            kind = group.kind or kind
            rate = rate if group.learning_rate is None else group.learning_rate
            decay = decay if group.weight_decay is None else group.weight_decay
            if kind == "muon" and parameter.ndim not in (2, 3):
                raise InputError(
                    f"train.optimizer.groups[{number}] gives Muon {name[:200]}, which has "
                    f"{parameter.ndim} dimensions",
                    hint="Muon takes matrices, and stacks of them; narrow the pattern",
                )
        found[name] = Rule(kind, rate, decay)
    for number, group in enumerate(config.groups):
        if number not in used:
            raise InputError(
                f"train.optimizer.groups[{number}]: no parameter takes it: names = "
                f"{group.names[:80]!r} matches none, or only names that an earlier group takes",
                hint=f"the model's parameters are named as {next(iter(parameters), '')[:200]}",
            )
    return found
