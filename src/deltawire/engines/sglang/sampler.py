"""Samples from an SGLang server over its endpoint of tokens, ``/generate``."""

from __future__ import annotations

from typing import Any

import msgspec

from deltawire.engines.base import Completion, Sampling
from deltawire.engines.following.engine_client import read_answer
from deltawire.engines.following.remote_sampler import Place, RemoteSampler, VersionSpan, checked


class _Reason(msgspec.Struct):
    type: str


class _About(msgspec.Struct):
    finish_reason: _Reason
    weight_versions: list[VersionSpan]
    output_token_logprobs: list[tuple[float, Place, Any]]
    routed_experts: str | None = None


class _SglangAnswer(msgspec.Struct):
    output_ids: list[Place]
    meta_info: _About


class SglangSampler(RemoteSampler):
    """See `RemoteSampler`. Seeds are not passed on: SGLang uses them only where all of its kernels
    are deterministic."""

    ENGINE = "SGLang"
    GENERATE = "/generate"
    ROUTES_ARE_FILES = False

    def body(self, prompt: list[int], sampling: Sampling) -> dict[str, Any]:
        """See `RemoteSampler.body`."""
        top_p, top_k, min_p = sampling.truncation
        parameters = {
            "max_new_tokens": sampling.max_tokens, "temperature": sampling.temperature,
            "top_p": top_p, "top_k": top_k or -1, "min_p": min_p, "stop_token_ids": self.stop,
        }  # fmt: skip
        body = {"input_ids": prompt, "sampling_params": parameters, "return_logprob": True}
        return body if self.experts is None else {**body, "return_routed_experts": True}

    def completion(
        self, data: bytes | bytearray, prompt: list[int], sampling: Sampling
    ) -> Completion:
        """See `RemoteSampler.completion`."""
        found = read_answer(data, _SglangAnswer, "a request", self.ENGINE)
        about = found.meta_info
        entries = about.output_token_logprobs
        completion = checked(
            self.ENGINE,
            found.output_ids,
            [logprob for logprob, _, _ in entries],
            [token for _, token, _ in entries],
            about.weight_versions,
            reason=about.finish_reason.type,
            sampling=sampling,
        )
        return self.with_routes(completion, about.routed_experts, prompt)
