"""Activation memory of one decoder layer, derived operation by operation.

A layer is a chain of operations in forward order. Each names what autograd saves for it and what
its backward holds besides: gradients in and out, temporaries, and weight gradients that stay. The
backward of a layer runs the chain in reverse and frees what each operation saved, as torch's
autograd engine does; its peak is the largest sum on the way (`LayerActivations.backward`).

All widths are bytes per token unless a name says otherwise: 2 for bf16, 4 for fp32, 8 for indices.
The saved tensors are those of transformers' eager modules (an RMSNorm that keeps an fp32 copy,
flash attention that keeps the log-sum-exp, grouped matrix products over sorted tokens), found with
`torch.autograd.graph.saved_tensors_hooks`. Legend: H hidden size, F feed-forward width, I expert
width, E experts, k experts per token, q and v the widths of all query and value heads.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from deltawire.packed_formats import planned_bits
from deltawire.plan.architecture import Attention, DecoderLayer, FeedForward
from deltawire.plan.layout import Packing, TrainingLayout

CHUNK_OF_LINEAR = 64
"""Tokens between the stored states of a linear attention kernel (flash-linear-attention)."""


@dataclass(frozen=True)
class Operation:
    """One step of a layer. Bytes per token, except the last three."""

    saved: float = 0
    """Kept from forward to backward."""
    held: float = 0
    """Gradients and temporaries that its backward holds, the residual's gradient excluded."""
    kept: float = 0
    """Its result, where selective checkpointing keeps it: matrix products and attention."""
    weights: float = 0
    """Values whose gradients this operation's backward makes."""
    work: float = 0
    """Bytes of a workspace that does not grow with tokens, such as a dequantized weight."""
    out: float = 0
    """Result bytes per token that the next operation reads, for the peak of a forward pass."""


@dataclass(frozen=True)
class LayerActivations:
    """Bytes of one layer for one micro-batch on one rank."""

    saved: float
    """Without checkpointing."""
    kept: float
    """With selective checkpointing, the layer's input included."""
    boundary: float
    """The layer's input, which full checkpointing keeps."""
    backward: float
    """Most that a backward holds, saved tensors and bf16 weight gradients included."""
    recompute: float
    """Most that its forward holds when it is repeated in the backward pass."""
    forward: float
    """Most that a forward without autograd holds."""


@dataclass(frozen=True)
class _Setting:
    """The settings that a layer's operations depend on, apart from the layer itself."""

    hidden: int
    tensor: int
    expert: int
    imbalance: float
    trained: bool
    """Weights have gradients; false for LoRA, whose adapters are counted apart."""
    rank: int
    expert_rank: int
    packing: Packing


def layer_activations(layer: DecoderLayer, hidden: int, layout: TrainingLayout) -> LayerActivations:
    """Returns the bytes that one layer's activations take under a layout.

    Tensor parallelism splits the heads of grouped attention, feed-forward widths and the experts of
    a layer, and leaves norms, other attention and the residual whole (no sequence parallelism).
    Context parallelism divides tokens; the buffers of its attention, which pass keys and values
    around, are not counted.
    """
    return _derive(
        layer,
        _Setting(
            hidden=hidden,
            tensor=layout.tensor,
            expert=layout.expert,
            imbalance=layout.imbalance if layout.expert > 1 else 1.0,
            trained=layout.mode == "full",
            rank=layout.lora_rank,
            expert_rank=layout.lora_rank if layout.lora_experts else 0,
            packing=layout.packing,
        ),
        layout.tokens,
    )


