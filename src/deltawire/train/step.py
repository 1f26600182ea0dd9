"""Runs one training step: groups in, new weights and measurements out.

A step is one or several minibatches (``train.minibatches``), each of which makes one optimizer
step. The gradients of a minibatch add up over micro-batches of at most
``train.max_tokens_per_batch`` tokens (`deltawire.train.budget`)::

    groups ─▶ minibatch ─▶ micro-batch ─▶ forward, loss, backward ─┐ gradients add up
                  │            ▲───────────────────────────────────┘
                  └─▶ clip, optimizer step ─▶ next minibatch

Every rank knows all groups, and computes its share of the micro-batches; denominators and
advantages are those of the whole step. Ranks gather a layer's weights together, so all make equally
many passes: a rank without a micro-batch makes one whose loss is zero.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor

from deltawire.config import RunConfig
from deltawire.config.scaffold import turn_limit
from deltawire.config.served import judged_parity, samples_quantized
from deltawire.errors import BugError
from deltawire.parity import NO_VERSION, BatchParity, ParityMeter
from deltawire.parity.router_replay import RouteReplay, replay_of
from deltawire.runtime.memory import HeapGrowth
from deltawire.train.batch import TokenBatch, collate
from deltawire.train.budget import Member, divide
from deltawire.train.head import TokenTerms
from deltawire.train.loss import ADVANTAGES, LossInputs, PolicyLoss, Totals, policy_loss
from deltawire.train.loss.inputs import sequence_sums
from deltawire.train.loss.lengths import with_length_terms
from deltawire.train.loss.preference import PairInputs, preference_loss, with_better_answers
from deltawire.train.loss.shared_tokens import (
    Spans,
    TokenSpan,
    budget_relative,
    shared_spans,
    with_reused_tokens,
)
from deltawire.train.masters import MasterWeights
from deltawire.train.policy import TrainedPolicy
from deltawire.train.reference import Reference
from deltawire.train.stopping import Stopping, abandon_if, never
from deltawire.wire.rollouts import Group

Advantages = Mapping[tuple[int, int], float]
"""The advantage of each (group, episode) of a step."""
NO_SPANS: Mapping[tuple[int, int], Sequence[TokenSpan]] = MappingProxyType({})


@dataclass(frozen=True)
class StepResult:
    """Measurements of one training step.

    ``reward_mean`` is over episodes; ``clipped`` and ``rejected`` are shares of the ``tokens``:
    those whose gradient the surrogate's bound reduced, and those to which a correction gave no
    weight. ``kl`` is the mean penalty, 0 without one; ``entropy`` the mean entropy of the policy's
    distributions at the trained tokens, in nats. ``loss`` and ``grad_norm`` are means over the
    optimizer steps. ``members`` are the rows that were trained on, in parity's order: (index of the
    group in the step, index of the trajectory in its group).
    """

    loss: float
    grad_norm: float
    reward_mean: float
    tokens: int
    clipped: float
    rejected: float
    kl: float
    entropy: float
    parity: BatchParity
    members: list[Member]


def train_step(
    masters: MasterWeights,
    groups: Sequence[Group],
    config: RunConfig,
    *,
    reference: Reference | None = None,
    version: int | None = None,
    parts: Sequence[int] = (),
    stopping: Stopping = never,
) -> StepResult:
    """Runs one training step on these groups, in this order.

    The same inputs and the same number of threads give the same bits. ``parts`` are the numbers of
    consecutive groups that are one prompt's (`prompts_of`). ``reference`` is that of the loss, None
    if it needs none. ``version`` is the one that the masters
    hold; the count of their steps without it. If parity stops the step, only the gradients have
    changed. Raises `StepAbandonedError` if the process is ``stopping`` before the first optimizer
    step; later ones are completed.
    """
    step = _TrainingStep.of(masters, groups, config, reference, version, parts, stopping)
    with deterministic():
        judged = config.train.loss.traits.good_or_bad
        if len(step.minibatches) > 1 or judged:
            step.compute_old()
        if judged:
            step.compute_reference_point()
        for minibatch in step.minibatches:
            if step.parity is None or not step.parity.stopped:
                step.optimize(minibatch)
    return step.result()


@contextmanager
def deterministic() -> Iterator[None]:
    """Makes torch choose algorithms whose sums have a fixed order, where it has a choice.

    Experts scatter and gather tokens by index; with several threads their gradients would add up
    in the order in which threads arrive.
    """
    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn_only)


def totals_of(groups: Sequence[Group], config: RunConfig) -> Totals:
    """Returns the denominators of an optimizer step on these groups."""
    rollout = config.rollout
    trained = [list(group.trained()) for group in groups]
    return Totals(
        tokens=float(sum(int(t.mask_T.sum()) for rows in trained for _, _, t in rows)),
        sequences=sum(len({episode for _, episode, _ in rows}) for rows in trained),
        horizon=config.train.loss.horizon or rollout.max_tokens * turn_limit(rollout),
    )


def prompts_of(groups: Sequence[Group], parts: Sequence[int]) -> list[int]:
    """Returns the number of each group's prompt: ``parts[i]`` consecutive groups are prompt i.

    Without ``parts``, each group is one. Raises `BugError` if they do not add up.
    """
    counts = list(parts) or [1] * len(groups)
    if sum(counts) != len(groups):
        raise BugError(f"the parts of prompts add up to {sum(counts)}, not {len(groups)} groups")
    return [number for number, count in enumerate(counts) for _ in range(count)]


def advantages_of(
    groups: Sequence[Group], config: RunConfig, parts: Sequence[int] = ()
) -> Advantages:
    """Returns the advantage of every episode, relative to all completions of its prompt
    (`token_advantages` also has those of single tokens).

    Prompts may differ in size: each has a mean, and a spread, of its own completions. Let the size
    depend on rewards that are part of the group, as with a pilot, and rewards have two values. A
    group of n with k successes adds k(n−k)/n · (s₁ − s₀) to the gradient of ``group_mean``, where
    s₁ and s₀ are the mean scores of a success and of a failure, whose difference points along the
    gradient of the pass rate. So choosing sizes by rewards changes how much a prompt weighs, by
    E[k(n−k)/n], and never the direction of what it adds. With more than two values it may, by terms
    that the pilot's share of the group bounds (``docs/ALLOCATION.md``).
    """
    return token_advantages(groups, config, parts)[0]


def token_advantages(
    groups: Sequence[Group], config: RunConfig, parts: Sequence[int] = ()
) -> tuple[Advantages, Spans]:
    """Returns the advantage of every episode, and those of tokens that differ from it: tokens that
    episodes share, and thoughts with ``advantage = "budget_relative"``."""
    prompts = prompts_of(groups, parts)
    rewards = {
        (number, episode): trajectory.reward
        for number, group in enumerate(groups)
        for _, episode, trajectory in group.trained()
    }
    rewards = with_length_terms(rewards, groups, config, prompts)
    if config.train.loss.advantage == "budget_relative":
        return budget_relative(rewards, groups, config)
    values = ADVANTAGES[config.train.loss.advantage](
        torch.tensor(list(rewards.values()), dtype=torch.float32),
        torch.tensor([prompts[number] for number, _ in rewards]),
    )
    advantages = dict(zip(rewards, values.tolist(), strict=True))
    centred = config.train.loss.advantage != "given"
    return advantages, shared_spans(groups, advantages, centred=centred)


def batch_loss(
    config: RunConfig,
    batch: TokenBatch,
    logprobs_NC: Tensor,
    totals: Totals,
    advantages: Advantages,
    *,
    keep_N: Tensor | None = None,
    old_NC: Tensor | None = None,
    reference_NC: Tensor | None = None,
    entropy_NC: Tensor | None = None,
    reference_point: float | None = None,
    spans: Mapping[tuple[int, int], Sequence[TokenSpan]] = NO_SPANS,
) -> PolicyLoss:
    """One micro-batch's part of the loss; ``keep_N`` is 0 for trajectories that do not count."""
    advantages_E = torch.tensor(
        [advantages[key] for key in batch.episodes_E], device=logprobs_NC.device
    )
    advantages_N = advantages_E[batch.episodes_N]
    if config.train.loss.mask_overlong:
        kept_N = 1 - batch.overlong_N
        keep_N = kept_N if keep_N is None else keep_N * kept_N
    inputs = LossInputs(
        logprobs_NC,
        batch.sampler_logprobs_NC,
        advantages_N,
        batch.loss_mask_NC,
        batch.episodes_N,
        old_NC=old_NC,
        reference_NC=reference_NC,
        entropy_NC=entropy_NC,
        keep_N=keep_N,
        advantages_NC=_spread(batch, advantages_N, spans),
        reference_point=reference_point,
    )
    part = policy_loss(config.train.loss, inputs, totals)
    if config.train.loss.preference.kind == "none":
        return part
    return replace(part, loss=part.loss + _pair_loss(config, batch, inputs, totals))


