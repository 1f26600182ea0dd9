"""An engine under test, and how to wait for it."""

from __future__ import annotations

import contextlib
import json
import time
from dataclasses import dataclass

from shapes import LAYERS


@dataclass(frozen=True)
class Answer:
    """The result of one request, with log-probabilities kept to the bit."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    spans: tuple[tuple[int, int, int], ...]
    cached: int


class Engine:
    """vLLM's offline engine on a model directory, following ``run`` if there is one."""

    def __init__(
        self, model, *, ranks=1, run=None, stages=1, experts=False, adapter=False,
        dtype="bfloat16", **settings,
    ):  # fmt: skip
        from vllm import LLM

        self.adapter = None
        self._loaded = 0
        slots = {"enable_lora": True, "max_lora_rank": 8, "lora_target_modules": list(LAYERS)}
        slots |= adapter if isinstance(adapter, dict) else {}
        told = {} if run is None else {"run": str(run), **settings}
        self.llm = LLM(
            str(model),
            skip_tokenizer_init=True,
            dtype=dtype,
            enforce_eager=True,
            max_logprobs=-1,
            tensor_parallel_size=ranks // stages,
            pipeline_parallel_size=stages,
            enable_expert_parallel=experts,
            max_model_len=256,
            kv_cache_memory_bytes=64 << 20,
            block_size=_block_size(model),
            max_num_seqs=16,
            seed=0,
            disable_log_stats=True,
            worker_extension_cls="planting.PlantingWorker",
            additional_config={"deltawire": told},
            **(slots if adapter else {}),
        )
        if adapter and run is None:
            self.load_adapter(model / "adapter")
        if stages > 1:
            self.call("make_room_between_stages")

    def call(self, method, *args):
        """``collective_rpc``: a dictionary of each rank, or of the engine for its own methods."""
        return self.llm.collective_rpc(method, args=args)

    def plant(self, fault, *args):
        """A fault of `planting`: what each rank says of it."""
        return self.call(fault, *args)

    def attest(self):
        """Have the live bits of all ranks checked."""
        return self.call("deltawire_attest")[0]

    @property
    def caches(self):
        """True if vLLM caches prefixes for this model here."""
        return self.llm.llm_engine.vllm_config.cache_config.enable_prefix_caching

    def load_adapter(self, folder):
        """Have vLLM load an adapter in its own way, and answer with it."""
        from vllm.lora.request import LoRARequest

        self.adapter = LoRARequest("own", 1, str(folder), load_inplace=True)
        self.llm.llm_engine.add_lora(self.adapter)
        self.adapter = LoRARequest("own", 1, str(folder))

    def status(self):
        """The conductor's own word."""
        return self.call("deltawire_status")[0]

    def generate(self, prompts, *, tokens=24, **sampling):
        """Greedy answers to prompts of token ids."""
        from vllm import SamplingParams

        wanted = SamplingParams(
            temperature=0.0, max_tokens=tokens, logprobs=0, detokenize=False, **sampling
        )
        found = self.llm.generate(
            [{"prompt_token_ids": list(prompt)} for prompt in prompts],
            wanted,
            use_tqdm=False,
            lora_request=self.adapter,
        )
        return [_answer(output) for output in found]

    def step_under_load(self, question, *, running=4, tokens=16):
        """Make one step with so many requests of the same prompt; the answers that it ended, by
        the number of their request."""
        from vllm import SamplingParams

        engine = self.llm.llm_engine
        wanted = SamplingParams(
            temperature=0.0, max_tokens=tokens, logprobs=0, ignore_eos=True, detokenize=False
        )
        while engine.get_num_unfinished_requests() < running:
            prompt = {"prompt_token_ids": list(question)}
            engine.add_request(f"load-{self._loaded}", prompt, wanted)
            self._loaded += 1
        return self._step()

    def finish_load(self):
        """Go on until no request runs; the answers by the number of their request."""
        found = {}
        while self.llm.llm_engine.has_unfinished_requests():
            found |= self._step()
        return found

    def _step(self):
        outputs = self.llm.llm_engine.step()
        return {
            int(output.request_id.split("-")[1]): _answer(output)
            for output in outputs
            if output.finished
        }

    def reach(self, version, *, within_s=60.0):
        """Let the engine go on until it serves ``version``; its status then."""
        deadline = time.monotonic() + within_s
        while True:
            status = self.status()
            if status["version"] == version and status["phase"] == "serving":
                return status
            if time.monotonic() > deadline:
                raise AssertionError(f"version {version} was not reached: {status}")
            self.generate([[1, 2, 3]], tokens=2)

    def fail(self, *, within_s=60.0):
        """Let the engine go on until something went wrong; what it says of it."""
        deadline = time.monotonic() + within_s
        while not (failure := self.status()["failure"]):
            assert time.monotonic() < deadline, f"nothing went wrong: {self.status()}"
            self.generate([[1, 2, 3]], tokens=2)
        return failure

    def abandon(self):
        """Let go of what has died."""
        with contextlib.suppress(Exception):
            self.llm.llm_engine.engine_core.shutdown()
        del self.llm

    def close(self):
        """Let go of it."""
        self.llm.llm_engine.engine_core.shutdown()
        del self.llm


def _block_size(model):
    """The dtypes that this model's attention takes on a CPU."""
    latent = "kv_lora_rank" in json.loads((model / "config.json").read_text())
    return 16 if latent else 32


def _answer(output):
    given = output.outputs[0]
    spans = tuple((int(s.version), s.start, s.end) for s in given.weight_versions or ()
                  if s.version != "default")  # fmt: skip
    logprobs = tuple(
        step[token].logprob for step, token in zip(given.logprobs, given.token_ids, strict=True)
    )
    return Answer(tuple(given.token_ids), logprobs, spans, output.num_cached_tokens or 0)