def _derive(layer: DecoderLayer, setting: _Setting, tokens: int) -> LayerActivations:
    chain = list(_operations(layer, setting))
    residual = 2.0 * setting.hidden * layer.streams
    saved = sum(operation.saved for operation in chain)
    alive, grads, peak = saved, 0.0, 0.0
    for operation in reversed(chain):
        grads += operation.weights
        total = tokens * (alive + residual + operation.held) + 2 * grads + operation.work
        peak = max(peak, total)
        alive -= operation.saved
    forward = recompute = alive = 0.0
    for before, operation in zip([Operation(), *chain], chain, strict=False):
        passing = tokens * (residual + before.out + operation.out) + operation.work
        forward = max(forward, passing)
        recompute = max(recompute, passing + tokens * (residual + alive))
        alive += operation.saved
    return LayerActivations(
        saved=tokens * saved,
        kept=tokens * (residual + sum(operation.kept for operation in chain)),
        boundary=tokens * residual,
        backward=peak,
        recompute=recompute,
        forward=forward,
    )


def _operations(layer: DecoderLayer, setting: _Setting) -> Iterator[Operation]:
    """Yields a layer's operations in forward order: norm, attention, norm, feed-forward."""
    yield _norm(setting.hidden * layer.streams, setting)
    kind = layer.attention.kind
    if kind == "linear":
        yield from _linear_attention(layer.attention, setting)
    elif kind == "grouped":
        yield from _grouped_attention(layer.attention, setting)
    else:
        yield from _latent_attention(layer.attention, setting)
    yield _norm(setting.hidden * layer.streams, setting)
    if layer.feed_forward.experts:
        yield from _mixture(layer.feed_forward, setting)
    else:
        yield from _gated(layer.feed_forward.intermediate, setting)


def _norm(width: float, setting: _Setting) -> Operation:
    """RMSNorm in fp32 over bf16: saves the fp32 input, 1/rms and, for its weight, the bf16 result.

    Its backward holds the bf16 gradient and three fp32 ones: 2 + 3·4 bytes per value.
    """
    return Operation(
        saved=4 * width + 4 + (2 * width if setting.trained else 0),
        held=14 * width,
        weights=width if setting.trained else 0,
        out=6 * width,
    )


def _project(
    setting: _Setting,
    inputs: float,
    outputs: float,
    *,
    shared: bool = False,
    held: float = 0,
) -> Operation:
    """Returns a linear layer: saves its input, unless another saved it, for its weight's gradient.

    With LoRA the adapter saves the input and its low-rank product (2r), and has gradients of
    r·(inputs + outputs) values; selective checkpointing keeps its two products as well.
    ``held`` adds gradients of other branches that wait meanwhile.
    """
    rank = setting.rank
    return Operation(
        saved=(0 if shared else 2 * inputs) + 2 * rank,
        held=2 * inputs + 2 * outputs + held,
        kept=2 * outputs + (2 * (rank + outputs) if rank else 0),
        weights=inputs * outputs if setting.trained else rank * (inputs + outputs),
        out=2 * outputs,
    )


def _grouped_attention(shape: Attention, setting: _Setting) -> Iterator[Operation]:
    """Query, key and value projections, their norms, rotary embedding, flash attention, output.

    Attention saves q, k, v, its output (2 bytes each) and a log-sum-exp per head (4). Its
    backward holds the output's gradient and those of q, k and v. A gate on the output (Qwen3.5)
    adds its own input and result.
    """
    hidden, split = setting.hidden, setting.tensor
    q, k, v = shape.queries / split, shape.keys / split, shape.values / split
    heads = shape.heads / split
    yield _project(setting, hidden, q * (2 if shape.gated else 1))
    if shape.normed:
        yield _norm(q, setting)
    yield _project(setting, hidden, k, shared=True, held=2 * q)
    if shape.normed:
        yield _norm(k, setting)
    yield _project(setting, hidden, v, shared=True, held=2 * (q + k))
    yield Operation(held=8 * q + 2 * (k + v), out=4 * q)
    yield Operation(
        saved=2 * (q + k + v) + 2 * q + 4 * heads,
        held=4 * q + 2 * (k + v),
        kept=2 * q + 4 * heads,
        out=2 * (2 * q + k + v),
    )
    if shape.gated:
        yield Operation(saved=6 * q, held=6 * q, out=4 * q)
    yield _project(setting, q, hidden, shared=True)


