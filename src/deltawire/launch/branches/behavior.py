"""Behaviors: differentiable figures of a model, whose change `deltawire why` explains.

``--on FILE`` has rows of JSON, ``{"prompt": …, "answer": …, "instead": …}``. The figure is the mean
over the rows of the answer's log-probability per token, less that of ``instead`` where a row has
it. ``--probe NAME`` takes answers that the run has stored: Σ (pᵢ − p̄) log π(answerᵢ) / n, where pᵢ
is the probe's value of answer i and p̄ their mean. Its gradient is that of the probe's mean (the
score function), so its change is, to first order, the change of that mean. ``--layer`` is the
distance of a layer's weights from the first version, along the line to the last one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import msgspec
import torch
from torch import Tensor

from deltawire.chat.messages import Message
from deltawire.chat.text import Text
from deltawire.errors import InputError
from deltawire.launch.branches.versioned_model import VersionedModel, logprobs_of
from deltawire.watch.weights import layer_and_part
from deltawire.wire.rollouts import Group

MAX_FILE_BYTES = 16 << 20
MAX_ROWS = 4096
MAX_ANSWERS = 256
"""Stored answers that a probe's behavior is measured on."""
REWARD = "reward"
"""The name of the reward among probes."""


class Behavior(Protocol):
    """A figure of a model."""

    unit: str

    def measure(self, module: Any, *, gradient: bool) -> float:
        """Returns the figure; with ``gradient``, leaves its gradient on the parameters."""
        ...


@dataclass(frozen=True)
class WeightedAnswer:
    """Tokens, and the weight of each one's log-probability: 0 for those of the prompt."""

    tokens: Sequence[int]
    weights: Sequence[float]


@dataclass
class AnswerBehavior:
    """A weighted sum of log-probabilities of answers."""

    answers: list[WeightedAnswer]
    unit: str = "nats per token"

    def measure(self, module: Any, *, gradient: bool) -> float:
        """See `Behavior.measure`."""
        total = 0.0
        with torch.set_grad_enabled(gradient):
            for numbers, logprobs in logprobs_of(module, [one.tokens for one in self.answers]):
                part: Any = 0.0
                for number, values in zip(numbers, logprobs, strict=True):
                    weights = torch.tensor(self.answers[number].weights[1:], device=values.device)
                    part = part + (values.double() * weights.double()).sum()
                if gradient:
                    part.backward()
                total += float(part.detach())
        return total


@dataclass
class LayerBehavior:
    """The distance of some weights from ``start`` along the line to where they end."""

    start: dict[str, Tensor]
    direction: dict[str, Tensor] = field(default_factory=dict)
    unit: str = "norm of the update"

    @torch.no_grad()
    def measure(self, module: Any, *, gradient: bool) -> float:
        """See `Behavior.measure`."""
        total, parameters = 0.0, dict(module.named_parameters())
        if not self.direction.keys() <= parameters.keys():
            raise InputError(
                "the trainer's model has the layer's weights under other names, so its groups have "
                "no measured effect",
                hint="ask with --on or --probe",
            )
        for name, parameter in parameters.items():
            if name in self.direction:
                moved = parameter.double() - self.start[name].double()
                total += float((moved * self.direction[name].double()).sum())
                if gradient:
                    parameter.grad = self.direction[name].clone()
        return total


class _Said(msgspec.Struct, forbid_unknown_fields=True):
    role: Literal["system", "user", "assistant"]
    content: str


def read_behavior(path: Path, text: Text) -> AnswerBehavior:
    """Reads the rows of ``--on``; raises `InputError` naming the line that is wrong."""
    rows = read_rows(path)
    answers = []
    for number, row in rows:
        prompt = prompt_tokens(row, text, f"{path}, line {number}")
        for name, sign in (("answer", 1.0), ("instead", -1.0)):
            said = row.get(name, "")
            if not isinstance(said, str) or (name == "answer" and not said):
                raise InputError(f"{path}, line {number}: {name} is no text")
            if said:
                tokens = text.encode(said)
                weight = sign / len(tokens) / len(rows)
                answers.append(_weighted(prompt, tokens, [weight] * len(tokens)))
    return AnswerBehavior(answers)


