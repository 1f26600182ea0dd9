"""Samples in batches from any transformers causal LM, whose weights may change between steps.

Shapes: N running sequences, R allocated rows, P parked sequences, V vocabulary.

Running sequences always occupy rows ``0 … N-1`` of one cache, so a decode step reads views and
copies nothing; the last row moves into a finished one. Prompts shared by several requests (the
completions of one group) are prefilled once.

A finished sequence is parked in a free row, from the last one downwards. A prompt that continues
it, such as a conversation's next turn, reuses its keys and values and reads only the new tokens, if
a single version computed them and is still being served. A request that needs a row takes the one
that was parked first::

    rows   0 … N-1        running, in the order of admission
           N … R-P-1      free
           R-P … R-1      parked, the first of `_parked` last

The cache grows with what runs. Each request reserves its prompt and ``max_tokens`` when it is
admitted, so memory is R rows of the longest reservation, rounded up, and no running sequence can
run out of it. A request that would exceed the cache's share of memory waits, parked sequences are
dropped for it, and one that could never fit is refused when it is submitted.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from deltawire.engines.base import EVERYTHING, Completion, OnToken, Sampling
from deltawire.engines.cache_size import SHARE, available_bytes, token_bytes
from deltawire.engines.routers import Routers
from deltawire.engines.transformers.cache import SlotCache, cache_argument
from deltawire.engines.transformers.noise import log_exponential, seeded
from deltawire.engines.transformers.truncation import kept_tokens
from deltawire.errors import InputError

IDLE_S = 0.001
"""Seconds that `TransformersEngine.advance` pauses when there is nothing to do."""

_ATTENTION_KINDS = {"full_attention", "sliding_attention"}
_ATTENTION_CODE = {"eager", "sdpa"}
"""Attention implementations whose masks are built here; the eager ones add the mask to the
scores.
"""

WIDTH_STEP = 64
"""Positions are allocated in multiples of this."""


@dataclass(eq=False)
class SamplingRequest:
    """A sequence that is being generated, as `TransformersEngine.submit` returns it.

    Example::

        request = engine.submit(prompt, Sampling(max_tokens=64), print)
        engine.cancel(request)
    """

    prompt: tuple[int, ...]
    sampling: Sampling
    on_done: Callable[[Completion], None]
    on_token: OnToken | None = None
    completion: Completion = field(default_factory=Completion)
    version: int = -1
    """The version that read the prompt."""
    generator: torch.Generator | None = None  # Of a request that has its own seed.

    @property
    def reserved(self) -> int:
        """The most positions that it will need."""
        return len(self.prompt) + self.sampling.max_tokens


@dataclass(eq=False)
class _Parked:
    """A finished sequence whose keys and values, those of ``tokens``, are still cached."""

    tokens: tuple[int, ...]
    version: int
    stamp: int


class TransformersEngine:
    """Continuous batching over one ``transformers`` causal LM on one device.

    `step` admits waiting requests or decodes one token for every running sequence. Between two
    steps the caller may change the parameters and `version`; sequences in flight continue over
    their cached keys and values, and every token keeps the version that drew it.

    At most ``slots`` sequences run at a time, and no more than ``cache_bytes`` of keys and values
    allow; by default half of the memory that is available when the cache grows.

    With ``record_routes``, completions carry the expert choices of what was read. With that, or
    without ``reuse``, every prompt is read from its beginning. ``tokens_read`` counts the prompt
    tokens that were computed.

    Raises `InputError` for a model whose layers keep state other than keys and values, whose
    attention takes other masks than torch's own, or whose expert choices cannot be recorded.

    Example::

        engine = TransformersEngine(model, stop_tokens=[2], slots=8, capacity=512)
        engine.submit(prompt, Sampling(max_tokens=64), print)
        while engine.active:
            engine.step()
    """

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        stop_tokens: Sequence[int],
        slots: int = 64,
        capacity: int = 256,
        seed: int = 0,
        version: int = 0,
        record_routes: bool = False,
        reuse: bool = True,
        cache_bytes: int | None = None,
    ) -> None:
        self._reuse = reuse and not record_routes
        self._parked: list[_Parked] = []
        self._stamps = 0
        self.tokens_read = 0
        self.model = model.eval()
        self._routers = Routers(model) if record_routes else None
        self._routes: list[torch.Tensor] = []
        self.version = version
        self.capacity = capacity
        self.slots = slots
        self._stop = frozenset(stop_tokens)
        embedding: Any = self.model.get_input_embeddings()  # type: ignore[operator]
        self._vocabulary = int(embedding.num_embeddings)
        self._device = next(model.parameters()).device
        self._generator = torch.Generator(self._device).manual_seed(seed)
        self._waiting: deque[SamplingRequest] = deque()
        self._running: list[SamplingRequest] = []
        self._lengths = torch.zeros(slots, dtype=torch.long, device=self._device)
        self._last = torch.zeros(slots, dtype=torch.long, device=self._device)
        self._temperatures = torch.ones(slots, device=self._device)
        config: Any = model.config
        self._kinds, self._window = _attention_kinds(model, config)
        eager = config._attn_implementation == "eager"
        self._added = next(model.parameters()).dtype if eager else None
        layers = int(config.get_text_config().num_hidden_layers)
        self._cache = SlotCache(layers, slots, capacity, self._device)
        self._cache_argument = cache_argument(model)
        itemsize = next(model.parameters()).element_size()
        self._token_bytes = token_bytes(config, itemsize=itemsize)
        self._cache_bytes = cache_bytes

    @property
    def active(self) -> int:
        """Requests not yet finished, waiting ones included."""
        return len(self._running) + len(self._waiting)

    def submit(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        on_done: Callable[[Completion], None],
        *,
        on_token: OnToken | None = None,
    ) -> SamplingRequest:
        """Queues a request; ``on_done`` and ``on_token`` are called from inside a later `step`.

        Raises `InputError` if the prompt and ``max_tokens`` exceed the engine's capacity or the
        memory for its cache, or a token is not one of the model's.
        """
        if not prompt or len(prompt) + sampling.max_tokens > self.capacity:
            raise InputError(
                f"a prompt of {len(prompt)} tokens with {sampling.max_tokens} new ones does not "
                f"fit the engine's {self.capacity}",
                hint="raise rollout.context or lower rollout.max_tokens",
            )
        if min(prompt) < 0 or max(prompt) >= self._vocabulary:
            # It would make the forward pass fail for all prompts that are read with it.
            raise InputError(f"a token of the prompt is not one of the model's {self._vocabulary}")
        request = SamplingRequest(tuple(prompt), sampling, on_done, on_token)
        self._require_memory(request)
        request.generator = seeded(sampling.seed, self._device)
        request.completion.experts = self._routers.experts if self._routers else 0
        self._waiting.append(request)
        return request

    def _require_memory(self, request: SamplingRequest) -> None:
        """Raises `InputError` if a request would not fit even if nothing else ran."""
        needed = self._size(1, self._rounded(request.reserved))
        if needed > self._allocated and needed > (limit := self._limit()):
            raise InputError(
                f"the keys and values of {request.reserved} tokens need {needed} bytes; the cache "
                f"may have {limit}",
                hint="lower rollout.context or rollout.max_tokens, or use a machine with more "
                "memory",
            )

    def _size(self, height: int, width: int) -> int:
        return height * width * (self._cache.token_bytes or self._token_bytes)

    @property
    def _allocated(self) -> int:
        return self._size(self._cache.height, self._cache.width)

    def _limit(self) -> int:
        """Returns the bytes that the cache may have: its own, plus a share of what is free."""
        if self._cache_bytes is not None:
            return self._cache_bytes
        return self._allocated + int(SHARE * available_bytes(self._device))

    def _rounded(self, width: int) -> int:
        return min(self.capacity, -(-width // WIDTH_STEP) * WIDTH_STEP)

    def _admit(self) -> tuple[list[SamplingRequest], int, int]:
        """Takes as many waiting requests, in order, as slots and memory allow. Returns them, the
        positions to allocate, and the limit in bytes that holds for them."""
        limit, admitted = self._limit(), list[SamplingRequest]()
        width = max((request.reserved for request in self._running), default=0)
        while self._waiting and (count := len(self._running) + len(admitted)) < self.slots:
            wider = max(width, self._waiting[0].reserved)
            # If nothing runs, try the first: it fitted when it was submitted.
            if count and self._size(count + 1, self._rounded(wider)) > limit:
                break
            width = wider
            admitted.append(self._waiting.popleft())
        width = self._rounded(width)
        count = len(self._running) + len(admitted)
        if self._cache.width > width and self._size(count, self._cache.width) <= limit:
            width = self._cache.width
        return admitted, width, limit

    def _make_room(self, needed: int, width: int, limit: int) -> None:
        """Allocates ``width`` positions of enough rows for ``needed`` running sequences and, where
        memory allows, all that are parked; drops those parked first where it does not."""
        cache = self._cache
        for place in reversed(range(len(self._parked))):
            if len(self._parked[place].tokens) > width:
                self._drop(place)
        height = cache.height
        while height < min(self.slots, needed + len(self._parked)):
            height = min(self.slots, max(1, 2 * height))
        height = max(needed, min(height, limit // max(1, self._size(1, width))))
        while len(self._parked) > height - needed:
            self._evict()
        if (height, width) != (cache.height, cache.width):
            cache.resize(height, width, head=len(self._running), tail=len(self._parked))

    @torch.inference_mode()
    def cancel(self, request: SamplingRequest) -> None:
        """Drops one request without calling back; its slot is free at once."""
        if request in self._waiting:
            self._waiting.remove(request)
        elif request in self._running:
            self._vacate(self._running.index(request))

    async def generate(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        *,
        on_token: OnToken | None = None,
    ) -> Completion:
        """See `deltawire.engines.base.Sampler.generate`."""
        done: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()

        def finish(completion: Completion) -> None:
            if not done.done():
                done.set_result(completion)

        request = self.submit(prompt, sampling, finish, on_token=on_token)
        try:
            return await done
        except asyncio.CancelledError:
            self.cancel(request)
            raise

    async def advance(self) -> int:
        """Does one `step` and yields to other tasks; with nothing to do, pauses briefly."""
        drawn = self.step()
        await asyncio.sleep(0 if drawn or self.active else IDLE_S)
        return drawn

    def cancel_all(self) -> None:
        """Drops every request without calling back."""
        self._waiting.clear()
        self._running.clear()
        self._parked.clear()
        self._cache.running = 0

    @torch.inference_mode()
    def step(self) -> int:
        """Does one unit of work; returns how many tokens it generated."""
        if not self._waiting or len(self._running) == self.slots:
            return self._decode() if self._running else 0
        self._drop_stale()
        admitted, width, limit = self._admit()
        if not admitted:
            return self._decode()
        if width != self._cache.width:
            self._make_room(len(self._running), width, limit)
        resumed, fresh = [], []
        for request in admitted:
            request.version = self.version
            if (parked := self._continued_by(request.prompt)) is None:
                fresh.append(request)
            else:
                resumed.append((request, len(parked.tokens)))
                self._take(parked, request)
        self._make_room(len(self._running) + len(fresh), width, limit)
        drawn = self._resume(resumed) if resumed else 0
        return drawn + (self._prefill(fresh) if fresh else 0)

    def _continued_by(self, prompt: tuple[int, ...]) -> _Parked | None:
        """Returns the longest parked sequence that is a proper prefix of ``prompt``."""
        return max(
            (
                parked
                for parked in self._parked
                if len(parked.tokens) < len(prompt)
                and prompt[: len(parked.tokens)] == parked.tokens
            ),
            key=lambda parked: len(parked.tokens),
            default=None,
        )

    def _take(self, parked: _Parked, request: SamplingRequest) -> None:
        """Runs a request in the next row, on the parked keys and values."""
        place, row = self._parked.index(parked), len(self._running)
        own, last = self._cache.height - 1 - place, self._parked[-1]
        full = row + len(self._parked) == self._cache.height
        self._running.append(request)
        if full and own != row:  # The next row is that of the last one parked.
            length = max(len(parked.tokens), len(last.tokens))
            for layer in self._cache.slot_layers:
                layer.exchange(own, row, length)
            self._parked[place] = last
            self._parked.pop()
            return
        if own != row:
            for layer in self._cache.slot_layers:
                layer.move(own, row, len(parked.tokens))
        self._drop(place)

    def _drop(self, place: int) -> None:
        """Drops a parked sequence; the last one parked takes its row."""
        last = self._parked.pop()
        if place < len(self._parked):
            bottom = self._cache.height - 1
            source, target = bottom - len(self._parked), bottom - place
            for layer in self._cache.slot_layers:
                layer.move(source, target, len(last.tokens))
            self._parked[place] = last

    def _drop_stale(self) -> None:
        """Drops parked sequences that another version computed."""
        for place in reversed(range(len(self._parked))):
            if self._parked[place].version != self.version:
                self._drop(place)

    def _evict(self) -> None:
        first = min(self._parked, key=lambda parked: parked.stamp)
        self._drop(self._parked.index(first))

    def _resume(self, resumed: list[tuple[SamplingRequest, int]]) -> int:
        """Reads the new tokens of prompts whose beginnings are in the last running rows."""
        count = len(resumed)
        rows = slice(len(self._running) - count, len(self._running))
        news = [request.prompt[held:] for request, held in resumed]
        width = max(map(len, news))
        ids = torch.zeros(count, width, dtype=torch.long)
        positions = torch.zeros(count, width, dtype=torch.long)
        for row, (new, (_, held)) in enumerate(zip(news, resumed, strict=True)):
            # Padding repeats the last token at its own position.
            ids[row] = torch.tensor([*new, *new[-1:] * (width - len(new))])
            positions[row] = held + torch.arange(width).clamp(max=len(new) - 1)
        ids, positions = ids.to(self._device), positions.to(self._device)
        lengths = torch.tensor([len(request.prompt) for request, _ in resumed])
        self._cache.running = len(self._running)
        self._cache.positions, self._cache.span = positions, int(lengths.max())
        self._cache.resumed = rows
        last = torch.tensor([len(new) - 1 for new in news], device=self._device)
        keys = torch.arange(self._cache.span, device=self._device).expand(count, -1)
        try:
            logits = self._forward(ids, positions, keys, last)
        finally:
            self._cache.resumed = None
        self.tokens_read += sum(map(len, news))
        self._lengths[rows] = lengths.to(self._device)
        self._temperatures[rows] = torch.tensor(
            [request.sampling.temperature for request, _ in resumed], device=self._device
        )
        self._draw(logits, rows)
        return count

    def _prefill(self, requests: list[SamplingRequest]) -> int:
        first, count = len(self._running), len(requests)
        unique = list(dict.fromkeys(request.prompt for request in requests))
        place = {prompt: i for i, prompt in enumerate(unique)}
        sources = torch.tensor([place[request.prompt] for request in requests])
        lengths = torch.tensor([len(prompt) for prompt in unique])
        width = int(lengths.max())
        ids = torch.zeros(len(unique), width, dtype=torch.long)
        for row, prompt in enumerate(unique):
            ids[row, : len(prompt)] = torch.tensor(prompt)
        ids, sources, lengths = (x.to(self._device) for x in (ids, sources, lengths))
        positions = torch.arange(width, device=self._device).expand(len(unique), width)
        self._cache.prefill_sources = sources
        try:
            hidden_logits = self._forward(ids, positions, positions, lengths - 1)
        finally:
            self._cache.prefill_sources = None
        if self._routers is not None:
            routes = self._routes_read(len(unique), width)
            for request in requests:
                request.completion.routes.append(
                    routes[place[request.prompt], : len(request.prompt)]
                )
        self.tokens_read += sum(map(len, unique))
        new = slice(first, first + count)
        self._running.extend(requests)
        self._cache.running = len(self._running)
        self._lengths[new] = lengths[sources]
        self._temperatures[new] = torch.tensor([r.sampling.temperature for r in requests])
        self._draw(hidden_logits[sources], new)
        return count

    def _decode(self) -> int:
        count = len(self._running)
        positions = self._lengths[:count] - 1
        self._cache.positions = positions
        self._cache.span = int(positions.max()) + 1
        keys = torch.arange(self._cache.span, device=self._device).expand(count, -1)
        logits = self._forward(self._last[:count, None], positions[:, None], keys, None)
        if self._routers is not None:
            for request, read in zip(self._running, self._routes_read(count, 1), strict=True):
                request.completion.routes.append(read)
        self._draw(logits, slice(0, count))
        return count

    def _forward(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        key_positions: torch.Tensor,
        last: torch.Tensor | None,
    ) -> torch.Tensor:
        """Returns logits float32[rows, V] at each row's ``last`` position (None: the only one)."""
        distance = positions[:, :, None] - key_positions[:, None, :]
        full = (distance >= 0)[:, None]
        masks = {
            "full_attention": full,
            "sliding_attention": full & (distance < self._window)[:, None],
        }
        if self._added is not None:
            masks = {kind: _additive(mask, self._added) for kind, mask in masks.items()}
        mask: Any = (
            masks[self._kinds[0]] if len(self._kinds) == 1 else {k: masks[k] for k in self._kinds}
        )
        ends = None if last is None else torch.unique(last)  # Only these positions have logits.
        recorded: AbstractContextManager[list[torch.Tensor]] = (
            self._routers.recorded() if self._routers is not None else nullcontext([])
        )
        with recorded as self._routes:
            logits: torch.Tensor = self.model(
                input_ids=ids,
                attention_mask=mask,
                position_ids=positions,
                use_cache=True,
                logits_to_keep=1 if ends is None else ends,
                **{self._cache_argument: self._cache},
            ).logits
        if last is None or ends is None:
            return logits[:, -1].float()
        return logits[torch.arange(len(ids)), torch.searchsorted(ends, last)].float()

    def _routes_read(self, rows: int, width: int) -> NDArray[np.int32]:
        """Returns the last forward pass's expert choices: int32[rows, width, layers, chosen]."""
        stacked = torch.stack([choices.reshape(rows, width, -1) for choices in self._routes], dim=2)
        return stacked.to("cpu", torch.int32).numpy()

    def _draw(self, logits_NV: torch.Tensor, rows: slice) -> None:
        temperatures = self._temperatures[rows, None]
        greedy = temperatures == 0
        scaled = logits_NV / torch.where(greedy, 1.0, temperatures)
        logprobs_NV = torch.log_softmax(scaled, dim=-1)
        own = [request.generator for request in self._running[rows]]
        noise = log_exponential(logprobs_NV, self._generator, own)
        drawn_from = self._truncated(logprobs_NV, self._running[rows])
        tokens = torch.where(greedy, logprobs_NV, drawn_from - noise).argmax(dim=-1)
        logprobs = logprobs_NV.gather(1, tokens[:, None])[:, 0]
        self._last[rows] = tokens
        self._lengths[rows] += 1
        finished = []
        for row, token, logprob in zip(
            range(rows.start, rows.stop), tokens.tolist(), logprobs.tolist(), strict=True
        ):
            request = self._running[row]
            completion = request.completion
            completion.tokens.append(token)
            completion.logprobs.append(logprob)
            completion.versions.append(self.version)
            enough = request.on_token is not None and request.on_token(token)
            if enough or token in self._stop:
                completion.finish = "stop"
                finished.append(row)
            elif len(completion.tokens) >= request.sampling.max_tokens:
                finished.append(row)
        self._finish(finished)

    def _truncated(
        self, logprobs_NV: torch.Tensor, requests: Sequence[SamplingRequest]
    ) -> torch.Tensor:
        """Returns the log-probabilities, with minus infinity for tokens that a request may not
        draw.
        """
        truncations = [request.sampling.truncation for request in requests]
        if all(truncation == EVERYTHING for truncation in truncations):
            return logprobs_NV
        top_p, top_k, min_p = (
            torch.tensor(values, device=self._device) for values in zip(*truncations, strict=True)
        )
        kept_NV = kept_tokens(logprobs_NV, top_p, top_k, min_p)
        return logprobs_NV.masked_fill(~kept_NV, -torch.inf)

    def _finish(self, rows: list[int]) -> None:
        done = [self._running[row] for row in rows]
        for row in reversed(rows):
            self._park(row)
        for request in done:
            request.on_done(request.completion)

    def _park(self, row: int) -> None:
        """Ends a running sequence; keeps its keys and values if a single version computed them."""
        request, running = self._running[row], len(self._running)
        if not self._reuse or request.version != self.version:
            self._vacate(row)
            return
        # The last token was drawn but not read.
        tokens = (*request.prompt, *request.completion.tokens[:-1])
        target, last = self._cache.height - 1 - len(self._parked), running - 1
        if target == last and row != last:
            length = max(int(self._lengths[last]), len(tokens))
            for layer in self._cache.slot_layers:
                layer.exchange(row, last, length)
        elif target != last:
            for layer in self._cache.slot_layers:
                layer.move(row, target, len(tokens))
        self._vacate(row, moved=target == last)
        self._stamps += 1
        self._parked.append(_Parked(tokens, self.version, self._stamps))

    def _vacate(self, row: int, *, moved: bool = False) -> None:
        """Ends a running sequence; the last one takes its row, unless it was ``moved`` there."""
        last = len(self._running) - 1
        if row != last:
            if not moved:
                length = int(self._lengths[last])
                for layer in self._cache.slot_layers:
                    layer.move(last, row, length)
            self._lengths[row] = self._lengths[last]
            self._last[row] = self._last[last]
            self._temperatures[row] = self._temperatures[last]
            self._running[row] = self._running[last]
        self._running.pop()
        self._cache.running = len(self._running)


def _attention_kinds(model: Any, config: Any) -> tuple[list[str], int]:
    """Returns the kinds of attention in a model's layers, and the window of sliding ones."""
    window = int(getattr(config, "sliding_window", None) or 0)
    kinds = set(getattr(config, "layer_types", None) or ())
    # Without a table of layers, a window applies to every layer, as in Mistral and its successors.
    kinds = kinds or {"sliding_attention" if window else "full_attention"}
    unknown = kinds - _ATTENTION_KINDS
    if unknown or getattr(model, "_is_stateful", False):
        raise InputError(
            f"the embedded engine cannot sample from {type(model).__name__}: its layers are "
            f"{', '.join(sorted(unknown)) or 'recurrent'}",
            hint="use a model with full or sliding attention",
        )
    if config._attn_implementation not in _ATTENTION_CODE:
        raise InputError(
            f"the embedded engine cannot use {config._attn_implementation} attention",
            hint='load the model with attn_implementation="sdpa"',
        )
    return sorted(kinds), window


def _additive(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns 0 where ``mask`` is true, and the lowest finite number elsewhere."""
    zeros = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
    return zeros.masked_fill(~mask, torch.finfo(dtype).min)