def _latent_attention(shape: Attention, setting: _Setting) -> Iterator[Operation]:
    """Low-rank projections with norms between, then attention as in `_grouped_attention`.

    Keys are as wide as queries once expanded. DeepSeek-V4's compressed attention has one shared
    key-value head and is described by the same chain; its compressor is small in comparison.
    """
    hidden = setting.hidden
    q, k, v = shape.queries, shape.keys, shape.values
    out, heads = shape.outputs, shape.heads
    low, pair = shape.query_rank, shape.key_value_rank
    yield _project(setting, hidden, low or q)
    if low:
        yield _norm(low, setting)
        yield _project(setting, low, q)
    yield _project(setting, hidden, pair or k, shared=True, held=2 * q)
    if pair:
        yield _norm(pair, setting)
        yield _project(setting, pair, k + v, held=2 * q)
    yield Operation(held=6 * q + 4 * k + 2 * v, out=4 * q)
    attended = q if shape.kind == "compressed" else out
    yield Operation(
        saved=2 * (q + k + v) + 2 * attended + 4 * heads,
        held=2 * attended + 2 * (q + k + v),
        kept=2 * attended + 4 * heads,
        out=2 * (q + k + v + attended),
    )
    if shape.kind == "compressed":
        yield _project(setting, q, out, shared=True)
        yield _project(setting, out, hidden)
    else:
        yield _project(setting, out, hidden, shared=True)


def _linear_attention(shape: Attention, setting: _Setting) -> Iterator[Operation]:
    """Projections, a short convolution, a chunked delta rule, a gated norm and the output.

    The kernel keeps its inputs, its output and one state for every `CHUNK_OF_LINEAR` tokens.
    transformers' fallback without that kernel takes far more and is not modeled.
    """
    hidden = setting.hidden
    keys, values = shape.keys, shape.values
    mixed = shape.queries + keys + values
    state = 2 * shape.state / CHUNK_OF_LINEAR
    yield _project(setting, hidden, mixed)
    yield _project(setting, hidden, values, shared=True, held=2 * mixed)
    yield Operation(saved=4 * mixed, held=6 * mixed, out=4 * mixed)
    yield Operation(
        saved=2 * (mixed + values) + 8 * shape.heads + state,
        held=2 * (mixed + 2 * values) + 2 * state,
        kept=2 * values,
        out=2 * (mixed + values),
    )
    yield Operation(saved=8 * values, held=14 * values, out=6 * values)
    yield _project(setting, values, hidden, shared=True)


def _gated(width: float, setting: _Setting) -> Iterator[Operation]:
    """Returns a gated MLP. Saved: its input (2H), gate, its activation, up and their product (2F
    each).
    """
    hidden, inner = setting.hidden, width / setting.tensor
    yield _project(setting, hidden, inner)
    yield Operation(saved=2 * inner, held=4 * inner + 2 * hidden, out=4 * inner)
    yield _project(setting, hidden, inner, shared=True, held=2 * inner)
    yield Operation(saved=4 * inner, held=6 * inner, out=6 * inner)
    yield _project(setting, inner, hidden, held=-2 * hidden)