def read_rows(path: Path) -> list[tuple[int, dict[str, Any]]]:
    """Reads a file of JSON objects, one a line, each with its line's number; raises `InputError`.
    Only newlines end a line: JSON may have other separators in its strings."""
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise InputError(f"{path} has more than {MAX_FILE_BYTES >> 20} MiB")
        numbered = enumerate(path.read_text().split("\n"), 1)
        lines = [(number, line) for number, line in numbered if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read {path}: {error}") from error
    if not 1 <= len(lines) <= MAX_ROWS:
        raise InputError(f"{path} has {len(lines)} rows; 1 to {MAX_ROWS} are taken")
    rows = []
    for number, line in lines:
        try:
            row = msgspec.json.decode(line, type=dict[str, Any])
        except (msgspec.MsgspecError, RecursionError) as error:
            raise InputError(f"{path}, line {number}: {error}") from error
        rows.append((number, row))
    return rows


def prompt_tokens(row: dict[str, Any], text: Text, where: str) -> list[int]:
    """Returns the tokens of a row's ``prompt``: a text, or a list of messages."""
    said = row.get("prompt")
    if isinstance(said, str):
        return list(text.prompt(said))
    if not isinstance(said, list):
        raise InputError(f"{where}: prompt is neither a text nor a list of messages")
    try:
        messages = msgspec.convert(said, list[_Said])
    except msgspec.ValidationError as error:
        raise InputError(
            f"{where}: a message of prompt: {error}", hint='such as {"role": "user", "content": …}'
        ) from error
    return list(text.prompt([Message(one.role, one.content) for one in messages]))


def probe_behavior(name: str, groups: Sequence[Group]) -> AnswerBehavior:
    """Returns the behavior of a probe, on the first `MAX_ANSWERS` answers that it judged. Raises
    `InputError` if there are none, or all have one value."""
    found, known = [], {REWARD}
    for group in groups:
        for _, _, one in group.trained():
            known |= one.probes.keys()
            value = one.probes.get(name, one.reward if name == REWARD else None)
            if value is not None and one.mask_T.any():
                found.append((float(value), group.prompt_of(one).tolist(), one))
    if not found:
        raise InputError(
            f"no stored answer has the probe {name[:64]!r}",
            hint=f"those of these versions have {', '.join(sorted(known))[:400]}",
        )
    found = found[:MAX_ANSWERS]
    mean = sum(value for value, _, _ in found) / len(found)
    if all(value == mean for value, _, _ in found):
        raise InputError(f"the probe {name[:64]!r} has the value {mean:g} for every stored answer")
    answers = [
        _weighted(
            prompt, one.tokens_T.tolist(), (one.mask_T * (value - mean) / len(found)).tolist()
        )
        for value, prompt, one in found
    ]
    return AnswerBehavior(answers, unit=f"first-order change of the mean {name}")


def layer_behavior(layer: str, model: VersionedModel, first: int, last: int) -> LayerBehavior:
    """Returns the behavior of a layer, by its number or by a part of the names of its tensors.
    Raises `InputError` if no trained tensor is meant, or none of them moved."""
    model.move_to(first)
    trained = model.trained()
    chosen = [name for name in trained if _is_meant(layer, name)]
    if not chosen:
        raise InputError(
            f"no trained tensor belongs to {layer[:80]!r}",
            hint="name a layer's number, or a part of a name such as mlp.down_proj",
        )
    start = {name: trained[name].detach().clone() for name in chosen}
    model.move_to(last)
    moved = {name: trained[name].detach() - start[name] for name in chosen}
    norm = sum(float(one.double().square().sum()) for one in moved.values()) ** 0.5
    if not norm:
        raise InputError(f"{layer[:80]!r} is the same in versions {first} and {last}")
    return LayerBehavior(start, {name: one / norm for name, one in moved.items()})


def _is_meant(layer: str, name: str) -> bool:
    if layer.isdigit():
        return layer_and_part(name)[0] == int(layer)
    return layer in name


def _weighted(
    prompt: Sequence[int], tokens: Sequence[int], weights: Sequence[float]
) -> WeightedAnswer:
    if not prompt:
        raise InputError("an answer needs a prompt of at least one token")
    return WeightedAnswer([*prompt, *tokens], [0.0] * len(prompt) + list(weights))
