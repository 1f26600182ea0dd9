"""Samples from a vLLM server over its endpoint of tokens, ``/inference/v1/generate``."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from deltawire.engines.base import Completion, Sampling
from deltawire.engines.following.engine_client import read_answer
from deltawire.engines.following.remote_sampler import Place, RemoteSampler, VersionSpan, checked


class _Logprob(msgspec.Struct):
    token_id: int
    logprob: float


class _Logprobs(msgspec.Struct):
    content: list[_Logprob]


class _Generation(msgspec.Struct):
    token_ids: list[Place]
    logprobs: _Logprobs
    weight_versions: list[VersionSpan]
    finish_reason: str
    routed_experts: str | None = None


class _Generated(msgspec.Struct):
    choices: Annotated[list[_Generation], Meta(min_length=1, max_length=1)]


class VllmSampler(RemoteSampler):
    """See `RemoteSampler`."""

    ENGINE = "vLLM"
    GENERATE = "/inference/v1/generate"

    def body(self, prompt: list[int], sampling: Sampling) -> dict[str, Any]:
        """See `RemoteSampler.body`."""
        parameters = {
            "max_tokens": sampling.max_tokens, "temperature": sampling.temperature,
            **sampling.truncation._asdict(), "logprobs": 0, "detokenize": False,
            "stop_token_ids": self.stop,
        }  # fmt: skip
        if sampling.seed is not None:
            parameters["seed"] = sampling.seed
        return {"token_ids": prompt, "sampling_params": parameters}

    def completion(
        self, data: bytes | bytearray, prompt: list[int], sampling: Sampling
    ) -> Completion:
        """See `RemoteSampler.completion`."""
        choice = read_answer(data, _Generated, "a request", self.ENGINE).choices[0]
        entries = choice.logprobs.content
        completion = checked(
            self.ENGINE,
            choice.token_ids,
            [entry.logprob for entry in entries],
            [entry.token_id for entry in entries],
            choice.weight_versions,
            reason=choice.finish_reason,
            sampling=sampling,
        )
        return self.with_routes(completion, choice.routed_experts, prompt)
