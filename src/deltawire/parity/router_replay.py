"""Replays the sampler's expert choices in the trainer's forward pass (router replay).

Two forward passes that agree up to rounding still choose different experts now and then, and
another expert is another function: later layers amplify what was a rounding. So the sampler's
choices travel with a trajectory and are used again in the trainer's forward pass, while the
trainer's own router recomputes the gates, with gradients. Source: Ma et al. 2025,
"Stabilizing MoE reinforcement learning by aligning training and inference routers" (R3,
arXiv 2510.11370).

The plausibility filter rejects choices that the trainer finds too unlikely, as after many stale
versions: a recorded expert is used only if its score is at least a share of the weakest score among
the trainer's own choices; otherwise the trainer's best unused choice replaces it. Source: Composer
2 technical report (arXiv 2603.24477); the rule by a share of the weakest is that of prime-rl, pull
request 2703. For a router that chooses by logits, the share applies to their exponentials.

Shapes: R rows (tokens, flat), L layers, E experts, K chosen; B sequences of S tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from deltawire.config import ParityConfig
from deltawire.engines.routers import Choose, Routers
from deltawire.errors import CorruptError
from deltawire.parity.routes import NOT_RECORDED, RouteShape, unpack_routes

_Replay = TypeVar("_Replay", bound="RouteReplay")

_found: WeakKeyDictionary[nn.Module, Routers] = WeakKeyDictionary()


def routers_of(model: nn.Module) -> Routers:
    """Returns the model's routers, cached; raises `InputError` as `Routers` does."""
    if model not in _found:
        _found[model] = Routers(model)
    return _found[model]


def route_shape(routers: Routers) -> RouteShape:
    """Returns the dimensions of this model's packed choices."""
    return RouteShape(routers.layers, routers.experts, routers.chosen)


def replay_of(model: nn.Module, config: ParityConfig) -> RouteReplay | None:
    """Returns the replay that ``parity.routes`` configures; None if it is off."""
    return _replay(RouteReplay, model, config)


def traced_replay_of(model: nn.Module, config: ParityConfig) -> TracedReplay | None:
    """Returns the same, keeping the flips of each token."""
    return _replay(TracedReplay, model, config)


def _replay(kind: type[_Replay], model: nn.Module, config: ParityConfig) -> _Replay | None:
    if config.routes == "off":
        return None
    take = config.routes == "replay"
    return kind(routers_of(model), take=take, plausible=config.plausible)


@dataclass
class RouteReplay:
    """Compares recorded choices with the trainer's own in forward passes; uses them if ``take``.

    Counts add up over all passes: recorded choices that the trainer's own router did not make,
    those that were not plausible, and all that were compared, int64[L] each. ``damaged`` counts
    sequences with invalid choices, which are treated as unrecorded.

    Example::

        replay = RouteReplay(Routers(model))
        with replay.over(routes_BSLK):
            model(input_ids=ids_BS)
    """

    routers: Routers
    take: bool = True
    plausible: float = 0.0
    damaged: int = 0
    flipped_L: Tensor = field(init=False)
    implausible_L: Tensor = field(init=False)
    compared_L: Tensor = field(init=False)
    _counting: bool = field(init=False, default=True)

    def __post_init__(self) -> None:
        for name in ("flipped_L", "implausible_L", "compared_L"):
            setattr(self, name, torch.zeros(self.routers.layers, dtype=torch.long))

    def placed(
        self,
        packed_N: Sequence[bytes],
        starts_N: Sequence[tuple[int, int]],
        sizes_N: Sequence[tuple[int, int]],
        positions: int,
    ) -> Tensor:
        """Unpacks sequences' choices to their places in a forward pass, int32[positions, L, K].

        ``packed_N`` are results of `pack_routes`, empty if nothing was recorded. ``starts_N`` are
        the flat positions of each sequence's prompt and of its first token after it, ``sizes_N``
        the lengths of both. A prompt that several sequences share gets the choices of the first
        one that recorded them.
        """
        shape = route_shape(self.routers)
        found = torch.full((positions, shape.layers, shape.chosen), NOT_RECORDED, dtype=torch.int32)
        known: set[int] = set()
        rows = zip(packed_N, starts_N, sizes_N, strict=True)
        for packed, (prompt, first), (before, length) in rows:
            if not packed:
                continue
            try:
                routes = unpack_routes(packed, shape, positions=before + length - 1)
            except CorruptError:
                self.damaged += 1
                continue
            if prompt not in known:
                found[prompt : prompt + before] = torch.from_numpy(routes[:before])
                known.add(prompt)
            found[first : first + length - 1] = torch.from_numpy(routes[before:])
        return found

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Counts nothing: for passes that compute activations again."""
        self._counting = False
        try:
            yield
        finally:
            self._counting = True

    @contextmanager
    def over(self, routes_BSLK: Tensor) -> Iterator[None]:
        """Applies choices to one forward pass over B sequences of S tokens; where they are
        `NOT_RECORDED`, the trainer's own choice is kept and not compared."""
        rows_RLK = routes_BSLK.flatten(0, 1).long()

        def answer(layer: int) -> Choose:
            def choose(scores_RE: Tensor, own_RK: Tensor) -> Tensor:
                return self._choose(layer, scores_RE.detach(), own_RK, rows_RLK[:, layer])

            return choose

        with self.routers.answered(answer):
            yield

    def _choose(self, layer: int, scores_RE: Tensor, own_RK: Tensor, recorded_RK: Tensor) -> Tensor:
        recorded_RK = recorded_RK.to(own_RK.device)
        recorded_R = (recorded_RK != NOT_RECORDED).all(1)
        flipped_RK = (recorded_RK[:, :, None] != own_RK[:, None, :]).all(2)
        if self._counting:
            self.flipped_L[layer] += int((flipped_RK & recorded_R[:, None]).sum())
            self.compared_L[layer] += int(recorded_R.sum()) * own_RK.shape[1]
        if not self.take:
            return own_RK
        taken_RK = torch.where(recorded_R[:, None], recorded_RK, own_RK)
        if self.plausible:
            bounded = self.routers.by_layer[layer].bounded
            likely_RK = plausible(scores_RE, own_RK, taken_RK, self.plausible, bounded=bounded)
            if self._counting:
                self.implausible_L[layer] += int((~likely_RK & recorded_R[:, None]).sum())
            taken_RK = refilled(scores_RE, own_RK, taken_RK, likely_RK)
        return taken_RK


