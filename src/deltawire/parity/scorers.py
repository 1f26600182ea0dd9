"""Scores given tokens with several engines: the log-probability of each token after its prompt.

An engine is named by a word and options, such as ``transformers:sdpa:bf16`` or
``transformers:eager:float32:decode``; `SPELLING` lists them. All engines score the same sequences,
one at a time and without padding, so that only arithmetic differs.

Shapes: P prompt tokens and T drawn tokens of one sequence; S = P + T − 1 positions are read.
L decoder layers, H hidden size; of a model with experts, M expert layers and K chosen.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from transformers import DynamicCache

from deltawire.engines.base import Sampling
from deltawire.engines.routers import Routers
from deltawire.engines.transformers import TransformersEngine
from deltawire.errors import InputError
from deltawire.export.models import serve_as
from deltawire.parity.router_replay import RouteReplay
from deltawire.parity.scores import DrawnSequence, Precision, Scorer, Scores

Passes = Literal["whole", "decode"]

PRECISIONS: dict[str, Precision] = {
    "float32": "float32",
    "fp32": "float32",
    "bfloat16": "bfloat16",
    "bf16": "bfloat16",
}
ATTENTION = ("sdpa", "eager")
PASSES: tuple[Passes, ...] = ("whole", "decode")
SPELLING = (
    "transformers, then any of sdpa or eager, float32 or bf16, whole (one forward pass) or decode "
    "(token by token over a cache); or vllm, then float32 or bf16"
)


@dataclass(frozen=True)
class ScorerSpec:
    """The parsed name of an engine."""

    name: str
    kind: Literal["transformers", "vllm"]
    attention: str = ""
    """Empty for the model's default."""
    precision: Precision = "float32"
    passes: Passes = "whole"


def parse_spec(text: str) -> ScorerSpec:
    """Parses an engine's name; raises `InputError` naming the invalid word."""
    kind, *words = text.split(":")
    if kind not in ("transformers", "vllm"):
        raise InputError(f"{text!r}: there is no engine {kind!r}", hint=f"use {SPELLING}")
    chosen: dict[str, str] = {}
    for word in words:
        field = (
            "precision"
            if word in PRECISIONS
            else "attention"
            if word in ATTENTION and kind == "transformers"
            else "passes"
            if word in PASSES and kind == "transformers"
            else ""
        )
        if not field or field in chosen:
            what = "occurs twice" if field else "is not known here"
            raise InputError(f"{text!r}: {word!r} {what}", hint=f"use {SPELLING}")
        chosen[field] = word
    return ScorerSpec(
        text,
        "vllm" if kind == "vllm" else "transformers",
        chosen.get("attention", ""),
        PRECISIONS[chosen.get("precision", "float32")],
        "decode" if chosen.get("passes") == "decode" else "whole",
    )


def open_scorer(
    spec: ScorerSpec, model: Any, folder: Path | None, *, device: torch.device | None = None
) -> Scorer:
    """Opens an engine on a copy of the weights: ``model`` is float32, and ``folder`` holds the same
    weights on disk for engines in another process. ``device`` is the one that transformers
    compute on, by default the model's. Raises `InputError`."""
    if spec.kind == "vllm":
        from deltawire.parity.vllm_scorer import VllmScorer

        if folder is None:
            raise InputError("vllm needs a model directory, and this model has none")
        return VllmScorer(spec.name, folder, spec.precision)
    return TransformersScorer(spec, model, device=device)


