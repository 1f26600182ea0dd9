"""Types of the training client: inputs, parameters and results.

Names, members and defaults are those of Tinker's SDK 0.38, and the SDK's own objects are accepted
wherever these are: a model input is read by ``to_ints()``, a tensor by ``to_torch()``.
"""

from __future__ import annotations

from collections.abc import Awaitable, Generator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar

import numpy as np
import torch
from torch import Tensor

from deltawire.errors import InputError

T = TypeVar("T")

INTEGERS = frozenset({"target_tokens"})
"""Loss inputs that are token ids; all others are float32."""

MAX_TOKENS = 1 << 24
"""The most tokens of one sequence that a client accepts."""


@dataclass(frozen=True)
class ModelInput:
    """The tokens that the model reads.

    Example::

        ModelInput.from_ints(tokenizer.encode("2 + 3 ="))
    """

    tokens: tuple[int, ...]

    @classmethod
    def from_ints(cls, tokens: Sequence[int]) -> ModelInput:
        """Returns the input of these token ids."""
        return cls(tuple(int(token) for token in tokens))

    def to_ints(self) -> list[int]:
        """Returns the token ids."""
        return list(self.tokens)

    @property
    def length(self) -> int:
        """Returns the number of tokens."""
        return len(self.tokens)


@dataclass(frozen=True)
class Datum:
    """One sequence of a batch: its input of L tokens, and the inputs of the loss by name.

    ``target_tokens`` is int64[L] or int64[L, K], already shifted: row t holds the tokens whose
    log-probabilities after input token t are wanted. ``weights``, ``advantages`` and ``logprobs``
    have its shape. Lists, NumPy arrays, tensors and the SDK's tensors are accepted.

    Example::

        Datum(ModelInput.from_ints(tokens[:-1]), {"target_tokens": tokens[1:]})
    """

    model_input: Any
    loss_fn_inputs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class AdamParams:
    """The parameters of one optimizer step; ``grad_clip_norm`` 0 does not clip.

    Example::

        client.optim_step(AdamParams(learning_rate=1e-5))
    """

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


@dataclass(frozen=True)
class SamplingParams:
    """How to sample. With a ``seed``, a version draws the same completions of a prompt again.
    ``stop`` is a string, or several strings or token ids; None stops at the model's end tokens, an
    empty list nowhere.

    Example::

        sampler.sample(prompt, 4, SamplingParams(max_tokens=64, stop=["\\n"]))
    """

    max_tokens: int | None = None
    seed: int | None = None
    stop: str | Sequence[str] | Sequence[int] | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0


@dataclass(frozen=True)
class ForwardBackwardOutput:
    """The result of a forward pass: a dictionary of tensors for each datum, in their order, and
    metrics named ``name:reduction``. ``logprobs`` has the shape of the datum's targets.

    Example::

        result = client.forward_backward(data, "cross_entropy").result()
        print(result.metrics["loss:sum"], result.loss_fn_outputs[0]["logprobs"].shape)
    """

    loss_fn_outputs: list[dict[str, Tensor]]
    metrics: dict[str, float]
    loss_fn_output_type: str = "TensorReturn"


@dataclass(frozen=True)
class OptimStepResponse:
    """The measurements of one optimizer step.

    Example::

        done = client.optim_step(AdamParams(learning_rate=1e-4)).result()
        print(done.metrics)
    """

    metrics: dict[str, float]


@dataclass(frozen=True)
class SaveResponse:
    """Where weights or a state were saved: ``path``, and the version that holds the weights.

    Example::

        saved = client.save_state("before-rl").result()
        print(saved.path, saved.version)
    """

    path: str
    version: int


@dataclass(frozen=True)
class SampledSequence:
    """One completion. The token or string that ended it is part of it. ``versions`` are the
    policy versions that drew each token.

    Example::

        for token, logprob, version in zip(sequence.tokens, sequence.logprobs, sequence.versions):
            print(token, logprob, version)
    """

    stop_reason: Literal["stop", "length"]
    tokens: list[int]
    logprobs: list[float]
    versions: list[int]


@dataclass(frozen=True)
class SampleResponse:
    """The completions of one prompt. ``prompt_logprobs`` has an entry for each prompt token, None
    for the first; so has ``topk_prompt_logprobs``, whose entries are the likeliest tokens there
    with their log-probabilities, likeliest first.

    Example::

        answer = sampler.sample(prompt, 4, SamplingParams(max_tokens=64)).result()
        print([sequence.tokens for sequence in answer.sequences])
    """

    sequences: list[SampledSequence]
    prompt_logprobs: list[float | None] | None = None
    topk_prompt_logprobs: list[list[tuple[int, float]] | None] | None = None


MOST_TOP_TOKENS = 256
"""The most tokens that ``topk_prompt_logprobs`` may ask for: with a prompt of 32,768 tokens, 8
million pairs."""


class APIFuture(Generic[T]):
    """A result that is being computed; wait with `result`, or ``await`` it.

    Example::

        future = client.forward_backward(data, "cross_entropy")
        print(future.result().metrics)
    """

    def __init__(self, future: Future[T]) -> None:
        self._future = future

    def result(self, timeout: float | None = None) -> T:
        """Waits for the result; raises what the operation raised, `TimeoutError` after
        ``timeout`` seconds."""
        return self._future.result(timeout)

    async def result_async(self, timeout: float | None = None) -> T:
        """Waits for the result without blocking the event loop."""
        import asyncio

        return await asyncio.wait_for(asyncio.wrap_future(self._future), timeout)

    def future(self) -> Future[T]:
        """Returns the future of the standard library that this one wraps."""
        return self._future

    def done(self) -> bool:
        """Returns whether `result` would return at once."""
        return self._future.done()

    def __await__(self) -> Generator[Any, None, T]:
        waiting: Awaitable[T] = self.result_async()
        return waiting.__await__()


def tokens_of(value: Any) -> list[int]:
    """Returns the token ids of a model input, or of a plain sequence; raises `InputError`."""
    try:
        tokens = value.to_ints() if hasattr(value, "to_ints") else list(value)
        ids = [int(token) for token in tokens]
    except (TypeError, ValueError) as error:
        raise InputError(
            f"a model input is not a sequence of token ids: {error}",
            hint="give ModelInput.from_ints(tokens); images are not supported",
        ) from error
    if not 0 < len(ids) <= MAX_TOKENS:
        raise InputError(f"a model input has {len(ids)} tokens", hint=f"give 1 to {MAX_TOKENS}")
    return ids


def tensor_of(name: str, value: Any) -> Tensor:
    """Returns a loss input as int64 or float32, on the CPU; raises `InputError`."""
    dtype = torch.int64 if name in INTEGERS else torch.float32
    try:
        if hasattr(value, "to_torch"):
            value = value.to_torch()
        elif hasattr(value, "to_ints"):
            value = value.to_ints()
        if isinstance(value, Tensor):
            dense = value.to_dense() if value.layout != torch.strided else value
            return dense.detach().to("cpu", dtype)
        return torch.from_numpy(np.asarray(value)).to(dtype)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(
            f"the loss input {name!r} is not a tensor: {error}",
            hint="give a rectangular list, an array or a tensor of numbers",
        ) from error
