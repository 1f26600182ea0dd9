"""``blackbox_error``: wrong verdicts of the black box over stored scores of a real model.

Versions and engines are those of `benchmarks.attest.scores`. The noise that the black box allows
is measured with fused attention and products that are rounded once. Scores are stored by version
and engine in ``--out``, so an interrupted measurement goes on.

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

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.attest.scores import MODEL, SEQUENCES, Scores, stored_scores
from benchmarks.runner import ROOT
from benchmarks.training.keys import Measured, Options
from deltawire.launch.black_box.judging import BATCH, EndpointTests, Floats

RATES = (1e-6, 3e-6, 1e-5, 3e-5, 1e-4)
STATED = 3e-5
"""The smallest step at which each of 100 looks saw a version that was not given."""
LOOKS = 500
ERROR = 0.01
ENGINES = ("eager", "torch", "vllm")


def measure(options: Options) -> Measured:
    """Scores what is not stored yet, and judges pairs."""
    keys = ("blackbox_error", "blackbox_told_apart", "blackbox_seen")
    if not (MODEL / "model.safetensors").is_file():
        return Measured(dict.fromkeys(keys), {"reason": f"{MODEL} is missing"})
    scores = stored_scores(Path(options.out or ROOT / "runs/bench-attest"), RATES)
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
