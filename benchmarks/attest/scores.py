"""Scores of a real model's versions by several engines, computed once and stored in files.

Version 0 is SmolLM2-135M. Each further one is a step of sign descent on a policy gradient with
random advantages, of one learning rate, whose masters are dithered, rounded to bf16. The engines
are passes in bf16: with eager attention, with fused attention and torch's own kernels for bf16,
and vLLM's if ``DELTAWIRE_VLLM_PYTHON`` names its Python. The names of the files contain a hash of
what the scores depend on: the model, kernels, threads, and this module's text.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

from benchmarks.runner import ROOT
from deltawire.launch.black_box.judging import Floats
from deltawire.train.arithmetic import arithmetic_of

MODEL = ROOT / "models/smollm2-135m"
SEQUENCES, LENGTH, TOGETHER = 96, 49, 16
VLLM = "DELTAWIRE_VLLM_PYTHON"
VLLM_SCRIPT = Path(__file__).with_name("vllm_scores.py")
RELEASES = """
from importlib.metadata import packages_distributions, version
print(*(f"{one} {version(one)}" for one in [*packages_distributions()["vllm"], "torch"]))
"""  # vLLM's build for CPUs is a distribution of another name.

Scores = dict[str, dict[str, Floats]]
"""By version: ``exact`` in float32, ``fused``, and each engine's, float64[sequences, tokens]."""


def stored_scores(folder: Path, rates: Sequence[float]) -> Scores:
    """Returns the scores of version 0 and of a step at each rate, from files or computed.

    `TOGETHER` sequences of a pass are stored once they are scored, so an interrupted measurement
    loses at most these, or a pass of vLLM.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokens = np.random.default_rng(0).integers(0, 49_152, (SEQUENCES, LENGTH))
    found: Scores = {}
    python = os.environ.get(VLLM, "")
    here = torch_key()
    of_key = dict.fromkeys(("changed", *PASSES), here)
    if python:
        of_key["vllm"] = vllm_key(here, python)
    for rate in (0.0, *rates):
        name = f"{rate:g}"
        paths = {one: folder / f"{one}-{name}-{key}.npy" for one, key in of_key.items()}
        missing = [one for one, path in paths.items() if not path.is_file()]
        if missing:
            model, changed = version(rate)
            for one in missing:
                if one == "changed":
                    made: Floats = np.array(changed)
                elif one == "vllm":
                    made = scores_of_vllm(model.bfloat16(), tokens, folder, python)
                else:
                    made = in_parts(paths[one], partial(PASSES[one], model), tokens)
                store(paths[one], made)
            del model
        found[name] = {one: np.load(path, allow_pickle=False) for one, path in paths.items()}
    return found


def torch_key() -> str:
    """Returns a hash of what the scores of torch's passes depend on, 12 hexadecimal digits."""
    model = hashlib.sha256()
    for path in (MODEL / "config.json", MODEL / "model.safetensors"):
        model.update(path.read_bytes())
    return _hashed(
        model.hexdigest(),
        arithmetic_of(torch.device("cpu")),
        f"{torch.get_num_threads()} threads, transformers {transformers.__version__}",
        Path(__file__).read_text(encoding="utf-8"),
    )


def vllm_key(key: str, python: str) -> str:
    """Returns the same for vLLM's scores of versions that are made under ``key``."""
    asked = subprocess.run(  # noqa: S603 - the user's own Python
        [python, "-c", RELEASES], check=True, stdout=subprocess.PIPE, text=True, timeout=60
    )
    return _hashed(key, asked.stdout, VLLM_SCRIPT.read_text(encoding="utf-8"))


def _hashed(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]


def in_parts(
    path: Path, run: Callable[[NDArray[np.int64]], Floats], tokens: NDArray[np.int64]
) -> Floats:
    """Scores some sequences after the others, next to the file of all of them."""
    parts = []
    for first in range(0, len(tokens), TOGETHER):
        part = path.with_suffix(f".{first}.npy")
        if not part.is_file():
            store(part, run(tokens[first : first + TOGETHER]))
        parts.append(part)
    return np.concatenate([np.load(part, allow_pickle=False) for part in parts])


def version(rate: float) -> tuple[Any, float]:
    """Returns the float32 model after a step of one learning rate, and the share of its weights
    that changed."""
    model: Any = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    return model, stepped(model, gradient_signs(), rate) if rate else 0.0


@cache
def gradient_signs() -> dict[str, torch.Tensor]:
    """Returns the direction of all steps, int8 by name."""
    return policy_gradient(AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32))


def store(path: Path, array: Floats) -> None:
    """Writes a file of an array that is whole once it is there."""
    unfinished = path.with_suffix(".part.npy")
    np.save(unfinished, array)
    unfinished.replace(path)


