"""``blackbox_error``: wrong verdicts of the black box over stored scores of a real model.

Version 0 is SmolLM2-135M. Each further one is a step of sign descent on a policy gradient with
random advantages, of one learning rate, whose masters are dithered, rounded to bf16. The engines
are passes in bf16: with eager attention, with fused attention one sequence at a time, and vLLM's
if ``DELTAWIRE_VLLM_PYTHON`` names its Python. The noise that the black box allows is measured with
fused attention, 16 sequences together. Scores are stored by version and engine in ``--out``, so an
interrupted measurement goes on.

Each of 500 honest looks asks an engine that serves a version about that version, each of 500 wrong
ones one that serves another version, half of each with the other version given, in an order of
sequences that is drawn for each look. An error is *different* for an honest one, and *same* for a
wrong one; *cannot tell* is none. A wrong look without the other version is drawn from steps of at
least `STATED` only: smaller ones are within the noise, as docs/ATTEST.md states.

``blackbox_told_apart`` is the smallest step of which all looks with the other version given are
right, as the mean shift of a token's log-probability over the noise; ``blackbox_seen`` the smallest
that all looks without it call different.
"""

from __future__ import annotations

import os
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

from benchmarks.runner import ROOT
from benchmarks.training.keys import Measured, Options
from deltawire.launch.black_box.judging import BATCH, EndpointTests, Floats

MODEL = ROOT / "models/smollm2-135m"
RATES = (1e-6, 3e-6, 1e-5, 3e-5, 1e-4)
STATED = 1e-4
"""Not measured yet: chosen before the first measurement."""
SEQUENCES, LENGTH, TOGETHER = 96, 49, 16
LOOKS = 500
ERROR = 0.01
ENGINES = ("eager", "single", "vllm")
VLLM = "DELTAWIRE_VLLM_PYTHON"

Scores = dict[str, dict[str, Floats]]
"""By version: ``exact`` in float32, ``fused``, and each engine's, float64[sequences, tokens]."""


def measure(options: Options) -> Measured:
    """Scores what is not stored yet, and judges pairs."""
    keys = ("blackbox_error", "blackbox_told_apart", "blackbox_seen")
    if not (MODEL / "model.safetensors").is_file():
        return Measured(dict.fromkeys(keys), {"reason": f"{MODEL} is missing"})
    scores = stored_scores(Path(options.out or ROOT / "runs/bench-attest"))
    base = scores["0"]
    engines = [one for one in ENGINES if all(one in held for held in scores.values())]
    rng = np.random.default_rng(options.seed)
    verdicts: dict[str, Counter[str]] = {}
    errors = 0
    for wrong in (False, True):
        for number in range(LOOKS):
            rate = RATES[number % len(RATES)]
            given = number // len(RATES) % 2 == 0
            if wrong and not given and rate < STATED:
                rate = STATED
            verdict = drawn_look(scores, engines, f"{rate:g}", wrong=wrong, given=given, rng=rng)
            errors += verdict == ("same" if wrong else "different")
            kind = f"{'wrong' if wrong else 'honest'}, {rate:g}, {'given' if given else 'alone'}"
            verdicts.setdefault(kind, Counter())[verdict] += 1
    details: dict[str, Any] = {kind: dict(count) for kind, count in sorted(verdicts.items())}
    noise = float(np.abs(base["fused"] - base["exact"]).mean())
    shifts = {rate: float(np.abs(scores[f"{rate:g}"]["exact"] - base["exact"]).mean()) / noise
              for rate in RATES}  # fmt: skip
    details |= {"engines": engines, "noise, nats": noise}
    for engine in engines:
        gap = float(np.abs(base[engine] - base["exact"]).mean())
        details[f"gap of {engine}, noises"] = gap / noise
    told, seen = [], []
    for rate in RATES:
        name = f"{rate:g}"
        found = [
            Counter(
                drawn_look(scores, engines, name, wrong=True, given=given, rng=rng)
                for _ in range(LOOKS // 5)
            )
            for given in (True, False)
        ]
        details[f"shift at {name}, noises"] = shifts[rate]
        details[f"changed at {name}"] = float(scores[name]["changed"])
        details[f"100 wrong looks at {name}: given, alone"] = [dict(one) for one in found]
        told += [shifts[rate]] if found[0]["different"] == LOOKS // 5 else []
        seen += [shifts[rate]] if found[1]["different"] == LOOKS // 5 else []
    values = (errors / (2 * LOOKS), min(told, default=None), min(seen, default=None))
    return Measured(dict(zip(keys, values, strict=True)), details)


def drawn_look(
    scores: Scores,
    engines: list[str],
    name: str,
    *,
    wrong: bool,
    given: bool,
    rng: np.random.Generator,
) -> str:
    """Draws an engine, which of the versions 0 and ``name`` it serves, and the order of sequences;
    returns the verdict."""
    served, named = rng.permutation(["0", name])
    reference = named if wrong else served
    others = [served if wrong else named] if given else []
    engine = engines[int(rng.integers(len(engines)))]
    return look_at(scores, scores[served][engine], [reference, *others], rng)


def look_at(scores: Scores, served: Floats, names: list[str], rng: np.random.Generator) -> str:
    """Returns the verdict on an endpoint's scores, in a drawn order of sequences."""
    tests = EndpointTests(names, error=ERROR)
    reference = scores[names[0]]
    for number, row in enumerate(rng.permutation(SEQUENCES)):
        if number % BATCH == 0 and tests.finished:
            break
        exact = [scores[name]["exact"][row] for name in names]
        noise = np.abs(reference["fused"][row] - exact[0])
        tests.add(served[row], exact, noise)
    return tests.weights


def stored_scores(folder: Path) -> Scores:
    """Returns the scores of each version, from files or computed. `TOGETHER` sequences of a pass
    are stored once they are scored, so an interrupted measurement loses at most these, or a pass of
    vLLM."""
    folder.mkdir(parents=True, exist_ok=True)
    tokens = np.random.default_rng(0).integers(0, 49_152, (SEQUENCES, LENGTH))
    found: Scores = {}
    python = os.environ.get(VLLM, "")
    for rate in (0.0, *RATES):
        name = f"{rate:g}"
        paths = {one: folder / f"{one}-{name}.npy" for one in ("changed", *PASSES, "vllm")}
        wanted = [one for one in paths if python or one != "vllm"]
        missing = [one for one in wanted if not paths[one].is_file()]
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
        found[name] = {
            one: np.load(path, allow_pickle=False) for one, path in paths.items() if path.is_file()
        }
    return found


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


def rounded_pass(attention: str, together: int) -> Callable[[Any, NDArray[np.int64]], Floats]:
    """Returns a pass in bf16."""

    def run(model: Any, tokens: NDArray[np.int64]) -> Floats:
        model = model.bfloat16()
        model.set_attn_implementation(attention)
        with float32_products(model):
            return score(model, tokens, together)

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
    script = Path(__file__).with_name("vllm_scores.py")
    subprocess.run([python, str(script), str(place)], check=True, timeout=1800)  # noqa: S603
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
    "fused": rounded_pass("sdpa", TOGETHER),
    "eager": rounded_pass("eager", TOGETHER),
    "single": rounded_pass("sdpa", 1),
}
"""The passes of torch over each version, in this order: only the first finds float32 weights."""
