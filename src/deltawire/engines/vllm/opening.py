"""Starts a vLLM server on a run's model and moves it to the newest version."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from deltawire.engines.base import EVERYTHING, EngineRequest, OpenEngine, Truncation
from deltawire.engines.cache_size import token_bytes
from deltawire.engines.following.environment import engine_python
from deltawire.engines.vllm.adapter_names import slot_flags
from deltawire.errors import InputError
from deltawire.wire.run import TensorSpec

BLOCK = 128
"""The most tokens that vLLM's cache is allocated by at a time; its choice on a CPU."""


def check_machine() -> None:
    """Raises `InputError` if no environment with vLLM is found."""
    engine_python("vllm")


def check_tensors(tensors: Sequence[TensorSpec]) -> None:
    """Raises `InputError` for the first tensor of an adapter that no slot of vLLM takes."""
    slot_flags(tensors)


def open_engine(request: EngineRequest) -> OpenEngine:
    """Starts the server and has it serve the newest version.

    Raises what `open_followed` raises, and `InputError` if there is no vLLM, or if it cannot serve
    the run's adapter.
    """
    from deltawire.engines.following.opening import open_followed, shape_of
    from deltawire.engines.vllm.sampler import VllmSampler
    from deltawire.engines.vllm.server import VllmServer

    mode = logprobs_mode(request.truncation, request.temperature)
    slot = slot_flags(request.run.tensors)
    model = shape_of(request)
    cache = cache_bytes(model.config, slots=request.slots, capacity=request.capacity)
    start = partial(VllmServer, cache_bytes=cache, logprobs_mode=mode, slot=slot)
    return open_followed(request, model, start, VllmSampler)


def logprobs_mode(truncation: Truncation, temperature: float) -> str:
    """Returns which of vLLM's log-probabilities are those of the full softmax at ``temperature``.

    vLLM reports a token's log-probability either after temperature and truncation (processed) or
    before both (raw). Raises `InputError` for a truncation at another temperature than 1, where
    neither is the one.
    """
    if truncation == EVERYTHING:
        return "processed_logprobs"
    if temperature != 1.0:
        raise InputError(
            f"vLLM does not report log-probabilities of the full softmax at temperature "
            f"{temperature:g} while it truncates",
            hint="set rollout.temperature = 1, leave out top_p, top_k and min_p, or set "
            'rollout.engine = "transformers"',
        )
    return "raw_logprobs"


def cache_bytes(config: Any, *, slots: int, capacity: int) -> int:
    """Returns enough for the keys and values of ``slots`` full sequences, in float32, plus 25 %."""
    tokens = slots * -(-capacity // BLOCK) * BLOCK
    needed = token_bytes(config, itemsize=4) * tokens
    return needed + needed // 4 + (16 << 20)