def _pair_loss(config: RunConfig, batch: TokenBatch, inputs: LossInputs, totals: Totals) -> Tensor:
    """The part of the pairs. Corrections do not reject them: what was drawn when does not matter,
    but parity may take them out."""
    weights_N = batch.pair_weights_N
    pairs = PairInputs(
        inputs.logprobs_NC,
        batch.loss_mask_NC,
        batch.better_mask_NC,
        weights_N if inputs.keep_N is None else weights_N * inputs.keep_N,
        batch.episodes_N,
        inputs.reference_NC,
    )
    return preference_loss(config.train.loss.preference, pairs, totals)


def _spread(
    batch: TokenBatch, advantages_N: Tensor, spans: Mapping[tuple[int, int], Sequence[TokenSpan]]
) -> Tensor | None:
    """The advantage of each token, float[N, C]; None if no token's differs from its episode's."""
    if not any(member in spans for member in batch.members_N):
        return None
    spread_NC = advantages_N[:, None].repeat(1, batch.tokens_NC.shape[1])
    for row, member in enumerate(batch.members_N):
        for start, end, advantage in spans.get(member, ()):
            spread_NC[row, start:end] = advantage
    return spread_NC


@dataclass
class _Minibatch:
    """This rank's micro-batches of one optimizer step.

    ``idle`` are passes without a part in the loss. ``members`` are the rows of each rank.
    ``before`` holds, once there are several optimizer steps, each micro-batch's log-probabilities
    before the first, and the rows that count. ``references`` holds the reference's, where they are
    needed before the loss.
    """

    batches: list[TokenBatch]
    idle: list[TokenBatch]
    totals: Totals
    members: list[list[Member]]
    before: list[tuple[Tensor, Tensor]]
    references: list[Tensor | None]


