"""Parity recheck: keeps comparing sampler and trainer where the trainer is the bottleneck.

Groups then wait for the trainer, and none is of the version that it trains. The differences in
their tokens come mostly from the policy, which hides those of arithmetic. So the weights of one
version are copied at intervals, and once groups of that version are trained on, a few versions
later, they are scored with the copy too.

Concurrency::

    main thread                                    recheck thread
      step makes version v: copy its weights
      steps v+1, v+2, …: none waits
      a batch holds groups of v  ────────────────▶  score them with the copy
      a later step records the figures ◀──────────  figures of version v
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

from deltawire.config import RunConfig
from deltawire.config.served import judged_parity
from deltawire.parity import BatchParity, Divergence, ParityMeter
from deltawire.parity.router_replay import replay_of
from deltawire.placement.live import saved_buffers
from deltawire.train.batch import collate
from deltawire.train.budget import divide
from deltawire.train.policy import TrainedPolicy
from deltawire.wire.rollouts import Group

STARVED_STEPS = 4
"""Steps in a row without enough tokens of the trained version, after which a copy is made."""

MEASURED_GROUPS = 2
"""Groups that are scored for one copy."""


class ParityRecheck:
    """Measures groups of older versions with the weights that sampled them, in a thread.

    ``model`` is the trainer's, whose parameters hold the published bits between two steps. The copy
    shares frozen parameters with it, is made when it is first needed, and takes, with the
    measurements, at most ``parity.recheck_share`` of the time. ``report`` is called with the reason
    if a measurement fails; no further one is made then. A model that is sharded is not measured,
    which ``report`` says once. ``serve`` sets a copy of the model to what samplers compute with,
    where that is not the trainer's bits.

    Example::

        recheck = ParityRecheck(model, config, report=print)
        parity = recheck.observe(result.parity, groups, version=7)
        recheck.close()
    """

    def __init__(
        self,
        model: Any,
        config: RunConfig,
        *,
        report: Callable[[str], None],
        serve: Callable[[Any], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._model = model
        self._config = config
        self._report = report
        self._serve = serve
        self._clock = clock
        # A sharded model cannot be copied, and no rank needs to have room for all of it.
        sharded = isinstance(model, FSDPModule)
        if sharded and config.parity.recheck_share:
            report(
                f"parity.recheck_share = {config.parity.recheck_share:g} has no effect: the "
                "model's weights are sharded (several ranks, or train.compute = bfloat16), and a "
                "copy would need room for all of them on one rank; parity is measured on groups "
                "of the trained version"
            )
        self._share = 0.0 if sharded else config.parity.recheck_share
        self._copy: Any = None
        self._version: int | None = None
        self._starved = 0
        self._due_at = clock()
        self._thread = ThreadPoolExecutor(1, "parity-recheck")
        self._pending: tuple[int, Future[tuple[Divergence, float]]] | None = None

    def observe(self, parity: BatchParity, groups: Sequence[Group], *, version: int) -> BatchParity:
        """Return the figures of the step that made ``version`` from ``groups``, with those of an
        older version if the batch has none and a measurement is finished.

        The model must hold the weights of ``version`` by now.
        """
        if not self._share or parity.stopped:
            return parity
        enough = parity.numeric.tokens >= self._config.parity.min_tokens
        self._starved = 0 if enough else self._starved + 1
        if self._pending is None and self._version is not None:
            self._measure(groups, version)
        measured = self._finished()
        idle = self._version is None and self._pending is None
        if self._share and idle and self._starved >= STARVED_STEPS:
            self._keep(version)
        if measured is None or enough:
            return parity
        return parity.with_numeric(measured[1], measured[0], judged_parity(self._config))

    def close(self) -> None:
        """End the thread once its measurement is done."""
        self._thread.shutdown(cancel_futures=True)

    @torch.no_grad()
    def _keep(self, version: int) -> None:
        """Copy the weights of ``version``, if the time spent so far allows it."""
        began = self._clock()
        if began < self._due_at:
            return
        if self._copy is None:
            frozen = {id(p): p for p in self._model.parameters() if not p.requires_grad}
            self._copy = copy.deepcopy(self._model, frozen).eval()
        else:
            own = dict(self._copy.named_parameters())
            for name, parameter in self._model.named_parameters():
                if parameter.requires_grad:
                    own[name].copy_(parameter)
            buffers = saved_buffers(self._copy)
            for name, buffer in saved_buffers(self._model).items():
                buffers[name].copy_(buffer)
        self._serve(self._copy)
        self._version = version
        self._spend(self._clock() - began)

    def _measure(self, groups: Sequence[Group], version: int) -> None:
        """Start to score the groups whose first tokens are of the version that was kept."""
        kept = self._version
        assert kept is not None
        found = [group for group in groups if _begins_with(group, kept)]
        if found:
            self._pending = kept, self._thread.submit(self._score, found[:MEASURED_GROUPS], kept)
            self._version = None
        elif version - kept > self._config.train.largest_age + 1:
            self._version = None  # No more groups of this version can arrive.

    @torch.no_grad()
    def _score(self, groups: list[Group], version: int) -> tuple[Divergence, float]:
        began = self._clock()
        model, train = self._copy, self._config.train
        device, policy = next(model.parameters()).device, TrainedPolicy.of(model, train)
        meter = ParityMeter(judged_parity(self._config), version)
        replay = replay_of(model, self._config.parity)
        (parts,) = divide(groups, budget=train.max_tokens_per_batch, packed=policy.packs)
        for members in parts:
            batch = collate(groups, members).to(device)
            sampler_NC, mask_NC = batch.sampler_logprobs_NC, batch.loss_mask_NC
            with policy.terms(batch, replay) as terms:
                meter.measure(terms.logprobs, sampler_NC, mask_NC, batch.versions_NC)
        return meter.result().numeric, self._clock() - began

    def _finished(self) -> tuple[int, Divergence] | None:
        if self._pending is None or not self._pending[1].done():
            return None
        (version, future), self._pending = self._pending, None
        try:
            numeric, took_s = future.result()
        except Exception as error:  # Training does not depend on it.
            self._share, self._copy = 0.0, None
            self._report(f"parity with older versions is not measured any more: {error}")
            return None
        self._spend(took_s)
        return (version, numeric) if numeric.tokens else None

    def _spend(self, seconds: float) -> None:
        self._due_at = max(self._due_at, self._clock()) + seconds * (1 / self._share - 1)


def _begins_with(group: Group, version: int) -> bool:
    """Returns whether ``version`` drew the first tokens of one of the group's sequences."""
    drawn = (one.versions_T[one.mask_T.astype(bool)] for _, _, one in group.trained())
    return any(len(versions_T) and int(versions_T[0]) == version for versions_T in drawn)
