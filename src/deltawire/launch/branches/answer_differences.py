"""Compares how two versions answer: the same prompts and seeds at both, KL by token.

Each version draws an answer to every prompt with the same seed, so the same noise chooses tokens
at both, and answers of equal models are equal. Over each answer both distributions are computed at
every token: on the old version's answers KL(old ‖ new), on the new one's KL(new ‖ old), in nats.
Its sum over an answer's tokens estimates the divergence of whole answers without bias, because the
answer was drawn by the first of the two.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from deltawire.engines.base import Completion, Sampling
from deltawire.engines.transformers.engine import TransformersEngine
from deltawire.errors import CorruptError, InputError
from deltawire.launch.branches.behavior import prompt_tokens, read_rows
from deltawire.launch.branches.versioned_model import VersionedModel, open_model_of
from deltawire.rl.trainer.resume import groups_of
from deltawire.store import Bucket
from deltawire.sync import committed_versions
from deltawire.wire.rollouts import LIVE_TASK
from deltawire.wire.run import Run

Progress = Callable[[str, int, int], None]
SLOTS = 16


class AnswerTokens(msgspec.Struct, frozen=True, kw_only=True):
    """An answer: its tokens' texts, and each one's divergence from the other version."""

    texts: list[str]
    kl: list[float]

    @property
    def total(self) -> float:
        """Returns the divergence of the whole answer."""
        return sum(self.kl)


class AnswerPair(msgspec.Struct, frozen=True, kw_only=True):
    """Both versions' answers to one prompt with one seed, another for each pair. ``kl`` is the mean
    of the divergences of the two answers, by which pairs are sorted."""

    prompt: str
    seed: int
    same: bool
    kl: float
    old: AnswerTokens
    new: AnswerTokens


class AnswerDifference(msgspec.Struct, frozen=True, kw_only=True):
    """The difference in behavior, the most different answers first. ``kl_per_token`` is the mean
    over all tokens of both; ``by_position`` the mean at each place of an answer; ``rows`` are
    those of the file that prompts were taken from."""

    prompts: int
    answers: int
    temperature: float
    same: int
    kl_per_token: float
    kl_per_answer: float
    by_position: list[float]
    rows: int | None = None
    pairs: list[AnswerPair]


class AnswerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """States the questions to both versions: ``file`` has rows with ``prompt``; without one, the
    prompts are those of groups that the newer version, and those before it, were trained on.
    ``max_tokens`` None is that of the run."""

    file: str = ""
    prompts: int = 16
    seeds: int = 1
    max_tokens: int | None = None


def prompt_ends(pairs: Sequence[AnswerPair], letters: int) -> list[str]:
    """Returns the last letters of each prompt, without the end that all share: a chat template's
    opening of the answer tells none from another."""
    prompts = [" ".join(pair.prompt.split()) for pair in pairs]
    last = zip(*(one[::-1] for one in prompts), strict=False)
    shared = len([*takewhile(lambda letters: len({*letters}) == 1, last)])
    if len({*prompts}) == 1:
        shared = 0
    return [(one[: len(one) - shared] or one).rstrip()[-letters:].lstrip() for one in prompts]


def compare_answers(
    old: tuple[Bucket, Run, int],
    new: tuple[Bucket, Run, int],
    settings: AnswerSettings,
    *,
    progress: Progress = lambda *_: None,
) -> AnswerDifference:
    """Asks both versions, each given as its bucket, run and number.

    Raises `InputError` if there are no prompts or the two have other vocabularies, and
    `CorruptError` if a version cannot be read.
    """
    with open_model_of(old[0]) as first, open_model_of(new[0]) as second:
        first.move_to(old[2])
        second.move_to(new[2])
        prompts, rows = _prompts(second, new[2], settings)
        _check_texts(first, second, prompts)
        rollout = second.config.rollout
        most = settings.max_tokens or rollout.max_tokens
        sampling = Sampling(max_tokens=most, temperature=rollout.temperature)
        asked = [prompt for prompt in prompts for _ in range(settings.seeds)]
        before = _answers(first, asked, sampling, lambda n: progress("old answers", n, len(asked)))
        after = _answers(second, asked, sampling, lambda n: progress("new answers", n, len(asked)))
        pairs = []
        for number, (prompt, a, b) in enumerate(zip(asked, before, after, strict=True)):
            progress("divergence", number, len(asked))
            kl_a = divergence(first.module, second.module, prompt, a, sampling.temperature)
            kl_b = divergence(second.module, first.module, prompt, b, sampling.temperature)
            pairs.append(
                AnswerPair(
                    prompt=second.text.decode_all(prompt),
                    seed=number,
                    same=a == b,
                    kl=(sum(kl_a) + sum(kl_b)) / 2,
                    old=AnswerTokens(texts=_texts(first, a), kl=kl_a),
                    new=AnswerTokens(texts=_texts(second, b), kl=kl_b),
                )
            )
        progress("divergence", len(asked), len(asked))
        found = summed(pairs, prompts=len(prompts), temperature=sampling.temperature)
        return msgspec.structs.replace(found, rows=rows)


def summed(pairs: list[AnswerPair], *, prompts: int, temperature: float) -> AnswerDifference:
    """Returns the difference that pairs of answers make up."""
    answers = [one for pair in pairs for one in (pair.old, pair.new)]
    every = [value for one in answers for value in one.kl]
    longest = max(len(one.kl) for one in answers)
    places = [[one.kl[at] for one in answers if at < len(one.kl)] for at in range(longest)]
    return AnswerDifference(
        prompts=prompts,
        answers=len(pairs),
        temperature=temperature,
        same=sum(pair.same for pair in pairs),
        kl_per_token=float(np.mean(every)),
        kl_per_answer=float(np.mean([pair.kl for pair in pairs])),
        by_position=[float(np.mean(values)) for values in places],
        pairs=sorted(pairs, key=lambda pair: -pair.kl),
    )


@torch.inference_mode()
def divergence(
    ours: Any, theirs: Any, prompt: Sequence[int], answer: Sequence[int], temperature: float
) -> list[float]:
    """Returns KL(ours ‖ theirs) at each token of an answer, in nats, at a temperature (0 counts as
    1, since a greedy choice has no divergence)."""
    device = next(ours.parameters()).device
    ids = torch.tensor([[*prompt, *answer]], device=device)
    first = len(prompt) - 1
    scale = temperature or 1.0
    log_p, log_q = (
        (one(input_ids=ids).logits[0, first:-1].double() / scale).log_softmax(-1)
        for one in (ours, theirs)
    )
    found: list[float] = (log_p.exp() * (log_p - log_q)).sum(-1).clamp_min(0).tolist()
    return found


def _prompts(
    model: VersionedModel, version: int, settings: AnswerSettings
) -> tuple[list[list[int]], int | None]:
    """Returns the prompts, and the rows of the file that they were taken from, if there is one."""
    if settings.file:
        path = Path(settings.file)
        found = [
            prompt_tokens(row, model.text, f"{path}, line {number}")
            for number, row in read_rows(path)
        ]
        return found[: settings.prompts], len(found)
    prompts: dict[tuple[int, ...], None] = {}
    earlier = [one for one in committed_versions(model.bucket) if one <= version]
    for at in reversed(earlier):
        try:
            groups = [one.group for one in groups_of(model.bucket, model.run, at)]
        except CorruptError:
            continue
        for group in groups:
            if LIVE_TASK not in (group.task, group.family):  # The page may be shown to others.
                prompts.setdefault(tuple(group.prompt.tolist()))
        if len(prompts) >= settings.prompts:
            break
    if not prompts:
        raise InputError(
            "the run has no stored prompts of tasks", hint="give some by --on FILE",
            run=model.bucket.url,
        )  # fmt: skip
    return [list(one) for one in prompts][: settings.prompts], None


def _check_texts(first: VersionedModel, second: VersionedModel, prompts: list[list[int]]) -> None:
    """Raises `InputError` if tokens do not mean the same to both models."""
    if any(first.text.decode_all(one) != second.text.decode_all(one) for one in prompts):
        raise InputError("the two runs have other tokenizers", hint="compare like with like")
    with torch.inference_mode():
        start = torch.zeros((1, 1), dtype=torch.long)
        widths = [
            one.module(input_ids=start.to(one.device)).logits.shape[-1] for one in (first, second)
        ]
    if widths[0] != widths[1]:
        raise InputError(
            f"the two models have {widths[0]} and {widths[1]} logits", hint="compare like with like"
        )


def _answers(
    model: VersionedModel,
    asked: Sequence[list[int]],
    sampling: Sampling,
    count: Callable[[int], None],
) -> list[list[int]]:
    longest = max(map(len, asked))
    engine = TransformersEngine(
        model.module,
        stop_tokens=sorted(model.stops),
        slots=SLOTS,
        capacity=longest + sampling.max_tokens,
        version=model.version or 0,
    )
    found: dict[int, list[int]] = {}

    def keep(number: int) -> Callable[[Completion], None]:
        def done(completion: Completion) -> None:
            found[number] = list(completion.tokens)
            count(len(found))

        return done

    for number, prompt in enumerate(asked):
        engine.submit(prompt, replace(sampling, seed=number), keep(number))
    while engine.active:
        engine.step()
    return [found[number] for number in range(len(asked))]


def _texts(model: VersionedModel, tokens: Sequence[int]) -> list[str]:
    """Returns the text that each token adds to those before it."""
    texts, before = [], ""
    for end in range(1, len(tokens) + 1):
        whole = model.text.decode_all(tokens[:end])
        texts.append(whole[len(before) :])
        before = whole
    return texts
