"""Scores sequences with a transformers causal LM, in one pass or token by token over a cache.

Shapes as in `deltawire.parity.scores`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import DynamicCache

from deltawire.engines.base import Sampling
from deltawire.engines.routers import Routers
from deltawire.engines.transformers import TransformersEngine
from deltawire.engines.transformers.cache import cache_argument
from deltawire.errors import InputError
from deltawire.export.models import serve_as
from deltawire.parity.router_replay import RouteReplay
from deltawire.parity.scorers import PRECISIONS, ScorerSpec
from deltawire.parity.scores import DrawnSequence, Precision, Scores

WORDS = {
    "attention": ("sdpa", "eager"),
    "precision": tuple(PRECISIONS),
    "passes": ("whole", "decode"),
}
READS_FOLDER = False


def open_scorer(
    spec: ScorerSpec, model: Any, folder: Path | None, *, device: torch.device | None = None
) -> TransformersScorer:
    """Opens the scorer on a copy of ``model``. Raises `InputError`."""
    del folder
    return TransformersScorer(spec, model, device=device)


class TransformersScorer:
    """Scores with a transformers causal LM, in one precision and with one attention implementation,
    in one pass over a sequence or token by token."""

    def __init__(self, spec: ScorerSpec, model: Any, *, device: torch.device | None = None) -> None:
        self.spec = spec
        attention = spec.options.get("attention", "")
        self.device = device or next(model.parameters()).device
        self.model = serve_as(copy.deepcopy(model), spec.precision).to(self.device).eval()
        try:
            self.model.set_attn_implementation(attention or model.config._attn_implementation)
        except (ValueError, ImportError) as error:
            raise InputError(
                f"{spec.name}: {type(model).__name__} has no {attention} attention",
                hint="name eager, or none",
            ) from error
        self._routers: Routers | None = None
        if hasattr(self.model.config.get_text_config(), "num_experts_per_tok"):
            self._routers = Routers(self.model)

    @property
    def name(self) -> str:
        """See `deltawire.parity.scores.Scorer`."""
        return self.spec.name

    @property
    def precision(self) -> Precision:
        """See `deltawire.parity.scores.Scorer`."""
        return self.spec.precision

    def draw(
        self, prompts: Sequence[tuple[int, ...]], *, count: int, seed: int
    ) -> list[DrawnSequence]:
        """See `deltawire.parity.scores.Scorer`."""
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
        """See `deltawire.parity.scores.Scorer`."""
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
        if self.spec.options.get("passes") == "decode":
            start = len(sequence.prompt)
            steps = [slice(0, start), *(slice(n, n + 1) for n in range(start, ids.shape[1]))]
        cache = DynamicCache() if len(steps) > 1 else None
        name = cache_argument(self.model)
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
                    input_ids=ids[:, step], use_cache=cache is not None, **{name: cache}
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
