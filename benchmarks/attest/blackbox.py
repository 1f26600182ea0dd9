"""``blackbox_error``: wrong verdicts of the black box over stored scores of a real model.

Version 0 is SmolLM2-135M. Each further one is a step of sign descent on a policy gradient with
random advantages, of one learning rate, whose masters are dithered, rounded to bf16. An endpoint
is a pass in bf16 with eager attention; the noise that the black box allows is measured with torch's
fused attention. Scores are stored by version in ``--out``, so an interrupted measurement goes on.

Each of 500 honest looks asks an endpoint of a version about that version, each of 500 wrong ones an
endpoint of another version, half of each with the other version given, in an order of sequences
that is drawn for each look. An error is *different* for an honest one, and *same* for a wrong one;
*cannot tell* is none. A wrong look without the other version is drawn from steps of at least
`STATED` only: smaller ones are within the noise, as docs/ATTEST.md states.
"""

from __future__ import annotations

from collections import Counter
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
SEQUENCES, LENGTH, TOGETHER = 96, 49, 16
LOOKS = 500
ERROR = 0.01


def measure(options: Options) -> Measured:
    """Scores what is not stored yet, and judges pairs."""
    if not (MODEL / "model.safetensors").is_file():
        return Measured({"blackbox_error": None}, {"reason": f"{MODEL} is missing"})
    scores = stored_scores(Path(options.out or ROOT / "runs/bench-attest"))
    rng = np.random.default_rng(options.seed)
    verdicts: dict[str, Counter[str]] = {}
    errors = 0
    for wrong in (False, True):
        for number in range(LOOKS):
            rate = RATES[number % len(RATES)]
            given = number // len(RATES) % 2 == 0
            if wrong and not given and rate < STATED:
                rate = STATED
            served, named = rng.permutation(["0", f"{rate:g}"])
            reference = named if wrong else served
            others = [served if wrong else named] if given else []
            verdict = look_at(scores, served, [reference, *others], rng)
            errors += verdict == ("same" if wrong else "different")
            kind = f"{'wrong' if wrong else 'honest'}, {rate:g}, {'given' if given else 'alone'}"
            verdicts.setdefault(kind, Counter())[verdict] += 1
    details: dict[str, Any] = {kind: dict(count) for kind, count in sorted(verdicts.items())}
    base = scores["0"]
    details["noise, nats"] = float(np.abs(base["fused"] - base["exact"]).mean())
    for rate in RATES:
        moved = scores[f"{rate:g}"]
        details[f"shift at {rate:g}, nats"] = float(np.abs(moved["exact"] - base["exact"]).mean())
        details[f"changed at {rate:g}"] = float(moved["changed"])
    return Measured({"blackbox_error": errors / (2 * LOOKS)}, details)


def look_at(
    scores: dict[str, dict[str, Floats]],
    served: str,
    names: list[str],
    rng: np.random.Generator,
) -> str:
    """Returns the verdict on an endpoint that serves one version, in a drawn order of sequences."""
    tests = EndpointTests(names, error=ERROR)
    reference = scores[names[0]]
    for number, row in enumerate(rng.permutation(SEQUENCES)):
        if number % BATCH == 0 and tests.finished:
            break
        exact = [scores[name]["exact"][row] for name in names]
        noise = np.abs(reference["fused"][row] - exact[0])
        tests.add(scores[served]["eager"][row], exact, noise)
    return tests.weights


def stored_scores(folder: Path) -> dict[str, dict[str, Floats]]:
    """Returns the scores of each version in float32 and in bf16 with both kinds of attention."""
    folder.mkdir(parents=True, exist_ok=True)
    tokens: NDArray[np.int64] | None = None
    found = {}
    gradient: dict[str, torch.Tensor] | None = None
    for rate in (0.0, *RATES):
        name = f"{rate:g}"
        path = folder / f"scores-{name}.npz"
        if not path.is_file():
            model: Any = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
            if tokens is None:
                size = (SEQUENCES, LENGTH)
                tokens = np.random.default_rng(0).integers(0, model.config.vocab_size, size)
            if rate and gradient is None:
                gradient = policy_gradient(model)
            changed = stepped(model, gradient, rate) if gradient is not None and rate else 0.0
            exact = score(model, tokens)
            model = model.bfloat16()
            fused = score(model, tokens)
            model.set_attn_implementation("eager")
            eager = score(model, tokens)
            partial = path.with_suffix(".part.npz")
            np.savez(partial, changed=np.array(changed), exact=exact, fused=fused, eager=eager)
            partial.replace(path)
        with np.load(path, allow_pickle=False) as stored:
            found[name] = {key: stored[key] for key in stored.files}
    return found


def policy_gradient(model: Any) -> dict[str, torch.Tensor]:
    """Returns the signs of a gradient of log-probabilities times random advantages."""
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(0, model.config.vocab_size, (16, 33), generator=generator)
    advantages = torch.randn(16, generator=generator)
    logits = model(input_ids=tokens[:, :-1]).logits.log_softmax(-1)
    chosen = logits.gather(2, tokens[:, 1:, None])[..., 0]
    (chosen.mean(1) * advantages).mean().backward()
    found = {name: held.grad.sign() for name, held in model.named_parameters()}
    model.zero_grad()
    return found


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
def score(model: Any, tokens: NDArray[np.int64]) -> Floats:
    """Returns the log-probability of each token after the first, float64[sequences, tokens]."""
    found = []
    for first in range(0, len(tokens), TOGETHER):
        part = torch.from_numpy(tokens[first : first + TOGETHER])
        logits = model(input_ids=part[:, :-1]).logits.float().log_softmax(-1)
        found.append(logits.gather(2, part[:, 1:, None])[..., 0].double().numpy())
    return np.concatenate(found)
