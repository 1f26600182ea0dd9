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


class _SglangAnswer(msgspec.Struct):
    output_ids: list[Place]
    meta_info: _About


class SglangSampler(RemoteSampler):
    """See `RemoteSampler`. Seeds are not passed on: SGLang uses them only where all of its kernels
    are deterministic."""

    ENGINE = "SGLang"
    GENERATE = "/generate"

    def body(self, prompt: list[int], sampling: Sampling) -> dict[str, Any]:
        """See `RemoteSampler.body`."""
        top_p, top_k, min_p = sampling.truncation
        parameters = {
            "max_new_tokens": sampling.max_tokens, "temperature": sampling.temperature,
            "top_p": top_p, "top_k": top_k or -1, "min_p": min_p, "stop_token_ids": self.stop,
        }  # fmt: skip
        return {"input_ids": prompt, "sampling_params": parameters, "return_logprob": True}

    def completion(
        self, data: bytes | bytearray, prompt: list[int], sampling: Sampling
    ) -> Completion:
        """See `RemoteSampler.completion`."""
        del prompt
        found = read_answer(data, _SglangAnswer, "a request", self.ENGINE)
        entries = found.meta_info.output_token_logprobs
        return checked(
            self.ENGINE,
            found.output_ids,
            [logprob for logprob, _, _ in entries],
            [token for _, token, _ in entries],
            found.meta_info.weight_versions,
            reason=found.meta_info.finish_reason.type,
            sampling=sampling,
        )