def _mixture(shape: FeedForward, setting: _Setting) -> Iterator[Operation]:
    """Router, sorted tokens, grouped products, weighting and the shared expert.

    A token is computed by k experts: saved are its k copies (2hk, h the experts' input width), the
    gate and up results (4Ik), the activation and the product (2Ik each), the result that the
    routing weight multiplies (2hk) and four index arrays. Where scores are fp32, so is that
    multiplication, and its backward holds three such arrays. The shared expert runs last, so the
    gradient of its input waits meanwhile. Frozen experts save neither copies nor
    product. Packed experts are dequantized into a bf16 workspace, once in each direction.
    """
    hidden, split = setting.hidden, setting.tensor
    inner, width = shape.expert_hidden, shape.expert_intermediate / split
    k = shape.chosen * setting.imbalance
    dispatch = _dispatch(2 * inner, sent=shape.chosen, received=k, setting=setting)
    local = shape.experts / setting.expert
    trained, rank = setting.trained, setting.expert_rank
    router = hidden * shape.experts
    reads = trained or (setting.rank and shape.shared_intermediate)
    yield Operation(
        saved=(2 * hidden if reads else 0) + (4 * hidden if shape.scores_fp32 and trained else 0),
        held=2 * hidden + 8 * shape.experts,
        kept=(4 if shape.scores_fp32 else 2) * shape.experts,
        weights=router if trained else 0,
        work=8 * router if shape.scores_fp32 and trained else 0,
        out=4 * shape.experts,
    )
    yield Operation(saved=4 * shape.experts + 8 * k, held=8 * shape.experts, out=8 * k)
    if inner != hidden:
        yield _project(setting, hidden, inner, shared=True)
    yield from dispatch
    yield Operation(saved=24 * k, held=2 * inner * k + 2 * hidden, out=2 * inner * k)

    def packed(values: float) -> float:
        if setting.packing == "none":
            return 0.0
        return values * (2 + planned_bits(setting.packing) / 8)

    sizes = (local * inner * 2 * width, local * width * inner)
    adapters = (local * rank * (inner + 2 * width), local * rank * (width + inner))
    saves = trained or rank
    waiting = 2 * hidden if shape.shared_intermediate else 0
    yield Operation(
        saved=(2 * inner if saves else 0) * k + 2 * rank * k,
        held=(4 * width + 2 * inner) * k + waiting,
        kept=4 * width * k,
        weights=sizes[0] if trained else adapters[0],
        work=packed(sizes[0]),
        out=4 * width * k,
    )
    yield Operation(saved=4 * width * k, held=8 * width * k, out=6 * width * k)
    yield Operation(saved=2 * width * k, held=6 * width * k, out=4 * width * k)
    yield Operation(
        saved=(2 * width if saves else 0) * k + 2 * rank * k,
        held=(2 * width + 2 * inner) * k,
        kept=2 * inner * k,
        weights=sizes[1] if trained else adapters[1],
        work=packed(sizes[1]),
        out=2 * inner * k,
    )
    score = 4 if shape.scores_fp32 else 2
    yield from dispatch
    yield Operation(
        saved=(2 * inner + score) * k,
        held=3 * score * inner * k + waiting,
        out=(2 + score) * inner * k,
    )
    if inner != hidden:
        yield _project(setting, inner, hidden)
    if shape.shared_intermediate:
        yield from _shared(shape.shared_intermediate, setting)


def _dispatch(
    width: float, *, sent: float, received: float, setting: _Setting
) -> tuple[Operation, ...]:
    """Returns the exchange of tokens among expert-parallel ranks, there or back; nothing without.

    While rows of ``width`` bytes travel, the buffer that is sent and the one that is received both
    exist, in the forward pass and, with gradients, in the backward pass. A rank sends the rows of
    its own tokens and receives those of its experts, and keeps where they belong (8 bytes a row).
    Source: `deltawire.train.parallel.expert_parallel`.
    """
    if setting.expert == 1:
        return ()
    both = width * (sent + received)
    return (Operation(saved=8 * sent, held=both, out=both),)


def _shared(width: float, setting: _Setting) -> Iterator[Operation]:
    """Returns the shared expert, a gated MLP whose input the router saved already."""
    first, *rest = _gated(width, setting)
    yield Operation(
        saved=first.saved - 2 * setting.hidden,
        held=first.held,
        kept=first.kept,
        weights=first.weights,
        out=first.out,
    )
    yield from rest