class _TrainingStep:
    """The inputs of one call of `train_step`, and its running sums."""

    def __init__(
        self,
        masters: MasterWeights,
        config: RunConfig,
        policy: TrainedPolicy,
        reference: Reference | None,
        meter: ParityMeter,
        minibatches: list[_Minibatch],
        advantages: Advantages,
        spans: Spans,
        stopping: Stopping,
    ) -> None:
        self.masters = masters
        self.config = config
        self.policy = policy
        self.reference = reference
        self.meter = meter
        self.minibatches = minibatches
        self.advantages = advantages
        self.spans = spans
        self.stopping = stopping
        self.replay: RouteReplay | None = replay_of(masters.model, config.parity)
        self.parity: BatchParity | None = None
        self.reference_point: float | None = None
        self.parts: list[tuple[PolicyLoss, Totals]] = []
        self.norms: list[float] = []
        self.entropy = 0.0
        self.rewards: list[Tensor] = []

    @classmethod
    def of(
        cls,
        masters: MasterWeights,
        groups: Sequence[Group],
        config: RunConfig,
        reference: Reference | None,
        version: int | None,
        parts: Sequence[int],
        stopping: Stopping,
    ) -> _TrainingStep:
        """Divides the groups into minibatches and micro-batches."""
        groups = with_reused_tokens(groups, config)
        if config.train.loss.preference.kind != "none":
            groups = with_better_answers(groups)
        policy = TrainedPolicy.of(masters.model, config.train)
        mesh = masters.mesh
        if samples_quantized(config):
            version = NO_VERSION
        elif version is None:
            version = masters.steps
        minibatches = []
        count = min(config.train.minibatches, len(groups))
        for chosen in np.array_split(np.arange(len(groups)), count):
            numbers = chosen.tolist()
            divided = divide(
                groups,
                budget=config.train.max_tokens_per_batch,
                ranks=mesh.data_ranks,
                packed=policy.packs,
                chosen=numbers,
            )
            own = divided[mesh.data_rank]
            some = next(members for rank in divided for members in rank if members)[:1]
            minibatches.append(
                _Minibatch(
                    [collate(groups, members).to(mesh.device) for members in own if members],
                    [collate(groups, some).to(mesh.device) for members in own if not members],
                    totals_of([groups[n] for n in numbers], config),
                    [
                        [
                            (n, place)
                            for members in rank
                            for n, place in members
                            if not groups[n].trajectories[place].is_better
                        ]
                        for rank in divided
                    ],
                    [],
                    [],
                )
            )
        return cls(
            masters,
            config,
            policy,
            reference,
            ParityMeter(judged_parity(config), version),
            minibatches,
            *token_advantages(groups, config, parts),
            stopping,
        )

    def compute_old(self) -> None:
        """Computes the log-probabilities before the first optimizer step, and checks parity."""
        for minibatch in self.minibatches:
            for batch in minibatch.batches:
                self._abandon_if_stopping()
                with torch.no_grad(), self.policy.terms(batch, self.replay) as terms:
                    minibatch.before.append((terms.logprobs, self._measure(batch, terms)))
            for batch in minibatch.idle:
                self._abandon_if_stopping()
                with torch.no_grad(), self.policy.terms(batch):
                    pass
        self.parity = self._judged()

    def compute_reference_point(self) -> None:
        """Computes the mean of Σ log π − log reference over the step's sequences, at least 0.

        That is the point z of ``kto``: KL(π ‖ reference), which is never below 0. The paper
        (Ethayarajh et al. 2024, section 4.1) estimates it by answers to other prompts, because its
        data was not drawn by π. Here the sampler drew all answers, so their mean estimates it, for
        the versions that drew them, without a further pass. It has no gradient.
        """
        total, count = 0.0, 0
        for minibatch in self.minibatches:
            for batch, (before_NC, _) in zip(minibatch.batches, minibatch.before, strict=True):
                reference_NC = self._reference(batch)
                minibatch.references.append(reference_NC)
                if reference_NC is None:  # The loss says what is missing.
                    continue
                sums_S = sequence_sums(
                    before_NC - reference_NC, batch.loss_mask_NC, batch.episodes_N
                )
                total, count = total + float(sums_S.double().sum()), count + len(sums_S)
            for batch in minibatch.idle:
                self._reference(batch)
        total, count = self.masters.mesh.sum_data([total, count]).tolist()
        self.reference_point = max(0.0, total / max(count, 1))

    def optimize(self, minibatch: _Minibatch) -> None:
        """Computes the gradients of a minibatch and takes an optimizer step, unless parity
        stops.

        Micro-batches differ in size. Without giving back between them, holes of earlier
        activations stay in the heap next to new ones.
        """
        growth = HeapGrowth()
        for number, batch in enumerate(minibatch.batches):
            self._abandon_if_stopping()
            # Before the policy's pass: they may share the model.
            known = minibatch.references
            reference_NC = known[number] if known else self._reference(batch)
            if minibatch.before:
                old_NC, keep_N = minibatch.before[number]
                with self.policy.terms(batch, self.replay) as terms:
                    self._backward(minibatch, batch, terms, keep_N, old_NC, reference_NC)
            else:
                with self.policy.terms(batch, self.replay) as terms:
                    keep_N = self._measure(batch, terms)
                    self._backward(minibatch, batch, terms, keep_N, None, reference_NC)
            growth.release()
        for batch in minibatch.idle:
            self._abandon_if_stopping()
            if self.reference_point is None:
                self._reference(batch)
            with self.policy.terms(batch) as terms:
                (terms.logprobs.sum() * 0.0).backward()  # type: ignore[no-untyped-call]
        if self.parity is None:
            self.parity = self._judged()
        if not self.parity.stopped:
            self.norms.append(self.masters.step())

    def _abandon_if_stopping(self) -> None:
        """Ends the step if the process was asked to stop and no master has changed."""
        if not self.norms:
            abandon_if(self.stopping, self.masters.mesh)

    def _judged(self) -> BatchParity:
        """Parity once every token was measured."""
        if self.replay is not None:
            flips = (self.replay.flipped_L, self.replay.compared_L)
            self.meter.add_flips(*flips, damaged=self.replay.damaged)
        return self.meter.joined(self.masters.mesh.gather_data).result()

    def _measure(self, batch: TokenBatch, terms: TokenTerms) -> Tensor:
        self.entropy += float((terms.entropies.detach() * batch.loss_mask_NC).sum())
        self.rewards.append(batch.rewards_E)
        # Better answers have no sampler. They stay or leave with the answer of their episode.
        drawn_N = batch.better_mask_NC.sum(1) == 0
        keep_N = self.meter.measure(
            terms.logprobs[drawn_N],
            batch.sampler_logprobs_NC[drawn_N],
            batch.loss_mask_NC[drawn_N],
            batch.versions_NC[drawn_N],
            episodes_N=batch.episodes_N[drawn_N],
        )
        left_E = torch.zeros_like(batch.rewards_E)
        left_E[batch.episodes_N[drawn_N]] = keep_N
        return left_E[batch.episodes_N]

    def _backward(
        self,
        minibatch: _Minibatch,
        batch: TokenBatch,
        terms: TokenTerms,
        keep_N: Tensor,
        old_NC: Tensor | None,
        reference_NC: Tensor | None,
    ) -> None:
        part = batch_loss(
            self.config,
            batch,
            terms.logprobs,
            minibatch.totals,
            self.advantages,
            keep_N=keep_N,
            old_NC=old_NC,
            reference_NC=reference_NC,
            entropy_NC=terms.entropies,
            reference_point=self.reference_point,
            spans=self.spans,
        )
        part.loss.backward()  # type: ignore[no-untyped-call]
        self.parts.append((part, minibatch.totals))

    def _reference(self, batch: TokenBatch) -> Tensor | None:
        return None if self.reference is None else self.reference.logprobs(batch)

    def result(self) -> StepResult:
        """Returns the sums as measurements."""
        assert self.parity is not None
        tokens = sum(minibatch.totals.tokens for minibatch in self.minibatches)
        parts = [(part, totals.tokens / tokens) for part, totals in self.parts]
        rewards = torch.cat(self.rewards) if self.rewards else torch.zeros(0)
        sums = [
            sum(float(part.loss.detach()) for part, _ in parts),
            sum(part.clipped * share for part, share in parts),
            sum(part.rejected * share for part, share in parts),
            sum(part.kl * share for part, share in parts),
            self.entropy,
            float(rewards.double().sum()),
            len(rewards),
        ]
        mesh = self.masters.mesh
        loss, clipped, rejected, kl, entropy, reward, episodes = mesh.sum_data(sums).tolist()
        return StepResult(
            loss=loss / len(self.minibatches),
            grad_norm=sum(self.norms) / max(len(self.norms), 1),
            reward_mean=reward / episodes,
            tokens=int(tokens),
            clipped=clipped,
            rejected=rejected,
            kl=kl,
            entropy=entropy / tokens,
            parity=self.parity,
            members=[
                member
                for rank in range(mesh.data_ranks)
                for minibatch in self.minibatches
                for member in minibatch.members[rank]
            ],
        )
