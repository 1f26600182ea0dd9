"""``adapter_swap_ms``: a version of an adapter in vLLM's slot, and vLLM's own way to load it.

vLLM runs in its own environment, in one process. A dense model serves a run's adapter from a slot;
each version changes a share of the adapter's elements, and is swapped in while sequences decode.
In turn vLLM loads the same adapter from a directory in PEFT's format with ``load_inplace``, as its
call ``load_lora_adapter`` does, into another slot; its files are in the page cache. The pause of a
swap is the time in which the engine does not step.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.runner import ROOT
from benchmarks.training.keys import Measured, Options
from deltawire.codec import Bits
from deltawire.engines.following.environment import engine_python
from deltawire.errors import BugError
from deltawire.store import open_bucket
from deltawire.sync import open_publisher, read_safetensors
from deltawire.sync.chain.objects import put_blob
from deltawire.sync.publish.safetensors_files import safetensors_table
from deltawire.wire.run import ModelFile, TensorSpec

RANK, CHANGED, WARM = 16, 0.1, 2
SEQUENCES, CONTEXT = 4, 1024
LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
SHAPE = {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 8192,
    "max_position_embeddings": CONTEXT,
}
SETTINGS = {
    "peft_type": "LORA",
    "r": RANK,
    "lora_alpha": 2 * RANK,
    "target_modules": list(LAYERS),
    "bias": "none",
    "task_type": "CAUSAL_LM",
}
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_CI_ENV": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
"""vLLM in one process, on one core: the other is for preparing."""


def measure(options: Options) -> Measured:
    """Measures in the environment that has vLLM; raises `InputError` if there is none."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", ""))))
    with tempfile.TemporaryDirectory(prefix="deltawire-bench-") as folder:
        result = Path(folder) / "result.json"
        arguments = [folder, str(options.repeats), str(options.seed), str(result)]
        done = subprocess.run(  # noqa: S603 - our own module
            [engine_python("vllm"), "-m", "benchmarks.adapters.slot_swap", *arguments],
            check=False,
            capture_output=True,
            text=True,
            env={**os.environ, **ENVIRONMENT, "PYTHONPATH": path},
        )
        if done.returncode:
            raise RuntimeError(
                f"vLLM's process ended with {done.returncode}: {done.stderr[-4000:]}"
            )
        found = json.loads(result.read_bytes())
    ours, theirs = median(found["swap_ms"]), median(found["load_inplace_ms"])
    return Measured(
        {"adapter_swap_ms": round(ours, 3), "adapter_swap_speedup": round(theirs / ours, 2)},
        {**found, "vllm_load_inplace_ms": round(theirs, 3)},
    )


