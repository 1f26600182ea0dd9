"""Lets the ranks of a trainer export together, and share a verdict: all go on, or all stop."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from deltawire.attest import Digests, digests_of_stream
from deltawire.attest.torch_tensors import torch_ranks
from deltawire.integrations.checking import WeightCheck, said

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


def digest_export(
    stream: Iterable[Any],
    dtype: str | None = None,
    *,
    pairs: Callable[[Any], Iterable[tuple[str, Any]]] = lambda one: (one,),
) -> Digests | str | None:
    """Digests on rank 0 what all ranks export together; ``pairs`` returns the names and tensors of
    one item. The others, and rank 0 after an error, read the stream to its end, because the ranks
    wait for each other in it. Returns a sentence that says what failed, and None on the other
    ranks."""
    rest = iter(stream)
    found: Digests | str | None = None
    if not rank_here():
        try:
            named = (pair for one in rest for pair in pairs(one))
            return digests_of_stream(named, dtype=dtype)
        except Exception as error:
            found = f"nothing was compared: {said(error)}"
    for _ in rest:
        pass
    return found
