"""Records and replaces the expert choices of a mixture-of-experts model.

A router scores every expert for every token, picks the best by one ``topk`` over the scores, and
returns (logits, weights, indices). Families differ in how they score experts and turn scores into
weights: softmax before or after the choice, sigmoid, groups, correction biases, scaling. None of
that is reimplemented here. A choice is replaced where the router makes it: its ``topk`` returns
other indices and their scores, and the rest of its forward continues, with gradients.

Shapes: R rows (tokens of all sequences, flat), E experts a layer, K chosen a token.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from deltawire.errors import InputError

_NAME = re.compile(r"Router|Gat(e|ing)$")
_CHOICES = frozenset({torch.topk, torch.Tensor.topk})
_BOUNDED: frozenset[Any] = frozenset(
    {
        torch.softmax,
        torch.Tensor.softmax,
        torch.nn.functional.softmax,
        torch.sigmoid,
        torch.Tensor.sigmoid,
        torch.nn.functional.sigmoid,
    }
)

Choose = Callable[[Tensor, Tensor], Tensor]
"""``choose(scores_RE, own_RK)`` returns the indices to use, int64[R, K], instead of the router's
own."""


@dataclass(frozen=True)
class Router:
    """One layer's router. ``call`` is the number of the ``topk`` that makes the choice; ``bounded``
    means that it ranks outputs of a softmax or a sigmoid rather than logits."""

    module: nn.Module
    call: int
    experts: int
    chosen: int
    bounded: bool


class Routers:
    """The routers of one causal LM, in the order in which its layers call them.

    Finding them takes a forward pass over two tokens. Raises `InputError` for a model without
    experts, or whose experts are chosen in another way.

    Example::

        routers = Routers(model)
        with routers.recorded() as choices:
            model(input_ids=ids)
        print(choices[0])  # the first expert layer's choices
    """

    def __init__(self, model: nn.Module) -> None:
        found: dict[nn.Module, Router] = {}
        training = [module for module in model.modules() if module.training]
        device = next(model.parameters()).device
        with torch.no_grad(), ExitStack() as stack:
            for module in model.modules():
                if _NAME.search(type(module).__name__):
                    stack.enter_context(_observed(module, found))
            model.eval()(
                input_ids=torch.zeros(1, 2, dtype=torch.long, device=device), use_cache=False
            )
        for module in training:
            module.training = True
        self.by_layer = list(found.values())
        kinds = {(router.experts, router.chosen) for router in self.by_layer}
        if len(kinds) != 1:
            what = (
                "layers with different numbers of experts"
                if kinds
                else "no router that returns them"
            )
            raise InputError(
                f"the expert choices of {type(model).__name__} cannot be recorded: it has {what}",
                hint='set parity.routes = "off"',
            )
        ((self.experts, self.chosen),) = kinds

    @property
    def layers(self) -> int:
        """The number of layers with experts."""
        return len(self.by_layer)

    @contextmanager
    def recorded(self) -> Iterator[list[Tensor]]:
        """Yields the choices of the latest forward pass, int[R, K] for each layer."""
        choices = [torch.empty(0, self.chosen, dtype=torch.long)] * self.layers

        def keeping(layer: int) -> Callable[..., None]:
            def keep(module: nn.Module, arguments: Any, output: Any) -> None:
                del module, arguments
                choices[layer] = output[2]

            return keep

        with ExitStack() as stack:
            for layer, router in enumerate(self.by_layer):
                handle = router.module.register_forward_hook(keeping(layer))
                stack.callback(handle.remove)
            yield choices

    @contextmanager
    def answered(self, choose: Callable[[int], Choose]) -> Iterator[None]:
        """Replaces the choices of layer n by what ``choose(n)`` returns."""
        with ExitStack() as stack:
            for layer, router in enumerate(self.by_layer):
                stack.enter_context(_answered(router, choose(layer)))
            yield


class _TopkInterceptor(TorchFunctionMode):
    """Records every ``topk`` of a router, and replaces the result of call number ``call``."""

    def __init__(self, call: int = -1, choose: Choose | None = None) -> None:
        super().__init__()
        self.seen: list[tuple[Tensor, Tensor, bool]] = []
        self._call = call
        self._choose = choose
        self._bounded = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        result = func(*args, **(kwargs or {}))
        self._bounded = self._bounded or func in _BOUNDED
        if func not in _CHOICES:
            return result
        scores: Tensor = args[0] if args else (kwargs or {})["input"]
        self.seen.append((scores, result.indices, self._bounded))
        if self._choose is None or len(self.seen) - 1 != self._call:
            return result
        answer = self._choose(scores, result.indices)
        return torch.return_types.topk((scores.gather(-1, answer), answer))


@contextmanager
def _observed(module: nn.Module, found: dict[nn.Module, Router]) -> Iterator[None]:
    """Adds the module to ``found`` if a forward pass shows it to be a router."""
    own_forward = module.forward

    def forward(*arguments: Any, **named: Any) -> Any:
        with _TopkInterceptor() as interceptor:
            output = own_forward(*arguments, **named)
        if isinstance(output, tuple) and len(output) >= 3 and isinstance(output[2], Tensor):
            for call, (scores, indices, bounded) in enumerate(interceptor.seen):
                same = indices.shape == output[1].shape and torch.equal(indices, output[2])
                if same and scores.ndim == 2:
                    found[module] = Router(module, call, scores.shape[1], indices.shape[1], bounded)
        return output

    with replaced_forward(module, forward):
        yield


@contextmanager
def _answered(router: Router, choose: Choose) -> Iterator[None]:
    own_forward = router.module.forward

    def forward(*arguments: Any, **named: Any) -> Any:
        with _TopkInterceptor(router.call, choose):
            return own_forward(*arguments, **named)

    with replaced_forward(router.module, forward):
        yield


@contextmanager
def replaced_forward(module: Any, forward: Callable[..., Any]) -> Iterator[None]:
    """Replaces the forward of one module; its hooks, such as FSDP2's, run around the new one."""
    before = vars(module).get("forward")
    module.forward = forward
    try:
        yield
    finally:
        if before is None:
            del module.forward  # This makes the method of the class visible again.
        else:
            module.forward = before
