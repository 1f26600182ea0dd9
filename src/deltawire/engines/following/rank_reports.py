"""Reports which version a rank of an engine holds, as `reader_report` describes it."""

from __future__ import annotations

import os
import weakref

import torch

from deltawire.engines.following.rank_weights import RankWeights
from deltawire.runtime.reader_report import Kind, ReaderReporter

_REPORTER = "_deltawire_reporter"
"""The attribute of a model that holds the reporter of its rank."""


def report_rank(model: torch.nn.Module, rank: RankWeights, engine: Kind) -> None:
    """Reports what ``rank`` holds, in place of a rank that the model had before, unless its
    settings say otherwise."""
    if (before := model.__dict__.pop(_REPORTER, None)) is not None:
        before.stop()
    if not rank.settings.report:
        return
    weights, last = weakref.ref(rank), (-1, "")

    def state() -> tuple[int, str]:
        nonlocal last
        if (live := weights()) is not None:
            last = live.version, live.status()["failure"]
        return last

    reporter = ReaderReporter(
        rank.subscriber.bucket,
        engine,
        name=f"{engine}-{os.getpid()}-rank-{rank.peers.number}",
        state=state,
    )
    model.__dict__[_REPORTER] = reporter
    # An engine in this process may end long before the process does.
    weakref.finalize(rank, reporter.stop).atexit = False
    reporter.start()