class _Served:
    """A model with an adapter, its run, and the vLLM that serves it."""

    def __init__(self, folder: Path, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self.folder = folder
        _write_model(folder / "model", seed)
        base = safetensors_table(folder / "model")
        self.adapter = _draw(base, self._rng)
        specs = [
            *base,
            *(TensorSpec(name, one.shape, "BF16") for name, one in self.adapter.items()),
        ]
        tensors = dict(read_safetensors(folder / "model"))
        bucket = open_bucket(str(folder / "bucket"), create=True)
        stored = put_blob(bucket, json.dumps(SETTINGS).encode())
        file = ModelFile(name="adapter_config.json", blob=stored.hash, bytes=stored.bytes)
        self.publisher = open_publisher(
            bucket,
            {**tensors, **self.adapter},
            specs=specs,
            anchor_every=1 << 20,
            model_files=[file],
            frozen=set(tensors),
        )
        import vllm

        self.version = str(vllm.__version__)
        self._llm: Any = vllm.LLM(
            str(folder / "model"),
            skip_tokenizer_init=True,
            dtype="bfloat16",
            enforce_eager=True,
            max_model_len=CONTEXT,
            kv_cache_memory_bytes=256 << 20,
            max_num_seqs=SEQUENCES,
            seed=0,
            enable_lora=True,
            max_loras=2,
            max_lora_rank=RANK,
            lora_target_modules=list(LAYERS),
            additional_config={"deltawire": {"run": bucket.url, "follow": False}},
        )
        self._core: Any = self._llm.llm_engine.engine_core.engine_core
        self._requests = iter(range(1 << 30))
        self.parts: list[dict[str, float]] = []

    def swap_ms(self) -> tuple[float, int]:
        """Publishes a version and swaps it in; returns the engine's pause and the changes."""
        for name, bits in self.adapter.items():
            flat = bits.reshape(-1).copy()
            count = max(1, round(CHANGED * flat.size))
            where = self._rng.choice(flat.size, count, replace=False, shuffle=False)
            flat[where] ^= self._rng.integers(1, 4, count, dtype=flat.dtype)
            self.adapter[name] = flat.reshape(bits.shape)
        self.publisher.publish(self.adapter, partial=True)
        self.publisher.flush()
        wanted = self.publisher.version
        self._core.collective_rpc("deltawire_want", args=(wanted,))
        deadline = time.monotonic() + 120
        while self._core.get_weight_version() != str(wanted):
            if time.monotonic() > deadline:
                raise BugError(f"version {wanted} was not reached: {self._status()}")
            self._keep_busy()
            self._llm.llm_engine.step()
        status = self._status()
        swap = status["ranks"][0]["swap"]
        self.parts.append({name: swap[name] for name in ("agree_ms", "scatter_ms", "whole_ms")})
        return status["last_swap"]["engine_ms"], swap["changes"]

    def load_inplace_ms(self) -> float:
        """Has vLLM load the present adapter from its directory in place; returns the time."""
        from vllm.lora.request import LoRARequest

        place = self.folder / "adapter"
        _write_adapter(place, self.adapter)
        request = LoRARequest("own", 1, str(place), load_inplace=True)
        (place / "adapter_model.safetensors").read_bytes()  # The page cache has it.
        began = time.perf_counter()
        self._llm.llm_engine.add_lora(request)
        return (time.perf_counter() - began) * 1e3

    def check_equal(self) -> None:
        """Raises `BugError` unless both slots hold the same adapter, and the run's is attested."""
        if not self._core.collective_rpc("deltawire_attest")[0]["sound"]:
            raise BugError("the slot of the run's adapter does not hold the version")
        model = self._core.model_executor.driver_worker.worker.get_model()
        manager = model.lora_manager
        ours, own = (manager.lora_index_to_id.index(number) for number in (_run_adapter(), 1))
        for name, module in manager.modules.items():
            for kind in ("lora_a_stacked", "lora_b_stacked"):
                for stack in getattr(module, kind):
                    if not bool((stack[ours] == stack[own]).all()):
                        raise BugError(f"{name}: vLLM loaded another adapter than the run's")

    def close(self) -> None:
        """Ends the engine."""
        self.publisher.close()
        self._llm.llm_engine.engine_core.shutdown()

    def _keep_busy(self) -> None:
        from vllm import SamplingParams

        engine = self._llm.llm_engine
        wanted = SamplingParams(
            temperature=0.0, max_tokens=CONTEXT - 8, ignore_eos=True, detokenize=False
        )
        while engine.get_num_unfinished_requests() < SEQUENCES:
            prompt = {"prompt_token_ids": [1, 2, 3]}
            engine.add_request(f"bench-{next(self._requests)}", prompt, wanted)

    def _status(self) -> dict[str, Any]:
        answer: dict[str, Any] = self._core.collective_rpc("deltawire_status")[0]
        return answer


def _run_adapter() -> int:
    from deltawire.engines.vllm.adapter_slot import ADAPTER_ID

    return ADAPTER_ID


def _write_model(folder: Path, seed: int) -> None:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    make: Any = Qwen3Config
    nothing = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    config = make(**SHAPE, **nothing, tie_word_embeddings=True)
    torch.manual_seed(seed)
    model: Any = Qwen3ForCausalLM(config)
    model = model.to(torch.bfloat16)
    model.save_pretrained(folder)


def _draw(specs: list[TensorSpec], rng: np.random.Generator) -> dict[str, Bits]:
    """Returns a bf16 adapter of every linear layer, as PEFT names its factors."""
    found: dict[str, Bits] = {}
    for spec in specs:
        layer = spec.name.removesuffix(".weight")
        if layer.rpartition(".")[2] not in LAYERS:
            continue
        for factor, shape in (("A", (RANK, spec.shape[1])), ("B", (spec.shape[0], RANK))):
            drawn = (rng.standard_normal(shape) * 0.05).astype(np.float32)
            bits = (drawn.view(np.uint32) >> 16).astype(np.uint16)
            found[f"base_model.model.{layer}.lora_{factor}.weight"] = bits
    return found


def _write_adapter(folder: Path, adapter: Mapping[str, Bits]) -> None:
    import torch
    from safetensors.torch import save_file

    folder.mkdir(exist_ok=True)
    tensors = {
        name: torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)
        for name, bits in adapter.items()
    }
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(SETTINGS))


def main(folder: str, repeats: str, seed: str, result: str) -> None:
    """Measures in this process, and writes the figures to ``result``."""
    served = _Served(Path(folder), int(seed))
    swaps, loads, changes = [], [], 0
    for _ in range(int(repeats) + WARM):
        pause, changes = served.swap_ms()
        swaps.append(pause)
        loads.append(served.load_inplace_ms())
    served.check_equal()
    elements = sum(bits.size for bits in served.adapter.values())
    found = {
        "swap_ms": swaps[WARM:],
        "swap_parts_ms": served.parts[WARM:],
        "load_inplace_ms": loads[WARM:],
        "adapter_elements": elements,
        "changed_elements": changes,
        "rank": RANK,
        "vllm": served.version,
    }
    served.close()
    Path(result).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
