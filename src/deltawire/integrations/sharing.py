"""Shares a verdict between the ranks of a trainer, so that all of them go on or all stop."""

from __future__ import annotations

from typing import Any

from deltawire.attest.torch_tensors import torch_ranks
from deltawire.integrations.checking import WeightCheck

MAX_TEXT = 2000


def rank_here() -> int:
    """Returns this process' rank; 0 for a process without others."""
    ranks = torch_ranks(None)
    return 0 if ranks is None else ranks.number


def act_together(check: WeightCheck, problem: str, group: Any = None) -> None:
    """Acts on the problem that rank 0 found, on every rank of ``group``; all call it together."""
    ranks = torch_ranks(group)
    if ranks is not None and ranks.count > 1:
        problem = ranks.gather(problem[:MAX_TEXT].encode())[0].decode(errors="replace")
        if ranks.number and check.on_mismatch == "warn":
            return
    check.act(problem)