class TransformersScorer:
    """Scores with a transformers causal LM, in one precision and with one attention implementation,
    in one pass over a sequence or token by token."""

    def __init__(self, spec: ScorerSpec, model: Any, *, device: torch.device | None = None) -> None:
        self.spec = spec
        self.device = device or next(model.parameters()).device
        self.model = serve_as(copy.deepcopy(model), spec.precision).to(self.device).eval()
        try:
            self.model.set_attn_implementation(spec.attention or model.config._attn_implementation)
        except (ValueError, ImportError) as error:
            raise InputError(
                f"{spec.name}: {type(model).__name__} has no {spec.attention} attention",
                hint="name eager, or none",
            ) from error
        self._routers: Routers | None = None
        if hasattr(self.model.config.get_text_config(), "num_experts_per_tok"):
            self._routers = Routers(self.model)

    @property
    def name(self) -> str:
        """See `Scorer`."""
        return self.spec.name

    @property
    def precision(self) -> Precision:
        """See `Scorer`."""
        return self.spec.precision

    def draw(
        self, prompts: Sequence[tuple[int, ...]], *, count: int, seed: int
    ) -> list[DrawnSequence]:
        """See `Scorer`."""
        longest = max(map(len, prompts))
        engine = TransformersEngine(
            self.model, stop_tokens=(), slots=len(prompts), capacity=longest + count, seed=seed
        )
        requests = [
            engine.submit(prompt, Sampling(count), lambda _completion: None) for prompt in prompts
        ]
        while engine.active:
            engine.step()
        return [DrawnSequence(one.prompt, tuple(one.completion.tokens)) for one in requests]

    @torch.no_grad()
    def score(
        self,
        sequences: Sequence[DrawnSequence],
        *,
        layers: bool = False,
        feed: Sequence[Scores] | None = None,
        replay: Sequence[Scores] | None = None,
    ) -> list[Scores]:
        """See `Scorer`."""
        if replay is not None and self._routers is None:
            raise InputError(f"{self.name}: this model has no expert choices to replay")
        return [
            self._one(
                sequence,
                layers=layers or feed is not None,
                feed=feed[number] if feed else None,
                replay=replay[number] if replay else None,
            )
            for number, sequence in enumerate(sequences)
        ]

    def _one(
        self, sequence: DrawnSequence, *, layers: bool, feed: Scores | None, replay: Scores | None
    ) -> Scores:
        ids = torch.tensor([sequence.read], device=self.device)
        steps = [slice(0, ids.shape[1])]
        if self.spec.passes == "decode":
            start = len(sequence.prompt)
            steps = [slice(0, start), *(slice(n, n + 1) for n in range(start, ids.shape[1]))]
        cache = DynamicCache() if len(steps) > 1 else None
        logits, hidden, routes = [], [], []
        for step in steps:
            with ExitStack() as stack:
                seen: list[Tensor] = []
                if layers:
                    fed = None if feed is None or feed.hidden_LSH is None else feed.hidden_LSH
                    given = None if fed is None else fed[:, step]
                    seen = stack.enter_context(_layers_observed(self.model, given))
                chosen = self._routed(stack, replay, step)
                output = self.model(
                    input_ids=ids[:, step], past_key_values=cache, use_cache=cache is not None
                )
            logits.append(output.logits[0].float().cpu())
            hidden += [torch.stack(seen).cpu()] if layers else []
            routes += [torch.stack(chosen, dim=1).to("cpu", torch.int32).numpy()] if chosen else []
        following = torch.cat(logits)[len(sequence.prompt) - 1 :].log_softmax(1).double()
        tokens = torch.tensor(sequence.tokens)
        return Scores(
            following.gather(1, tokens[:, None])[:, 0].numpy(),
            torch.cat(hidden, dim=1) if layers else None,
            np.concatenate(routes) if routes else None,
        )

    def _routed(self, stack: ExitStack, replay: Scores | None, step: slice) -> list[Tensor]:
        """Returns a list that the next pass fills with its expert choices, empty if it has none."""
        if self._routers is None:
            return []
        if replay is not None and replay.routes_SMK is not None:
            recorded = torch.from_numpy(replay.routes_SMK[step])[None]
            stack.enter_context(RouteReplay(self._routers).over(recorded))
        return stack.enter_context(self._routers.recorded())


def decoder_layers(model: Any) -> list[nn.Module]:
    """Returns the decoder layers in order; raises `InputError` if they are not exposed."""
    found = getattr(model.get_decoder(), "layers", None)
    if not isinstance(found, nn.ModuleList) or not len(found):
        raise InputError(f"{type(model).__name__} does not expose its decoder layers")
    return list(found)


@contextmanager
def _layers_observed(model: Any, feed_LSH: Tensor | None) -> Iterator[list[Tensor]]:
    """Yields a list that collects the first layer's input and every layer's output for one
    sequence, float32[S, H] each; ``feed_LSH`` replaces the input of each layer."""
    seen: list[Tensor] = []

    def before(number: int) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            del module
            hidden = args[0] if args else kwargs["hidden_states"]
            if number == 0:
                seen.append(hidden[0].float())
            if feed_LSH is None:
                return None
            given = feed_LSH[number][None].to(hidden)
            return (
                ((given, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": given})
            )

        return hook

    def after(module: nn.Module, args: Any, output: Any) -> None:
        del module, args
        seen.append((output if isinstance(output, Tensor) else output[0])[0].float())

    with ExitStack() as stack:
        for number, layer in enumerate(decoder_layers(model)):
            first = layer.register_forward_pre_hook(before(number), with_kwargs=True)
            stack.callback(first.remove)
            stack.callback(layer.register_forward_hook(after).remove)
        yield seen
