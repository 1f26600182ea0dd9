"""Measures a swap in vLLM, which runs in this process with a model built from its configuration.

One run measures the pause of a swap, in turn with the same number of changes in a model twice as
large; vLLM's time to reload the same model from the page cache, and to load the same changes with
its patch loader; and the throughput while a step is prepared.
"""

from __future__ import annotations

import gc
import importlib.util
import os
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import msgspec
import numpy as np

from benchmarks.runner import Machine, this_machine
from deltawire.errors import BugError, InputError
from deltawire.store import Bucket, open_bucket
from deltawire.sync import Publisher, open_publisher, read_safetensors
from deltawire.sync.follow.mirror import Bits
from deltawire.sync.publish.safetensors_files import safetensors_table

SEQUENCES = 4
CONTEXT = 2048
SEED = 7


class SwapFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The figures that docs/BENCHMARKS.md defines by key. Times are medians over ``repeats``.

    ``pause_ms`` is how long the engine does not step because of a swap; ``token_gap_ms`` is from
    the last token before it to the first after it, compared with ``usual_gap_ms`` between two other
    tokens.
    """

    pause_ms: float
    token_gap_ms: float
    usual_gap_ms: float
    reload_ms: float
    reload_call_ms: float
    patch_loader_ms: float
    pause_speedup_vs_reload: float
    pause_speedup_vs_reload_call: float
    pause_speedup_vs_patch_loader: float
    pause_doubled_ms: float
    pause_growth_model_doubled: float
    swap_allocated_bytes: int
    staged_bytes: int
    throughput_lost: float
    prepare_ms: float
    parameters: int
    parameters_doubled: int
    changes: int
    changed: float
    repeats: int
    threads: int
    vllm: str
    machine: Machine


def bench_swap(
    *,
    parameters: int = 100_000_000,
    changed: float = 0.01,
    repeats: int = 7,
    tell: Callable[[str], None] = lambda _: None,
) -> SwapFigures:
    """Measures. Raises `InputError` if vLLM is not installed here."""
    if importlib.util.find_spec("vllm") is None:
        raise InputError(
            "vLLM is not installed here",
            hint="run `make engines`, then .venv-vllm/bin/deltawire bench swap",
        )
    if parameters < 10_000_000 or not 0 < changed < 0.5 or repeats < 1:
        raise InputError("at least 10 million parameters, a share below a half, one repeat")
    _set_environment()
    with tempfile.TemporaryDirectory(prefix="deltawire-bench-") as folder:
        once = _Subject(Path(folder) / "once", parameters, tell)
        twice = _Subject(Path(folder) / "twice", 2 * parameters, tell)
        changes = int(once.elements * changed)
        swaps, doubled = [], []
        for _ in range(repeats + 1):
            swaps.append(once.swap(changes))
            doubled.append(twice.swap(changes).pause_ms)
        del swaps[0], doubled[0]  # Warm-up.
        pause_ms = median(swap.pause_ms for swap in swaps)
        tell(f"swaps of {changes} changes: {pause_ms:.1f} ms, of two models {median(doubled):.1f}")
        twice.drain()
        allocated = once.allocated(changes)
        reload_ms, reload_call_ms, patch_ms = once.rivals(changes, repeats)
        lost = once.throughput_lost(changes)
        prepare_ms = once.last["prepare_ms"]
        staged = int(once.last["staged_bytes"])
        once.close()  # Also releases the state that all engines of this process share.
        twice.close()
        return SwapFigures(
            pause_ms=pause_ms,
            token_gap_ms=median(swap.gap_ms for swap in swaps),
            usual_gap_ms=median(gap for swap in swaps for gap in swap.usual_ms),
            reload_ms=reload_ms,
            reload_call_ms=reload_call_ms,
            patch_loader_ms=patch_ms,
            pause_speedup_vs_reload=reload_ms / pause_ms,
            pause_speedup_vs_reload_call=reload_call_ms / pause_ms,
            pause_speedup_vs_patch_loader=patch_ms / pause_ms,
            pause_doubled_ms=median(doubled),
            pause_growth_model_doubled=median(doubled) / pause_ms - 1,
            swap_allocated_bytes=allocated,
            staged_bytes=staged,
            throughput_lost=lost,
            prepare_ms=prepare_ms,
            parameters=once.elements,
            parameters_doubled=twice.elements,
            changes=changes,
            changed=changed,
            repeats=repeats,
            threads=1,
            vllm=once.vllm_version,
            machine=this_machine(),
        )


def _set_environment() -> None:
    """vLLM in this process, on one core: the other is for preparing. Read when it is imported."""
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_CPU_CI_ENV="1",
        TORCHDYNAMO_DISABLE="1",
        HF_HUB_OFFLINE="1",
        VLLM_CPU_OMP_THREADS_BIND="nobind",
        OMP_NUM_THREADS="1",
    )
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")


class _Swap(NamedTuple):
    """Time one swap, in ms: the pause of the engine, the gap between tokens across it, and the
    usual gap."""

    pause_ms: float
    gap_ms: float
    usual_ms: list[float]


class _Subject:
    """One model, its run, and the engine that serves it."""

    def __init__(self, folder: Path, parameters: int, tell: Callable[[str], None]) -> None:
        self._model_folder = folder / "model"
        tell(f"making a model of {parameters / 1e6:.0f} million parameters")
        _build(self._model_folder, parameters)
        self.specs = safetensors_table(self._model_folder)
        self.tensors = {n: np.array(b) for n, b in read_safetensors(self._model_folder).items()}
        self.elements = sum(bits.size for bits in self.tensors.values())
        self._rng = np.random.default_rng(SEED)
        self.bucket: Bucket = open_bucket(str(folder / "bucket"), create=True)
        self.publisher: Publisher = open_publisher(
            self.bucket, self.tensors, specs=self.specs, anchor_every=1 << 20
        )
        tell("starting vLLM")
        import vllm

        self.vllm_version = str(vllm.__version__)
        self._llm: Any = vllm.LLM(
            str(self._model_folder),
            skip_tokenizer_init=True,
            dtype="bfloat16",
            enforce_eager=True,
            max_model_len=CONTEXT,
            kv_cache_memory_bytes=512 << 20,
            max_num_seqs=SEQUENCES,
            seed=0,
            additional_config={"deltawire": {"run": self.bucket.url, "follow": False}},
        )
        self._core: Any = self._llm.llm_engine.engine_core.engine_core
        self._numbers = iter(range(1 << 30))
        self.last: dict[str, Any] = {}

    def publish(self, changes: int) -> int:
        """Makes the next version, with this many elements changed at random places."""
        share = changes / self.elements
        changed: dict[str, Bits] = {}
        for name, bits in self.tensors.items():
            flat = bits.reshape(-1).copy()
            count = max(1, round(share * flat.size))
            where = self._rng.choice(flat.size, count, replace=False, shuffle=False)
            flat[where] ^= self._rng.integers(1, 4, count, dtype=flat.dtype)
            changed[name] = flat.reshape(bits.shape)
        self.tensors = changed
        self.publisher.publish(changed)
        self.publisher.flush()
        return self.publisher.version

    def swap(self, changes: int) -> _Swap:
        """Swaps while sequences run."""
        version = self.publish(changes)
        self._keep_busy()
        usual = [self._step_ms() for _ in range(8)][2:]
        self._status("deltawire_want", version)
        deadline = time.perf_counter() + 300
        while True:
            began = time.perf_counter()
            self._llm.llm_engine.step()
            ended = time.perf_counter()
            if self._core.get_weight_version() == str(version):
                break
            if ended > deadline:
                raise BugError(f"version {version} was not reached: {self._status()}")
            self._keep_busy()
        status = self._status()
        self.last = status["ranks"][0]["swap"]
        return _Swap(status["last_swap"]["engine_ms"], (ended - began) * 1e3, usual)

    def allocated(self, changes: int) -> int:
        """Returns the peak allocation of a swap, as counted by Python and NumPy."""
        version = self.publish(changes)
        self._prepare(version)
        gc.collect()
        tracemalloc.start()
        tracemalloc.reset_peak()
        held = tracemalloc.get_traced_memory()[0]
        self._finish(version)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return max(0, peak - held)

    def rivals(self, changes: int, repeats: int) -> tuple[float, float, float]:
        """Times vLLM's loaders on the same live weights, in turn: all weights again from the page
        cache, handed to the model and by its call for that, and the same number of changes by its
        patch loader. Milliseconds."""
        import torch
        from safetensors.torch import load_file
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.checkpoint_weight_patch import (
            CheckpointWeightPatch,
            load_checkpoint_weight_patches,
        )

        worker = self._core.model_executor.driver_worker.worker
        model = worker.get_model()
        files = sorted(self._model_folder.glob("*.safetensors"))
        reloads, calls, patches_ms = [], [], []
        self.drain()
        for _ in range(min(repeats, 3) + 1):
            began = time.perf_counter()
            self._llm.collective_rpc("reload_weights")
            calls.append((time.perf_counter() - began) * 1e3)
        with set_current_vllm_config(worker.vllm_config), torch.no_grad():
            for _ in range(min(repeats, 3) + 1):
                began = time.perf_counter()
                for file in files:
                    model.load_weights(iter(load_file(file).items()))
                reloads.append((time.perf_counter() - began) * 1e3)
                patches = list(self._patches(changes / self.elements, CheckpointWeightPatch))
                began = time.perf_counter()
                load_checkpoint_weight_patches(model, patches)
                patches_ms.append((time.perf_counter() - began) * 1e3)
        for answer in self._status("deltawire_attest")["ranks"]:
            if answer["sound"]:
                raise BugError("loading other weights was not noticed")
        if not self._status("deltawire_attest")["sound"]:
            raise BugError("the weights were not repaired")
        return median(reloads[1:]), median(calls[1:]), median(patches_ms[1:])

    def _patches(self, share: float, make: Any) -> Iterator[Any]:
        import torch

        for spec in self.specs:
            count = max(1, round(share * spec.count))
            where = np.sort(self._rng.choice(spec.count, count, replace=False, shuffle=False))
            bits = self.tensors[spec.name].reshape(-1)[where]
            values = torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)
            yield make(spec.name, spec.shape, torch.bfloat16, values, torch.from_numpy(where))

    def throughput_lost(self, changes: int, *, rounds: int = 3, steps: int = 40) -> float:
        """The share of steps per second that is lost while a version is prepared.

        Alternates with as many steps without preparation.
        """
        from deltawire.engines.vllm.rank_calls import rank_of

        rank = rank_of(self._core.model_executor.driver_worker.worker.get_model())
        quiet, busy = [], []
        version = self.publish(changes)
        for _ in range(rounds):
            self._keep_busy()
            began = time.perf_counter()
            for _ in range(steps):
                self._step_ms()
            quiet.append((time.perf_counter() - began) / steps)
            self._keep_busy()
            spent, done = 0.0, 0
            while done < steps:
                rank.wait()
                rank.discard()
                rank.prepare(version)
                while rank.status()["preparing"] and done < steps:
                    spent += self._step_ms() / 1e3
                    done += 1
            busy.append(spent / steps)
        rank.wait()
        self._prepare(version)
        self._finish(version)
        return 1 - median(quiet) / median(busy)

    def _prepare(self, version: int) -> None:
        self._status("deltawire_want", version)
        deadline = time.perf_counter() + 300
        while self._status()["ranks"][0]["prepared"] != version:
            if time.perf_counter() > deadline:
                raise BugError(f"version {version} was not prepared: {self._status()}")
            self._llm.llm_engine.step()
            time.sleep(0.005)

    def _finish(self, version: int) -> None:
        deadline = time.perf_counter() + 60
        while self._core.get_weight_version() != str(version):
            if time.perf_counter() > deadline:
                raise BugError(f"version {version} was not reached: {self._status()}")
            self._llm.llm_engine.step()

    def _keep_busy(self) -> None:
        """Keeps sequences running; start new ones if none is left."""
        from vllm import SamplingParams

        engine = self._llm.llm_engine
        while engine.get_num_unfinished_requests() < SEQUENCES:
            engine.add_request(
                f"bench-{next(self._numbers)}",
                {"prompt_token_ids": [1, 2, 3]},
                SamplingParams(
                    temperature=0.0, max_tokens=CONTEXT - 8, ignore_eos=True, detokenize=False
                ),
            )

    def _step_ms(self) -> float:
        began = time.perf_counter()
        self._llm.llm_engine.step()
        return (time.perf_counter() - began) * 1e3

    def drain(self) -> None:
        """Ends all sequences."""
        engine = self._llm.llm_engine
        engine.abort_request(list(engine.output_processor.request_states), internal=True)
        while engine.has_unfinished_requests():
            engine.step()

    def _status(self, method: str = "deltawire_status", *arguments: Any) -> dict[str, Any]:
        answer: dict[str, Any] = self._core.collective_rpc(method, args=arguments)[0]
        return answer

    def close(self) -> None:
        """Releases the memory."""
        self.drain()
        self.publisher.close()
        self._llm.llm_engine.engine_core.shutdown()
        del self._llm, self._core
        self.tensors = {}
        gc.collect()


def _build(folder: Path, parameters: int) -> None:
    """A Qwen3 of about this many parameters, twelve layers deep, with random weights in bf16."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    layers, vocabulary = 12, 8192
    # 12 h² of attention and 9 h² of a feed-forward three times as wide, a layer.
    hidden = 64 * max(1, round((parameters / (layers * 13)) ** 0.5 / 64))
    config: Any = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64,
        head_dim=64,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(SEED)
    with _default_dtype(torch, torch.bfloat16):
        model: Any = Qwen3ForCausalLM(config)
    model.save_pretrained(folder)


@contextmanager
def _default_dtype(torch: Any, dtype: Any) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