@dataclass
class TracedReplay(RouteReplay):
    """A replay that also keeps the flips of each token of its last forward pass.

    Example::

        replay = TracedReplay(routers_of(model), take=True)
        token_logprobs(model, batch, replay)
        replay.flips_of(0)
    """

    _flips_RL: Tensor = field(init=False, default_factory=lambda: torch.zeros(0, 0))
    _starts_N: Sequence[tuple[int, int]] = field(init=False, default=())
    _sizes_N: Sequence[tuple[int, int]] = field(init=False, default=())

    def placed(
        self,
        packed_N: Sequence[bytes],
        starts_N: Sequence[tuple[int, int]],
        sizes_N: Sequence[tuple[int, int]],
        positions: int,
    ) -> Tensor:
        """Returns `RouteReplay.placed`, and begins a pass."""
        self._starts_N, self._sizes_N = starts_N, sizes_N
        unknown = torch.full((positions, self.routers.layers), NOT_RECORDED, dtype=torch.int32)
        self._flips_RL = unknown
        return super().placed(packed_N, starts_N, sizes_N, positions)

    def flips_of(self, sequence: int) -> NDArray[np.int32]:
        """Returns, for each token of a sequence of the last pass and each expert layer, how many of
        the experts that drew the token the model's own router did not choose: int32[T, L],
        `NOT_RECORDED` where no choice was recorded.

        The position before a token is the one whose output it was drawn from.
        """
        prompt, first = self._starts_N[sequence]
        before, length = self._sizes_N[sequence]
        places = [prompt + before - 1, *range(first, first + length - 1)][:length]
        found: NDArray[np.int32] = self._flips_RL[places].numpy()
        return found

    def _choose(self, layer: int, scores_RE: Tensor, own_RK: Tensor, recorded_RK: Tensor) -> Tensor:
        recorded_RK = recorded_RK.to(own_RK.device)
        flips_R = (recorded_RK[:, :, None] != own_RK[:, None, :]).all(2).sum(1, dtype=torch.int32)
        known_R = (recorded_RK != NOT_RECORDED).all(1)
        if self._counting:
            self._flips_RL[:, layer] = flips_R.masked_fill(~known_R, NOT_RECORDED).cpu()
        return super()._choose(layer, scores_RE, own_RK, recorded_RK)


def plausible(
    scores_RE: Tensor, own_RK: Tensor, taken_RK: Tensor, share: float, *, bounded: bool
) -> Tensor:
    """Returns which taken experts score at least ``share`` of the weakest own choice: bool[R, K].

    The router's own choices are always plausible.
    """
    weakest_R1 = scores_RE.gather(1, own_RK).amin(1, keepdim=True)
    taken = scores_RE.gather(1, taken_RK)
    least = weakest_R1 * share if bounded else weakest_R1 + math.log(share)
    return (taken >= least) | (taken_RK[:, :, None] == own_RK[:, None, :]).any(2)


def refilled(scores_RE: Tensor, own_RK: Tensor, taken_RK: Tensor, kept_RK: Tensor) -> Tensor:
    """Replaces the taken experts that are not kept by the best own choices that are not taken yet,
    in order of their scores."""
    there_RK = ((own_RK[:, :, None] == taken_RK[:, None, :]) & kept_RK[:, None, :]).any(2)
    worth_RK = scores_RE.gather(1, own_RK).masked_fill(there_RK, -math.inf)
    order_RK = worth_RK.sort(dim=1, descending=True, stable=True).indices
    # Experts that are taken already come last even if another score is -inf too.
    last_RK = there_RK.gather(1, order_RK).long().sort(dim=1, stable=True).indices
    order_RK = order_RK.gather(1, last_RK)
    spare_RK = own_RK.gather(1, order_RK)
    rank_RK = ((~kept_RK).cumsum(1) - 1).clamp(min=0)
    return torch.where(kept_RK, taken_RK, spare_RK.gather(1, rank_RK))
