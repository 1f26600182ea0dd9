"""The trainer's forward pass: log-probabilities and entropies of the tokens that were drawn.

Trajectories are packed into one row (`deltawire.train.packing`), where the model's attention can be
computed block by block; a model with recurrent or other layers gets one padded row for each
trajectory. The head is computed in chunks, for drawn tokens only (`deltawire.train.head`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from deltawire.config import TrainConfig
from deltawire.engines.routers import replaced_forward
from deltawire.parity.router_replay import RouteReplay
from deltawire.train.activation_checkpointing import Checkpointing, checkpointed
from deltawire.train.batch import TokenBatch
from deltawire.train.head import TokenTerms, head_of, head_terms
from deltawire.train.layout import BatchLayout, lay_out, lay_out_sequences
from deltawire.train.packing import PACKED, PackingProbe

_PACKED_LAYERS = {"full_attention", "sliding_attention"}
_packable: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()


@dataclass(frozen=True)
class TrainedPolicy:
    """A causal LM as a training step computes with it.

    ``packing`` packs if the model allows it; ``fp32_head`` computes the head's product in float32;
    ``entropy_gradient`` gives the entropies a gradient; ``checkpointing`` is
    `deltawire.train.activation_checkpointing`'s.

    Example::

        policy = TrainedPolicy.of(model, config.train)
        with policy.terms(batch) as terms:
            loss(terms.logprobs).backward()
    """

    model: Any
    packing: bool = True
    fp32_head: bool = False
    entropy_gradient: bool = False
    checkpointing: Checkpointing = "none"

    @classmethod
    def of(cls, model: Any, config: TrainConfig) -> TrainedPolicy:
        """Returns the policy that a configuration describes."""
        return cls(
            model,
            packing=config.packing == "auto",
            fp32_head=config.fp32_head,
            checkpointing=config.activation_checkpointing,
            entropy_gradient=config.loss.entropy_coefficient > 0,
        )

    @property
    def packs(self) -> bool:
        """True if batches are packed: asked for, and possible for this model."""
        return self.packing and packable(self.model)

    @contextmanager
    def terms(self, batch: TokenBatch, replay: RouteReplay | None = None) -> Iterator[TokenTerms]:
        """Returns log π(token | everything before it) at the batch's temperature, and entropies:
        [N, C].

        Entries where ``wanted`` is 0 are 0. ``replay`` compares the sampler's expert choices
        with the model's own, and uses them if it is configured to. Call ``backward`` inside the
        context: activations may be computed again there.
        """
        head_of(self.model)  # Probe the model before any part of it is replaced.
        layout = lay_out(batch, packed=self.packs)
        with ExitStack() as stack:
            if layout.packing is not None:
                stack.enter_context(_attention(self.model))
            if replay is not None:
                stack.enter_context(replay.over(_routes(batch, layout, replay)))
            stack.enter_context(checkpointed(self.model, self.checkpointing))
            targets_W = batch.tokens_NC.reshape(-1)[layout.places_W]
            found_2W = self._forward(layout, targets_W, batch.temperature)
            if replay is not None:
                stack.enter_context(replay.uncounted())
            shape = batch.tokens_NC.shape
            both = found_2W.new_zeros(2, shape.numel()).index_copy(1, layout.places_W, found_2W)
            logprobs, entropies = both.view(2, *shape)
            yield TokenTerms(logprobs, entropies if self.entropy_gradient else entropies.detach())

    @contextmanager
    def sequence_terms(
        self, sequences: Sequence[Tensor], targets: Sequence[Tensor]
    ) -> Iterator[list[TokenTerms]]:
        """Returns log π(target | its sequence up to that row) at temperature 1, and entropies.

        Each sequence is int64[L], its targets int64[L] or int64[L, K]; results have the targets'
        shape. No sequence sees another one. Call ``backward`` inside the context.
        """
        head_of(self.model)
        layout = lay_out_sequences(sequences, targets, self.device, packed=self.packs)
        targets_W = torch.cat([one.reshape(-1) for one in targets]).to(self.device)
        with ExitStack() as stack:
            if layout.packing is not None:
                stack.enter_context(_attention(self.model))
            stack.enter_context(checkpointed(self.model, self.checkpointing))
            found_2W = self._forward(layout, targets_W, 1.0)
            parts = torch.split(found_2W, [one.numel() for one in targets], dim=1)
            yield [
                TokenTerms(part[0].view(one.shape), part[1].view(one.shape).detach())
                for part, one in zip(parts, targets, strict=True)
            ]

    @property
    def device(self) -> torch.device:
        """Where the model computes."""
        return torch.device(self.model.device)

    def _forward(self, layout: BatchLayout, targets_W: Tensor, temperature: float) -> Tensor:
        """Log-probabilities and entropies of the wanted tokens: float32[2, W]."""
        head = head_of(self.model)
        kept: list[Tensor] = []

        def through(hidden_RSH: Tensor) -> Tensor:
            hidden_WH = torch.index_select(hidden_RSH.flatten(0, 1), 0, layout.reads_W)
            terms = head_terms(
                hidden_WH,
                head.linear.weight,
                targets_W,
                bias_V=head.linear.bias,
                adapter=head.adapter(hidden_WH),
                transform=head.transform,
                temperature=temperature,
                fp32=self.fp32_head,
                entropy_gradient=self.entropy_gradient,
            )
            kept.append(torch.stack(terms))
            return kept[0]

        own_forward = self.model.forward

        def forward(**inputs: Any) -> Tensor:
            # The terms are the result of head and model, so that hooks on their results, such as
            # FSDP2's, see the tensors that gradients come through.
            with replaced_forward(head.module, through):
                own_forward(**inputs)
            return kept[0]

        inputs: dict[str, Any] = {"attention_mask": layout.mask_RS}
        if layout.packing is not None:
            inputs = {"attention_mask": None, "packing": layout.packing}
        with replaced_forward(self.model, forward):
            found_2W: Tensor = self.model(
                input_ids=layout.ids_RS,
                position_ids=layout.positions_RS,
                use_cache=False,
                **inputs,
            )
        return found_2W


def token_logprobs(model: Any, batch: TokenBatch, replay: RouteReplay | None = None) -> Tensor:
    """Log-probabilities by `TrainedPolicy.terms`, with default settings: float32[N, C]."""
    with TrainedPolicy(model).terms(batch, replay) as terms:
        return terms.logprobs


def packable(model: Any) -> bool:
    """Returns whether a packed row gives this model's results; a forward pass finds out once.

    Every layer has to compute causal attention through transformers' interface, over all tokens or
    a window that it states. Recurrent layers, convolutions and masks of a layer's own do not.
    """
    if model not in _packable:
        _packable[model] = _probed(model)
    return _packable[model]


def _probed(model: Any) -> bool:
    config = model.config.get_text_config()
    types = getattr(config, "layer_types", None) or []
    if not set(types) <= _PACKED_LAYERS:
        return False
    probe = PackingProbe()
    device = next(model.parameters()).device
    training = [module for module in model.modules() if module.training]
    try:
        with torch.no_grad(), _attention(model):
            # Without dropout, the pass draws no random numbers from the step's.
            model.eval()(
                input_ids=torch.zeros(1, 2, dtype=torch.long, device=device),
                position_ids=torch.zeros(1, 2, dtype=torch.long, device=device),
                use_cache=False,
                packing=probe,
            )
    except (TypeError, ValueError):
        return False
    finally:
        for module in training:
            module.training = True
    windowed = sum(window is not None for window in probe.windows)
    wanted = types.count("sliding_attention") if types else 0
    return len(probe.windows) == config.num_hidden_layers and windowed >= wanted


@contextmanager
def _attention(model: Any) -> Iterator[None]:
    """Lets the model compute packed attention; other users of the model must wait."""
    config = model.config.get_text_config()
    before = config._attn_implementation
    config._attn_implementation = PACKED
    try:
        yield
    finally:
        config._attn_implementation = before


def _routes(batch: TokenBatch, layout: BatchLayout, replay: RouteReplay) -> Tensor:
    """Returns the batch's recorded expert choices as the forward pass reads them, int32[1, R·S, L,
    K].
    """
    lengths = batch.prompt_mask_GP.sum(1)[batch.prompts_N].tolist()
    counts = batch.token_mask_NC.sum(1).tolist()
    sizes = list(zip(lengths, counts, strict=True))
    return replay.placed(batch.routes_N, layout.starts_N, sizes, layout.ids_RS.numel())[None]