def own_pass(attention: str) -> Callable[[Any, NDArray[np.int64]], Floats]:
    """Returns a pass in bf16 with torch's own kernels."""

    def run(model: Any, tokens: NDArray[np.int64]) -> Floats:
        model = model.bfloat16()
        model.set_attn_implementation(attention)
        return score(model, tokens, TOGETHER)

    return run


def rounded_pass(attention: str) -> Callable[[Any, NDArray[np.int64]], Floats]:
    """Returns a pass in bf16 whose products are rounded once.

    How many sequences a pass takes together makes no difference to it: scores of one after the
    other had the same bits.
    """

    def run(model: Any, tokens: NDArray[np.int64]) -> Floats:
        model = model.bfloat16()
        model.set_attn_implementation(attention)
        with float32_products(model):
            return score(model, tokens, TOGETHER)

    return run


@contextmanager
def float32_products(model: Any) -> Iterator[None]:
    """Has the linear layers of a model in bf16 multiply in float32 and round each result once.

    That is what kernels for bf16 compute, which add up in float32. Torch's own on a processor
    without bf16 arithmetic take four times as long; both differ from the product in float64 in as
    few elements (`tests/unit/benchmarks/test_bench_blackbox.py`).
    """
    linears = [one for one in model.modules() if isinstance(one, torch.nn.Linear)]
    for one in linears:
        one.__dict__["forward"] = partial(_rounded_product, one.weight.float(), one.bias)
    try:
        yield
    finally:
        for one in linears:
            del one.__dict__["forward"]


def _rounded_product(
    weight: torch.Tensor, bias: torch.Tensor | None, given: torch.Tensor
) -> torch.Tensor:
    wide = None if bias is None else bias.float()
    return torch.nn.functional.linear(given.float(), weight, wide).bfloat16()


def scores_of_vllm(
    model: Any, tokens: NDArray[np.int64], folder: Path, python: str
) -> Floats:  # pragma: no cover - needs vLLM's environment
    """Scores with vLLM, in its environment, on a copy of the weights that is removed again."""
    place = folder / "served"
    model.save_pretrained(place)
    np.save(place / "tokens.npy", tokens)
    command = [python, str(VLLM_SCRIPT), str(place)]
    subprocess.run(command, check=True, timeout=1800)  # noqa: S603 - the user's own Python
    found: Floats = np.load(place / "scores.npy", allow_pickle=False)
    for path in place.iterdir():
        path.unlink()
    place.rmdir()
    return found


def policy_gradient(model: Any) -> dict[str, torch.Tensor]:
    """Returns the signs of a gradient of log-probabilities times random advantages."""
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(0, model.config.vocab_size, (16, 33), generator=generator)
    advantages = torch.randn(16, generator=generator)
    logits = model(input_ids=tokens[:, :-1]).logits.log_softmax(-1)
    chosen = logits.gather(2, tokens[:, 1:, None])[..., 0]
    (chosen.mean(1) * advantages).mean().backward()
    return {name: held.grad.sign().to(torch.int8) for name, held in model.named_parameters()}


@torch.no_grad()
def stepped(model: Any, gradient: dict[str, torch.Tensor], rate: float) -> float:
    """Moves float32 weights that are bf16 by a step and rounds them to bf16 as dithered masters do;
    returns the share of weights that changed."""
    generator = torch.Generator().manual_seed(11)
    changed, count = 0, 0
    for name, held in model.named_parameters():
        moved = (held + rate * gradient[name]).contiguous().view(torch.int32)
        dither = torch.randint(0, 1 << 16, moved.shape, generator=generator, dtype=torch.int32)
        rounded = ((moved + dither) & -65536).view(torch.float32)
        changed += int((rounded != held).sum())
        count += held.numel()
        held.copy_(rounded)
    return changed / count


@torch.no_grad()
def score(model: Any, tokens: NDArray[np.int64], together: int) -> Floats:
    """Returns the log-probability of each token after the first, float64[sequences, tokens]."""
    found = []
    for first in range(0, len(tokens), together):
        part = torch.from_numpy(tokens[first : first + together])
        logits = model(input_ids=part[:, :-1]).logits.float().log_softmax(-1)
        found.append(logits.gather(2, part[:, 1:, None])[..., 0].double().numpy())
    return np.concatenate(found)


PASSES: dict[str, Callable[[Any, NDArray[np.int64]], Floats]] = {
    "exact": lambda model, tokens: score(model, tokens, TOGETHER),
    "fused": rounded_pass("sdpa"),
    "eager": rounded_pass("eager"),
    "torch": own_pass("sdpa"),
}
"""The passes of torch over each version, in this order: only the first finds float32 weights."""
